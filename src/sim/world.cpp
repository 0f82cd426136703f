// Worlds of simulated ranks: every group of an engine is a communicator with its own streams.
#include <exception>
#include <map>
#include <mutex>

#include "plumb/sim.h"
#include "world/world_impl.h"

namespace plumb::sim {
namespace {

// Nothing here takes time: a rank that cannot go on never will.
constexpr std::chrono::milliseconds patience{1'000};

// The communicators of one world, made when the first rank asks for them.
class Communicators {
 public:
  c10::intrusive_ptr<c10d::Backend> at(const std::string& name, int size, int rank) {
    std::lock_guard lock(mutex_);
    return all_.try_emplace(name, size, name).first->second.backend(rank);
  }

 private:
  std::mutex mutex_;
  std::map<std::string, Communicator> all_;
};

World make_world(int rank, int size, const std::shared_ptr<Communicators>& all,
                 const std::shared_ptr<LocalReports>& reports) {
  auto impl = std::make_shared<World::Impl>();
  impl->rank = impl->local_rank = rank;
  impl->size = size;
  impl->timeout = patience;
  impl->backend = "sim";
  if (size == 1) return World(std::move(impl));
  auto progress = std::make_shared<Progress>(rank);
  impl->watch =
      std::make_shared<Watch>(rank, size, patience, patience, progress, make_local_channel(reports, rank, progress));
  impl->another = [all, rank, size, watch = impl->watch](int number) {
    const std::string name = std::to_string(number);
    return World::Impl::Pair{make_group(all->at("data " + name, size, rank), watch, data_index),
                             make_group(all->at("control " + name, size, rank), watch, control_index)};
  };
  impl->part = [all, watch = impl->watch](const std::string& name, const std::vector<int>& members, int place,
                                          int index) {
    return make_group(all->at(name, static_cast<int>(members.size()), place), watch, index);
  };
  const World::Impl::Pair own = impl->another(0);
  impl->data = own.data;
  impl->control = own.control;
  return World(std::move(impl));
}

}  // namespace

void run_world(int n, const std::function<void(World)>& body) {
  const auto all = std::make_shared<Communicators>();
  const auto reports = make_local_reports(n);
  std::exception_ptr first;  // one rank runs at a time
  try {
    run_ranks(n, [&](int rank) {
      World world = make_world(rank, n, all, reports);
      const auto watch = world.impl().watch;
      try {
        body(std::move(world));
        synchronize(rank);
        if (watch) watch->leave();
      } catch (const std::exception& error) {
        if (!first) first = std::current_exception();
        if (watch) watch->fail(error.what(), rank, {});
        throw;
      }
    });
  } catch (...) {
    std::rethrow_exception(first ? first : std::current_exception());
  }
}

}  // namespace plumb::sim
