// Strikes: faults on purpose, for trials of everything that must go well when something goes wrong. PLUMB_FAULT asks for
// them: "rank=1,point=gather:3,kind=kill" ends rank 1 when it passes that point of the road for the third time. Several,
// with ';' between them, are for one life each of a run that is restarted.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "watch/road.h"

namespace plumb {

struct Strike {
  // "none" for a life without; "throw" is an Error; "flip" changes a bit, at the points that have numbers: a gradient as it
  // comes (hook), a parameter as it was updated (publish).
  enum class Kind { none, kill, stop, raise, flip };
  int rank = 0;
  Point point = Point::none;
  int64_t number = 1;  // the how manieth time, from 1
  Kind kind = Kind::none;
};

// Throws an Error that says what of it cannot be read.
std::vector<Strike> read_strikes(const std::string& text);

// How often the run was restarted before this process began: by our launcher, or by torchrun.
inline constexpr const char* kRestarted = "PLUMB_RESTARTED";
int64_t restarts_before();

// Reads PLUMB_FAULT; the strike of this life, if any, is armed. Throws an Error on nonsense.
void arm_strike();

namespace strikes {
extern std::atomic<bool> armed;
void look(int rank, Point point);  // strikes, if it is the one
bool flip_now(int rank, Point point);
// Whether a bit is to be flipped at the point that was passed last.
inline bool flips(int rank, Point point) { return armed.load(std::memory_order_acquire) && flip_now(rank, point); }
}  // namespace strikes

void flip_a_bit(const at::Tensor& tensor);

}  // namespace plumb
