// What the processes of the world tests do: each role is a small program.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>
#include <thread>

#include "backend/shm_ring.h"
#include "plumb/error.h"
#include "plumb/world.h"
#include "slowness.h"
#include "world/group.h"
#include "world/support/drill.h"
#include "world/support/processes.h"
#include "world/support/rehearsal.h"
#include "world/world_impl.h"

namespace plumb::testing {
namespace {

using Clock = std::chrono::steady_clock;

struct Failed {
  std::string what;
};

void must(bool truth, const std::string& what) {
  if (!truth) throw Failed{what};
}

WorldOptions options() {
  WorldOptions result;
  if (const char* timeout = std::getenv("PLUMB_TEST_TIMEOUT_MS")) {
    result.timeout = std::chrono::milliseconds(std::atoi(timeout));
  }
  if (const char* backend = std::getenv("PLUMB_TEST_BACKEND")) result.backend = backend;
  return result;
}

void verbs(const World& world) {
  const int n = world.size();
  const int me = world.rank();
  const Where where{.detail = "verbs"};
  Group group = data_group(world);
  for (auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kComplexFloat}) {
    at::Tensor tensor = at::full({50'001}, me + 1, dtype);
    group.all_reduce(tensor).wait(where);
    must(at::equal(tensor, at::full({50'001}, n * (n + 1) / 2, dtype)),
         std::string("all_reduce ") + c10::toString(dtype));

    at::Tensor shard = at::empty({1001}, dtype);
    group.reduce_scatter(shard, at::arange(n).repeat_interleave(1001).add(me).to(dtype)).wait(where);
    must(at::equal(shard, at::full({1001}, n * me + n * (n - 1) / 2, dtype)),
         std::string("reduce_scatter ") + c10::toString(dtype));

    at::Tensor full = at::empty({n * 77}, dtype);
    group.all_gather(full, at::full({77}, me + 5, dtype)).wait(where);
    must(at::equal(full, at::arange(n).add(5).repeat_interleave(77).to(dtype)), "all_gather");

    at::Tensor scalar = at::full({}, me == n - 1 ? 3 : 0, dtype);
    group.broadcast(scalar, n - 1).wait(where);
    must(at::equal(scalar, at::full({}, 3, dtype)), "broadcast");
  }
  at::Tensor flags = at::full({3}, me == 0, at::kBool);
  group.broadcast(flags, 0).wait(where);
  must(flags.all().item<bool>(), "broadcast of bool");

  // bf16 shards are summed in f32 and rounded once.
  at::Tensor shard = at::empty({2}, at::kBFloat16);
  group.reduce_scatter(shard, at::full({2 * n}, me == 0 ? 256.0 : 0.75, at::kBFloat16)).wait(where);
  must(shard[0].item<float>() == at::full({}, 256.0 + 0.75 * (n - 1)).to(at::kBFloat16).item<float>(), "f32 sums");

  // Several as one message, each in its own dtype.
  at::Tensor one = at::empty({5});
  at::Tensor two = at::empty({3}, at::kBFloat16);
  const at::Tensor whole = at::arange(n).repeat_interleave(5).add(me).to(at::kFloat);
  group.reduce_scatter({{one, whole}, {two, at::full({3 * n}, me + 1, at::kBFloat16)}}).wait(where);
  must(at::equal(one, at::full({5}, static_cast<float>(n * me + n * (n - 1) / 2))), "the first of two reduce_scatters");
  must(at::equal(two, at::full({3}, n * (n + 1) / 2, at::kBFloat16)), "the second of two reduce_scatters");

  std::vector<at::Tensor> tensors;
  std::vector<Pending> pending;
  for (int i = 0; i < 16; ++i) {
    tensors.push_back(at::full({10'000 + i}, i + me * 1.0f));
    pending.push_back(group.all_reduce(tensors.back()));
  }
  const std::vector<int64_t> mine{me, 42};
  const auto all = exchange(world, mine, where);
  for (int r = 0; r < n; ++r) must(all[r] == std::vector<int64_t>{r, 42}, "exchange");
  const auto texts = exchange_text(world, std::string(me, 'x'), where);
  for (int r = 0; r < n; ++r) must(texts[r] == std::string(r, 'x'), "exchange_text");
  for (int i = 15; i >= 0; --i) {
    pending[i].wait(where);
    must(tensors[i][9'999].item<float>() == n * i + n * (n - 1) / 2, "asynchronous all_reduce");
  }
  world.barrier();
}

void reduce_for_ever(const World& world, int64_t numel) {
  at::Tensor tensor = data_group(world).allocate(numel, at::kFloat).fill_(1);
  for (int i = 0;; ++i) {
    data_group(world).all_reduce(tensor).wait({.kind = Where::Kind::backward, .step = i, .pass = 1});
    tensor.fill_(1);
    if (i == 3) {
      std::puts("READY");
      std::fflush(stdout);
    }
  }
}

// So many of the segments that this machine sent, it sent because it took others of the same bytes for lost.
int64_t segments_sent_again() {
  std::ifstream counts("/proc/net/snmp");
  for (std::string names, values; std::getline(counts, names) && std::getline(counts, values);) {
    std::istringstream name(names), value(values);
    for (std::string what, count; name >> what && value >> count;) {
      if (what == "RetransSegs") return std::stoll(count);
    }
  }
  throw Failed{"this machine does not say what it sent again"};
}

// How many bytes leave this machine while all ranks reduce, scatter and gather: the network's own count. And how many of
// these TCP sent again: with several processors, a cable that is none delivers out of order, which looks like a loss.
void cross(const World& world) {
  const auto sent = [] {
    int64_t bytes = 0;
    std::ifstream("/sys/class/net/plumb0/statistics/tx_bytes") >> bytes;
    return bytes;
  };
  const Where where{.detail = "what crosses"};
  constexpr int64_t numel = 1 << 20;
  constexpr int64_t segment = 1448;  // at most: what a frame of 1500 bytes carries
  Group data = data_group(world), control = control_group(world);
  at::Tensor full = data.allocate(numel, at::kFloat), shard = at::ones({numel / world.size()});
  const auto measure = [&](const char* name, const auto& act) {
    act();  // connects
    world.barrier();
    const int64_t before = sent(), again_before = segments_sent_again();
    world.barrier();
    for (int i = 0; i < 4; ++i) act();
    world.barrier();
    const int64_t bytes = sent() - before, again = (segments_sent_again() - again_before) * segment;
    std::printf("%s %.3f of its bytes\n", name, static_cast<double>(bytes) / (4.0 * numel * 4));
    std::printf("%s again %.3f of its bytes\n", name, static_cast<double>(again) / (4.0 * numel * 4));
    world.barrier();
  };
  measure("all_reduce", [&] { data.all_reduce(full.fill_(1)).wait(where); });
  measure("reduce_scatter", [&] { data.reduce_scatter(shard, full.fill_(1)).wait(where); });
  measure("all_gather", [&] { data.all_gather(full, shard).wait(where); });
  measure("gather", [&] { control.gather({{shard, full}}, 7).wait(where); });
}

void bench(const World& world) {
  const Where where;
  auto measure = [&](const char* name, int times, const auto& act) {
    std::vector<double> micros;
    for (int i = 0; i < times; ++i) {
      world.barrier();
      const auto begin = Clock::now();
      act();
      micros.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
    }
    std::sort(micros.begin(), micros.end());
    if (world.rank() == 0) std::printf("%-24s median %.1f us, best %.1f us\n", name, micros[times / 2], micros[0]);
  };
  const std::vector<int64_t> mine{1, 2, 3, 4};
  at::Tensor small = at::ones({16 << 10});
  at::Tensor large = at::ones({1 << 20});
  at::Tensor bucket = data_group(world).allocate(150'000, at::kFloat).fill_(0);
  at::Tensor ordinary = at::zeros({150'000});
  measure("exchange of 4 numbers", 1000, [&] { exchange(world, mine, where); });
  measure("all_reduce of 600 kB", 500, [&] { data_group(world).all_reduce(bucket).wait(where); });
  measure("  of ordinary memory", 500, [&] { data_group(world).all_reduce(ordinary).wait(where); });
  measure("all_reduce of 64 KiB", 500, [&] { data_group(world).all_reduce(small).wait(where); });
  measure("all_reduce of 4 MiB", 100, [&] { data_group(world).all_reduce(large).wait(where); });
}

// An engine takes a gradient that somebody holds for the user's: a collective that has ended must hold none.
void hold_nothing(const World& world) {
  Group group = data_group(world);
  for (int turn = 0; turn < 5; ++turn) {
    for (const bool own : {false, true}) {
      at::Tensor tensor = own ? group.allocate(500'000, at::kFloat) : at::empty({500'000});
      group.all_reduce(tensor.fill_(1)).wait(Where());
      std::this_thread::sleep_for(std::chrono::milliseconds(100));  // every rank has heard that it ended
      group.let_go();
      must(tensor.storage().use_count() == 1, "nobody holds a tensor whose collective has ended");
    }
  }
  world.barrier();
}

// What a rank shared is still there after it let go, for whoever has not.
void let_go_first(const World& world) {
  const Where where;
  Group group = data_group(world);
  Group::Shared shared = group.share(5'000, at::kFloat, where);
  must(shared.everybody.size() == static_cast<size_t>(world.size()), "ranks of one machine read in place");
  shared.mine.fill_(world.rank() + 1);
  world.barrier();
  if (world.rank() == 1) shared = {};
  Group::Shared next = world.rank() == 1 ? Group::Shared{group.allocate(5'000, at::kFloat), {}} : Group::Shared{};
  if (next.mine.defined()) next.mine.fill_(-1);
  world.barrier();
  for (size_t r = 0; r < shared.everybody.size(); ++r) {
    must(at::equal(shared.everybody[r], at::full({5'000}, static_cast<float>(r + 1))), "what was shared is as it was");
  }
  world.barrier();
}

// Bits and sums of everybody, whatever the control plane runs over.
void combine(const World& world) {
  const int n = world.size(), me = world.rank();
  for (Group group : {control_group(world), data_group(world)}) {
    const std::vector<int64_t> bits = {int64_t{1} << me, 12 + me % 2, -1};
    const std::vector<double> sums = {0.5 + me, 2.0};
    const Group::Combined all = group.combine(bits, sums, {.detail = "combine"});
    must(all.any == std::vector<int64_t>{(int64_t{1} << n) - 1, 13, -1}, "what any rank has");
    must(all.every == std::vector<int64_t>{0, 12, -1}, "what every rank has");
    must(all.sums == std::vector<double>{0.5 * n + n * (n - 1) / 2.0, 2.0 * n}, "sums of everybody's");
  }
}

// A rank with room for little: whoever has no room for something reads nobody's in place, and so does nobody else.
void little_room(const World& world) {
  Group group = data_group(world);
  const Where where{.detail = "share"};
  for (const int64_t numel : {int64_t{1000}, int64_t{4} << 20, int64_t{1000}}) {
    Group::Shared shared = group.share(numel, at::kFloat, where);
    must(shared.everybody.size() == (numel == 1000 ? static_cast<size_t>(world.size()) : 0), "in place, or not at all");
    must(shared.mine.numel() == numel, "room of its own");
    shared.mine.fill_(world.rank() + 1);
    world.barrier();
    for (size_t r = 0; r < shared.everybody.size(); ++r) {
      must(shared.everybody[r].eq(static_cast<float>(r + 1)).all().item<bool>(), "what the others wrote");
    }
    must(shared.mine.eq(world.rank() + 1).all().item<bool>(), "what this rank wrote");
    world.barrier();
  }
}

// Ranks of an axis read each other's memory, and nobody else's.
void share_along_an_axis(const World& world) {
  const Where where{.detail = "share"};
  Groups groups = new_groups(world, {.replicate = 2, .shard = 2});
  Group::Shared shared = groups.shard.share(1000, at::kFloat, where);
  must(shared.everybody.size() == 2, "ranks of one machine read in place");
  shared.mine.fill_(world.rank());
  world.barrier();
  for (int r = 0; r < 2; ++r) {
    must(shared.everybody[r].eq(world.rank() / 2 * 2 + r).all().item<bool>(), "what the others of the axis wrote");
  }
  world.barrier();
}

// A process that a rank forks lets go of all that it inherited, as a program does at its end, and its parent goes on.
void fork_and_go_on() {
  auto world = std::make_unique<World>(World::join(options()));
  const int me = world->rank(), next = (me + 1) % world->size();
  Group group = data_group(*world);
  Group::Shared shared = group.share(5'000, at::kFloat, {.detail = "share"});
  at::Tensor tensor = group.allocate(5'000, at::kFloat).fill_(me + 1);
  shared.mine.fill_(me + 1);
  group.all_reduce(at::ones({10})).wait({});
  world->barrier();
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    tensor.reset();
    shared = {};
    group = Group();
    world.reset();
    _exit(7);
  }
  int status = 0;
  must(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 7, "the child ends");
  world->barrier();
  must(tensor.eq(me + 1).all().item<bool>(), "what the child let go of is its parent's");
  for (size_t r = 0; r < shared.everybody.size(); ++r) {
    must(shared.everybody[r].eq(static_cast<int64_t>(r) + 1).all().item<bool>(), "and everybody's who reads it");
  }
  const std::vector<int64_t> mine{me};
  must(exchange(*world, mine, {})[static_cast<size_t>(next)][0] == next, "host messages");
  verbs(*world);
}

void act(const std::string& role) {
  if (role == "fork") return fork_and_go_on();
  if (role == "rank 1 has little room" && std::string(std::getenv("RANK")) == "1") {
    const rlimit little{4 << 20, 4 << 20};
    must(setrlimit(RLIMIT_FSIZE, &little) == 0, "setrlimit");
  }
  const World world = World::join(options());
  const int me = world.rank();
  at::Tensor tensor = at::ones({64});
  std::printf("JOINED as rank %d of %d over %s\n", me, world.size(), world.backend().c_str());
  std::fflush(stdout);
  if (role == "start a program" && me == 0) {
    const std::string inherited = std::string("/proc/self/fd/") + std::getenv("PLUMB_STORE_FD");
    must(std::system(("test ! -e " + inherited).c_str()) == 0,
         "a program that rank 0 starts has the port of its ranks");
  }
  if (role == "verbs") verbs(world);
  if (role == "bench") bench(world);
  if (role == "cross") cross(world);
  if (role == "gather astray") {
    at::Tensor full = at::zeros({400 * world.size()}), shard = at::ones({400});
    control_group(world).gather({{shard, full}}, me == 1 ? 8 : 7).wait({.detail = me == 1 ? "unit b" : "unit a"});
  }
  if (role == "drill") drill(*world.impl().data->backend);
  if (role == "soak") {
    soak({world.impl().data->backend.get(), world.impl().control->backend.get()},
         static_cast<uint32_t>(std::atoi(std::getenv("PLUMB_TEST_SEED"))), 700 / slowness);
  }
  if (role == "rehearse") {
    rehearse(world, static_cast<uint32_t>(std::atoi(std::getenv("PLUMB_TEST_SEED"))), 120 / slowness);
  }
  if (role == "reduce for ever") reduce_for_ever(world, 1 << 16);
  if (role == "reduce much for ever") reduce_for_ever(world, 1 << 24);
  if (role == "gather for ever") {
    at::Tensor shard = data_group(world).allocate(1 << 20, at::kFloat).fill_(1);
    at::Tensor full = at::empty({shard.numel() * world.size()});
    for (int i = 0;; ++i) {
      data_group(world).all_gather(full, shard).wait({.kind = Where::Kind::backward, .step = i, .pass = 1});
      if (i == 3) {
        std::puts("READY");
        std::fflush(stdout);
      }
    }
  }
  if (role == "different collectives") {
    if (me == 1) {
      data_group(world).broadcast(tensor, 0).wait({.kind = Where::Kind::step, .step = 3});
    } else {
      data_group(world).all_reduce(tensor).wait({.kind = Where::Kind::step, .step = 3});
    }
  }
  if (role == "two worlds") {
    const World second = World::join(options());
    verbs(world);
    verbs(second);
  }
  if (role == "combine") combine(world);
  if (role == "axes") share_along_an_axis(world);
  if (role == "rank 1 has little room") little_room(world);
  if (role == "rank 1 lets go first") let_go_first(world);
  if (role == "hold nothing") hold_nothing(world);
  if (role == "crossed") {
    const int64_t mine = 1;
    if (me == 1) exchange(world, {&mine, 1}, {.kind = Where::Kind::step, .step = 5, .pass = 1});
    data_group(world).all_reduce(tensor).wait({.kind = Where::Kind::backward, .step = 5, .pass = 2});
  }
  if (role == "rank 1 leaves" && me != 1) {
    data_group(world).all_reduce(tensor).wait({.kind = Where::Kind::backward, .step = 7, .pass = 1});
  }
  if (role == "rank 1 stays away") {
    if (me == 1) {
      std::puts("READY");
      std::fflush(stdout);
      for (;;) pause();
    }
    data_group(world).all_reduce(tensor).wait({.kind = Where::Kind::backward, .step = 7, .pass = 1});
  }
  if (role == "rank 1 dies in a gather") {
    Group group = data_group(world);
    constexpr int64_t each = 1 << 20;  // which the others read in place, until all have
    const at::Tensor shard = group.allocate(each, at::kFloat).fill_(me), full = at::empty({each * world.size()});
    // It comes first, and dies before there is anything to read: the others wait for who has come.
    const auto heap = heap_of(*world.impl().data->backend);
    while (me != 1 && heap->gone().empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    Pending gathered = group.all_gather(full, shard);
    if (me == 1) raise(SIGKILL);
    gathered.wait({.kind = Where::Kind::backward, .step = 7, .pass = 1});
  }
  if (role == "rank 1 throws") {
    if (me == 1) throw Failed{"the loader found no file"};
    data_group(world).all_reduce(tensor).wait({.kind = Where::Kind::backward, .step = 7, .pass = 1});
  }
  if (role == "rank 1 reports") {
    if (me == 1) {
      report_failure(world, Error(1, "parameter 'w' was delivered twice").what(), {});
      throw Failed{"reported"};
    }
    data_group(world).all_reduce(tensor).wait({.kind = Where::Kind::backward, .step = 7, .pass = 1});
  }
  if (role == "leave with work pending") {
    if (me == 0) (void)data_group(world).all_reduce(tensor);
    if (me == 1) usleep(300'000);
  }
}

}  // namespace

int play(const std::string& role) {
  at::set_num_threads(1);
  const auto begin = Clock::now();
  const bool open = fcntl(STDIN_FILENO, F_GETFD) >= 0;
  int code = 0;
  try {
    act(role);
    must((fcntl(STDIN_FILENO, F_GETFD) >= 0) == open, "the world closed a file that is not its own");
    std::puts("DONE");
  } catch (const Error& e) {
    std::printf("ERROR %s\n", e.what());
    code = 3;
  } catch (const Failed& e) {
    std::printf("FAILED %s\n", e.what.c_str());
    code = 4;
  } catch (const std::exception& e) {
    std::printf("EXCEPTION %s\n", e.what());
    code = 5;
  }
  std::printf("after %.1f s\n", std::chrono::duration<double>(Clock::now() - begin).count());
  std::fflush(stdout);
  return code;
}

}  // namespace plumb::testing
