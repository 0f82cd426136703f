#include "plumb/trace.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <utility>

#include "engine/spent.h"
#include "plumb/engine.h"
#include "watch/timeline.h"
#include "world/clock.h"
#include "world/outcome.h"

namespace plumb {
namespace {

Where here() { return {Where::Kind::setup, 0, 0, "the trace"}; }

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

// A rank as a process of the picture, its tracks as threads.
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

// What rank 0 does with the file; an Error of every rank where it cannot.
void on_rank_zero(const World& world, const std::function<void()>& work) {
  const Outcome mine = attempt([&] {
    if (world.rank() == 0) work();
    return std::string();
  });
  try {
    share_outcome(world, mine, here());
  } catch (const RankFailed& failed) {
    throw Error(world.rank(), failed.why);
  }
}

std::string reason() { return errno != 0 ? std::string(": ") + std::strerror(errno) : ""; }

// The same file wherever the process works when it is written.
std::string absolute(std::string path) {
  std::error_code ignored;
  std::string found = path.empty() ? "" : std::filesystem::absolute(path, ignored).string();
  if (found.empty()) return path;
  return found;
}

// Whole or not at all: what was there before stays until all of it is written. A device or a pipe is written as it is.
void write_whole(const std::string& path, const std::vector<std::string>& ranks) {
  std::error_code failed;
  const auto there = std::filesystem::canonical(path, failed);
  const bool plain = std::filesystem::is_regular_file(there, failed);
  const std::string target = plain ? there.string() : path;
  std::string name = plain ? target + ".unfinished" : target;
  errno = 0;
  std::ofstream file(name);
  if (!file.is_open() && plain) file.open(name = target);  // in a folder of somebody else's
  file << "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
  for (size_t rank = 0; rank < ranks.size(); ++rank) file << (rank > 0 ? ",\n" : "") << ranks[rank];
  file << "\n]}\n";
  file.close();
  if (file && (name == target || std::rename(name.c_str(), target.c_str()) == 0)) return;
  const std::string why = reason();
  if (name != target) std::filesystem::remove(name, failed);
  throw Error("cannot write the trace to '" + path + "'" + why);
}

// Numbers travel as their bytes.
std::string packed(const TimeSpent& spent) {
  const double numbers[] = {static_cast<double>(spent.steps),
                            spent.step,
                            spent.compute,
                            spent.data,
                            spent.gathers,
                            spent.control,
                            spent.optimizer};
  std::string out(reinterpret_cast<const char*>(numbers), sizeof numbers);
  return out.append(reinterpret_cast<const char*>(spent.waited_for.data()), spent.waited_for.size() * sizeof(double));
}

TimeSpent unpacked(const std::string& text) {
  std::vector<double> numbers(text.size() / sizeof(double));
  std::memcpy(numbers.data(), text.data(), numbers.size() * sizeof(double));
  return {static_cast<int64_t>(numbers[0]),
          numbers[1],
          numbers[2],
          numbers[3],
          numbers[4],
          numbers[5],
          numbers[6],
          std::vector<double>(numbers.begin() + 7, numbers.end())};
}

}  // namespace

Trace::Trace(World world, std::string path)
    : world_(std::move(world)), path_(absolute(std::move(path))), begun_(std::chrono::steady_clock::now()) {
  on_rank_zero(world_, [&] {
    made_ = !std::filesystem::exists(path_);
    errno = 0;
    if (!std::ofstream(path_, std::ios::app)) {
      made_ = false;
      throw Error("cannot write a trace to '" + path_ + "'" + reason() +
                  "; name a file in a folder that exists and can be written to");
    }
  });
  timeline_of(world_).start();
  on_ = true;
}

Trace::~Trace() {
  if (!on_) return;
  timeline_of(world_).stop();
  std::error_code ignored;
  if (made_) std::filesystem::remove(path_, ignored);
}

std::vector<TimeSpent> Trace::stop() {
  if (!on_) return spent_;
  std::vector<Timeline::Event> events = timeline_of(world_).events();
  // What began before is of a trace that was on already.
  std::erase_if(events, [&](const Timeline::Event& event) { return event.begin < begun_; });
  const Timeline::Moment zero = common_origin(world_, begun_).moment;
  const auto everybody = exchange_text(world_, arrivals(events, zero), here());
  const TimeSpent mine = time_spent(events, zero, world_.rank(), everybody);
  std::vector<TimeSpent> spent;
  for (const std::string& text : exchange_text(world_, packed(mine), here())) spent.push_back(unpacked(text));
  const auto all = exchange_text(world_, json_of(events, world_.rank(), zero), here());
  on_rank_zero(world_, [&] { write_whole(path_, all); });
  spent_ = std::move(spent);
  timeline_of(world_).stop();
  on_ = false;
  return spent_;
}

Trace Engine::trace(const std::string& path) { return Trace(world(), path); }

}  // namespace plumb
