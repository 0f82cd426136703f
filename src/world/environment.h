// Reads from the environment of a launcher who this process is.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace plumb {

// What a launcher says of one process.
struct Place {
  std::string launcher = "none";  // "torchrun", "Open MPI", "MPICH", "Slurm", "none"
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  std::string host = "127.0.0.1";
  int port = 29500;
  bool store_is_hosted = false;              // the launcher serves the store; every rank is a client
  std::string attempt = "0";                 // of this world: a restarted one must not read the last one's keys
  std::string size_variable = "WORLD_SIZE";  // where the size stood
  int bound = -1;     // rank 0's: a socket that its launcher has bound to the port, so that nobody takes it meanwhile
  std::string job{};  // what the launcher calls the job, the same on all its ranks; empty where it has no name for it
};

using Lookup = std::function<std::optional<std::string>(const std::string& name)>;

// How many ranks of the launcher run on this machine; 1 where it does not say.
int ranks_here(const Lookup& lookup);

// Throws Error that says which variable had which value. The variables are named in docs/world.md.
Place read_place(const Lookup& lookup);
Place read_place();  // from this process's environment

// Of a process that brings a store, and its rank and size with it: of the variables only LOCAL_RANK and MASTER_ADDR count.
Place place_at(int rank, int size, const Lookup& lookup);

// Where a launcher of ours says so, for the first world of rank 0's process.
inline constexpr const char* kStoreFd = "PLUMB_STORE_FD";

std::optional<std::string> environment(const std::string& name);  // a Lookup: this process's

// "n[03-05,9],m1" -> "n03"; nothing when the list is of a kind that cannot be read simply.
std::optional<std::string> first_node(const std::string& list);

}  // namespace plumb
