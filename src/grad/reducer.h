// Reducer: carries the gradients of one engine from the entrances to the mean over the ranks. It conducts; its parts own
// their state and do the work:
//
//   Members   who takes part         Traffic   what travels when
//   Buckets   where gradients lie    Facts     what ranks agree on
//   Summing   how they are summed    Changes   what users changed
//   Absence   who ran out of inputs  Weights   what a step's sums are divided by
//   OpenPass  the open pass, while there is one
//
// A pass opens with the first gradient of an outermost backward. A bucket is reduced when its last expected gradient has
// come and all buckets before it have begun; the last bucket, and whatever is not complete, when the backward has ended.
// Then the ranks exchange one small message of facts, so that parameters unused on some ranks, modules run again inside
// checkpoints, and ranks out of step are seen by everybody.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "grad/absence.h"
#include "grad/backward.h"
#include "grad/buckets.h"
#include "grad/changes.h"
#include "grad/facts.h"
#include "grad/faults.h"
#include "grad/gathering.h"
#include "grad/ledger.h"
#include "grad/members.h"
#include "grad/pass.h"
#include "grad/summing.h"
#include "grad/team.h"
#include "grad/traffic.h"
#include "grad/weights.h"
#include "plumb/engine.h"

namespace plumb {

inline constexpr const char* kOthersGather = "what other ranks gather";

class Reducer final : public backward::Listener, public Entrances, public std::enable_shared_from_this<Reducer> {
 public:
  // `unit_of`: by parameter, the unit that gathers it; -1 for one that is always whole.
  Reducer(World world, const NamedTensors& parameters, std::vector<int> unit_of, const Options& options);

  // Arms the hooks; separate from construction because they refer back to this object.
  void start();
  // Disarms them for good: gradients of later backwards are nobody's business here.
  void stop();

  void hold_sync(int change);  // +1 and -1 around a no_sync scope
  bool holds() const;          // gradients on this rank wait for a reduction
  bool rebuilt() const;        // the buckets lie in the order of the first pass

  // See Summing; for the passes that begin from now on.
  void use_hook(std::unique_ptr<c10d::CommHookInterface> hook);
  void divide_by(int ranks);
  // The backward of a rank that ran out of inputs, for the others'; its own gradients are none of theirs.
  void sit_out();

  // Around a backward that counts whether or not it reaches a parameter.
  void begin_backward();
  void end_backward(std::exception_ptr failure);

  // Inside of such a backward, before its gradients come: it is of a sum over `weight` things. Those of one step all are,
  // or none is; several of one pass add up.
  void weigh(double weight);
  // After settle_step(): what makes the mean over the ranks the mean over everybody's weights. Once; 1 from then on.
  double take_weight_factor();

  // A gradient that comes without autograd: from a compiled or hand-written backward, in any dtype and order. Inside a
  // backward it belongs to that pass; otherwise to one that end_pass() closes.
  void deliver(const at::Tensor& parameter, const at::Tensor& raw);
  void end_pass();
  // The same from inside the backward of a node whose output would go to `accumulator`. False: it must go there, since
  // others than us listen to that leaf, or nobody does.
  bool hand_over(const at::Tensor& parameter, const torch::autograd::Node& accumulator, const at::Tensor& raw);

  // Settles everything that is not reduced yet, after all ranks agreed that they are at the same point. Afterwards every
  // rank holds the same gradients. Throws on every rank otherwise.
  void settle_step();
  // The optimizer lays its state out by where gradients lie now, though the step may be refused yet.
  void begin_layout();
  // Its gradients are in use from now on: a backward that would leave some for a later reduction is an Error.
  void begin_update();
  // A step that was settled is refused before anything was updated, and may be taken again: also, in deterministic mode, with
  // other shares.
  void refuse_step();
  // The step is over: the next backward is the first of the next step.
  void finish_step();

  // What the user may set between steps, by name: must be the same on every rank at a step.
  Settings settings;
  // Likewise, in every backward that is reduced.
  Settings settings_of_backwards;

  // The run goes on after `steps` steps. All gradients are cleared, and with them what is kept of their passes.
  void resume(int64_t steps);
  // Where gradients may still move, they lie in this order from now on, if it names every parameter. Collective; between
  // steps.
  void arrange(const std::vector<std::string>& order);
  std::vector<std::string> order() const;  // of the parameters in the buckets
  // An Error if a backward has begun whose step has not ended. Where gradients were cleared nothing is left of it: enough
  // where the ranks tell each other of the error, since one of them alone may have cleared its own.
  enum class Cleared { is_enough, is_not_enough };
  void check_between_steps(const std::string& what, Cleared cleared = Cleared::is_not_enough) const;

  // Every rank is in the same call that writes these parameters; an Error on every rank otherwise. Its description.
  Where agree_to_write(const std::vector<at::Tensor>& parameters);
  // An Error if gradients (of one bucket) have not been reduced yet, which `what` would need: a call of every rank's.
  void check_reduced(const std::string& what, const Bucket* bucket = nullptr);

  // The whole reduced gradient of a parameter, a copy; undefined where it has none. Collective where gradients are sharded.
  at::Tensor full_gradient(const at::Tensor& parameter);
  // After gradients were cleared: their memory may go, until the next one comes.
  void gradients_cleared();
  // The parameters are as they should be now.
  void remember_parameters();
  void leave_parameters_to_user() { changes_.leave_parameters_to_user(); }
  void take_parameters_back() { changes_.take_parameters_back(sinks()); }

