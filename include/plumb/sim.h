// A simulated accelerator for finding races in stream code on any machine.
//
//   plumb::sim::init(1);                              // once, before the process's first backward
//   plumb::sim::Session session(/*seed=*/7);          // one seed is one order of execution
//   auto x = torch::ones({8}, plumb::sim::device(0));
//   auto side = plumb::sim::new_stream(0);
//   { c10::StreamGuard guard(side); x.add_(1); }      // nobody waited for the ones
//   session.finish();
//   for (const auto& race : session.races()) std::cout << race.text();
//
// The device (type `privateuseone`, name `sim`) holds its memory on the host and runs the CPU's kernels, so numbers have
// the CPU's bits. Its streams run nothing until a seeded scheduler lets them, in any order the program allows. Whether
// two operations are ordered is decided when they are enqueued: a race is reported under every seed, whether or not it
// struck. See docs/sim.md for what counts as ordered.
#pragma once

#include <plumb/error.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <source_location>
#include <string>
#include <vector>

namespace c10d {
class Backend;
}

namespace plumb {
class World;
}

namespace plumb::sim {

inline constexpr int max_devices = 16;

// Makes `devices` simulated devices available. Nothing in the process changes before this call. Must come before the
// process's first backward, since autograd counts devices once; may be repeated, also with another number.
void init(int devices);
bool initialised();

c10::Device device(int index);

// ---- Streams ----

// Streams live until the next Session begins.
c10::Stream new_stream(int device_index, const std::string& name = "");
c10::Stream current_stream(int device_index);
// `waiter` runs nothing enqueued from now on before everything `on` holds now has run.
void wait_for(c10::Stream waiter, c10::Stream on);
// The host blocks until the device has run everything; then everything later is ordered after it.
void synchronize(int device_index);

// ---- Words for reports ----

// Reports call this tensor's bytes `name` while its memory lives.
void name(const at::Tensor& tensor, const std::string& name);

// Operations enqueued while it lives, also by the backwards started under it, are reported as "in <what>". Nests.
class Scope {
 public:
  explicit Scope(const std::string& what, std::source_location where = std::source_location::current());
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  struct Guard;
  std::unique_ptr<Guard> guard_;
};

// ---- What was found ----

struct Site {
  std::string operation;  // "copy_"
  std::string stream;     // "stream 2 (reduce) of sim:0", or "the host of rank 0"
  std::string scope;      // "backward > deliver h.0.weight (reducer.cpp:40), MmBackward0"; empty outside any Scope
  uint64_t number = 0;    // counts this stream's operations
};

// Two operations that touch the same bytes, at least one of them writing, with nothing that orders them.
struct Race {
  std::string kind;    // "read after write", "write after read", "write after write", in the order of enqueueing
  Site first, second;  // in the order in which they were enqueued
  std::string memory;  // the tensor's name, or what is known of its memory
  int64_t offset = 0;  // first byte, counted from the start of `memory`
  int64_t bytes = 0;
  std::string missing;  // the wait that is not there
  int64_t times = 1;    // how often this pair of operations met
  std::string text() const;
};

// An exception inside a kernel. It is thrown by the next host synchronisation of its device, and kept here.
struct Fault {
  Site site;
  std::string what;
};

struct Statistics {
  uint64_t operations = 0;
  uint64_t order = 0;         // hash of the order of execution: equal for equal seeds
  uint64_t host_syncs = 0;    // times a host blocked: for a device, or for the others' hosts
  uint64_t device_waits = 0;  // of those, for a device
  // Of programs; what collectives and the allocator do among themselves is not counted.
  uint64_t events = 0;        // times an event was recorded
  uint64_t stream_waits = 0;  // times a stream was made to wait for one
  uint64_t allocations = 0;
  uint64_t reuses = 0;  // allocations served by memory that had been freed
  uint64_t collectives = 0;
  // The most bytes device d held at one time.
  std::vector<int64_t> peak_bytes = std::vector<int64_t>(max_devices, 0);
};

// One run under one seed. Its begin forgets everything earlier (races, orders, streams); tensors keep their values. Its
// end runs what can still run and throws nothing.
class Session {
 public:
  explicit Session(uint64_t seed);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Waits for every device; throws Error for a deadlock or a fault.
  void finish();
  std::vector<Race> races() const;
  std::vector<Fault> faults() const;
  Statistics statistics() const;
  // All races and faults, for humans; "no races" when there are none.
  std::string report() const;
};

// The same, for code that did not make the session.
std::vector<Race> races();
std::vector<Fault> faults();
Statistics statistics();

// ---- Own kernels and own memory ----

// Enqueues `kernel` on the current stream of the tensors' device. It gets CPU tensors over the same memory.
using Tensors = std::vector<at::Tensor>;
void launch(const std::string& name, const Tensors& reads, const Tensors& writes,
            const std::function<void(const Tensors& reads, const Tensors& writes)>& kernel);

// Tells that the host reads or writes this CPU tensor's memory now, past torch (through a raw pointer). Operations of
// torch on CPU tensors need no telling.
void host_reads(const at::Tensor& cpu_tensor);
void host_writes(const at::Tensor& cpu_tensor);

// ---- Ranks ----

// Runs `body` for ranks 0..n-1 as threads of this process; rank r's current device is device r. One rank runs at a time
// and hands over only where it blocks, so one seed is one order. Each rank has its own default random generator, which
// starts as the caller's. Throws the first rank's error, when any.
void run_ranks(int n, const std::function<void(int rank)>& body);

// The same, with a World for each rank whose engines train on the rank's device: gradients travel over communicators of
// their own streams, small host messages beside them. Throws the error that came first.
void run_world(int n, const std::function<void(World)>& body);

// Blocks this rank, letting others run, until `ready` holds; `ready` runs with no other rank running.
void wait_until(const std::function<bool()>& ready, const std::string& what);

// A rank that blocks in something the simulator does not know (a lock, a socket) lets the others run meanwhile. When it
// comes back is up to the machine: within such a program one seed is no longer one order.
class Outside {
 public:
  Outside();
  ~Outside();
  Outside(const Outside&) = delete;
  Outside& operator=(const Outside&) = delete;

 private:
  int rank_ = -1;
};

// A communicator over n ranks. Its backends behave as NCCL's: a collective runs on the communicator's own stream after
// the current stream's work, in the order of the calls; Work::wait makes the current stream wait and does not block the
// host; tensors are kept until then. CPU tensors are carried too: there, Work::wait blocks the rank.
class Communicator {
 public:
  explicit Communicator(int size, std::string name = "world");
  c10::intrusive_ptr<c10d::Backend> backend(int rank) const;
  int size() const;

  struct Impl;

 private:
  std::shared_ptr<Impl> impl_;
};

// ---- For the program `plumb sim` ----

// Runs a small program with deliberate races and returns what a user would see.
std::string demo(uint64_t seed = 1);

// Calls every ATen operation that generic arguments fit on the simulator and on the CPU: a table in Markdown.
std::string coverage_table();

}  // namespace plumb::sim
