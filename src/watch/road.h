// The road of a run: named points that every rank passes. The last one passed is what is told of a rank that is gone, and
// where a fault strikes that was asked for (watch/strike.h). Passing one costs four stores and a load.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>

#include "plumb/world.h"

namespace plumb {

enum class Point : int64_t {
  none,
  join,
  setup,
  gather,
  hook,
  reduce,
  agree,
  rebuild,
  step,
  update,
  publish,
  save,
  snapshot,
  write,
  commit,
  load,
  read,
  fill,
  evaluate,
  exit
};
constexpr int kPoints = static_cast<int>(Point::exit) + 1;
const char* name_of(Point point);

struct Passed {
  Point point = Point::none;
  int64_t step = 0, pass = 0;  // steps finished, backwards begun since then
  int64_t index = -1;          // of the bucket or parameter; -1: none
  Point beside = Point::none;  // where the thread is that saves beside the training; none: it rests
};
// "reducing bucket 3 in backward 1 of step 5, writing a checkpoint beside it"; empty for none.
std::string describe(const Passed& passed);

// What a rank writes and others read at any moment, from another process too.
struct Footprint {
  std::atomic<int64_t> point{0}, step{0}, pass{0}, index{-1}, beside{0};
  Passed read() const;
};

// Of one rank.
class Road {
 public:
  explicit Road(int rank);
  Road(const Road&) = delete;
  Road& operator=(const Road&) = delete;

  void pass(Point point, int64_t step, int64_t pass, int64_t index = -1);
  void pass(Point point);    // in the step and backward of the last one
  void enter(int64_t step);  // which has no backward yet
  void beside(Point point);  // by the thread that saves; none: it has ended
  Passed last() const { return footprint_->read(); }
  // From here on the launcher sees it, where a launcher of ours started this process.
  void use_board();

 private:
  const int rank_;
  Footprint own_;
  Footprint* footprint_ = &own_;
};

Road& road_of(const World& world);

// The footprints of the ranks that a launcher starts: they inherit its descriptor, whose number kBoardFd tells them.
class Board {
 public:
  explicit Board(int64_t ranks);
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;
  int fd() const { return fd_; }
  Passed of(int64_t rank) const { return footprints_[rank].read(); }

 private:
  const int64_t ranks_;
  int fd_ = -1;
  Footprint* footprints_ = nullptr;
};
inline constexpr const char* kBoardFd = "PLUMB_BOARD_FD";

}  // namespace plumb
