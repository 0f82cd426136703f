// Units: the parameters of an engine that are sharded over the ranks, and whole only while somebody needs them.
//
// The parameters of one bucket are whole in one piece of memory, each through a storage of its own that points into it.
// Gathering makes that memory and fills it with every rank's shard; releasing takes it away, and whatever touches a
// parameter then gets an error that names it. A forward holds its
// unit by a scope. A backward finds its way alone (contract 4): whatever a node saved inside a unit's scope gathers that
// unit when the node unpacks it, in every graph task anew, and the unit is let go when its last gradient has come, when
// the backward has moved on to other units, or when it ends, well or badly.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "grad/backward.h"
#include "grad/bucket.h"
#include "grad/reducer.h"
#include "layout/digest.h"
#include "unit/door.h"
#include "unit/order.h"

namespace plumb {

// A module that is a unit: its own parameters, tied ones included; those of units inside it are theirs.
struct UnitSpec {
  std::shared_ptr<unit::Door> door;
  std::vector<at::Tensor> parameters;
};

class Units : public backward::Listener, public std::enable_shared_from_this<Units> {
 public:
  // Cuts the parameters of the reducer's unit buckets over its shard group. Collective.
  Units(std::vector<UnitSpec> specs, std::shared_ptr<Reducer> reducer);
  ~Units() override;
  void open_doors();

  // Around a use of a unit, outside or inside of a backward.
  void enter(int unit);
  void leave(int unit);

  // Around a use of single parameters.
  void hold(const std::vector<at::Tensor>& parameters);
  void let_go(const std::vector<at::Tensor>& parameters);
  // The same across scopes and threads: what is saved meanwhile is none of its business.
  void keep(const std::vector<at::Tensor>& parameters) { hold(homes_of(parameters)); }
  void drop(const std::vector<at::Tensor>& parameters) { let_go(homes_of(parameters)); }
  // What rank 0 wrote into held parameters becomes everybody's. Collective.
  void publish(const std::vector<at::Tensor>& parameters, const Where& where);

  // Nobody reads a shard from here to `updated`. An Error if somebody holds one.
  void begin_update();
  void end_update();

  // See Engine.
  NamedTensors shards() const;
  void shards_written();

  // Everything that was sent for has come; a digest of all that was, in order. 0 where nobody has to gather alike.
  int64_t settle_gathers();
  // Ranks found different ones: an Error that names the first units that differ. Collective.
  [[noreturn]] void explain_gathers(const Where& where);

  bool owns(const at::Tensor& parameter) const;  // also one that was given other memory
  int64_t gathered_bytes() const;                // right now
  int64_t gathers() const { return gathers_; }   // so far
  // From here on by collectives, as between machines; for tests. `ahead`: bytes of the window. Collective.
  void gather_together(int64_t ahead);

  // Inside a node's backward: gathers what it saved.
  void need(int unit);
  void need_storage(const c10::StorageImpl* storage);
  bool is_home(const c10::StorageImpl* storage) const { return homes_of_.contains(storage); }

  // For a graph that knows when it is done with them: whole parameters, each in a storage of its own; their memory goes with the
  // last of a bucket. (inside.cpp)
  std::vector<at::Tensor> hand_out(const std::vector<at::Tensor>& parameters);

  void backward_ended(std::exception_ptr failure) override;

 private:
  // Where the parameters of one bucket live.
  struct Home {
    Bucket* bucket = nullptr;
    at::Tensor whole;                // all of them, flat; without memory while it is released
    std::vector<at::Tensor> places;  // by parameter, flat: its own storage, which points into `whole`
    Lanes lanes;                     // of that memory and of the shard: readers use a part, gather and update all
    std::vector<at::Tensor> peers;   // everybody's shard, to be read in place; empty: gathered by a collective
    bool named = false;              // such a one says what it gathers, and asks nobody
    int holds = 0;
    std::unordered_set<const void*> readers;  // nodes that are running with what they unpacked
    bool full = false;                        // there is memory, with the values or with those on their way
    bool lent = false;                        // the parameters point into it
    bool complete = false;                    // its last gradient of this pass has come
    bool ahead = false;                       // gathered, or kept, before anybody asked
    bool soon = false;                        // in the window of those that are used next
    std::shared_ptr<Pending> arriving{};      // the message that fills it
    std::chrono::steady_clock::time_point sent_for{};
    std::vector<std::vector<int64_t>> shapes;  // of the parameters
    std::vector<uint32_t> versions;            // of the parameters when it became full
  };
  struct ReaderHook;

  void settle_in(Home& home);
  void lend(Home& home);      // memory of `whole` to the parameters
  void withdraw(Home& home);  // and away from them
  void use(Home& home);       // it is whole for the current stream
  void use_together(Home& home);
  void ask_to_gather(Home& home);
  void make_room(Home& home);
  void gather(Home& home);
  void send_for(const std::vector<Home*>& homes);
  void send_ahead(Home* first);
  void receive(Home& home);
  void pass_gather(const Home& home) const;
  void lose_gathers();
  void look_ahead();
  int64_t bytes_of(const Home& home) const;
  static std::vector<uint32_t> versions(const Home& home);
  void bring_home(Home& home);
  void note_changes(int unit);
  void check_nothing_lost();
  bool owns_memory_of(const at::Tensor& parameter) const;
  Where gathering(const Home& home) const;
  void release(Home& home);
  c10::DataPtr take_memory(Home& home);
  void release_ahead();
  void release_if_idle(Home& home);
  void need(Home& home);
  void touch(int unit);
  void left(Home& home, const void* node);
  void completed(Bucket& bucket);
  void hold(const std::vector<Home*>& homes);
  void let_go(const std::vector<Home*>& homes);
  std::vector<Home*> homes_of(const std::vector<at::Tensor>& parameters) const;  // each once

  std::shared_ptr<Reducer> owner_;
  Reducer& reducer_;
  std::vector<UnitSpec> specs_;
  mutable std::recursive_mutex mutex_;
  std::deque<Home> homes_;
  std::vector<std::vector<Home*>> homes_of_unit_;
  std::unordered_map<const c10::StorageImpl*, Home*> homes_of_;
  std::unordered_map<const c10::TensorImpl*, Home*> home_of_;  // by parameter
  std::string lost_;                                           // a parameter that was changed where nobody else sees it
  std::unordered_map<int, Home*> home_of_bucket_;              // by the bucket's index
  std::vector<Home*> soon_;                                    // the window
  Order order_;                                                // of gathers by collectives
  int64_t ahead_bytes_;                                // of the window in which units are whole before their use
  std::deque<std::shared_ptr<Pending>> on_their_way_;  // messages, in the order of their sending
  Digest sent_for_;                                    // every gather so far, in order
  std::vector<int64_t> sent_since_;                    // those since ranks last but one compared
  size_t compared_ = 0;                                // how many of them the last comparison covers
  std::deque<int> recent_;                             // units the running backwards needed last
  std::map<const void*, std::vector<Home*>> hooked_;   // nodes that tell when they are done
  int tasks_ = 0;                                      // backwards under way
  std::shared_ptr<std::atomic<int64_t>> handed_out_;   // bytes that graphs have
  int64_t gathers_ = 0;
};

}  // namespace plumb