  Team& team() { return team_; }
  const Options& options() const { return options_; }
  const World& world() const { return team_.world(); }
  Group& data() { return team_.data(); }
  Group& control() { return team_.control(); }
  Group& shard() { return team_.shard(); }
  Group& replicate() { return team_.replicate(); }
  Groups& gathers() { return team_.gathers(); }
  bool shards(Placement placement) const { return team_.shards(placement); }
  Summing& summing() { return *summing_; }
  const Strategy& row() const { return team_.row(); }
  void for_devices(const std::function<void(c10::Device)>& call) const { buckets_.for_devices(call); }
  Buckets& layout() { return buckets_; }
  std::deque<Bucket>& buckets() { return buckets_.all(); }
  const std::deque<Sink>& sinks() const { return members_.sinks(); }
  Ledger& ledger() { return ledger_; }
  Where here(Where::Kind kind, std::string detail = {}) const { return {kind, steps_, passes_, std::move(detail)}; }
  int64_t steps() const { return steps_; }

  // A backward is under way, or a scope of several, or gradients were delivered that end_pass() has not closed yet.
  bool pass_open() const;
  bool has_taken_in() const;  // of the open pass's gradients: they are in a sum, and .grad has none of them
  // How far this rank is: which pass, and how many of its buckets are being reduced.
  struct Progress {
    int64_t pass = 0;  // a number that grows when one opens, and when it closes
    int64_t launched = 0;
  };
  Progress progress() const;
  // Ranks gather different units: none of them waits for another's gradients any more before this backward ends, or the next
  // where none has begun. The first `launched` buckets are being reduced by somebody, and so by everybody.
  void part_ways(int64_t launched);
  // Every rank comes here, and needs nothing more for what came before: takes part in what others still gather for that.
  void serve_gathers(const Where& where);
  std::recursive_mutex& mutex() const { return mutex_; }  // taken before the units' by whoever asks others

  // Called with a bucket of a unit when its last expected gradient has come.
  std::function<void(Bucket&)> on_complete;
  std::weak_ptr<Gathering> gathering;  // the units', where there are any
  // Called when a pass opens, before anything is added to a gradient.
  std::function<void()> on_open;
  Fault fault = Fault::none;  // for tests
  // A gradient as autograd hands it over, before anything is done to it.
  std::function<void(const Sink&, const at::Tensor&)> on_gradient;

 private:
  // Entrances.
  at::Tensor before_accumulation(Sink& sink, const at::Tensor& gradient) override;
  void after_accumulation(Sink& sink, const at::Tensor& gradient) override;
  void accumulator_changed(Sink& sink) override;
  GradTarget open_fused(Sink& sink) override;
  void wrote_fused(Sink& sink) override;
  void made_up_fused(Sink& sink) override;
  bool inside_pass() const;  // whether a contribution that comes now belongs to a pass, or comes between two
  void check_nothing_put_off(const std::string& what) const;

  // A pass.
  OpenPass& open_pass();
  OpenPass::Sync sync_of_next() const;
  void check_weighed_alike(const OpenPass& pass) const;
  void join_pass(Sink& sink, bool contributes);
  void accumulated(Sink& sink, const at::Tensor& gradient);
  void count_arrival(Sink& sink);
  void count_down(Sink& sink);
  void launch_ready();
  void backward_ended(std::exception_ptr failure) override;
  void follow_caller(c10::Device device);
  void close_synced_pass(OpenPass& pass);
  void close_held_pass(OpenPass& pass);
  bool waits_for_step(const Bucket& bucket) const;

  // Passes that are captured into a graph.
  void prepare_capture();
  void note_capture();
  void check_captured() const;

  // Agreement.
  bool may_be_asked_while_it_waits();
  Agreement exchange_facts(Where::Kind kind, std::vector<bool> late, bool failed);
  void admit(const std::vector<int>& candidates);
  void agree_on_newcomers(const Facts& mine);
  void laid_out();
  void admit_newcomers(Agreement& all, std::vector<bool>& late, bool failed);
  void adopt(const Agreement& all);
  void check_used_alike(const Sink& sink, const Agreement& all) const;
  void gradients_agreed();
  void rebuild(const OpenPass& pass);
  std::vector<int> ready_order(const OpenPass& pass) const;
  Where ask_about_pieces(const std::string& what);
  void check_alive() const;
  // What `collective` throws ends communication for good.
  void or_break(const std::function<void()>& collective);

  const Options options_;
  Team team_;
  Ledger ledger_;
  Members members_;
  Buckets buckets_;
  std::unique_ptr<Summing> summing_;
  Road& road_;
  Traffic traffic_;
  Changes changes_;
  Weights weights_;
  Absence absence_;
  std::optional<OpenPass> pass_;

  mutable std::recursive_mutex mutex_;
  bool stopped_ = false;
  std::string broken_;  // why communication is over, if it is
  int no_sync_ = 0;
  bool divides_by_all_ = true;
  int64_t steps_ = 0;
  int64_t passes_ = 0;     // begun since the last step
  bool updating_ = false;  // from begin_update() to finish_step()
  bool held_ = false;      // contributions wait for a reduction
  bool rebuilt_ = false;   // the buckets lie in ready order
  LaneSet callers_;        // the lanes that backwards of this step were called from
  // How many of its sinks and buckets the ranks have agreed on: all of them, but in the midst of a deterministic step.
  struct Known {
    size_t sinks = 0, buckets = 0;
  } known_;
  bool follows_layout_ = false;  // the optimizer's state does, from the first step on that began to use it
};

}  // namespace plumb
