// The shadow of memory: for every byte, who wrote it last and who has read it since.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "sim/clock.h"

namespace plumb::sim {

struct Range {
  char* begin = nullptr;
  char* end = nullptr;
  bool write = false;
};

// One operation's access, small enough to be stored per byte range.
struct Access {
  int stream = -1;  // -1: none
  uint32_t number = 0;
  uint32_t site = 0;
};

enum class Conflict { read_after_write, write_after_read, write_after_write };

class Shadow {
 public:
  using OnConflict = std::function<void(Conflict, const Access& first, char* begin, char* end)>;

  // Notes that `access`, whose stream's clock is `clock`, touches `range`; calls `on_conflict` for every earlier access
  // that `clock` does not cover.
  void touch(const Range& range, const Access& access, const Clock& clock, const OnConflict& on_conflict);

  // Forgets what `clock` covers in these bytes.
  void forget(char* begin, char* end, const Clock& clock);
  void clear() { segments_.clear(); }

 private:
  struct Segment {
    char* end = nullptr;
    Access writer;
    std::vector<Access> readers;
  };
  using Segments = std::map<char*, Segment>;

  void split(char* at);
  void check(const Range& range, const Segments::value_type& segment, const Access& access, const Clock& clock,
             const OnConflict& on_conflict) const;

  Segments segments_;
};

}  // namespace plumb::sim
