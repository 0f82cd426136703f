// The interval map behind the race check.
#include "sim/shadow.h"

#include <algorithm>

namespace plumb::sim {

void Shadow::split(char* at) {
  auto next = segments_.upper_bound(at);
  if (next == segments_.begin()) return;
  auto it = std::prev(next);
  if (it->first < at && at < it->second.end) {
    Segment rest = it->second;
    it->second.end = at;
    segments_.emplace_hint(next, at, std::move(rest));
  }
}

void Shadow::check(const Range& range, const Segments::value_type& segment, const Access& access, const Clock& clock,
                   const OnConflict& on_conflict) const {
  const auto& [begin, state] = segment;
  const auto unordered = [&](const Access& earlier) {
    return earlier.stream >= 0 && earlier.stream != access.stream && !clock.covers(earlier.stream, earlier.number);
  };
  if (unordered(state.writer)) {
    on_conflict(range.write ? Conflict::write_after_write : Conflict::read_after_write, state.writer, begin, state.end);
  }
  if (!range.write) return;
  for (const Access& reader : state.readers) {
    if (unordered(reader)) on_conflict(Conflict::write_after_read, reader, begin, state.end);
  }
}

void Shadow::touch(const Range& range, const Access& access, const Clock& clock, const OnConflict& on_conflict) {
  if (range.begin >= range.end) return;
  auto it = segments_.find(range.begin);
  if (it == segments_.end() || it->second.end != range.end) {
    split(range.begin);
    split(range.end);
    it = segments_.lower_bound(range.begin);
  }
  if (range.write) {
    bool stored = false;
    while (it != segments_.end() && it->first < range.end) {
      check(range, *it, access, clock, on_conflict);
      if (it->first == range.begin) {
        it->second.end = range.end;
        it->second.writer = access;
        it->second.readers.clear();
        stored = true;
        ++it;
      } else {
        it = segments_.erase(it);
      }
    }
    if (!stored) segments_.emplace_hint(it, range.begin, Segment{range.end, access, {}});
    return;
  }
  for (char* at = range.begin; at < range.end; ++it) {
    if (it == segments_.end() || it->first > at) {
      char* end = it == segments_.end() ? range.end : std::min(range.end, it->first);
      it = segments_.emplace_hint(it, at, Segment{end, {}, {}});
    }
    check(range, *it, access, clock, on_conflict);
    auto& readers = it->second.readers;
    const auto same = std::find_if(readers.begin(), readers.end(), [&](auto& r) { return r.stream == access.stream; });
    if (same == readers.end()) {
      readers.push_back(access);
    } else {
      *same = access;
    }
    at = it->second.end;
  }
}

void Shadow::forget(char* begin, char* end, const Clock& clock) {
  split(begin);
  split(end);
  for (auto it = segments_.lower_bound(begin); it != segments_.end() && it->first < end; ++it) {
    Segment& state = it->second;
    if (state.writer.stream >= 0 && clock.covers(state.writer.stream, state.writer.number)) state.writer = {};
    std::erase_if(state.readers, [&](const Access& reader) { return clock.covers(reader.stream, reader.number); });
  }
}

}  // namespace plumb::sim
