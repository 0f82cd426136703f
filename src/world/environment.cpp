// One table of launchers, one way to read a number.
#include "world/environment.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <initializer_list>

#include "plumb/error.h"

namespace plumb {
namespace {

struct Launcher {
  const char* name;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
};

// In this order: torchrun may itself run under srun or mpirun.
constexpr std::array<Launcher, 4> launchers{{
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {"Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"},
}};

int number(const std::string& name, const std::string& value, int low, int high) {
  int result = 0;
  const auto [end, failure] = std::from_chars(value.data(), value.data() + value.size(), result);
  if (failure != std::errc() || end != value.data() + value.size() || result < low || result > high) {
    throw Error(name + "=" + value + ": expected a whole number from " + std::to_string(low) + " to " +
                std::to_string(high));
  }
  return result;
}

bool is_loopback_name(const std::string& host) {
  return host == "localhost" || host == "::1" || host.rfind("127.", 0) == 0;
}

// A batch script has Slurm's rank variables too, but is not one of srun's tasks.
bool in_batch_script(const Lookup& lookup) {
  return lookup("ENVIRONMENT") == "BATCH" && !lookup("SLURM_STEP_ID") && !lookup("SLURM_STEPID");
}

std::string slurm_host(const Lookup& lookup) {
  for (const char* name : {"SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"}) {
    const auto nodes = lookup(name);
    if (nodes == "1") return "127.0.0.1";
    if (nodes) break;
  }
  for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"}) {
    const auto list = lookup(name);
    if (!list || list->empty()) continue;
    if (auto node = first_node(*list)) return *node;
    throw Error(std::string(name) + "=" + *list +
                ": cannot tell the first node; set MASTER_ADDR to the node of rank 0");
  }
  return "127.0.0.1";
}

// Only what is one for all ranks of a world, and another for any other world.
std::string job_of(const Launcher& launcher, const Lookup& lookup) {
  const auto first = [&](std::initializer_list<const char*> names) {
    for (const char* name : names) {
      const auto value = lookup(name);
      if (value && !value->empty()) return *value;
    }
    return std::string();
  };
  if (std::string given = first({"PLUMB_JOB"}); !given.empty()) {
    std::ranges::replace_if(given, [](unsigned char c) { return c < 32; }, ' ');  // it stands on lines of its own
    return "job " + given;
  }
  const std::string name = launcher.name;
  if (name == "torchrun") {
    const std::string run = first({"TORCHELASTIC_RUN_ID"});
    return run.empty() ? "" : "torchrun's run " + run;
  }
  if (name == "Slurm") {
    // The parts of a heterogeneous job have numbers, and steps, of their own.
    if (const std::string whole = first({"SLURM_HET_JOB_ID"}); !whole.empty()) return "Slurm's job " + whole;
    const std::string job = first({"SLURM_JOB_ID", "SLURM_JOBID"});
    const std::string step = first({"SLURM_STEP_ID", "SLURM_STEPID"});
    return job.empty() ? "" : "Slurm's job " + job + (step.empty() ? "" : "." + step);
  }
  const std::string space = first({"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"});
  return space.empty() ? "" : name + "'s job " + space;
}

}  // namespace

int ranks_here(const Lookup& lookup) {
  for (const Launcher& launcher : launchers) {
    if (!lookup(launcher.rank) || !lookup(launcher.size)) continue;
    if (launcher.name == std::string("Slurm") && in_batch_script(lookup)) continue;
    const std::string text = lookup(launcher.local_size).value_or("1");
    int count = 1;  // Slurm's is "4", "4(x2)" or "4,3": of the first node
    const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), count);
    return failure == std::errc() && count > 0 ? count : 1;
  }
  return 1;
}

std::optional<std::string> first_node(const std::string& list) {
  const size_t bracket = list.find('[');
  const size_t comma = list.find(',');
  if (bracket == std::string::npos || comma < bracket) {
    const std::string name = list.substr(0, comma);
    return name.empty() ? std::nullopt : std::optional(name);
  }
  const size_t end = list.find_first_of(",-]", bracket);
  const size_t close = list.find(']', bracket);
  if (end == std::string::npos || close == std::string::npos || end == bracket + 1) return std::nullopt;
  const size_t after = list.find_first_of(",[", close);
  if (after != std::string::npos && list[after] == '[') return std::nullopt;  // two brackets in one name
  const std::string suffix = list.substr(close + 1, (after == std::string::npos ? list.size() : after) - close - 1);
  return list.substr(0, bracket) + list.substr(bracket + 1, end - bracket - 1) + suffix;
}

Place read_place(const Lookup& lookup) {
  Place place;
  for (const Launcher& launcher : launchers) {
    const auto rank = lookup(launcher.rank);
    const auto size = lookup(launcher.size);
    if (!rank && !size) continue;
    const bool slurm = launcher.name == std::string("Slurm");
    if (slurm && (!rank || !size || in_batch_script(lookup))) continue;
    if (!rank || !size) {
      throw Error(std::string(rank ? launcher.rank : launcher.size) + "=" + (rank ? *rank : *size) + " is set, but " +
                  (rank ? launcher.size : launcher.rank) + " is not; a launcher sets both (unset it to run alone)");
    }
    place.launcher = launcher.name;
    place.size = number(launcher.size, *size, 1, 1 << 20);
    place.rank = number(launcher.rank, *rank, 0, 1 << 20);
    if (place.rank >= place.size) {
      throw Error(std::string(launcher.rank) + "=" + *rank + " and " + launcher.size + "=" + *size +
                  ": ranks go from 0 to " + std::to_string(place.size - 1));
    }
    if (slurm) place.host = slurm_host(lookup);
    const auto host = lookup("MASTER_ADDR");
    if (host && host->empty()) throw Error("MASTER_ADDR is empty; set it to the address of rank 0's machine");
    if (host) place.host = *host;
    if (const auto port = lookup("MASTER_PORT")) place.port = number("MASTER_PORT", *port, 1, 65535);
    if (const auto bound = lookup(kStoreFd); bound && place.rank == 0)
      place.bound = number(kStoreFd, *bound, 0, 1 << 20);
    const auto local_rank = lookup(launcher.local_rank);
    if (local_rank) {
      place.local_rank = number(launcher.local_rank, *local_rank, 0, 1 << 20);
    } else {
      place.local_rank = is_loopback_name(place.host) ? place.rank : 0;
    }
    const auto hosted = lookup("TORCHELASTIC_USE_AGENT_STORE");
    place.store_is_hosted = hosted == "True" || hosted == "true" || hosted == "1";
    place.attempt = lookup("TORCHELASTIC_RESTART_COUNT").value_or("0");
    place.size_variable = launcher.size;
    place.job = job_of(launcher, lookup);
    return place;
  }
  return place;
}

Place read_place() { return read_place(environment); }

Place place_at(int rank, int size, const Lookup& lookup) {
  Place place;
  place.rank = rank;
  place.size = size;
  const auto local = lookup("LOCAL_RANK");
  place.local_rank = local && !local->empty() ? number("LOCAL_RANK", *local, 0, 1 << 20) : rank;
  if (const auto host = lookup("MASTER_ADDR"); host && !host->empty()) place.host = *host;
  place.store_is_hosted = true;
  place.size_variable = "size";
  return place;
}

std::optional<std::string> environment(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value ? std::optional<std::string>(value) : std::nullopt;
}

}  // namespace plumb
