// Ranks as threads of this process, over the `local` backend.
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "world/local.h"
#include "world/world_impl.h"

namespace plumb {
namespace {

// Short, since looking costs nothing here, and tests of waiting ranks should not wait long.
constexpr std::chrono::milliseconds slice{50};

// The hubs of all groups of one world, made when the first rank asks for them.
class Hubs {
 public:
  Hubs(int ranks, std::chrono::milliseconds timeout) : ranks_(ranks), timeout_(timeout) {}

  std::shared_ptr<LocalHub> at(int number) {
    std::lock_guard lock(mutex_);
    while (static_cast<int>(hubs_.size()) <= number) {
      const auto hub = hubs_.emplace_back(std::make_shared<LocalHub>(ranks_, timeout_));
      for (const auto& deed : deeds_) deed(*hub);  // a rank that left before the hub was made has left it too
    }
    return hubs_[number];
  }

  void each(const std::function<void(LocalHub&)>& deed) {
    std::vector<std::shared_ptr<LocalHub>> all;
    {
      std::lock_guard lock(mutex_);
      deeds_.push_back(deed);
      all = hubs_;
    }
    for (const auto& hub : all) deed(*hub);
  }

 private:
  const int ranks_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<LocalHub>> hubs_;
  std::vector<std::function<void(LocalHub&)>> deeds_;
};

bool is_consequence(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Consequence&) {
    return true;
  } catch (...) {
    return false;
  }
}

std::string text_of(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

}  // namespace

void run_local(int ranks, const std::function<void(World)>& body, const WorldOptions& options) {
  if (ranks < 1) throw Error("run_local with " + std::to_string(ranks) + " ranks; at least 1 is needed");
  if (options.timeout.count() <= 0) {
    throw Error("a time-out of " + std::to_string(options.timeout.count()) + " ms; it must be positive");
  }
  if (ranks == 1) {
    auto alone = std::make_shared<World::Impl>();
    alone->timeout = options.timeout;
    body(World(std::move(alone)));
    return;
  }
  const auto hall = make_hall(ranks);
  const auto hubs = std::make_shared<Hubs>(ranks, options.timeout);
  std::vector<World> worlds;
  for (int rank = 0; rank < ranks; ++rank) {
    auto impl = std::make_shared<World::Impl>();
    impl->rank = impl->local_rank = rank;
    impl->size = ranks;
    impl->timeout = options.timeout;
    auto counters = std::make_shared<Counters>();
    impl->watch =
        std::make_shared<Watch>(rank, ranks, options.timeout, slice, counters, make_hall_board(hall, rank, counters));
    impl->another = [hubs, rank, watch = impl->watch](int number) {
      return World::Impl::Pair{make_group(make_local_backend(hubs->at(2 * number), rank), watch, data_index),
                               make_group(make_local_backend(hubs->at(2 * number + 1), rank), watch, control_index)};
    };
    const World::Impl::Pair own = impl->another(0);
    impl->data = own.data;
    impl->control = own.control;
    worlds.emplace_back(std::move(impl));
  }

  std::vector<std::exception_ptr> thrown(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank, world = std::move(worlds[rank])]() mutable {
      const auto watch = world.impl().watch;
      try {
        body(std::move(world));
        watch->leave();
        hubs->each([rank](LocalHub& hub) { hub.leave(rank); });
      } catch (...) {
        thrown[rank] = std::current_exception();
        const std::string text = text_of(thrown[rank]);
        watch->fail(text, rank, {});
        hubs->each([rank, text](LocalHub& hub) { hub.fail(rank, text); });
      }
    });
  }
  for (auto& thread : threads) thread.join();

  std::exception_ptr first;
  for (const auto& one : thrown) {
    if (!one) continue;
    if (!is_consequence(one)) std::rethrow_exception(one);
    if (!first) first = one;
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace plumb
