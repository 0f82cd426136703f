// Machines: which ranks run on the same one, by what processes must have in common to share memory; and how ranks tell each
// other such things at the store in a few messages, however many they are.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <optional>
#include <string>
#include <vector>

namespace plumb {

class World;

// How many ranks every machine of a world has, where they are equally many and follow one another; 0 where they do not, or
// where that is not known (threads, an adopted backend).
int ranks_per_machine(const World& world);

// The ranks of a group by machine, where those of each follow one another.
struct Tiers {
  std::vector<int> first;  // of each machine, and the size of the group at the end

  int machines() const { return static_cast<int>(first.size()) - 1; }
  int size() const { return first.back(); }
  int machine_of(int rank) const;
  int ranks_on(int machine) const { return first[machine + 1] - first[machine]; }
};

class Machines {
 public:
  // Collective. A rank that may not share memory (PLUMB_SHM=0, PLUMB_SHAPE) is a machine of its own.
  static Machines find(c10d::Store& store, int rank, int size);
  // Every rank on its own.
  static Machines apart(int size);
  explicit Machines(std::vector<int> of_rank) : of_(std::move(of_rank)) {}

  int of(int rank) const { return of_[rank]; }
  int count() const;
  bool together(const std::vector<int>& ranks) const;  // all on one machine
  // Of these ranks, in this order; nothing where no two of them share a machine, all do, or those of one do not follow
  // one another.
  std::optional<Tiers> tiers(const std::vector<int>& ranks) const;
  // How many ranks each has, in order; 0 where that differs.
  int ranks_each() const;

  // As a text of a length that does not grow with the ranks where machines have equally many.
  std::string encode() const;
  static Machines decode(const std::string& text);

 private:
  std::vector<int> of_;  // by rank; numbered in the order of their first ranks
};

// What two processes must have in common to open each other's memory: the running kernel, and the numbering of processes.
// Without white space; up to the '/': the machine alone.
std::string machine_identity();

// For trials: the machine that PLUMB_MACHINES gives this rank of a world; "3": three machines, of equally many ranks; "1,3": two,
// of one and of three. -1 where it is not set. Throws Error where it does not fit the world.
int pretended_machine(int rank, int size);

// Why this process shares no memory with any other; empty where it may.
std::string why_no_sharing();

// The values of `key` with the ranks' numbers behind it, as soon as all are there.
std::vector<std::string> read_all(c10d::Store& store, const std::string& key, int size);

// What some rank objected with, the same on every rank; empty where all said nothing. Collective, once per `key`.
std::string first_objection(c10d::Store& store, const std::string& key, int size, const std::string& mine);

}  // namespace plumb
