#include "backend/machines.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <map>
#include <numeric>
#include <set>
#include <sstream>

#include "plumb/error.h"

namespace plumb {
namespace {

const char* text_of(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr ? value : "";
}

}  // namespace

int Tiers::machine_of(int rank) const {
  return static_cast<int>(std::upper_bound(first.begin(), first.end(), rank) - first.begin()) - 1;
}

std::string machine_identity() {
  std::string boot = "?";
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char space[64] = "?";
  (void)!readlink("/proc/self/ns/pid", space, sizeof space - 1);
  return boot + "/" + space;
}

int pretended_machine(int rank, int size) {
  const std::string text = text_of("PLUMB_MACHINES");
  if (text.empty()) return -1;
  std::vector<int> counts;
  std::istringstream list(text);
  for (std::string item; std::getline(list, item, ',');) {
    int count = 0;
    const auto [end, error] = std::from_chars(item.data(), item.data() + item.size(), count);
    counts.push_back(error == std::errc{} && end == item.data() + item.size() ? count : 0);
  }
  if (counts.size() == 1 && counts[0] > 0 && size % counts[0] == 0) counts.assign(counts[0], size / counts[0]);
  const bool positive = std::ranges::all_of(counts, [](int count) { return count > 0; });
  if (!positive || std::reduce(counts.begin(), counts.end()) != size) {
    throw Error(rank, "PLUMB_MACHINES=" + text + " does not spread a world of " + std::to_string(size) +
                          " ranks; write how many machines there are (2), or how many ranks each has (1,3)");
  }
  int machine = 0;
  for (int left = rank; left >= counts[machine]; ++machine) left -= counts[machine];
  return machine;
}

std::string why_no_sharing() {
  if (text_of("PLUMB_SHM") == std::string("0")) return "PLUMB_SHM=0 forbids it";
  return *text_of("PLUMB_SHAPE") != 0 ? "PLUMB_SHAPE shapes the links between machines" : "";
}

std::vector<std::string> read_all(c10d::Store& store, const std::string& key, int size) {
  std::vector<std::string> keys;
  for (int r = 0; r < size; ++r) keys.push_back(key + std::to_string(r));
  std::vector<std::string> values;
  if (store.hasExtendedApi()) {
    store.wait(keys);
    for (const auto& value : store.multiGet(keys)) values.emplace_back(value.begin(), value.end());
  } else {
    for (const std::string& one : keys) values.push_back(store.get_to_str(one));
  }
  return values;
}

std::string first_objection(c10d::Store& store, const std::string& key, int size, const std::string& mine) {
  if (!mine.empty()) store.compareSet(key + "/objection", std::string(), mine);
  if (store.add(key + "/count", 1) == size) store.set(key + "/all", std::string("came"));
  store.wait({key + "/all"});
  return store.check({key + "/objection"}) ? store.get_to_str(key + "/objection") : "";
}

// Rank 0 reads what all say, and tells who is together: one long answer for one rank, a short one for each of the others.
Machines Machines::find(c10d::Store& store, int rank, int size) {
  const std::string alone = why_no_sharing();
  const int pretended = pretended_machine(rank, size);
  const std::string shared = machine_identity() + (pretended < 0 ? "" : " as " + std::to_string(pretended));
  store.set("machine/" + std::to_string(rank), alone.empty() ? shared : "rank " + std::to_string(rank));
  if (rank == 0) {
    std::map<std::string, int> numbers;
    std::vector<int> of;
    for (const std::string& identity : read_all(store, "machine/", size)) {
      of.push_back(numbers.emplace(identity, static_cast<int>(numbers.size())).first->second);
    }
    store.set("machines", Machines(std::move(of)).encode());
  }
  return decode(store.get_to_str("machines"));
}

Machines Machines::apart(int size) {
  std::vector<int> of(size);
  std::iota(of.begin(), of.end(), 0);
  return Machines(std::move(of));
}

int Machines::count() const { return of_.empty() ? 0 : *std::ranges::max_element(of_) + 1; }

bool Machines::together(const std::vector<int>& ranks) const {
  return std::ranges::all_of(ranks, [&](int rank) { return of(rank) == of(ranks.front()); });
}

std::optional<Tiers> Machines::tiers(const std::vector<int>& ranks) const {
  Tiers tiers;
  std::set<int> seen;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0 && of(ranks[i]) == of(ranks[i - 1])) continue;
    if (!seen.insert(of(ranks[i])).second) return std::nullopt;
    tiers.first.push_back(static_cast<int>(i));
  }
  tiers.first.push_back(static_cast<int>(ranks.size()));
  const bool worth_it = tiers.machines() > 1 && tiers.machines() < tiers.size();
  return worth_it ? std::optional(tiers) : std::nullopt;
}

int Machines::ranks_each() const {
  const int each = static_cast<int>(of_.size()) / std::max(count(), 1);
  for (size_t r = 0; r < of_.size(); ++r) {
    if (of_[r] != static_cast<int>(r) / std::max(each, 1)) return 0;
  }
  return each;
}

// Runs of ranks of one machine; runs of equal length on machines of consecutive numbers are written once: "0,8,512;" for 512
// machines of eight ranks.
std::string Machines::encode() const {
  struct Run {
    int machine, ranks, times;
  };
  std::vector<Run> runs;
  for (size_t r = 0; r < of_.size();) {
    Run run{of_[r], 0, 1};
    for (; r < of_.size() && of_[r] == run.machine; ++r) ++run.ranks;
    const bool goes_on =
        !runs.empty() && runs.back().ranks == run.ranks && runs.back().machine + runs.back().times == run.machine;
    if (goes_on) {
      ++runs.back().times;
    } else {
      runs.push_back(run);
    }
  }
  std::ostringstream text;
  for (const Run& run : runs) text << run.machine << ',' << run.ranks << ',' << run.times << ';';
  return text.str();
}

Machines Machines::decode(const std::string& text) {
  std::vector<int> of;
  std::istringstream in(text);
  int machine = 0, ranks = 0, times = 0;
  char comma = 0;
  while (in >> machine >> comma >> ranks >> comma >> times >> comma) {
    for (int i = 0; i < times; ++i) of.insert(of.end(), ranks, machine + i);
  }
  return Machines(std::move(of));
}

}  // namespace plumb
