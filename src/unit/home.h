// A home: the memory of the parameters of one bucket, which is there while they are whole.
//
// Each parameter has a storage of its own, which points into that memory while it is lent; otherwise whatever touches the
// parameter gets an error that names it.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "grad/bucket.h"
#include "grad/reducer.h"
#include "lane/lane.h"

namespace plumb {

struct Home {
  // Takes in the bucket's parameters, and keeps this rank's shard of them. Collective over the reducer's shard group.
  Home(Bucket& bucket, Reducer& reducer);
  Home(const Home&) = delete;
  Home& operator=(const Home&) = delete;

  Bucket& bucket;
  const int rank;                  // for errors
  at::Tensor whole;                // all of them, flat; without memory while it is released
  std::vector<at::Tensor> places;  // by parameter, flat: its own storage, which points into `whole`
  Lanes lanes;                     // of that memory and of the shard: readers use a part, gather and update all
  std::vector<at::Tensor> peers;   // everybody's shard, to be read in place; empty: gathered by a collective
  bool named = false;              // such a one says what it gathers, and asks nobody
  int holds = 0;
  std::unordered_set<const void*> readers;  // nodes that are running with what they unpacked
  bool lingers = false;   // saved where nobody tells when it is read: whole until a backward or an update is over
  bool full = false;      // there is memory, with the values or with those on their way
  bool lent = false;      // the parameters point into it
  bool complete = false;  // its last gradient of this pass has come
  bool ahead = false;     // gathered, or kept, before anybody asked
  bool soon = false;      // in the window of those that are used next
  std::shared_ptr<Pending> arriving{};  // the message that fills it
  std::chrono::steady_clock::time_point sent_for{};
  std::vector<std::vector<int64_t>> shapes;  // of the parameters
  std::vector<uint32_t> versions;            // of the parameters when it became full

  const std::string& name() const { return bucket.sinks[0]->name; }  // by which errors call it
  int64_t bytes() const { return bucket.numel * whole.element_size(); }
  bool in_use() const { return holds > 0 || !readers.empty() || lingers; }
  std::vector<uint32_t> versions_now() const;

  void make_room();  // it is full, of nothing yet
  void lend();       // memory of `whole` to the parameters; it lives as long as somebody points into it
  void withdraw();   // and away from them
  void release();    // the memory, too
  void abandon();    // the same, of memory that may still be written: it is never freed
  // The memory, as the current stream's from now on, behind every kernel that uses it. A copy of it where others hold it, too.
  c10::DataPtr take_memory();
  // A parameter that was given other memory (set_data, torch::load) comes home with its values: all of them while the home is
  // whole, otherwise this rank's part.
  void bring_home();
};

}  // namespace plumb
