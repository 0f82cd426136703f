// Units: the parameters of an engine that are sharded over the ranks, and whole only while somebody needs them.
//
// Their memory is a Home per bucket, filled by Gathers; here is who needs it, and for how long. A forward holds its unit by a
// scope. A backward finds its way alone (contract 4): whatever a node saved inside a unit's scope gathers that
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
#include "unit/door.h"
#include "unit/gathers.h"

namespace plumb {

// A module that is a unit: its own parameters, tied ones included; those of units inside it are theirs.
struct UnitSpec {
  std::shared_ptr<unit::Door> door;
  std::vector<at::Tensor> parameters;
};

class Units : public backward::Listener, public Gathering, public std::enable_shared_from_this<Units> {
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
  void keep(const std::vector<at::Tensor>& parameters);
  void drop(const std::vector<at::Tensor>& parameters) { let_go(homes_of(parameters)); }
  // What rank 0 wrote into held parameters becomes everybody's. Collective.
  void publish(const std::vector<at::Tensor>& parameters, const Where& where);

  // Nobody reads a shard from here to `updated`. An Error if somebody holds one.
  void begin_update();
  void end_update();

  // See Engine.
  NamedTensors shards() const;
  void shards_written();

  bool owns(const at::Tensor& parameter) const;           // also one that was given other memory
  bool is_everybodys(const at::Tensor& parameter) const;  // nobody changed it since it was gathered or published
  int64_t gathered_bytes() const;                         // right now
  int64_t gathers() const { return gathers_.count(); }    // so far
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

  bool asks() const override { return gathers_.asks(); }
  void serve(const Where& where) override;
  int64_t settle() override;
  void explain(const Where& where) override;

 private:
  struct ReaderHook;
  // Who may gather: where that asks other ranks, it tells the reducer what they answer, whose lock comes first.
  struct Entrance {
    explicit Entrance(Units& units)
        : reducer(units.reducer_.mutex(), std::defer_lock), own(units.mutex_, std::defer_lock) {
      if (units.asks()) reducer.lock();
      own.lock();
    }
    std::unique_lock<std::recursive_mutex> reducer, own;
  };

  void note_changes(int unit);
  void check_nothing_lost();
  bool owns_memory_of(const at::Tensor& parameter) const;
  void release_if_idle(Home& home);
  void need(Home& home);
  void touch(int unit);
  void left(Home& home, const void* node);
  void completed(Bucket& bucket);
  void hold(const std::vector<Home*>& homes);
  void hold_together(const std::vector<Home*>& homes);
  void let_go(const std::vector<Home*>& homes);
  std::vector<Home*> homes_of(const std::vector<at::Tensor>& parameters) const;  // each once

  std::shared_ptr<Reducer> owner_;
  Reducer& reducer_;
  std::vector<UnitSpec> specs_;
  mutable std::recursive_mutex mutex_;
  std::deque<Home> homes_;
  Gathers gathers_;
  std::vector<std::vector<Home*>> homes_of_unit_;
  std::unordered_map<const c10::StorageImpl*, Home*> homes_of_;
  std::unordered_map<const c10::TensorImpl*, Home*> home_of_;  // by parameter
  std::string lost_;                                           // a parameter that was changed where nobody else sees it
  std::deque<int> recent_;                                     // units the running backwards needed last
  std::map<const void*, std::vector<Home*>> hooked_;           // nodes that tell when they are done
  int tasks_ = 0;                                              // backwards under way
  std::shared_ptr<std::atomic<int64_t>> handed_out_;           // bytes that graphs have
};

}  // namespace plumb
