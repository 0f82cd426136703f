// Ranks as threads of this process, over the `local` backend.
#include <exception>
#include <thread>
#include <vector>

#include "world/local.h"
#include "world/world_impl.h"

namespace plumb {
namespace {

// Short, since looking costs nothing here, and tests of waiting ranks should not wait long.
constexpr std::chrono::milliseconds slice{50};

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
  const auto data = std::make_shared<LocalHub>(ranks, options.timeout);
  const auto control = std::make_shared<LocalHub>(ranks, options.timeout);
  std::vector<World> worlds;
  for (int rank = 0; rank < ranks; ++rank) {
    auto impl = std::make_shared<World::Impl>();
    impl->rank = impl->local_rank = rank;
    impl->size = ranks;
    impl->timeout = options.timeout;
    auto counters = std::make_shared<Counters>();
    impl->watch = std::make_shared<Watch>(rank, ranks, options.timeout, slice, counters,
                                          make_hall_board(hall, rank, counters));
    impl->data = make_group(make_local_backend(data, rank), impl->watch, data_index);
    impl->control = make_group(make_local_backend(control, rank), impl->watch, control_index);
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
        data->leave(rank);
        control->leave(rank);
      } catch (...) {
        thrown[rank] = std::current_exception();
        const std::string text = text_of(thrown[rank]);
        watch->fail(text, rank, {});
        data->fail(rank, text);
        control->fail(rank, text);
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
