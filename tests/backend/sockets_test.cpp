// Sockets by themselves: what is asked of connections that are broken.
#include "backend/sockets.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <functional>

namespace plumb {
namespace {

using ::testing::HasSubstr;

using Clock = std::chrono::steady_clock;

// Two ranks of one process, and a number of each.
struct Pair {
  c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  Sockets zero{store, 0, 2, "127.0.0.1"}, one{store, 1, 2, "127.0.0.1"};
  at::Tensor numbers = at::zeros({2}, at::kLong);

  Sockets::Span number(int of) {
    return {numbers, reinterpret_cast<char*>(numbers.data_ptr<int64_t>() + of), sizeof(int64_t)};
  }
  // Both move until it has ended. False where it does not.
  bool ends(const Sockets::Ref& transfer) {
    for (const auto end = Clock::now() + std::chrono::seconds(20); !transfer->ended && Clock::now() < end;) {
      zero.move();
      one.move();
    }
    return transfer->ended;
  }
};

// A process that was forked has the connections of its parent, as workers of a data loader do.
TEST(Sockets, TheEndOfAConnectionIsHeardThoughAForkedProcessHasItOpen) {
  Pair pair;
  const auto came = pair.zero.receive(1, Sockets::Lane::control, 7, pair.number(0));
  const auto went = pair.one.send(0, Sockets::Lane::control, 7, pair.number(1));
  ASSERT_TRUE(pair.ends(came) && pair.ends(went));
  EXPECT_EQ(came->failure, "");
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    for (;;) ::pause();
  }
  const auto awaited = pair.one.receive(0, Sockets::Lane::control, 8, pair.number(1));
  pair.zero.close("is lost");
  EXPECT_TRUE(pair.ends(awaited));
  EXPECT_THAT(awaited->failure, HasSubstr("rank 0 was closed by it"));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

// Nobody waits for a connection that the system has no room for.
TEST(Sockets, WhoHasNoRoomForTheOthersConnectionSaysSo) {
  Pair pair;
  const auto went = pair.one.send(0, Sockets::Lane::control, 7, pair.number(1));
  const auto awaited = pair.zero.receive(1, Sockets::Lane::control, 7, pair.number(0));
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const int lowest = ::dup(0);
  ::close(lowest);
  rlimit none = before;
  none.rlim_cur = static_cast<rlim_t>(lowest);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const bool ended = pair.ends(awaited);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_TRUE(ended);
  EXPECT_THAT(awaited->failure, HasSubstr("rank 1 could not be made: no socket: Too many open files"));
}

// However many connections there are, and whoever asks: over one that is broken nothing comes, and that is said at once.
TEST(Sockets, NothingIsWaitedForOverBrokenConnections) {
  for (const int size : {2, 5, 9, 10, 20}) {
    Sockets sockets(c10::make_intrusive<c10d::HashStore>(), 0, size, "127.0.0.1");
    const at::Tensor memory = at::zeros({1}, at::kLong);
    const Sockets::Span span{memory, static_cast<char*>(memory.data_ptr()), sizeof(int64_t)};
    std::vector<Sockets::Ref> all;
    using Lane = Sockets::Lane;
    const auto ask = [&](Lane in, Lane out) {
      for (int peer = 1; peer < size; ++peer) {
        all.push_back(sockets.receive(peer, in, 7, span));
        all.push_back(sockets.send(peer, out, 7, span));
      }
    };
    ask(Lane::control, Lane::issued);  // before it breaks
    sockets.close("is lost");
    ask(Lane::control, Lane::issued);
    sockets.move();
    ask(Lane::control, Lane::issued);
    ask(Lane::gather, Lane::deferred);  // which nobody has used
    for (size_t i = 0; i < all.size(); ++i) {
      EXPECT_TRUE(all[i]->ended) << i << " of " << size;
      EXPECT_THAT(all[i]->failure, HasSubstr(" is lost")) << i << " of " << size;
    }
  }
}

}  // namespace
}  // namespace plumb
