// Points that ranks pass, the board that a launcher reads them from, and the faults that strike there.
#include "watch/road.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>

#include "plumb/error.h"
#include "watch/strike.h"

namespace plumb {
namespace {

using ::testing::HasSubstr;

TEST(Road, RemembersTheLastPointInItsStepAndBackward) {
  Road road(0);
  EXPECT_EQ(road.last().point, Point::none);
  road.pass(Point::reduce, 5, 2, 3);
  EXPECT_EQ(road.last().point, Point::reduce);
  EXPECT_EQ(road.last().step, 5);
  EXPECT_EQ(road.last().pass, 2);
  EXPECT_EQ(road.last().index, 3);
  road.pass(Point::agree);
  EXPECT_EQ(road.last().point, Point::agree);
  EXPECT_EQ(road.last().step, 5);
  EXPECT_EQ(road.last().pass, 2);
  EXPECT_EQ(road.last().index, -1) << "the index was of another point";
  road.beside(Point::write);
  EXPECT_EQ(road.last().point, Point::agree);
  EXPECT_EQ(road.last().beside, Point::write);
  road.beside(Point::none);
  EXPECT_EQ(road.last().beside, Point::none);
  road.enter(6);
  EXPECT_EQ(road.last().step, 6);
  EXPECT_EQ(road.last().pass, 0);
}

TEST(Road, IsSeenOnTheBoardOfItsRankAlone) {
  const Board board(3);
  setenv(kBoardFd, std::to_string(board.fd()).c_str(), 1);
  Road road(1);
  road.pass(Point::join);
  EXPECT_EQ(board.of(1).point, Point::none) << "nobody said that it may be seen";
  road.use_board();
  road.pass(Point::gather, 4, 1, 9);
  EXPECT_EQ(board.of(1).point, Point::gather);
  EXPECT_EQ(board.of(1).index, 9);
  EXPECT_EQ(board.of(0).point, Point::none);
  EXPECT_EQ(board.of(2).point, Point::none);
  Road fourth(3);  // a board of three has no place for it
  fourth.use_board();
  fourth.pass(Point::step, 1, 1);
  EXPECT_EQ(fourth.last().point, Point::step);
  setenv(kBoardFd, "0", 1);  // a number that has become somebody else's
  Road other(1);
  other.use_board();
  other.pass(Point::exit);
  EXPECT_EQ(other.last().point, Point::exit);
  EXPECT_EQ(board.of(1).point, Point::gather);
  unsetenv(kBoardFd);
}

TEST(Road, OfEveryRankIsOnTheBoardAndOutlivesIt) {
  const Board board(3);
  setenv(kBoardFd, std::to_string(board.fd()).c_str(), 1);
  for (int rank = 0; rank < 3; ++rank) {
    Road road(rank);
    road.use_board();
    road.use_board();  // asked twice, it is where it was
    road.pass(Point::hook, rank, 1, 10 + rank);
  }
  unsetenv(kBoardFd);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(board.of(rank).point, Point::hook) << rank;
    EXPECT_EQ(board.of(rank).step, rank);
    EXPECT_EQ(board.of(rank).index, 10 + rank);
  }
}

// More than a page of ranks; those whose places it does not have keep to themselves.
TEST(Road, OfManyRanksHasItsPlaceOnTheirBoard) {
  const Board board(500);
  setenv(kBoardFd, std::to_string(board.fd()).c_str(), 1);
  const auto passed = [](int rank, int64_t step) {
    Road road(rank);
    road.use_board();
    road.pass(Point::update, step, 2);
    return road.last().step;
  };
  for (const int rank : {0, 1, 102, 103, 499}) {
    EXPECT_EQ(passed(rank, rank + 1), rank + 1);
    EXPECT_EQ(board.of(rank).step, rank + 1);
  }
  EXPECT_EQ(board.of(2).point, Point::none);
  EXPECT_EQ(board.of(498).point, Point::none);
  for (const int rank : {500, 501, 100'000}) {
    EXPECT_EQ(passed(rank, 7), 7);
    Road again(rank);
    again.use_board();
    EXPECT_EQ(again.last().point, Point::none) << "it saw the other of its number";
  }
  for (const std::string& wrong : {std::to_string(board.fd()) + "x", std::string("x"), std::string("-1")}) {
    setenv(kBoardFd, wrong.c_str(), 1);
    EXPECT_EQ(passed(2, 7), 7);
    EXPECT_EQ(board.of(2).point, Point::none) << wrong;
  }
  unsetenv(kBoardFd);
}

TEST(Strikes, AreRead) {
  const std::vector<Strike> all = read_strikes("rank=1,point=gather:3,kind=kill;;rank=0,point=exit,kind=throw");
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(all[0].rank, 1);
  EXPECT_EQ(all[0].point, Point::gather);
  EXPECT_EQ(all[0].number, 3);
  EXPECT_EQ(all[0].kind, Strike::Kind::kill);
  EXPECT_EQ(all[1].kind, Strike::Kind::none);
  EXPECT_EQ(all[2].rank, 0);
  EXPECT_EQ(all[2].number, 1);
  EXPECT_EQ(all[2].kind, Strike::Kind::raise);
  EXPECT_EQ(read_strikes("rank=0,point=hook,kind=flip")[0].kind, Strike::Kind::flip);
  EXPECT_EQ(read_strikes("rank=0,point=publish,kind=flip")[0].point, Point::publish);
  EXPECT_EQ(read_strikes("rank=0,point=join,kind=stop")[0].kind, Strike::Kind::stop);
  EXPECT_TRUE(read_strikes("").empty());
}

TEST(Strikes, ThatSayNothingAreAnErrorThatSaysHow) {
  for (const char* wrong :
       {"rank=1", "point=gather,kind=kill", "rank=1,kind=kill", "rank=1,point=gather", "rank=1,point=gather,kind=none",
        "rank=-1,point=gather,kind=kill", "rank=x,point=gather,kind=kill", "rank=1x,point=gather,kind=kill",
        "rank=1,point=gather:0,kind=kill", "rank=1,point=nowhere,kind=kill", "rank=1,point=none,kind=kill",
        "rank=1,point=gather,kind=maim", "rank=1,point=gather,kind=flip", "rank=1,point=gather,kind=kill,more"}) {
    try {
      read_strikes(wrong);
      ADD_FAILURE() << wrong;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("rank=1,point=gather:3,kind=kill")) << wrong;
      EXPECT_THAT(error.what(), HasSubstr(wrong));
    }
  }
}

// Raises where it was asked for, the third time that the rank comes by, in the second life alone.
TEST(Strikes, StrikeTheRankAtThePointTheTimeAndInTheLifeThatWereAskedFor) {
  setenv("PLUMB_FAULT", ";rank=1,point=gather:3,kind=throw", 1);
  for (const char* life : {"0", "1", "2"}) {
    setenv(kRestarted, life, 1);
    setenv("PLUMB_FAULT", "", 1);
    arm_strike();
    setenv("PLUMB_FAULT", ";rank=1,point=gather:3,kind=throw", 1);
    Road mine(1), other(0);
    std::string said;
    int at = 0;
    for (int i = 1; i <= 5; ++i) {
      other.pass(Point::gather, 0, 1);
      mine.pass(Point::reduce, 0, 1);
      try {
        mine.pass(Point::gather, 0, 1);
      } catch (const Error& error) {
        said += error.what();
        at = i;
      }
    }
    EXPECT_EQ(at, std::string(life) == "1" ? 3 : 0) << "life " << life;
    EXPECT_EQ(said.empty(), std::string(life) != "1") << said;
  }
  unsetenv(kRestarted);
  setenv("TORCHELASTIC_RESTART_COUNT", "4", 1);
  EXPECT_EQ(restarts_before(), 4);
  unsetenv("TORCHELASTIC_RESTART_COUNT");
  EXPECT_EQ(restarts_before(), 0);
  unsetenv("PLUMB_FAULT");
  arm_strike();
  EXPECT_FALSE(strikes::armed);
}

class Armed {
 public:
  explicit Armed(const char* fault) { setenv("PLUMB_FAULT", fault, 1); }
  ~Armed() {
    unsetenv("PLUMB_FAULT");
    arm_strike();
  }
};

std::string struck(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Strikes, SayWhomTheyStrikeWhereAndHow) {
  const Armed armed("rank=2,point=reduce:2,kind=throw");
  Road road(2);
  road.pass(Point::reduce, 0, 1);
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(struck([&] { road.pass(Point::reduce, 0, 1); }),
            "plumb: rank 2: PLUMB_FAULT asked for an error at reduce:2");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "plumb: PLUMB_FAULT strikes rank 2 at reduce:2: throw\n");
  EXPECT_EQ(struck([&] { road.pass(Point::reduce, 0, 1); }), "") << "once";
}

