// Reducer: turns ready buckets into collectives, in the same order on every rank, and closes every pass so that the
// gradients of all ranks agree when the user's backward returns.
//
// A pass opens with the first gradient of an outermost backward. A bucket is reduced when its last expected gradient has
// come and all buckets before it have begun; the last bucket, and whatever is not complete, when the backward has ended.
// Then the ranks exchange one small message of facts (where they stand, who has which gradient, which bucket got a
// gradient after its reduction began), so that parameters unused on some ranks, modules run again inside checkpoints,
// and ranks out of step are seen by everybody.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "grad/backward.h"
#include "grad/bucket.h"
#include "grad/facts.h"
#include "grad/faults.h"
#include "grad/ledger.h"
#include "plumb/engine.h"
#include "plumb/fused.h"
#include "world/group.h"

namespace plumb {

class Reducer : public backward::Listener, public std::enable_shared_from_this<Reducer> {
 public:
  // `unit_of`: by parameter, the unit that gathers it; -1 for one that is always whole.
  Reducer(World world, const NamedTensors& parameters, std::vector<int> unit_of, const Options& options);

  // Arms the hooks; separate from construction because they refer back to this object.
  void start();
  // Disarms them for good: gradients of later backwards are nobody's business here.
  void stop();

  void hold_sync(int change);  // +1 and -1 around a no_sync scope

  // Around a backward that counts whether or not it reaches a parameter.
  void begin_backward();
  void end_backward(std::exception_ptr failure);

  // A gradient that comes without autograd: from a compiled or hand-written backward, in any dtype and order. Inside a
  // backward it belongs to that pass; otherwise to one that end_pass() closes.
  void deliver(const at::Tensor& parameter, const at::Tensor& raw);
  void end_pass();

  // The same from an operation that writes the gradient itself: where to, and that it did. Outside of a backward (weight
  // gradients that were put off) it stays on this rank until the next reduction.
  GradTarget open_fused(Sink& sink);
  void wrote_fused(Sink& sink);

  // Settles everything that is not reduced yet, after all ranks agreed that they are at the same point. Afterwards every
  // rank holds the same gradients. Throws on every rank otherwise.
  void settle_step();
  // The parameters are as they should be now; alone, or without an optimizer of ours, nobody looks.
  void remember_parameters();
  void leave_parameters_to_user() { watches_parameters_ = false; }
  // The step is over: the next backward is the first of the next step.
  void finish_step();

  void backward_ended(std::exception_ptr failure) override;

  std::deque<Bucket>& buckets() { return buckets_; }
  const std::deque<Sink>& sinks() const { return sinks_; }
  Ledger& ledger() { return ledger_; }
  const World& world() const { return world_; }
  Group& data() { return data_; }
  Group& control() { return control_; }
  Group& shard() { return groups_.shard; }
  // Apart from the others, so that gathers and reductions need no common order. Made when first asked for; collective.
  Groups& gathers();
  bool shards(Placement placement) const { return placement == Placement::sharded && groups_.shard.size() > 1; }
  const Strategy& row() const { return row_; }
  // Where gradients are sharded or not, the whole reduced gradient of a parameter; undefined where it has none. Collective.
  at::Tensor full_gradient(const at::Tensor& parameter);
  // After gradients were cleared: their memory may go, until the next one comes.
  void let_go_of_gradients();
  int64_t small = 1 << 20;  // bytes of a bucket that keeps its memory
  // Called with a bucket of a unit when its last expected gradient has come.
  std::function<void(Bucket&)> on_complete;
  Sink* sink_of(const at::Tensor& parameter);
  Where here(Where::Kind kind, std::string detail = {}) const { return {kind, steps_, passes_, std::move(detail)}; }
  int64_t steps() const { return steps_; }

  // For each device that holds parameters, but the CPU.
  void for_devices(const std::function<void(c10::Device)>& call) const;

  Fault fault = Fault::none;  // for tests

 private:
  // Members: who is in the buckets.
  std::vector<int> newcomers() const;  // candidates that require or have a gradient, and have no sink yet
  int64_t newcomers_digest() const;
  void admit(const std::vector<int>& candidates);
  void hook(Sink& sink);
  void offer_fused(Sink& sink);
  void check_nothing_put_off() const;
  void place(const Layout& layout, const std::vector<int>& indices);
  void rebuild();
  void reshard(std::deque<Bucket>& old, const std::vector<int>& indices);

