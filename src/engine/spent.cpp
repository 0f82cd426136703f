#include "engine/spent.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <sstream>
#include <utility>

namespace plumb {
namespace {

struct Span {
  int64_t begin, end;  // nanoseconds since the common origin
};

bool is(const char* track, const char* which) { return std::strcmp(track, which) == 0; }

int64_t since(Timeline::Moment moment, Timeline::Moment zero) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(moment - zero).count();
}

// Disjoint, in order.
std::vector<Span> joined(std::vector<Span> spans) {
  std::ranges::sort(spans, {}, &Span::begin);
  std::vector<Span> out;
  for (const Span& span : spans) {
    if (!out.empty() && span.begin <= out.back().end) {
      out.back().end = std::max(out.back().end, span.end);
    } else {
      out.push_back(span);
    }
  }
  return out;
}

// What both cover; each disjoint and in order.
std::vector<Span> common(const std::vector<Span>& first, const std::vector<Span>& second) {
  std::vector<Span> out;
  for (size_t i = 0, j = 0; i < first.size() && j < second.size();) {
    const Span both{std::max(first[i].begin, second[j].begin), std::min(first[i].end, second[j].end)};
    if (both.begin < both.end) out.push_back(both);
    first[i].end < second[j].end ? ++i : ++j;
  }
  return out;
}

int64_t length(const std::vector<Span>& spans) {
  int64_t sum = 0;
  for (const Span& span : spans) sum += span.end - span.begin;
  return sum;
}

// Meetings are told apart by what they are called, and how often that came before.
using Meeting = std::pair<std::string, int64_t>;

std::map<Meeting, int64_t> read_arrivals(const std::string& text) {
  std::map<Meeting, int64_t> all;
  std::map<std::string, int64_t> seen;
  std::istringstream lines(text);
  int64_t when = 0;
  for (std::string name; lines >> when && lines.get() && std::getline(lines, name);) all[{name, seen[name]++}] = when;
  return all;
}

// Who came last to each meeting that all ranks came to, and when, in order.
struct Last {
  int64_t when;
  int rank;
};
std::vector<Last> last_ones(const std::vector<std::string>& everybody) {
  std::map<Meeting, std::pair<int, Last>> meetings;  // and how many came
  for (size_t rank = 0; rank < everybody.size(); ++rank) {
    for (const auto& [meeting, when] : read_arrivals(everybody[rank])) {
      auto& [count, last] = meetings.try_emplace(meeting, 0, Last{when, static_cast<int>(rank)}).first->second;
      ++count;
      if (when > last.when) last = {when, static_cast<int>(rank)};
    }
  }
  std::vector<Last> all;
  for (const auto& [meeting, one] : meetings) {
    if (one.first == static_cast<int>(everybody.size())) all.push_back(one.second);
  }
  std::ranges::sort(all, {}, &Last::when);
  return all;
}

}  // namespace

std::string arrivals(const std::vector<Timeline::Event>& events, Timeline::Moment zero) {
  std::string text;
  for (const Timeline::Event& event : events) {
    const auto together = {tracks::control, tracks::buckets, "gathers"};
    const auto same = [&](const char* track) { return is(event.track, track); };
    if (std::ranges::none_of(together, same)) continue;
    std::string name = event.name;
    std::ranges::replace(name, '\n', ' ');
    text += std::to_string(since(event.begin, zero)) + " " + name + "\n";
  }
  return text;
}

TimeSpent time_spent(const std::vector<Timeline::Event>& events, Timeline::Moment zero, int rank,
                     const std::vector<std::string>& everybody) {
  TimeSpent spent;
  std::vector<Span> program, optimizer, data, gathers, control;
  for (const Timeline::Event& event : events) {
    const Span span{since(event.begin, zero), since(event.end, zero)};
    if (is(event.track, tracks::steps)) ++spent.steps;
    if (is(event.track, tracks::data)) data.push_back(span);
    if (is(event.track, tracks::gathers)) gathers.push_back(span);
    if (is(event.track, tracks::control)) control.push_back(span);
    if (!is(event.track, tracks::program)) continue;
    if (event.name == doing::optimizer) optimizer.push_back(span);
    const auto names = {doing::forward, doing::backward, doing::step, doing::optimizer};
    if (std::ranges::find(names, event.name) != names.end()) program.push_back(span);
  }
  spent.waited_for.resize(everybody.size());
  if (spent.steps == 0) return spent;
  const double scale = 1e-9 / static_cast<double>(spent.steps);
  program = joined(program);
  // Each moment counts once: as a wait, or else as the optimizer's, or else as the program's own.
  std::vector<Span> counted;
  const auto take = [&](std::vector<Span> spans) {
    const int64_t before = length(counted);
    spans.insert(spans.end(), counted.begin(), counted.end());
    counted = common(joined(std::move(spans)), program);
    return static_cast<double>(length(counted) - before) * scale;
  };
  spent.data = take(data);
  spent.gathers = take(gathers);
  spent.control = take(control);
  const std::vector<Span> waits = counted;
  spent.optimizer = take(optimizer);
  spent.step = static_cast<double>(length(program)) * scale;
  spent.compute = spent.step - spent.data - spent.gathers - spent.control - spent.optimizer;
  // A wait that somebody else came to last was for that one, until then.
  const std::vector<Last> lasts = last_ones(everybody);
  for (const Span& wait : waits) {
    const auto after = std::ranges::upper_bound(lasts, wait.end, {}, &Last::when);
    if (after == lasts.begin()) continue;
    const Last& last = *std::prev(after);
    if (last.when > wait.begin && last.rank != rank)
      spent.waited_for[static_cast<size_t>(last.rank)] += static_cast<double>(last.when - wait.begin) * scale;
  }
  return spent;
}

}  // namespace plumb
