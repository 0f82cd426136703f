#include "watch/road.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string_view>

#include "plumb/error.h"
#include "watch/strike.h"

namespace plumb {
namespace {

// By the order of Point: the name, what a rank does there, and of what the index is.
struct Words {
  const char* name;
  const char* doing;
  const char* index;
};
constexpr std::array<Words, kPoints> kWords = {{{"none", "", ""},
                                                {"join", "joining the world", ""},
                                                {"setup", "setting up its engine", ""},
                                                {"gather", "gathering the parameters", " of bucket "},
                                                {"hook", "taking a gradient", " of parameter "},
                                                {"reduce", "reducing", " bucket "},
                                                {"agree", "telling the others what it has", ""},
                                                {"rebuild", "ordering its buckets", ""},
                                                {"step", "beginning the step", ""},
                                                {"update", "updating parameters", ""},
                                                {"publish", "ending the step", ""},
                                                {"save", "beginning to save", ""},
                                                {"snapshot", "taking a snapshot to save", ""},
                                                {"write", "writing a checkpoint", ""},
                                                {"commit", "completing a checkpoint", ""},
                                                {"load", "beginning to load", ""},
                                                {"read", "reading a checkpoint", ""},
                                                {"fill", "filling in what was loaded", ""},
                                                {"evaluate", "evaluating", ""},
                                                {"exit", "leaving", ""}}};

const Words& words_of(Point point) {
  const auto index = static_cast<size_t>(point);
  return kWords[index < kWords.size() ? index : 0];
}

static_assert(std::atomic<int64_t>::is_always_lock_free);  // between processes

}  // namespace

const char* name_of(Point point) { return words_of(point).name; }

std::string describe(const Passed& passed) {
  if (passed.point == Point::none) return "";
  const Words& words = words_of(passed.point);
  std::string text = words.doing;
  if (passed.index >= 0 && *words.index != 0) text += words.index + std::to_string(passed.index);
  if (passed.point == Point::join || passed.point == Point::setup || passed.point == Point::exit) return text;
  const std::string step = " of step " + std::to_string(passed.step);
  text += passed.pass > 0 ? " in backward " + std::to_string(passed.pass) + step : ", before any backward" + step;
  if (passed.beside != Point::none) text += std::string(", ") + words_of(passed.beside).doing + " beside it";
  return text;
}

Passed Footprint::read() const {
  constexpr auto relaxed = std::memory_order_relaxed;
  return {static_cast<Point>(point.load(relaxed)), step.load(relaxed), pass.load(relaxed), index.load(relaxed),
          static_cast<Point>(beside.load(relaxed))};
}

Road::Road(int rank) : rank_(rank) { arm_strike(); }

void Road::pass(Point point, int64_t step, int64_t pass, int64_t index) {
  constexpr auto relaxed = std::memory_order_relaxed;
  footprint_->step.store(step, relaxed);
  footprint_->pass.store(pass, relaxed);
  footprint_->index.store(index, relaxed);
  footprint_->point.store(static_cast<int64_t>(point), relaxed);
  if (strikes::armed.load(std::memory_order_acquire)) strikes::look(rank_, point);
}

void Road::pass(Point point) {
  const Passed before = last();
  pass(point, before.step, before.pass);
}

void Road::enter(int64_t step) {
  footprint_->step.store(step, std::memory_order_relaxed);
  footprint_->pass.store(0, std::memory_order_relaxed);
}

void Road::beside(Point point) {
  footprint_->beside.store(static_cast<int64_t>(point), std::memory_order_relaxed);
  if (point != Point::none && strikes::armed.load(std::memory_order_acquire)) strikes::look(rank_, point);
}

void Road::use_board() {
  const char* text = std::getenv(kBoardFd);
  if (text == nullptr || footprint_ != &own_) return;
  const std::string_view digits = text;
  int fd = -1;
  if (std::from_chars(digits.begin(), digits.end(), fd).ptr != digits.end()) return;
  const size_t bytes = sizeof(Footprint) * static_cast<size_t>(rank_ + 1);
  // Where the number has become somebody else's descriptor, the launcher knows less.
  struct stat status{};
  if (fcntl(fd, F_GET_SEALS) < 0 || fstat(fd, &status) != 0 || status.st_size < static_cast<off_t>(bytes)) return;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return;
  footprint_ = static_cast<Footprint*>(memory) + rank_;  // mapped until the process ends
}

Board::Board(int64_t ranks) : ranks_(ranks) {
  const size_t bytes = sizeof(Footprint) * static_cast<size_t>(ranks);
  fd_ = memfd_create("plumb-board", MFD_CLOEXEC);
  void* memory = MAP_FAILED;
  if (fd_ >= 0 && ftruncate(fd_, static_cast<off_t>(bytes)) == 0) {
    memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  }
  if (memory == MAP_FAILED) {
    const int error = errno;
    if (fd_ >= 0) close(fd_);
    throw Error(std::string("no memory to watch the ranks by: ") + std::strerror(error));
  }
  footprints_ = static_cast<Footprint*>(memory);
  for (int64_t rank = 0; rank < ranks; ++rank) new (footprints_ + rank) Footprint();
}

Board::~Board() {
  munmap(footprints_, sizeof(Footprint) * static_cast<size_t>(ranks_));
  close(fd_);
}

}  // namespace plumb