  bool in_pass() const;  // whether a contribution that comes now belongs to a pass, or comes between two
  void join_pass(Sink& sink, bool contributes);
  void follow_accumulator(Sink& sink);
  void listen_to(Sink& sink, const NodePtr& accumulator);
  at::Tensor before_accumulation(Sink& sink, const at::Tensor& gradient);
  void after_accumulation(Sink& sink, const at::Tensor& gradient);
  void open_pass();
  void untangle();
  void renew_kept();
  void renew(Bucket& bucket);
  bool follow_rules();
  void form_convoys();
  size_t end_of_convoy(size_t begin) const;  // by index of a bucket
  void launch_ready();
  void launch_convoy();
  void send_waiting();
  void send(const std::vector<Bucket*>& buckets);
  void settle(Sink& sink, double scale);
  void reduce(Bucket& bucket);
  void copy_together(Bucket& bucket);

  // Gradients that are not summed in place: sharded ones, and all of them in deterministic mode.
  bool eats() const { return deterministic_ || shards_gradient_; }
  void take(Sink& sink, const at::Tensor& gradient);
  void open_incoming(Bucket& bucket);
  // What a new gradient must hold: zeros, zeros between parameters, whose own places are about to be written, or nothing.
  enum class Blank { yes, padding, no };
  void make_gradient(Bucket& bucket, Blank blank = Blank::yes);
  void complete_incoming(Bucket& bucket);
  // A contribution's factor: the mean over the ranks; 1 in deterministic mode, which scales the sum of all of them.
  double incoming_scale() const { return deterministic_ ? 1.0 : 1.0 / data_.size(); }
  int64_t shares_per_step() const { return options_.virtual_ranks / data_.size(); }  // of this rank
  void reduce_incoming(Bucket& bucket);
  void reduce_tree(Bucket& bucket, const at::Tensor& target);
  void finish(Bucket& bucket, const Where& where);
  void keep_few_in_flight();
  void push_shares();
  void prepare_share();
  void check_shares() const;
  void follow_caller(c10::Device device);
  void close_pass(bool failure_is_known);
  void close_synced_pass();

  // Everybody's facts, in rank order, checked to belong together.
  std::vector<Facts> agree(Where::Kind kind, std::vector<bool> late);
  void check_in_step(const std::vector<Facts>& all) const;
  // Takes in parameters that began to require a gradient, on all ranks alike. Their buckets are added to `late`.
  void admit_newcomers(std::vector<Facts>& all, std::vector<bool>& late);
  void reduce_and_wait(const std::vector<bool>& which, const Where& where);
  void adopt(const std::vector<Facts>& all);
  void throw_if_failed_elsewhere(const std::vector<Facts>& all);
  std::vector<bool> changed_parameters() const;
  void check_changes(const std::vector<Facts>& all);
  void sample_pieces();
  double factor_of_pieces() const;
  void check_factors(const std::vector<Facts>& all);
  void check_alive() const;
  // Once for each device of the buckets that has streams.

  World world_;
  Options options_;
  const Strategy& row_;
  Mesh mesh_;
  Groups groups_;
  std::unique_ptr<Groups> gathers_;
  Group& data_;
  Group& control_;
  Ledger ledger_;
  const bool deterministic_;
  bool shards_gradient_ = false;
  NamedTensors candidates_;                               // everything that could be trained
  std::unordered_map<const void*, size_t> candidate_of_;  // by parameter
  std::vector<int> unit_of_;                              // by candidate
  std::vector<int> sink_of_;                              // by candidate; -1 while it has never required a gradient
  std::deque<Sink> sinks_;                                // stable addresses: hooks and buckets point here
  std::deque<Bucket> buckets_;

  LaneSet callers_;  // the lanes that backwards of this step were called from

  std::recursive_mutex mutex_;
  bool stopped_ = false;
  bool watches_parameters_;  // whether ranks could change them differently, and our optimizer alone should
  std::string broken_;       // why communication is over, if it is
  bool rebuilt_ = false;
  int no_sync_ = 0;
  int64_t steps_ = 0;
  int64_t passes_ = 0;  // begun since the last step
  int64_t rules_ = 0;   // digest of the rules that the buckets follow
  bool held_ = false;   // contributions of no_sync passes wait for a reduction

  // The open pass.
  bool open_ = false;
  bool synced_ = true;
  bool delivering_ = false;  // it was opened by deliver()
  int attached_ = 0;         // backwards, ours or the user's, that must end before it closes
  int last_task_ = -1;
  bool hold_launches_ = false;
  bool eaten_ = false;             // its gradients go to `incoming`
  size_t next_ = 0;                // the next bucket to reduce
  std::vector<Bucket*> outgoing_;  // wait for the rest of their convoy
  std::deque<Bucket*> in_flight_;
  std::vector<at::Tensor> spares_;  // memory of `incoming` buffers that ended, until the step ends
  std::exception_ptr failure_;
  std::vector<int> ready_order_;
};

}  // namespace plumb
