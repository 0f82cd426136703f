// How a rank joins: finds out who it is, meets the others at the store, and makes the groups.
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <numeric>
#include <thread>

#include "backend/gloo.h"
#include "backend/shm_heap.h"
#include "world/carriers.h"
#include "world/environment.h"
#include "world/rendezvous.h"
#include "world/world_impl.h"

namespace plumb {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds slice{1'000};
constexpr milliseconds rendezvous_limit{60'000};
const Where joining{.detail = "the meeting of all ranks"};
constexpr milliseconds keen{2};  // how long a wait keeps its core where every rank has one

// The address of this machine that packets to `host` leave from; empty when it cannot be told.
std::string local_address_towards(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return {};
  std::string address;
  for (const addrinfo* info = found; info && address.empty(); info = info->ai_next) {
    const int fd = socket(info->ai_family, SOCK_DGRAM, 0);
    if (fd < 0) continue;
    sockaddr_storage mine{};
    socklen_t length = sizeof mine;
    char text[NI_MAXHOST];
    if (connect(fd, info->ai_addr, info->ai_addrlen) == 0 &&
        getsockname(fd, reinterpret_cast<sockaddr*>(&mine), &length) == 0 &&
        getnameinfo(reinterpret_cast<sockaddr*>(&mine), length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0) {
      address = text;
    }
    close(fd);
  }
  freeaddrinfo(found);
  return address;
}

// The address of the interface that the user chose.
std::string address_of_interface(const std::string& names, int rank) {
  const std::string name = names.substr(0, names.find(','));
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) all = nullptr;
  std::string address;
  for (const ifaddrs* one = all; one && address.empty(); one = one->ifa_next) {
    const int family = one->ifa_addr ? one->ifa_addr->sa_family : AF_UNSPEC;
    if (name != one->ifa_name || (family != AF_INET && family != AF_INET6)) continue;
    char text[NI_MAXHOST];
    const socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (getnameinfo(one->ifa_addr, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0) address = text;
  }
  if (all) freeifaddrs(all);
  if (!address.empty()) return address;
  throw Error(rank,
              "GLOO_SOCKET_IFNAME=" + names + ": there is no usable interface '" + name + "'; `ip address` lists them");
}

bool is_loopback(const std::string& address) { return address.rfind("127.", 0) == 0 || address == "::1"; }

// The address that the others reach this rank at. A machine that knows its own name as a loopback address (Debian's
// /etc/hosts) learns a better one from the first rank that is elsewhere.
std::string choose_address(c10d::Store& store, const Place& place) {
  if (const char* names = std::getenv("GLOO_SOCKET_IFNAME"); names && *names) {
    return address_of_interface(names, place.rank);
  }
  std::string mine = local_address_towards(place.host, place.port);
  if (mine.empty()) mine = "127.0.0.1";
  store.set("address/" + std::to_string(place.rank), mine);
  if (!is_loopback(mine)) return mine;
  for (const std::string& other : read_all(store, "address/", place.size)) {
    if (is_loopback(other)) continue;
    const std::string towards = local_address_towards(other, place.port);
    if (!towards.empty()) return towards;
  }
  return mine;
}

// c10d logs each failed attempt and lost connection, with a stack; our errors say it once, in words. `level`: the least
// that is still logged, 2 for errors and 3 for none. The setting is the process's, and its threads may join at once.
void hush_c10d(int level) {
  if (!std::getenv("TORCH_CPP_LOG_LEVEL")) std::atomic_ref<int>(FLAGS_caffe2_log_level).store(level);
}

// As Python does: the death of a peer would otherwise kill this process without a word.
void ignore_broken_pipes() {
  struct sigaction now{};
  if (sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) std::signal(SIGPIPE, SIG_IGN);
}

// What this rank asks for; empty leaves the choice to the place: shm on one machine, tcp otherwise.
std::string asked_backend(const WorldOptions& options, int rank) {
  if (options.device != "cpu" && options.device != "cuda") {
    throw Error(rank, "device '" + options.device + "' is unknown; there are 'cpu' and 'cuda'");
  }
  if (options.timeout.count() <= 0) {
    throw Error(rank, "a time-out of " + std::to_string(options.timeout.count()) + " ms; it must be positive");
  }
  if (options.backend.empty()) return options.device == "cuda" ? "nccl" : "";
  const std::string& name = options.backend;
  if (name == "local") {
    throw Error(rank,
                "backend 'local' is for ranks that are threads of one process (plumb::run_local); processes "
                "join by 'shm', 'tcp', 'gloo' or 'nccl'");
  }
  if (name != "shm" && name != "tcp" && name != "gloo" && name != "nccl") {
    throw Error(rank, "backend '" + name + "' is unknown; there are 'shm', 'tcp', 'gloo' and 'nccl'");
  }
  if ((name == "shm" || name == "tcp") && options.device != "cpu") {
    throw Error(rank, "backend '" + name + "' carries gradients on 'cpu', and the device is '" + options.device +
                          "'; choose nccl, or that device");
  }
  if (name == "nccl" && options.device == "cpu") {
    throw Error(rank,
                "backend 'nccl' carries gradients on 'cuda', and the device is 'cpu'; choose gloo, or that device");
  }
  return name;
}

// One name for all: who left it open takes what another asked for. Empty when nobody asked. A few messages per rank.
std::string agree_on_backend(c10d::Store& store, const Place& place, const std::string& asked) {
  const std::string first_key = "asks/first", other_key = "asks/other", all_key = "asks/all";
  const std::string mine = asked + " " + std::to_string(place.rank);
  const auto name_in = [](const std::string& ask) { return ask.substr(0, ask.find(' ')); };
  const auto rank_in = [](const std::string& ask) { return ask.substr(ask.find(' ') + 1); };
  if (!asked.empty()) {
    const std::string first = store.compareSet(first_key, std::string(), mine);
    if (name_in(first) != asked) store.compareSet(other_key, std::string(), mine);
  }
  if (store.add("asks/count", 1) == place.size) store.set(all_key, std::string("yes"));
  store.wait({all_key});
  if (!store.check({first_key})) return {};
  std::string first = store.get_to_str(first_key);
  if (!store.check({other_key})) return name_in(first);
  std::string other = store.get_to_str(other_key);
  if (std::stoi(rank_in(other)) < std::stoi(rank_in(first))) first.swap(other);
  throw Error(place.rank, "rank " + rank_in(first) + " asked for backend '" + name_in(first) + "' and rank " +
                              rank_in(other) + " for '" + name_in(other) + "'; every rank must ask for the same");
}

// The store, for waits that the failure of another rank ends.
class WatchedStore final : public c10d::PrefixStore {
 public:
  WatchedStore(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<Watch> watch)
      : PrefixStore("", std::move(store)), watch_(std::move(watch)) {}

  std::vector<uint8_t> get(const std::string& key) override {
    wait({key});
    return PrefixStore::get(key);
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }
  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override {
    const auto end = Clock::now() + timeout;
    for (;;) {
      const auto begin = Clock::now();
      const auto left = std::chrono::duration_cast<milliseconds>(end - begin);
      try {
        return PrefixStore::wait(keys, std::clamp(left, milliseconds(1), slice));
      } catch (const std::exception&) {
        // Not for want of time: the store is gone.
        if (left <= slice || Clock::now() - begin < slice / 2) throw;
      }
      watch_->look_around(joining, Watch::Silent::is_waited_for);
    }
  }

 private:
  const std::shared_ptr<Watch> watch_;
};

std::vector<int> everybody(int size) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// Who is on which machine, whether ranks of one share its memory, and so what carries gradients where nobody `asked`. If
// those of one machine cannot share, nobody does: all must have the same idea of what crosses.
void find_machines(Carriers& carriers, const std::string& asked) {
  const int rank = carriers.place.rank, size = carriers.place.size;
  c10d::Store& store = *carriers.store;
  carriers.machines = Machines::find(store, rank, size);
  const bool one_machine = carriers.machines.count() == 1;
  const auto tiers = carriers.machines.tiers(everybody(size));
  std::string why_not;
  if (one_machine || asked == "shm") {
    carriers.heap = ShmHeap::meet(store, rank, size, why_not);
  } else if (tiers && asked.empty()) {
    const int machine = tiers->machine_of(rank);
    if (tiers->ranks_on(machine) > 1) {
      const auto own = c10::make_intrusive<c10d::PrefixStore>("machine " + std::to_string(machine), carriers.store);
      carriers.heap = ShmHeap::meet(*own, rank - tiers->first[machine], tiers->ranks_on(machine), why_not);
    }
    if (!first_objection(store, "machines/share", size, why_not).empty()) {
      carriers.heap.reset();
      carriers.machines = Machines::apart(size);
    }
  }
  if (asked == "shm" && !carriers.heap) {
    throw Error(rank, "backend 'shm' is for processes that share a machine's memory, and " + why_not +
                          "; choose 'tcp', or none to have it chosen");
  }
  const bool tiered = tiers && carriers.machines.count() < size;
  carriers.backend = !asked.empty() ? asked : one_machine && carriers.heap ? "shm" : tiered ? "shm+tcp" : "tcp";
}

std::atomic<int> joins{0};  // of this process: each world has its own keys

// `meet` finds the other ranks within a time.
World join_at(const Place& place, const std::function<Rendezvous(milliseconds)>& meet, const WorldOptions& options) {
  auto impl = std::make_shared<World::Impl>();
  impl->rank = place.rank;
  impl->size = place.size;
  impl->local_rank = place.local_rank;
  impl->timeout = options.timeout;
  const std::string asked = asked_backend(options, place.rank);
  impl->backend = asked.empty() ? "shm" : asked;
  auto progress = std::make_shared<Progress>(place.rank);
  if (place.size == 1) {
    impl->road.use_board();
    impl->road.pass(Point::join);
    return World(std::move(impl));
  }
  progress->road.use_board();
  progress->road.pass(Point::join);

  ignore_broken_pipes();
  hush_c10d(3);
  const milliseconds limit = std::min(options.timeout, rendezvous_limit);
  Rendezvous rendezvous = meet(limit);
  impl->store = rendezvous.store();
  hush_c10d(2);
  try {
    rendezvous.settle();
    auto channel = make_store_channel(impl->store, place.rank, place.size, progress, limit,
                                      rendezvous.serves() ? StoreHost::here : StoreHost::elsewhere, rendezvous.end());
    try {
      const Wire readable;  // the others hear what this rank's is not
    } catch (const Error& e) {
      Report report;
      report.state = Report::State::failed;
      report.origin = place.rank;
      report.message = e.what();
      channel->publish(report);
      throw Error(place.rank, without_prefix(e.what()));
    }
    impl->watch = std::make_shared<Watch>(place.rank, place.size, options.timeout, slice, progress, std::move(channel));
    progress->road.pass(Point::join);
    const auto meeting = c10::make_intrusive<WatchedStore>(impl->store, impl->watch);
    const std::string agreed = agree_on_backend(*meeting, place, asked);
    const auto carriers = std::make_shared<Carriers>();
    carriers->place = place;
    carriers->timeout = options.timeout;
    carriers->watch = impl->watch;
    carriers->store = meeting;
    find_machines(*carriers, agreed);
    carriers->store = impl->store;
    impl->backend = carriers->backend;
    impl->ranks_per_machine = carriers->machines.ranks_each();
    const bool memory = carriers->in_one_memory();
    const bool sockets = impl->backend == "gloo" || impl->backend == "tcp" || !memory;  // somewhere
    const int here = static_cast<int>(std::ranges::count_if(
        everybody(place.size), [&](int r) { return carriers->machines.of(r) == carriers->machines.of(place.rank); }));
    const bool crowded = carriers->heap && here > static_cast<int>(std::thread::hardware_concurrency());
    if (impl->backend == "gloo" && !crowded) impl->watch->keep_core(keen);
    if (sockets) carriers->address = choose_address(*meeting, place);
    carriers->patience = crowded ? std::chrono::microseconds(50) : keen;
    impl->another = [carriers](int number) { return carriers->pair(number); };
    impl->part = [carriers](const std::string& name, const std::vector<int>& members, int rank, int index) {
      return carriers->part(name, members, rank, index);
    };
    const World::Impl::Pair own = impl->another(0);
    impl->data = own.data;
    impl->control = own.control;
    // Connections are made when they are needed; that they can be made is known from here on.
    if (!memory) own.control->backend->barrier()->wait(limit);
  } catch (const Error& e) {
    if (impl->watch) impl->watch->fail(e.what(), place.rank, {});
    throw;
  } catch (const std::exception& e) {
    // Who is at fault, if that can be told.
    if (impl->watch) impl->watch->look_around(joining, Watch::Silent::is_gone);
    const Error error(place.rank, "met the others at " + place.host + ":" + std::to_string(place.port) +
                                      ", but could not connect to all of them; see whether they run, and whether the "
                                      "network lets them through (GLOO_SOCKET_IFNAME chooses the interface) [" +
                                      first_line(e.what()) + "]");
    if (impl->watch) impl->watch->fail(error.what(), place.rank, {});
    throw error;
  }
  return World(std::move(impl));
}

}  // namespace

World World::join(const WorldOptions& options) {
  const Place place = read_place();
  return join_at(place, [&](milliseconds limit) { return Rendezvous(place, joins++, limit); }, options);
}

World World::join(c10::intrusive_ptr<c10d::Store> store, int rank, int size, const WorldOptions& options) {
  const Place place = place_at(rank, size, environment);
  // By the number of worlds at this rank: all ranks join in the same order.
  const auto meet = [&](milliseconds limit) {
    const int64_t turn = store->add("plumb/joined/" + std::to_string(rank), 1);
    const std::string keys = "plumb/joined/" + std::to_string(turn);
    c10::intrusive_ptr<c10d::Store> ours = c10::make_intrusive<c10d::PrefixStore>(keys, store);
    return Rendezvous(place, std::move(ours), limit);
  };
  return join_at(place, meet, options);
}

World World::adopt(c10::intrusive_ptr<c10d::Backend> backend, c10::intrusive_ptr<c10d::Store> store,
                   const WorldOptions& options) {
  auto impl = std::make_shared<Impl>();
  impl->rank = backend->getRank();
  impl->size = backend->getSize();
  impl->local_rank = impl->rank;
  impl->backend = backend->getBackendName();
  impl->timeout = options.timeout;
  if (impl->size == 1) return World(std::move(impl));
  const bool on_host = impl->backend != "nccl";
  if (!on_host && !store) {
    throw Error(impl->rank, "World::adopt of an nccl backend needs the store too: host messages travel beside it");
  }
  auto progress = std::make_shared<Progress>(impl->rank);
  std::unique_ptr<ReportChannel> channel;
  const milliseconds limit = std::min(options.timeout, rendezvous_limit);
  if (store) {
    // By the number of worlds at this rank: all ranks adopt in the same order.
    const int64_t turn = store->add("plumb/adopted/" + std::to_string(impl->rank), 1);
    impl->store = c10::make_intrusive<c10d::PrefixStore>("plumb/adopted/" + std::to_string(turn), store);
    channel = make_store_channel(impl->store, impl->rank, impl->size, progress, limit, StoreHost::elsewhere);
  }
  ignore_broken_pipes();
  impl->watch = std::make_shared<Watch>(impl->rank, impl->size, options.timeout, slice, progress, std::move(channel));
  std::vector<int> everybody(impl->size);
  std::iota(everybody.begin(), everybody.end(), 0);
  impl->data = make_group(backend, impl->watch, data_index, "adopted", everybody);
  impl->control = impl->data;
  if (!on_host) {
    Place place;
    place.rank = impl->rank;
    place.size = impl->size;
    if (const char* host = std::getenv("MASTER_ADDR"); host && *host) place.host = host;
    impl->control = make_group(
        make_gloo(impl->store, impl->rank, impl->size, options.timeout, choose_address(*impl->store, place), 1)[0],
        impl->watch, control_index);
  }
  return World(std::move(impl));
}

}  // namespace plumb
