// The `tcp` backend between ranks that are threads of one process: results, order, and what is said when it cannot go on.
#include "backend/tcp.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <filesystem>
#include <fstream>
#include <functional>
#include <latch>
#include <mutex>
#include <sstream>
#include <thread>

#include "backend/links.h"
#include "backend/sockets.h"
#include "backend/support/tcp_ranks.h"
#include "world/support/drill.h"
#include "world/support/threads.h"

namespace plumb::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

WorkPtr all_reduce(const BackendPtr& backend, const at::Tensor& tensor) {
  std::vector<at::Tensor> one{tensor};
  return backend->allreduce(one);
}

TEST(Tcp, CarriesEveryVerbDtypeAndLength) {
  for (const int size : {2, 5}) {
    expect_all_well(on_tcp(size, [](int, const BackendPtr& backend) { drill(*backend); }));
  }
}

TEST(Tcp, CarriesRandomCallsThatAreWaitedForInAnotherOrderOnEachRank) {
  expect_all_well(on_tcp(3, [](int, const BackendPtr& backend) { soak({backend.get()}, 5, 60); }));
}

// Several slices, which end in an uneven one: each is summed, and sent on, by itself.
TEST(Tcp, SumsWhatIsLongerThanASlice) {
  for (const int64_t numel : {524'288 * 3, 524'288 * 3 + 7, 524'288 * 2 - 1, 3}) {
    expect_all_well(on_tcp(3, [&](int rank, const BackendPtr& backend) {
      const at::Tensor mine = at::arange(numel, at::kFloat).remainder(1000).add(rank);
      all_reduce(backend, mine)->wait(seconds(60));
      EXPECT_TRUE(at::equal(mine, at::arange(numel, at::kFloat).remainder(1000).mul(3).add(3))) << numel;
    }));
  }
}

// Rank 0 is a call ahead: its next one must not stand in the way of what rank 1 still waits for.
TEST(Tcp, ARankThatIsACallAheadKeepsNobodyFromEndingTheOneBefore) {
  expect_all_well(on_tcp(2, [](int rank, const BackendPtr& backend) {
    for (int turn = 0; turn < 20; ++turn) {
      const at::Tensor first = at::full({1'500'000}, 1.0 + rank), second = at::full({1'500'000}, 10.0 + rank);
      const WorkPtr begun = all_reduce(backend, first);
      if (rank == 1) begun->wait(seconds(60));
      const WorkPtr next = all_reduce(backend, second);
      begun->wait(seconds(60));
      next->wait(seconds(60));
      expect_all(first, 3);
      expect_all(second, 21);
    }
  }));
}

// While nobody waits: sums are made, and sent on, by the thread.
TEST(Tcp, ACallEndsWhileItsRanksCompute) {
  std::latch all(2);
  expect_all_well(on_tcp(2, [&](int rank, const BackendPtr& backend) {
    const at::Tensor warm = at::ones({8});
    all_reduce(backend, warm)->wait(seconds(60));
    const at::Tensor mine = at::full({400'000}, 1.0 + rank);
    const WorkPtr work = all_reduce(backend, mine);
    // Nobody asks, and it ends all the same: the memory shows it.
    const volatile float* last = mine.data_ptr<float>() + 399'999;
    for (int i = 0; i < 20'000 && *last != 3.0f; ++i) std::this_thread::sleep_for(milliseconds(1));
    EXPECT_EQ(*last, 3.0f);
    all.arrive_and_wait();
    work->wait(seconds(60));
    expect_all(mine, 3);
  }));
}

// More than the network holds: both sides go on when there is room, or something has come, without anybody's asking.
TEST(Tcp, AGatherMovesWhileItsRanksCompute) {
  constexpr int64_t numel = 8'000'000;
  std::latch all(2);
  expect_all_well(on_tcp(2, [&](int rank, const BackendPtr& backend) {
    const auto begin = [&](std::vector<at::Tensor>& memory) {
      return rank == 0 ? backend->send(memory, 1, kGatherTag | 1) : backend->recv(memory, 0, kGatherTag | 1);
    };
    std::vector<at::Tensor> warm{at::ones({8})};
    begin(warm)->wait(seconds(60));  // makes the connection: that, nobody does beside
    std::vector<at::Tensor> memory{at::full({numel}, rank == 0 ? 5.0 : 0.0)};
    const WorkPtr work = begin(memory);
    if (rank == 1) {
      const volatile float* last = memory[0].data_ptr<float>() + numel - 1;
      for (int i = 0; i < 20'000 && *last != 5.0f; ++i) std::this_thread::sleep_for(milliseconds(1));
      EXPECT_EQ(*last, 5.0f);
    }
    all.arrive_and_wait();
    work->wait(seconds(60));
    expect_all(memory[0], 5);
  }));
}

TEST(Tcp, AMessageThatHasNoPlaceYetWaitsInTheNetwork) {
  expect_all_well(on_tcp(2, [](int rank, const BackendPtr& backend) {
    std::vector<at::Tensor> large{at::full({8'000'000}, 5.0)}, small{at::full({3}, 7.0)};
    if (rank == 0) {
      const WorkPtr sent = backend->send(large, 1, kGatherTag | 1);
      backend->send(small, 1, 2)->wait(seconds(60));  // another lane: the large one is not in its way
      sent->wait(seconds(60));
    } else {
      std::vector<at::Tensor> first{at::zeros({3})}, second{at::zeros({8'000'000})};
      backend->recv(first, 0, 2)->wait(seconds(60));
      expect_all(first[0], 7);
      backend->recv(second, 0, kGatherTag | 1)->wait(seconds(60));
      expect_all(second[0], 5);
    }
  }));
}

// The next round begins when the one before has come, also for who never waits.
TEST(Tcp, RoundsOfMessagesGoOnForWhoOnlyAsks) {
  constexpr int size = 5;
  std::latch all(size);
  expect_all_well(on_tcp(size, [&](int rank, const BackendPtr& backend) {
    std::mutex issuing;
    Links links(backend, issuing, std::make_shared<Wire>(), Cargo::control);
    const at::Tensor blocks = at::full({size * 3}, -1.0);
    const WorkPtr work = links.start(spread(rank, size, at::full({3}, 1.0 * rank), blocks), 7);
    for (int i = 0; i < 20'000 && !work->isCompleted(); ++i) std::this_thread::sleep_for(milliseconds(1));
    EXPECT_TRUE(work->isCompleted());
    for (int r = 0; r < size; ++r) expect_all(blocks.narrow(0, 3 * r, 3), r);
    all.arrive_and_wait();
  }));
}

TEST(Tcp, AMessageOfAnotherKindNeverFillsThisOnesMemory) {
  expect_all_well(on_tcp(2, [](int rank, const BackendPtr& backend) {
    std::vector<at::Tensor> memory{at::full({4}, rank == 0 ? 5.0 : -1.0)};
    if (rank == 0) {
      backend->send(memory, 1, 3)->wait(seconds(60));
    } else {
      EXPECT_ANY_THROW(backend->recv(memory, 0, 4)->wait(milliseconds(300)));
      expect_all(memory[0], -1);
    }
  }));
}

int threads_of_tcp() {
  int found = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm") >> std::ws, name);
    found += name == "plumb_tcp" ? 1 : 0;
  }
  return found;
}

// Rank 0 has let go of the call and of the backend when the thread ends the call, and with it itself.
TEST(Tcp, ACallThatNobodyHoldsEndsAllTheSame) {
  const int before = threads_of_tcp();
  for (int turn = 0; turn < 5; ++turn) {
    expect_all_well(on_tcp(2, [](int rank, const BackendPtr& backend) {
      all_reduce(backend, at::ones({10}))->wait(seconds(60));
      const at::Tensor mine = at::full({100'000}, 1.0 + rank);
      if (rank == 0) return static_cast<void>(all_reduce(backend, mine));
      std::this_thread::sleep_for(milliseconds(50));
      all_reduce(backend, mine)->wait(seconds(60));
      expect_all(mine, 3);
    }));
  }
  for (int i = 0; i < 10'000 && threads_of_tcp() > before; ++i) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_EQ(threads_of_tcp(), before);
}

// Whether it ends by itself, as it was asked to.
bool ends(pid_t child) {
  int status = 0;
  for (int i = 0; i < 20'000; ++i) {
    if (waitpid(child, &status, WNOHANG) == child) return WIFEXITED(status) && WEXITSTATUS(status) == 7;
    std::this_thread::sleep_for(milliseconds(1));
  }
  kill(child, SIGKILL);
  waitpid(child, &status, 0);
  return false;
}

// What a process inherits by a fork is its parent's: letting go of it waits for nobody, whoever of the parent's threads was
// moving it at that moment, and the parent goes on.
TEST(Tcp, AForkedChildLetsGoAtOnceAndItsParentGoesOn) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer ends a forked child that lets go of its parent's thread";
#endif
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::latch forked(2);
  expect_all_well(on_threads(2, [&](int rank) {
    // Rank 0 moves it all the time while it waits.
    const auto patience = rank == 0 ? std::chrono::microseconds(seconds(60)) : kPatience;
    BackendPtr backend = make_tcp_backend(store, rank, 2, "127.0.0.1", patience);
    all_reduce(backend, at::ones({10}))->wait(seconds(60));
    const at::Tensor after = at::ones({10'000});
    if (rank == 1) forked.arrive_and_wait();
    const WorkPtr work = all_reduce(backend, after);
    std::thread waiter([&] { work->wait(seconds(60)); });
    for (int i = 0; rank == 0 && i < 20; ++i) {
      const pid_t child = fork();
      if (child == 0) {
        backend.reset();
        _exit(7);
      }
      const bool well = ends(child);
      EXPECT_TRUE(well) << "child " << i;
      if (!well) break;
    }
    if (rank == 0) forked.arrive_and_wait();
    waiter.join();
    expect_all(after, 2);
  }));
}

TEST(Tcp, ArgumentsThatCannotBeCarriedAreRefusedBeforeAnybodyWaits) {
  expect_all_well(on_tcp(2, [](int, const BackendPtr& backend) {
    EXPECT_ANY_THROW(all_reduce(backend, at::ones({4, 4}).t()));
    EXPECT_ANY_THROW(all_reduce(backend, at::ones({4}, at::kBool)));
    std::vector<at::Tensor> one{at::ones({4})};
    EXPECT_ANY_THROW(backend->send(one, 2, 1));
    at::Tensor input = at::ones({4}), output = at::ones({4});
    std::vector<int64_t> sent{2, 2}, expected{1, 3};
    EXPECT_ANY_THROW(backend->alltoall_base(output, input, expected, sent));  // neither rank gives itself what it takes
    at::Tensor wide = at::ones({4}, at::kDouble);
    std::vector<int64_t> equal;
    EXPECT_ANY_THROW(backend->alltoall_base(output, wide, equal, equal));
    at::Tensor three = at::ones({3});
    EXPECT_ANY_THROW(backend->_allgather_base(input, three));
    EXPECT_ANY_THROW(backend->_reduce_scatter_base(three, input));
    for (const int root : {-1, 2}) {
      c10d::BroadcastOptions from;
      from.rootRank = root;
      EXPECT_ANY_THROW(backend->broadcast(one, from));
    }
    c10d::AllreduceOptions product;
    product.reduceOp = c10d::ReduceOp::PRODUCT;
    EXPECT_ANY_THROW(backend->allreduce(one, product));
    const at::Tensor after = at::ones({4});
    all_reduce(backend, after)->wait(seconds(60));
    expect_all(after, 2);
  }));
}

// A process may have so many files open that one more is left to it, and two are needed.
TEST(Tcp, AProcessWithoutRoomForItsSocketsIsToldAtOnce) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const int lowest = ::dup(0);  // all below are in use
  ASSERT_GE(lowest, 0);
  ::close(lowest);
  for (const int left : {0, 1}) {
    rlimit few = before;
    few.rlim_cur = static_cast<rlim_t>(lowest + left);
    std::string told = "nothing";
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
    try {
      const Sockets sockets(c10::make_intrusive<c10d::HashStore>(), 0, 2, "127.0.0.1");
    } catch (const std::exception& error) {
      told = error.what();
    }
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
    EXPECT_THAT(told, AllOf(HasSubstr("no socket"), HasSubstr("Too many open files"))) << left << " left";
    const int again = ::dup(0);
    EXPECT_EQ(again, lowest) << "what it had opened is closed again";
    ::close(again);
  }
}

// A process that is forked has none of its parent's threads: what it inherited ends without waiting for them, and the parent
// goes on.
TEST(Tcp, AForkedProcessLeavesWhatItInheritedToItsParent) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer ends a forked child that lets go of its parent's thread";
#endif
  expect_all_well(on_tcp(2, [](int rank, const BackendPtr& given) {
    BackendPtr backend = given;
    all_reduce(backend, at::ones({10}))->wait(seconds(60));
    if (rank == 0) {
      const pid_t child = ::fork();
      if (child == 0) {
        ::alarm(60);
        backend->shutdown();
        const_cast<BackendPtr&>(given).reset();
        backend.reset();
        ::_exit(7);
      }
      int status = 0;
      EXPECT_EQ(::waitpid(child, &status, 0), child);
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
    }
    const at::Tensor mine = at::full({1000}, 1.0 + rank);
    all_reduce(backend, mine)->wait(seconds(60));
    expect_all(mine, 3);
  }));
}

// More connections than a few: every rank sends to every other on several lanes at once.
TEST(Tcp, ManyRanksCallManyThingsAtOnce) {
  constexpr int size = 7;
  expect_all_well(on_tcp(size, [&](int rank, const BackendPtr& backend) {
    for (int turn = 0; turn < 5; ++turn) {
      const at::Tensor sum = at::full({5000 + turn}, 1.0 + rank);
      at::Tensor full = at::empty({size * 300}), shard = at::full({300}, 10.0 * rank + turn);
      const WorkPtr reduced = all_reduce(backend, sum), gathered = backend->_allgather_base(full, shard);
      std::vector<at::Tensor> passed{at::full({100}, rank == turn ? 5.0 : 0.0)};
      c10d::BroadcastOptions from;
      from.rootRank = turn;
      const WorkPtr told = backend->broadcast(passed, from);
      std::vector<at::Tensor> in{at::empty({50})}, out{at::full({50}, 1.0 * rank)};
      const WorkPtr came = backend->recv(in, (rank + size - 1) % size, turn);
      const WorkPtr went = backend->send(out, (rank + 1) % size, turn);
      backend->barrier()->wait(seconds(60));
      for (const WorkPtr& work : {went, came, told, gathered, reduced}) work->wait(seconds(60));
      expect_all(sum, size * (size + 1) / 2);
      expect_all(in[0], (rank + size - 1) % size);
      expect_all(passed[0], 5);
      for (int r = 0; r < size; ++r) expect_all(full.narrow(0, r * 300, 300), 10.0 * r + turn);
    }
  }));
}

// A rank's greeting, and whatever follows, come as the network cuts them.
TEST(Tcp, WhatComesInPiecesIsPutTogether) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto backend = make_tcp_backend(store, 0, 2, "127.0.0.1", kPatience);
  std::istringstream text(store->get_to_str("socket/0"));
  int port = 0;
  uint64_t secret = 0;
  text >> port >> secret;
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  sockaddr_in there{};
  there.sin_family = AF_INET;
  there.sin_port = htons(static_cast<uint16_t>(port));
  there.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&there), sizeof there), 0);
  const at::Tensor memory = at::zeros({3}, at::kLong);
  std::vector<at::Tensor> one{memory};
  const WorkPtr work = backend->recv(one, 1, 5);
  // Who it is, on the lane of messages; then a message's head and its numbers.
  std::string bytes(24 + 16 + 24, '\0');
  const std::array<uint32_t, 4> said{0x504c4d42, 1, 0, 0};
  const std::array<uint64_t, 5> sent{(uint64_t{1} << 63) | 5, 24, 10, 20, 30};
  std::memcpy(bytes.data(), &secret, 8);
  std::memcpy(bytes.data() + 8, said.data(), 16);
  std::memcpy(bytes.data() + 24, sent.data(), 40);
  for (const char& byte : bytes) {
    EXPECT_FALSE(work->isCompleted());
    ASSERT_EQ(::send(fd, &byte, 1, MSG_NOSIGNAL), 1);
    for (int look = 0; look < 3; ++look) (void)work->isCompleted();
  }
  work->wait(seconds(60));
  EXPECT_TRUE(memory.equal(at::tensor({10, 20, 30}, at::kLong)));
  ::close(fd);
}

// The sum so far is what the next rank gets, though more is added while it is on its way.
TEST(Tcp, ACombinationThatFillsTheNetworkIsEverybodysOnce) {
  constexpr int64_t numel = 1'000'000;
  for (const int size : {2, 5}) {
    expect_all_well(on_tcp(size, [&](int rank, const BackendPtr& backend) {
      std::mutex issuing;
      Links links(backend, issuing, std::make_shared<Wire>(), Cargo::control);
      const at::Tensor mine = at::full({numel}, int64_t{1} << (4 * rank), at::kLong);
      links.start(combination(rank, size, mine, [&](const at::Tensor& theirs) { mine.add_(theirs); }), 7)
          ->wait(seconds(60));
      int64_t all = 0;
      for (int r = 0; r < size; ++r) all += int64_t{1} << (4 * r);
      EXPECT_TRUE(mine.eq(all).all().item<bool>()) << rank << " of " << size;
      backend->barrier()->wait(seconds(60));
    }));
  }
}

// Somebody who connects without knowing the secret is nobody, whatever rank it says it is.
TEST(Tcp, AStrangerIsSentAway) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::latch ready(2), tried(2);
  expect_all_well(on_tcp(
      2,
      [&](int rank, const BackendPtr& backend) {
        ready.arrive_and_wait();
        if (rank == 1) {
          std::istringstream text(store->get_to_str("socket/0"));
          int port = 0;
          text >> port;
          const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
          sockaddr_in there{};
          there.sin_family = AF_INET;
          there.sin_port = htons(static_cast<uint16_t>(port));
          there.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
          EXPECT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&there), sizeof there), 0);
          std::array<uint32_t, 6> greeting{1, 2, 0x504c4d42, 1, 2, 0};
          EXPECT_EQ(::write(fd, greeting.data(), sizeof greeting), static_cast<ssize_t>(sizeof greeting));
          tried.arrive_and_wait();
          const at::Tensor mine = at::ones({5});
          all_reduce(backend, mine)->wait(seconds(60));
          expect_all(mine, 3);
          char byte = 0;
          EXPECT_LE(::read(fd, &byte, 1), 0);  // closed
          ::close(fd);
        } else {
          tried.arrive_and_wait();
          const at::Tensor mine = at::full({5}, 2.0);
          all_reduce(backend, mine)->wait(seconds(60));
          expect_all(mine, 3);
        }
      },
      store));
}

}  // namespace
}  // namespace plumb::testing
