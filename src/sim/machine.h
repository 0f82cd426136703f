// The machine: streams with their queues and clocks, events, hosts, and the seeded scheduler over them.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "plumb/sim.h"
#include "sim/clock.h"
#include "sim/labels.h"
#include "sim/shadow.h"

namespace plumb::sim {

inline constexpr auto device_type = c10::DeviceType::PrivateUse1;

using Kernel = std::function<void()>;

// Where an operation was enqueued.
struct SiteRecord {
  Label operation = 0, scope = 0, node = 0;
  int stream = -1;
  uint32_t number = 0;
};

// A point in one stream. Recording overwrites it; whoever waits keeps the version it saw.
struct EventState {
  int stream = -1;
  uint64_t position = 0;  // the stream has passed when it has done so many tasks
  Clock clock;
  uint64_t generation = 0;  // of the session; an event of an earlier one has passed
};

// One thread of control that enqueues: a rank, or the whole process outside run_ranks.
struct Host {
  int id = -1;  // a stream number of its own, for accesses to host memory
  Clock clock;
  uint64_t version = 0;  // counts changes of `clock`
};

// All simulator state that a session resets. One per process; every member function wants lock() held by the caller
// unless it says otherwise.
class Machine {
 public:
  using Lock = std::unique_lock<std::recursive_mutex>;
  static Lock lock();
  static Machine& get();

  // ---- streams (numbered densely over all devices) ----
  int id_of(const c10::Stream& stream);
  int id_of(int device, int64_t index);
  c10::Stream add_stream(int device, const std::string& name);
  int device_of(int stream) const { return streams_[stream].device; }
  int streams_of(int device) const { return next_index_[device]; }
  std::string describe_stream(int stream) const;
  const Clock& clock_of(int stream) const { return streams_[stream].clock; }

  // ---- work ----
  // Orders the operation after its stream and host, checks its ranges, and queues the kernel. `ready` holds it back.
  uint32_t enqueue(int stream, Label operation, const std::vector<Range>& ranges, Kernel kernel,
                   std::function<bool()> ready = nullptr);
  // An access without work: memory handed out, or touched by the host.
  void note(int stream, Label operation, const Range& range);
  void note_host(int host, Label operation, const Range& range);
  void promise(int stream, const std::shared_ptr<Promise>& promise) { streams_[stream].clock.join(promise); }

  // ---- events ----
  EventState record(int stream);
  void wait(int stream, const EventState& event);
  bool passed(const EventState& event) const;

  // ---- hosts ----
  // The host that enqueues for `device` on this thread.
  int host_of(int device) const;
  Host& host(int index);
  void host_learns(int host, const Clock& clock);

  // Runs tasks, handing over to other ranks when none can run, until `done`. Throws Error for a deadlock. `lock` is
  // held exactly once.
  void run_until(int device, Lock& lock, const std::function<bool()>& done, const std::string& what);
  // run_until for everything enqueued on the stream so far; then the host knows of it, and faults are thrown.
  void synchronize(int stream, Lock& lock);
  void synchronize_event(const EventState& event, Lock& lock);
  void throw_fault(int device);
  // Runs one task that can run; false when none can.
  bool step();
  // step(), but only for a thread that holds the turn: asking from elsewhere must not change the order.
  void step_if_mine();
  // Progress that may let a blocked rank go on.
  void progress() { stalled_.clear(); }

  // ---- ranks ----
  void begin_ranks(int n);
  void end_ranks();
  void take_turn(int rank, Lock& lock);
  void end_rank(int rank);
  void leave(int rank);  // until come_back, this rank is not waited for
  void come_back(int rank, Lock& lock);
  bool has_ranks() const { return !alive_.empty(); }

  // ---- session ----
  void reset(uint64_t seed);
  void drain();
  uint64_t generation() const { return generation_; }
  Site site(uint32_t record) const;
  const SiteRecord& record_of(uint32_t site) const { return sites_[site]; }

  Names names;
  Shadow shadow;
  std::vector<Race> races;
  std::vector<Fault> faults;
  Statistics statistics;
  // Calls that are made when a session begins, for state that other files keep.
  std::vector<std::function<void()>> on_reset;

 private:
  struct Task {
    uint32_t site = 0;
    Kernel kernel;
    EventState after;  // stream -1: nothing
    std::function<bool()> ready;
  };
  struct StreamState {
    int device = 0;
    int64_t index = 0;
    std::string name;
    std::deque<Task> queue;
    uint64_t enqueued = 0, done = 0;
    Clock clock;
    std::pair<int, uint64_t> host_seen{-1, 0};
    uint64_t priority = 0;
  };

  uint32_t new_site(int stream, Label operation);
  void follow_host(StreamState& stream);
  void push(int stream, Task task);
  bool can_run(const StreamState& stream) const;
  int pick(const std::vector<int>& candidates);
  void check(const Range& range, const Access& access, const Clock& clock);
  void add_race(Conflict conflict, const Access& first, const Access& second, const Clock& clock, char* begin,
                char* end);
  std::string stuck_heads() const;
  void hand_over(int rank, Lock& lock, const std::string& what);
  void switch_to(int rank);

  // A deque: kernels may meet new streams while one runs.
  std::deque<StreamState> streams_;
  std::vector<std::vector<int>> ids_ = std::vector<std::vector<int>>(max_devices);
  std::vector<int> next_index_ = std::vector<int>(max_devices, 1);
  std::vector<Host> hosts_ = std::vector<Host>(max_devices);
  std::vector<SiteRecord> sites_;
  std::map<std::tuple<int, Label, Label, int, Label, Label, int, std::string>, size_t> seen_;
  std::vector<size_t> unthrown_faults_;
  uint64_t pending_ = 0;
  std::atomic<uint64_t> generation_ = 1;

  std::mt19937_64 random_{0};
  enum class Order { uniform, priorities } order_ = Order::uniform;
  uint32_t eagerness_ = 0;  // of 256: how likely a task runs right after an enqueue
  bool running_ = false;    // inside a kernel

  std::vector<char> alive_;  // empty: no ranks
  std::vector<char> outside_;
  std::set<int> stalled_;  // ranks that found nothing to do since the last progress
  int turn_ = -1;
  std::vector<at::Tensor> generators_;  // each rank's default generator while others run
  at::Tensor callers_generator_;
  std::condition_variable_any turn_changed_;
};

// How many devices init made available.
int device_count();

// This thread's place.
struct Place {
  int device = 0;
  int rank = -1;              // of run_ranks, on the rank's own thread
  bool chose_device = false;  // as the threads of ranks and of autograd do
  bool in_kernel = false;     // the simulator runs a kernel on this thread
  uint64_t generation = 0;
  int64_t current[max_devices] = {};  // stream index per device
};
Place& place();
c10::Stream make_stream(int device, int64_t index);
// The id of the current stream of `device` on this thread.
int current_id(int device);

}  // namespace plumb::sim