TEST(Strikes, CountTheTimesOfARankWhateverEnginesItMakes) {
  const Armed armed("rank=0,point=save:3,kind=throw");
  for (int i = 1; i <= 4; ++i) {
    Road road(0);  // reads the variable again, and it is the same
    EXPECT_EQ(struck([&] { road.pass(Point::save); }) != "", i == 3) << i;
  }
}

// The thread that saves passes its points beside those of the training.
TEST(Strikes, AlsoStrikeBesideTheRoad) {
  const Armed armed("rank=0,point=write:2,kind=throw");
  Road road(0), other(1);
  other.beside(Point::write);
  road.beside(Point::write);
  road.beside(Point::none);
  EXPECT_NE(struck([&] { road.beside(Point::write); }), "");
}

TEST(Strikes, ThatCannotBeReadAreToldEveryTime) {
  const Armed armed("rank=0,point=save,kind=maim");
  for (int i = 0; i < 2; ++i) EXPECT_THAT(struck([] { Road road(0); }), HasSubstr("'kind=maim' says nothing"));
  EXPECT_FALSE(strikes::armed);
  unsetenv("PLUMB_FAULT");
}

TEST(Strikes, EndOrStopTheProcess) {
  for (const bool kills : {true, false}) {
    const Armed armed(kills ? "rank=0,point=step,kind=kill" : "rank=0,point=step,kind=stop");
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      Road road(0);
      road.pass(Point::step);
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, WUNTRACED), child);
    EXPECT_TRUE(kills ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL
                      : WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP)
        << status;
    if (!kills) {
      kill(child, SIGKILL);
      waitpid(child, &status, 0);
    }
  }
}

TEST(Strikes, FlipOneBitOnce) {
  setenv("PLUMB_FAULT", "rank=0,point=hook:2,kind=flip", 1);
  Road road(0);
  road.pass(Point::hook, 0, 1);
  EXPECT_FALSE(strikes::flips(0, Point::hook));
  road.pass(Point::hook, 0, 1);
  EXPECT_FALSE(strikes::flips(1, Point::hook));
  EXPECT_FALSE(strikes::flips(0, Point::publish));
  EXPECT_TRUE(strikes::flips(0, Point::hook));
  EXPECT_FALSE(strikes::flips(0, Point::hook));
  unsetenv("PLUMB_FAULT");
  arm_strike();
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const at::Tensor before = at::ones({3}, dtype), now = before.clone();
    flip_a_bit(now);
    EXPECT_EQ(before.ne(now).sum().item<int64_t>(), 1) << dtype;
    EXPECT_TRUE(now.isfinite().all().item<bool>()) << dtype;
    EXPECT_EQ(now._version(), before.clone()._version()) << "it leaves no trace";
  }
  flip_a_bit(at::ones({0}));
}

}  // namespace
}  // namespace plumb
