// What a rank says of itself to the others: alive, waiting where, failed how, or left.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "plumb/error.h"
#include "watch/road.h"
#include "watch/where.h"

namespace plumb {

// What others' errors say before their stack traces.
inline std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

// An error that reached this rank from another one; the cause is reported there.
class Consequence : public Error {
 public:
  using Error::Error;
};

// What a backend throws when it sees that these ranks' processes have ended while this rank needed them.
struct RanksGone : std::runtime_error {
  explicit RanksGone(std::vector<int> which) : std::runtime_error("processes have ended"), ranks(std::move(which)) {}
  std::vector<int> ranks;
};

// The groups of a world, by number: each has its own order of collectives. Gathers by name (Group::gather) count apart.
constexpr int data_index = 0;
constexpr int control_index = 1;
constexpr int gather_index = 2;
constexpr int group_count = 3;

// What a rank has done so far, for the others to be told.
struct Progress {
  explicit Progress(int rank) : road(rank) {}
  std::array<std::atomic<int64_t>, group_count> issued{};  // collectives, on each group
  Road road;
};

// The collective a wait is for: the `number`-th (from 1) of a group.
struct Ticket {
  int group = data_index;
  int64_t number = 0;
  // Where ranks say what they do: between whom, and a digest of it; 0 elsewhere. Two that say different things at the same
  // number both wait in vain.
  int64_t circle = 0;
  int64_t what = 0;
  std::shared_ptr<const std::vector<int>> members{};  // the ranks that it is waited for; null: all. Not told.
};

struct Report {
  enum class State { running, waiting, failed, left };
  State state = State::running;
  int64_t beat = 0;                           // renewed while the process lives
  std::array<int64_t, group_count> issued{};  // as in Progress
  Passed last;                                // on its road
  int64_t wait = 0;                           // which wait of this rank; two reports of one wait carry one number
  Ticket ticket;                              // waiting, or failed in a wait: for what
  Where where;                                // waiting, failed: in which place
  int origin = -1;                            // failed: the rank where it began
  std::string message;                        // failed: what() of it

  std::string encode() const;
  static Report decode(const std::string& text);
};

// "backward 2 of step 5 (reduction of bucket 3)".
std::string describe(const Where& where);
// What the rank of this report is doing, as the end of a sentence that begins with its name: "is in backward 2 of …".
std::string describe(const Report& report);
// "1 backward", "2 backwards".
std::string backwards(int64_t count);
// `what` without the "plumb: " that every Error carries.
std::string without_prefix(const std::string& what);

}  // namespace plumb
