// How collectives of the `tcp` backend end that cannot go on: who hears of it, in which words, and what is let go of.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <exception>
#include <latch>

#include "backend/support/tcp_ranks.h"

namespace plumb::testing {
namespace {

using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

WorkPtr begin_sum(const BackendPtr& backend, const at::Tensor& tensor) {
  std::vector<at::Tensor> one{tensor};
  return backend->allreduce(one);
}

TEST(TcpEnds, RanksThatCallDifferentCollectivesAreToldBoth) {
  const auto thrown = on_tcp(2, [](int rank, const BackendPtr& backend) {
    at::Tensor mine = at::ones({100}), all = at::zeros({200});
    (rank == 0 ? begin_sum(backend, mine) : backend->_allgather_base(all, mine))->wait(seconds(60));
  });
  const bool told =
      thrown[0].find("all_reduce") != std::string::npos && thrown[0].find("all_gather") != std::string::npos;
  const bool other =
      thrown[1].find("all_reduce") != std::string::npos && thrown[1].find("all_gather") != std::string::npos;
  EXPECT_TRUE(told || other) << thrown[0] << "\n" << thrown[1];
  for (const std::string& text : thrown) EXPECT_NE(text, "");
}

TEST(TcpEnds, RanksWhoseTensorsDifferInLengthAreToldBoth) {
  const auto thrown = on_tcp(2, [](int rank, const BackendPtr& backend) {
    begin_sum(backend, at::ones({rank == 0 ? 100 : 500}))->wait(seconds(60));
  });
  for (const std::string& text : thrown) EXPECT_NE(text, "");
  EXPECT_THAT(thrown[0] + thrown[1], AllOf(HasSubstr("called all_reduce (number 1, "), HasSubstr("every rank must")));
}

TEST(TcpEnds, TheEndOfARankEndsTheWaitsOfTheOthers) {
  const auto thrown = on_tcp(3, [](int rank, const BackendPtr& backend) {
    begin_sum(backend, at::ones({10}))->wait(seconds(60));
    if (rank == 1) return;
    begin_sum(backend, at::ones({10}))->wait(seconds(60));
  });
  EXPECT_EQ(thrown[1], "");
  for (const int r : {0, 2}) EXPECT_THAT(thrown[r], HasSubstr("the connection to rank"));
}

TEST(TcpEnds, WhatIsDroppedUnfinishedNeitherHangsNorIsWritten) {
  const auto thrown = on_tcp(2, [](int rank, const BackendPtr& backend) {
    const at::Tensor warm = at::ones({10});
    begin_sum(backend, warm)->wait(seconds(60));
    if (rank == 1) begin_sum(backend, at::ones({3'000'000}));  // nobody waits, and rank 0 never comes
    backend->shutdown();
  });
  expect_all_well(thrown);
}

// Whoever sees that another one called something else says so as an Error of its own, which needs no explanation; and closes its
// connections, so that those who called the same hear of it at once.
TEST(TcpEnds, AContradictionIsACompleteErrorAndEndsTheWaitsOfAll) {
  std::latch ended(4);
  const auto thrown = on_tcp(4, [&](int rank, const BackendPtr& backend) {
    std::vector<at::Tensor> one{at::ones({10'000})};  // a part for everybody
    backend->allreduce(one)->wait(seconds(60));
    std::exception_ptr failure;
    try {
      (rank == 2 ? backend->broadcast(one) : backend->allreduce(one))->wait(seconds(30));
    } catch (...) {
      failure = std::current_exception();
    }
    ended.arrive_and_wait();  // what closes a connection is the error, and not the end of a rank
    if (failure) std::rethrow_exception(failure);
  });
  int contradictions = 0;
  for (size_t r = 0; r < 4; ++r) {
    EXPECT_THAT(thrown[r], AllOf(Not(""), Not(HasSubstr("gave up"))));
    if (thrown[r].find(" called ") == std::string::npos) continue;
    EXPECT_THAT(thrown[r], StartsWith("plumb: rank " + std::to_string(r) + ": rank "));
    ++contradictions;
  }
  EXPECT_GT(contradictions, 0);
}

// A call that nobody waits for holds nothing once the backend is shut down.
TEST(TcpEnds, AShutDownLetsGoOfWhatWasUnderWay) {
  std::latch ended(2);
  expect_all_well(on_tcp(2, [&](int rank, const BackendPtr& backend) {
    begin_sum(backend, at::ones({10}))->wait(seconds(60));
    if (rank == 1) {
      const at::Tensor mine = at::ones({3'000'000});
      (void)begin_sum(backend, mine);  // rank 0 never comes
      backend->shutdown();
      EXPECT_EQ(mine.use_count(), 1u);
      EXPECT_ANY_THROW(begin_sum(backend, mine)->wait(seconds(60)));
      EXPECT_EQ(mine.use_count(), 1u);
    }
    ended.arrive_and_wait();
  }));
}

}  // namespace
}  // namespace plumb::testing
