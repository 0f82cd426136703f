#include "world/timeline.h"

#include <cstdio>
#include <map>
#include <utility>

#include "world/world_impl.h"

namespace plumb {
namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char letter : text) {
    if (letter == '"' || letter == '\\') out += '\\';
    if (static_cast<unsigned char>(letter) < 0x20) {
      out += ' ';
    } else {
      out += letter;
    }
  }
  return out + "\"";
}

double microseconds(Timeline::Moment::duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

std::string json_of(const std::vector<Timeline::Event>& events, int rank, Timeline::Moment zero) {
  std::map<std::string, int> rows;
  std::string out;
  const auto add = [&](const std::string& line) { out += (out.empty() ? "" : ",\n") + line; };
  const std::string process = "\"pid\":" + std::to_string(rank);
  add("{\"ph\":\"M\",\"name\":\"process_name\"," + process + ",\"args\":{\"name\":\"rank " + std::to_string(rank) +
      "\"}}");
  for (const Timeline::Event& event : events) {
    const auto [row, fresh] = rows.try_emplace(event.track, static_cast<int>(rows.size()));
    const std::string place = process + ",\"tid\":" + std::to_string(row->second);
    if (fresh)
      add("{\"ph\":\"M\",\"name\":\"thread_name\"," + place + ",\"args\":{\"name\":" + quoted(event.track) + "}}");
    char times[96];
    if (event.end == event.begin) {
      std::snprintf(times, sizeof times, "\"ph\":\"i\",\"s\":\"t\",\"ts\":%.3f", microseconds(event.begin - zero));
    } else {
      std::snprintf(times, sizeof times, "\"ph\":\"X\",\"ts\":%.3f,\"dur\":%.3f", microseconds(event.begin - zero),
                    microseconds(event.end - event.begin));
    }
    add("{" + std::string(times) + ",\"cat\":" + quoted(event.track) + ",\"name\":" + quoted(event.name) + "," + place +
        "}");
  }
  return out;
}

}  // namespace

void Timeline::span(const char* track, const std::string& name, Moment begin, Moment end) {
  if (!on()) return;
  std::lock_guard lock(mutex_);
  events_.push_back({track, name, begin, end});
}

void Timeline::mark(const char* track, const std::string& name) {
  const Moment now = std::chrono::steady_clock::now();
  span(track, name, now, now);
}

std::vector<Timeline::Event> Timeline::events() const {
  std::lock_guard lock(mutex_);
  return events_;
}

Timeline& timeline_of(const World& world) {
  World::Impl& impl = world.impl();
  return impl.watch ? impl.watch->timeline() : impl.timeline;
}

std::string trace_of(const World& world, Timeline::Moment origin) {
  world.barrier();
  const auto together = std::chrono::steady_clock::now();
  const Where where{Where::Kind::setup, 0, 0, "the trace"};
  const int64_t since = std::chrono::duration_cast<std::chrono::nanoseconds>(together - origin).count();
  // Rank 0's origin, on this rank's clock.
  const auto zero = together - std::chrono::nanoseconds(exchange(world, std::span(&since, 1), where)[0][0]);
  const auto all = exchange_text(world, json_of(timeline_of(world).events(), world.rank(), zero), where);
  if (world.rank() != 0) return {};
  std::string out = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
  for (size_t rank = 0; rank < all.size(); ++rank) out += (rank > 0 ? ",\n" : "") + all[rank];
  return out + "\n]}\n";
}

}  // namespace plumb
