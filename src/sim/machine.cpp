// Streams, clocks and the race check: everything that is decided at enqueue.
#include "sim/machine.h"

#include <algorithm>

namespace plumb::sim {
namespace {

// As a real device's launch queue: beyond this many waiting tasks an enqueue lets some run.
constexpr uint64_t max_pending = 4096;

std::recursive_mutex& mutex() {
  static auto* const mutex = new std::recursive_mutex;
  return *mutex;
}

}  // namespace

Machine::Lock Machine::lock() { return Lock(mutex()); }

Machine& Machine::get() {
  static auto* const machine = new Machine;
  return *machine;
}

Place& place() {
  thread_local Place here;
  const uint64_t generation = Machine::get().generation();
  if (here.generation != generation) {
    std::fill(std::begin(here.current), std::end(here.current), 0);
    here.generation = generation;
  }
  return here;
}

c10::Stream make_stream(int device, int64_t index) {
  return c10::Stream(c10::Stream::UNSAFE, sim::device(device), index);
}

int current_id(int device) { return Machine::get().id_of(device, place().current[device]); }

int Machine::id_of(const c10::Stream& stream) { return id_of(stream.device_index(), stream.id()); }

int Machine::id_of(int device, int64_t index) {
  auto& ids = ids_[device];
  if (ids.size() <= static_cast<size_t>(index)) ids.resize(index + 1, -1);
  if (ids[index] < 0) {
    ids[index] = static_cast<int>(streams_.size());
    StreamState state;
    state.device = device;
    state.index = index;
    state.priority = random_();
    streams_.push_back(std::move(state));
    next_index_[device] = std::max(next_index_[device], static_cast<int>(index) + 1);
  }
  return ids[index];
}

c10::Stream Machine::add_stream(int device, const std::string& name) {
  const int64_t index = next_index_[device];
  streams_[id_of(device, index)].name = name;
  return make_stream(device, index);
}

std::string Machine::describe_stream(int stream) const {
  const StreamState& state = streams_[stream];
  if (state.device < 0) return "the host" + (state.index ? " of rank " + std::to_string(state.index) : std::string());
  return "stream " + std::to_string(state.index) + (state.name.empty() ? "" : " (" + state.name + ")") +
         " of sim:" + std::to_string(state.device);
}

Host& Machine::host(int index) {
  Host& host = hosts_[index];
  if (host.id < 0) {
    host.id = static_cast<int>(streams_.size());
    StreamState state;
    state.device = -1;
    state.index = index;
    streams_.push_back(std::move(state));
  }
  return host;
}

int Machine::host_of(int device) const {
  if (!has_ranks()) return 0;
  return place().rank >= 0 ? place().rank : device;
}

void Machine::host_learns(int index, const Clock& clock) {
  Host& knower = host(index);
  knower.clock.join(clock);
  ++knower.version;
}

uint32_t Machine::new_site(int stream, Label operation) {
  sites_.push_back({operation, current_scope(), current_node(), stream, 0});
  return static_cast<uint32_t>(sites_.size() - 1);
}

// What the host knows to be done, the work it enqueues comes after.
void Machine::follow_host(StreamState& stream) {
  const int index = host_of(stream.device);
  const Host& enqueuer = host(index);
  if (stream.host_seen == std::pair{index, enqueuer.version}) return;
  stream.clock.join(enqueuer.clock);
  stream.host_seen = {index, enqueuer.version};
}

uint32_t Machine::enqueue(int stream, Label operation, const std::vector<Range>& ranges, Kernel kernel,
                          std::function<bool()> ready) {
  StreamState& state = streams_[stream];
  follow_host(state);
  const uint32_t site = new_site(stream, operation);
  const Access access{stream, state.clock.tick(stream), site};
  sites_[site].number = access.number;
  for (const Range& range : ranges) {
    if (!range.write) check(range, access, state.clock);
  }
  for (const Range& range : ranges) {
    if (range.write) check(range, access, state.clock);
  }
  ++statistics.operations;
  push(stream, {site, std::move(kernel), {}, std::move(ready)});
  return site;
}

void Machine::note(int stream, Label operation, const Range& range) {
  StreamState& state = streams_[stream];
  follow_host(state);
  const uint32_t site = new_site(stream, operation);
  sites_[site].number = state.clock.now(stream);
  check(range, {stream, state.clock.now(stream), site}, state.clock);
}

void Machine::note_host(int index, Label operation, const Range& range) {
  Host& toucher = host(index);
  const uint32_t site = new_site(toucher.id, operation);
  const uint32_t number = toucher.clock.tick(toucher.id);
  ++toucher.version;
  sites_[site].number = number;
  check(range, {toucher.id, number, site}, toucher.clock);
}

EventState Machine::record(int stream) {
  const StreamState& state = streams_[stream];
  return {stream, state.enqueued, state.clock, generation_};
}

void Machine::wait(int stream, const EventState& event) {
  if (event.stream < 0 || event.stream == stream || event.generation != generation_) return;
  streams_[stream].clock.join(event.clock);
  static const Label operation = intern("wait");
  EventState after = event;
  after.clock.clear();
  push(stream, {new_site(stream, operation), nullptr, std::move(after), nullptr});
}

bool Machine::passed(const EventState& event) const {
  return event.stream < 0 || event.generation != generation_ || streams_[event.stream].done >= event.position;
}

void Machine::push(int stream, Task task) {
  StreamState& state = streams_[stream];
  state.queue.push_back(std::move(task));
  ++state.enqueued;
  ++pending_;
  progress();
  if (running_) return;
  while (pending_ > max_pending && step()) {
  }
  while (eagerness_ && (random_() & 255) < eagerness_ && step()) {
  }
}

void Machine::check(const Range& range, const Access& access, const Clock& clock) {
  shadow.touch(range, access, clock, [&](Conflict conflict, const Access& first, char* begin, char* end) {
    add_race(conflict, first, access, clock, begin, end);
  });
}

void Machine::reset(uint64_t seed) {
  drain();
  for (StreamState& state : streams_) state.queue.clear();
  streams_.clear();
  for (auto& ids : ids_) ids.clear();
  std::fill(next_index_.begin(), next_index_.end(), 1);
  for (Host& each : hosts_) each = {};
  sites_.clear();
  seen_.clear();
  shadow.clear();
  races.clear();
  faults.clear();
  unthrown_faults_.clear();
  statistics = {};
  pending_ = 0;
  ++generation_;
  random_.seed(seed);
  // The seed chooses the scheduler's temper too: lazy or eager, even or with favourites.
  order_ = seed % 2 ? Order::priorities : Order::uniform;
  eagerness_ = (seed / 2) % 3 * 90;
  // Numbered the same in every session, whatever memory survived the last one.
  for (int device = 0; device < device_count(); ++device) id_of(device, 0);
  for (const auto& call : on_reset) call();
}

void Machine::drain() {
  while (step()) {
  }
}

}  // namespace plumb::sim
