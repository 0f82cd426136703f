// World: a value over what its ranks share.
#include "plumb/world.h"

#include "world/world_impl.h"

namespace plumb {

World::World() : impl_(std::make_shared<Impl>()) {}

int World::rank() const { return impl_->rank; }
int World::size() const { return impl_->size; }
int World::local_rank() const { return impl_->local_rank; }
const std::string& World::backend() const { return impl_->backend; }
std::chrono::milliseconds World::timeout() const { return impl_->timeout; }

void World::barrier() const { control_group(*this).barrier().wait(Where{.detail = "barrier"}); }

// The others learn that this rank left before its connections go.
World::Impl::~Impl() {
  try {
    if (watch) watch->leave();
  } catch (...) {  // nobody is left to tell
  }
}

}  // namespace plumb
