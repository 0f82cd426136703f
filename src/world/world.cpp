// World: a value over what its ranks share.
#include "plumb/world.h"

#include <exception>

#include "world/world_impl.h"

namespace plumb {

World::World() : impl_(std::make_shared<Impl>()) {}

int World::rank() const { return impl_->rank; }
int World::size() const { return impl_->size; }
int World::local_rank() const { return impl_->local_rank; }
const std::string& World::backend() const { return impl_->backend; }
std::chrono::milliseconds World::timeout() const { return impl_->timeout; }

void World::barrier() const { control_group(*this).barrier().wait(Where{.detail = "barrier"}); }

Road& road_of(const World& world) {
  World::Impl& impl = world.impl();
  return impl.watch ? impl.watch->road() : impl.road;
}

Timeline& timeline_of(const World& world) {
  World::Impl& impl = world.impl();
  return impl.watch ? impl.watch->timeline() : impl.timeline;
}

int ranks_per_machine(const World& world) { return world.impl().ranks_per_machine; }

// The others learn that this rank left before its connections go.
World::Impl::~Impl() {
  if (process.left()) {
    leave_to_parent(store, watch, data, control, another, part);
    return;
  }
  try {
    if (watch && std::uncaught_exceptions() > 0) {
      watch->fail(Error(rank, "its program was ended by an exception").what(), rank, {});
    }
    if (watch) watch->leave();
  } catch (...) {  // nobody is left to tell
  }
}

}  // namespace plumb
