// The rendezvous: ranks find each other at a store, and who takes part is settled before anything else travels.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>
#include <vector>

#include "plumb/error.h"
#include "watch/report_channel.h"
#include "world/environment.h"

namespace plumb {

// Rank 0 serves the store, unless its launcher does. Every rank claims its number there, with the size of the world that
// it was told and, where the launcher has a name for it, its job.
//
// Claims that contradict each other (two sizes, one number twice) end the world on every rank with one text: nobody can
// say which of the two is right. A process that its launcher counts to another job is refused alone.
class Rendezvous {
 public:
  // Connects. `world`: which of this process's worlds it is; `limit`: for connecting and settling together.
  Rendezvous(const Place& place, int world, std::chrono::milliseconds limit);

  // At a store that the ranks have found already, with keys of this world alone.
  Rendezvous(const Place& place, c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds limit);

  // Returns when every rank has claimed its number and all were told the same; throws Error within the limit otherwise.
  void settle();

  // With keys of this world alone.
  const c10::intrusive_ptr<c10d::Store>& store() const { return store_; }
  bool serves() const { return serves_; }
  // A rank of this world would have come by then: whoever comes later is a stranger.
  Clock::time_point end() const { return end_; }

 private:
  c10::intrusive_ptr<c10d::Store> connect(const std::string& prefix);
  void agree();
  void claim();
  [[noreturn]] void object(const std::string& text, int expected);
  [[noreturn]] void refuse(const std::string& text, int expected);

  const Place place_;
  const std::chrono::milliseconds limit_;
  const Clock::time_point end_;
  bool serves_;
  const c10::intrusive_ptr<c10d::Store> store_;
};

// What a process that came after the world was settled holds against it; empty while nobody does.
std::string late_objection(c10d::Store& store);

// Whether `key` stands in the store by `end`. Throws when the store is gone: that is not a rank that is missing.
bool await_key(c10d::Store& store, const std::string& key, int rank, Clock::time_point end);

// For a rank that waited `limit` for all, of which these are missing. `note`: what may explain it.
Error not_heard_of(int rank, int size, std::chrono::milliseconds limit, const std::vector<int>& missing,
                   const std::string& note = {});

}  // namespace plumb
