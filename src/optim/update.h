// Updater: runs an optimizer over flat memory. Parameters move into flat tensors laid out like their gradients, so that
// a step is a few calls of libtorch's fused kernels whatever the number of parameters.
#pragma once

#include <deque>
#include <vector>

#include "grad/bucket.h"
#include "grad/faults.h"
#include "grad/ledger.h"
#include "optim/counts.h"
#include "optim/rates.h"
#include "optim/rules.h"
#include "optim/runs.h"
#include "optim/stretches.h"
#include "plumb/engine.h"

namespace plumb {

class Updater {
 public:
  // An Error if a group names no parameter, or the values make no sense.
  Updater(int rank, Optimizer optimizer, const Options& options, const NamedTensors& parameters);

  Rates& rates() { return rates_; }
  const Optimizer& optimizer() const { return optimizer_; }

  // Everything that may refuse a step, before it changes anything: lays out memory, and follows what the user did to
  // parameters since the last one.
  void prepare(std::deque<Bucket>& buckets);
  // The latter alone: parameters lie beside their state again, in its order.
  void bring_home(std::deque<Bucket>& buckets);

  // One update of every parameter that has a gradient; the learning rates are multiplied by `factor`. Where the state is
  // sharded, each rank updates its part of every bucket, and whole parameters get the others' parts over `shard`. After
  // prepare().
  void step(std::deque<Bucket>& buckets, Group& shard, double factor, Ledger& ledger, Fault fault, const Where& where);

  // The same by the user: what he updates, and what follows his update. After prepare().
  bool is_users() const { return std::holds_alternative<UserOptimizer>(optimizer_); }
  std::vector<Piece> lend(std::deque<Bucket>& buckets);
  // The same as stretches of flat memory, for updates that treat every element alike: neighbours with a gradient, and padding
  // between them that stays zero.
  const Stretches& lend_flat(std::deque<Bucket>& buckets);
  const Stretches& stretches() const { return stretches_; }  // of the last call
  void take_back(std::deque<Bucket>& buckets, Group& shard, Ledger& ledger, const Where& where);

  // For checkpoints: what is remembered of one parameter, this rank's part of each; undefined: nothing, or not kept.
  struct Memory {
    at::Tensor master, momentum, mean, square;
    int64_t updates = 0;
  };
  Memory memory_of(const Sink& sink) const;
  // What is kept of a parameter once it was updated: by the names of Memory's fields, and in which dtype.
  struct Kept {
    std::vector<std::pair<std::string, bool>> names;
    at::ScalarType dtype = at::kFloat;
  };
  Kept kept_of(const at::Tensor& parameter) const;
  // There is memory for parameters that were updated so often, by sink. Changes no value.
  void make_room(std::deque<Bucket>& buckets, const std::vector<int64_t>& updates);
  // Everything is as before the first update, but the counts: memory is about to be filled.
  void forget(std::deque<Bucket>& buckets, const std::vector<int64_t>& updates);
  // Parameters and memory were filled: they belong together as they are.
  void filled(std::deque<Bucket>& buckets);

 private:
  // The optimizer's memory of one parameter: its parts of the flat tensors, and how often it was updated.
  struct State {
    at::Tensor home;  // where a whole parameter lies, in its shape
    at::Tensor weight, momentum, mean, square;
    int64_t steps = 0;
    uint64_t graphs = 0;   // tells the captured steps that count it
    uint32_t version = 0;  // of the parameter, after our last update
    bool lent = false;     // the user may have updated it, whatever became of its gradient since
  };
  // The flat tensors of one bucket: `held` of the parameters, `updated` of the rest. `weight` is what the optimizer
  // updates: the parameters, or their f32 masters.
  struct Flats {
    at::Tensor parameter, weight, momentum, mean, square;
    bool master = false;
  };

  bool is_home(const Bucket& bucket) const;
  Flats& flats_of(Bucket& bucket);
  void follow_user(const Bucket& bucket, const Sink& sink, const Flats& flats);
  void spread(const Bucket& bucket, Group& shard, std::deque<Pending>& gathers, const Where& where);
  void updated(Sink& sink);
  void count(const std::deque<Bucket>& buckets);
  // Runs of some buckets, to be updated together, and the parameters that their weights do not lie in.
  struct Together {
    std::vector<Operands> runs;
    std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // from the weight to the parameter
    int64_t bytes = 0;                                      // of memory that lives until then
    at::Tensor count;                                       // on the CPU, where it is made for each step
    int64_t counted = 0;                                    // the number in it
  };
  void add_run(Together& together, const Bucket& bucket, const Flats& flats, const Run& run, double factor);
  void update_all(Together& together);
  void check_begun(const Bucket& bucket, const Run& run) const;

  int rank_;
  uint64_t captures_ = 0;  // steps that were captured
  Optimizer optimizer_;
  Rates rates_;
  Counts counts_;
  bool master_weights_;
  Stretches stretches_;        // of the last step
  std::vector<State> states_;  // by sink
  std::vector<Flats> flats_;   // by bucket
};

}  // namespace plumb
