// Ranks as threads of this process, over the `local` backend.
#include <algorithm>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "backend/local.h"
#include "world/world_impl.h"

namespace plumb {
namespace {

// Short, since looking costs nothing here, and tests of waiting ranks should not wait long.
constexpr std::chrono::milliseconds slice{50};

// The hubs of all groups of one world, made when the first rank asks for them.
class Hubs {
 public:
  Hubs(int ranks, std::chrono::milliseconds timeout) : timeout_(timeout) {
    for (int rank = 0; rank < ranks; ++rank) everybody_.push_back(rank);
  }

  std::shared_ptr<LocalHub> at(const std::string& name, const std::vector<int>& members) {
    std::lock_guard lock(mutex_);
    auto& [hub, of] = hubs_[name];
    if (!hub) {
      hub = std::make_shared<LocalHub>(static_cast<int>(members.size()), timeout_, members);
      of = members;
      for (const auto& [rank, deed] : deeds_) apply(*hub, of, rank, deed);  // a rank that left before has left it too
    }
    return hub;
  }
  std::shared_ptr<LocalHub> at(int number) { return at(std::to_string(number), everybody_); }
  const std::vector<int>& everybody() const { return everybody_; }

  // Does `deed` in every group of `rank`, with its number there.
  using Deed = std::function<void(LocalHub&, int rank_in_hub)>;
  void each(int rank, const Deed& deed) {
    std::map<std::string, Entry> all;
    {
      std::lock_guard lock(mutex_);
      deeds_.emplace_back(rank, deed);
      all = hubs_;
    }
    for (const auto& [name, entry] : all) apply(*entry.hub, entry.members, rank, deed);
  }

 private:
  struct Entry {
    std::shared_ptr<LocalHub> hub;
    std::vector<int> members;
  };
  static void apply(LocalHub& hub, const std::vector<int>& members, int rank, const Deed& deed) {
    const auto it = std::find(members.begin(), members.end(), rank);
    if (it != members.end()) deed(hub, static_cast<int>(it - members.begin()));
  }

  std::vector<int> everybody_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::map<std::string, Entry> hubs_;
  std::vector<std::pair<int, Deed>> deeds_;
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
  const auto reports = make_local_reports(ranks);
  const auto hubs = std::make_shared<Hubs>(ranks, options.timeout);
  std::vector<World> worlds;
  for (int rank = 0; rank < ranks; ++rank) {
    auto impl = std::make_shared<World::Impl>();
    impl->rank = impl->local_rank = rank;
    impl->size = ranks;
    impl->timeout = options.timeout;
    auto progress = std::make_shared<Progress>(rank);
    impl->watch = std::make_shared<Watch>(rank, ranks, options.timeout, slice, progress,
                                          make_local_channel(reports, rank, progress));
    impl->another = [hubs, rank, watch = impl->watch](int number) {
      const auto at = [&](int index) {
        const int hub = 2 * number + index;
        return make_group(make_local_backend(hubs->at(hub), rank), watch, index, std::to_string(hub),
                          hubs->everybody());
      };
      return World::Impl::Pair{at(data_index), at(control_index)};
    };
    impl->part = [hubs, watch = impl->watch](const std::string& name, const std::vector<int>& members, int place,
                                             int index) {
      return make_group(make_local_backend(hubs->at(name, members), place), watch, index, name, members);
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
        hubs->each(rank, [](LocalHub& hub, int index) { hub.leave(index); });
      } catch (...) {
        thrown[rank] = std::current_exception();
        const std::string text = text_of(thrown[rank]);
        watch->fail(text, rank, {});
        hubs->each(rank, [text](LocalHub& hub, int index) { hub.fail(index, text); });
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
