// What a race report says, and the session that collects them.
#include <algorithm>
#include <sstream>

#include "sim/allocator.h"
#include "sim/machine.h"

namespace plumb::sim {
namespace {

const char* word(Conflict conflict) {
  switch (conflict) {
    case Conflict::read_after_write:
      return "read after write";
    case Conflict::write_after_read:
      return "write after read";
    case Conflict::write_after_write:
      return "write after write";
  }
  return "";
}

std::string line(const char* role, const Site& site) {
  std::ostringstream out;
  out << "  " << role << site.operation << " on " << site.stream;
  if (!site.scope.empty()) out << ", in " << site.scope;
  out << ", operation " << site.number << "\n";
  return out.str();
}

}  // namespace

Site Machine::site(uint32_t index) const {
  const SiteRecord& record = sites_[index];
  std::string scope = text_of(record.scope);
  if (record.node) scope += (scope.empty() ? "" : ", ") + text_of(record.node);
  return {text_of(record.operation), describe_stream(record.stream), scope, record.number};
}

void Machine::add_race(Conflict conflict, const Access& first, const Access& second, const Clock& clock, char* begin,
                       char* end) {
  const SiteRecord& a = sites_[first.site];
  const SiteRecord& b = sites_[second.site];
  const auto [memory, start] = describe_memory(begin);
  const auto [it, fresh] = seen_.try_emplace(
      {a.stream, a.operation, a.scope, b.stream, b.operation, b.scope, static_cast<int>(conflict), memory},
      races.size());
  if (!fresh) {
    Race& known = races[it->second];
    ++known.times;
    // Neighbouring bytes of the same pair of operations are one finding.
    if (begin - start == known.offset + known.bytes) known.bytes += end - begin;
    return;
  }
  Race race{word(conflict), site(first.site), site(second.site), memory, begin - start, end - begin, "", 1};
  std::ostringstream missing;
  const bool host_first = device_of(first.stream) < 0;
  const bool host_second = device_of(second.stream) < 0;
  if (host_second) {
    missing << "the host does not wait for " << race.first.stream << ": synchronize it, or an event recorded after "
            << race.first.operation << ", before the host touches the memory";
  } else if (race.second.operation == freed_word) {
    missing << "the memory goes back to " << race.second.stream << " while " << race.first.stream
            << " may still use it: call record_stream with that stream before the tensor is freed, or let "
            << race.second.stream << " wait for it";
  } else {
    missing << race.second.stream << " does not wait for " << race.first.stream << ": record an event there after "
            << race.first.operation << " and wait for it before " << race.second.operation;
  }
  if (!host_first && !host_second) {
    const uint32_t known = clock.now(first.stream);
    if (known) {
      missing << " (it has waited up to operation " << known << " of " << race.first.stream << "; this is operation "
              << first.number << ")";
    } else {
      missing << " (it has never waited for it)";
    }
  }
  race.missing = missing.str();
  races.push_back(std::move(race));
}

std::string Race::text() const {
  std::ostringstream out;
  out << kind << " on " << memory << ", bytes " << offset << " to " << offset + bytes;
  if (times > 1) out << ", met " << times << " times";
  out << "\n" << line("first    ", first) << line("second   ", second) << "  missing  " << missing << "\n";
  return out.str();
}

Session::Session(uint64_t seed) {
  if (!initialised()) throw Error("the simulated accelerator is not initialised; call plumb::sim::init(devices) first");
  const auto lock = Machine::lock();
  if (Machine::get().has_ranks()) {
    throw Error("a Session began inside run_ranks; begin it before, on the thread that calls run_ranks");
  }
  Machine::get().reset(seed);
}

Session::~Session() {
  const auto lock = Machine::lock();
  Machine::get().drain();
}

void Session::finish() {
  for (int device = 0; device < max_devices; ++device) synchronize(device);
}

std::vector<Race> Session::races() const { return sim::races(); }
std::vector<Fault> Session::faults() const { return sim::faults(); }
Statistics Session::statistics() const { return sim::statistics(); }

std::string Session::report() const {
  std::ostringstream out;
  const auto found = races();
  for (size_t i = 0; i < found.size(); ++i) out << "race " << i + 1 << ": " << found[i].text();
  for (const Fault& fault : faults()) out << "fault: " << fault.what << "\n" << line("in       ", fault.site);
  const std::string text = out.str();
  return text.empty() ? "no races\n" : text;
}

std::vector<Race> races() {
  const auto lock = Machine::lock();
  return Machine::get().races;
}

std::vector<Fault> faults() {
  const auto lock = Machine::lock();
  return Machine::get().faults;
}

Statistics statistics() {
  const auto lock = Machine::lock();
  return Machine::get().statistics;
}

}  // namespace plumb::sim
