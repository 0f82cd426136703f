// The engine: carries every gradient of a model from the backward that made it to the optimizer that uses it.
//
//   plumb::World world = plumb::World::join();
//   plumb::Engine engine(world, *model, plumb::AdamW{.lr = 3e-4});
//   for (...) {
//     loss_of(model, batch).backward();   // any pattern of forwards and backwards
//     engine.step();
//     engine.zero_grad();
//   }
//
// After step(), the parameters are what one process would hold that had run every rank's forwards and backwards itself
// (each rank's loss weighted 1/N). Otherwise an Error, on every rank.
#pragma once

#include <plumb/error.h>
#include <plumb/optim.h>
#include <plumb/save.h>
#include <plumb/strategy.h>
#include <plumb/trace.h>
#include <plumb/world.h>

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace plumb {

struct LossScale {
  double initial = 65536.0;
  double growth = 2.0;   // after `interval` good steps in a row
  double backoff = 0.5;  // after a step that was skipped
  int64_t interval = 2000;
  double minimum = 0.0;    // the scale never falls below it
  int64_t hysteresis = 1;  // steps that are skipped until the scale falls; counted anew as `recovery` says
  enum class Recovery { when_it_grows, at_a_good_step } recovery = Recovery::when_it_grows;
  int64_t delay = 0;  // good steps that do not count towards `interval`, at the start and after a skipped one
};

// Where the ranks' parts of what is sharded may end. `at_parameters`: each parameter is one rank's, for optimizers that
// look at whole parameters; parts are then as even as the parameters' sizes allow, and padded to the largest. `at_rows`: each
// parameter of a unit lies in a bucket of its own, and a rank has the rows of it that torch.chunk would give it: DTensor's
// Shard(0), or of the dimension whose stride is longest, for a parameter that is not contiguous.
enum class Cut { anywhere, at_parameters, at_rows };

// What step() does when a gradient is not finite, once all ranks have told each other: an update as if nothing were wrong,
// no update at all, or an Error on every rank that names the parameters.
enum class NonFinite { proceed, skip, error };

struct Options {
  std::string strategy = "ddp";  // a row of the placement table
  Mesh mesh;                     // the axes that sharding and replication run over; by default the strategy's own
  Cut cut = Cut::anywhere;
  int64_t bucket_bytes = 4 << 20;        // cap of a bucket
  int64_t first_bucket_bytes = 1 << 20;  // cap of the first one, so that communication starts early
  // The dtype gradients are summed in, over micro-batches and over ranks. Unset: each parameter's own rule (its
  // `grad_dtype`, or its dtype). With bf16 parameters, f32 is the recipe.
  std::optional<at::ScalarType> accumulate_dtype;
  // f32 copies of bf16 and f16 parameters, which the optimizer updates and the parameters are rounded from.
  bool master_weights = true;
  // Gradients are scaled so that their global norm is at most this. Unset: no clipping, no norm.
  std::optional<double> clip_norm;
  // Dynamic loss scaling, for f16: engine.backward() and engine.scale() multiply the loss, step() divides the gradients,
  // once: those that are kept over a step are the true ones until the next backward, which adds to them as it should.
  // When a gradient of any rank is not finite, every rank skips the update and lowers the scale alike.
  std::optional<LossScale> loss_scale;
  NonFinite nonfinite = NonFinite::proceed;  // with loss_scale, which skips such steps: unless it is `error`
  Schedule schedule;
  std::vector<ParameterGroup> groups;
  // no_sync with sharded gradients. Off: each backward is reduced all the same, and no rank ever holds a whole
  // gradient. On: nothing travels, and .grad is this rank's whole, unsharded sum until it does.
  bool hold_unsharded = false;
  // Sharded parameters, where ranks cannot read each other's memory: units that are used next are gathered before their
  // use, and kept after it, as many bytes of whole parameters as this; one unit at least.
  int64_t gather_ahead_bytes = 16 << 20;
  // There, ranks may use different units: they ask each other before they gather, for as much as is gathered ahead, in
  // messages of log₂ N rounds, and gather whatever somebody needs. Off: they do not ask, and ranks that use different units end in an Error that names them. (On
  // GPUs, and over backends that were adopted, they ask anyway.) PLUMB_ASK_BEFORE_GATHERS=1 sets it for every engine of a
  // program, on every rank.
  bool ask_before_gathers = false;
  // Gradients are summed as one binary tree over `virtual_ranks` shares of the global batch, one backward each, so that
  // a run gives the same bits on every number of ranks and in every strategy. Each step takes virtual_ranks / ranks
  // backwards on every rank, of each share's mean loss times engine.share_weight().
  bool deterministic = false;
  int virtual_ranks = 8;
  // Accounts for every contribution; an Error names the one that was lost, doubled or taken early.
  bool ledger = true;
};

// What a step did.
struct StepInfo {
  int64_t step = 0;                 // number of this step, from 0
  double lr = 0.0;                  // of the parameters outside all groups
  std::vector<double> group_lrs{};  // of each of Options::groups
  bool skipped = false;             // a gradient was not finite: nothing was updated
  double loss_scale = 1.0;          // that the gradients of this step were made with
  at::Tensor grad_norm;             // before clipping; a scalar on the parameters' device. Undefined without clip_norm
};

// What an optimizer of the user's own updates of one parameter: see Engine::pieces().
struct Piece {
  at::Tensor parameter;
  int64_t begin = 0;    // of the weight among the parameter's elements, in the order of their memory
  at::Tensor weight;    // flat; of the parameter, or of its master
  at::Tensor gradient;  // flat, in the weight's dtype; undefined: this step leaves it alone
};

class Engine;

// While it lives, this engine's backwards keep their gradients on this rank; a later backward, or step(), reduces the
// sum. Only backwards count: where the forward ran does not matter.
class NoSync {
 public:
  explicit NoSync(Engine& engine);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  Engine& engine_;
};

// While it lives, all that reaches this engine is one pass: backwards, deliver(), and weight gradients that backward_dw()
// brings later. A bucket is reduced once, as soon as the last one that was put off has come, beside the computation of the
// others; at the scope's end .grad holds the mean, and what a backward would throw there is thrown. Every rank opens it
// for the same backwards.
class Pass {
 public:
  explicit Pass(Engine& engine);
  ~Pass() noexcept(false);
  Pass(const Pass&) = delete;
  Pass& operator=(const Pass&) = delete;

 private:
  Engine& engine_;
  int exceptions_;
};

enum class Access { read, write };

// Keeps parameters whole; see Engine::gathered. Throws at its end if a change would be lost: hold it as a local variable.
class Gathered {
 public:
  Gathered(Engine& engine, std::vector<at::Tensor> parameters, Access access);
  ~Gathered() noexcept(false);
  Gathered(const Gathered&) = delete;
  Gathered& operator=(const Gathered&) = delete;

 private:
  Engine& engine_;
  std::vector<at::Tensor> parameters_;
  Access access_;
  int exceptions_;
  std::vector<uint32_t> versions_;
};

class Engine {
 public:
  // Compares the model over the ranks (an Error on every rank names the first difference), takes rank 0's values for
  // parameters and buffers, and from then on sees every backward that reaches one of the parameters.
  Engine(World world, torch::nn::Module& module, Optimizer optimizer = NoOptimizer{}, Options options = {});
  Engine(World world, NamedTensors parameters, NamedTensors buffers, Optimizer optimizer = NoOptimizer{},
         Options options = {});
  struct Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Same as loss.backward(), and also counts as this rank's backward when `loss` reaches no parameter, needs no
  // gradient, or is undefined: for a rank with nothing to contribute. With a weight, `loss` is a sum over that many things
  // (tokens): step() then takes the mean over all of them, of all backwards and ranks, whatever each had. Until step(),
  // gradients are of the sums.
  void backward(const at::Tensor& loss, bool retain_graph = false, std::optional<double> weight = std::nullopt);

  // For a backward that is not autograd's: hands over a gradient in any dtype, in any order, several times per parameter
  // if need be; the parameter's dtype rule applies. Inside a backward of autograd's it belongs to that pass; otherwise
  // end_pass() says where the pass ends. As operators: plumb::deliver(parameter, gradient), plumb::end_pass(parameter).
  void deliver(const at::Tensor& parameter, const at::Tensor& raw_gradient);
  void end_pass();

  // The loss times the loss scale, to call backward() on; the loss itself without Options::loss_scale.
  at::Tensor scale(const at::Tensor& loss) const;
  double loss_scale() const;  // of the next loss; 1 without Options::loss_scale

  [[nodiscard]] NoSync no_sync() { return NoSync(*this); }
  [[nodiscard]] Pass pass() { return Pass(*this); }

  // Settles every gradient of this step over the ranks, clips, updates the parameters, and broadcasts rank 0's buffers.
  // Collective: every rank calls it after the same number of backwards. Gradients stay; zero_grad() clears them.
  StepInfo step();

  // step() with UserOptimizer, in three: in between, the user updates the weight of every piece that has a gradient, unless
  // the step is skipped. With sharded state a piece is what this rank owns of a parameter (it may be empty), otherwise all
  // of it. Collective. The pieces of a parameter stay the same tensors from step to step.
  StepInfo begin_step();
  std::vector<Piece> pieces();
  void end_step();

  // What this rank holds of each parameter that a unit gathers: flat, in the parameter's dtype, the same memory as long as
  // the engine lives. Whoever writes there, outside of a step, does so on every rank while none gathers, and says it.
  NamedTensors shards() const;
  void shards_written();

  // While the scope lives, these parameters are whole, whatever the strategy: to look at them, to export them. With
  // Access::write, what rank 0 wrote into them is everybody's when the scope ends; collective, then.
  [[nodiscard]] Gathered gathered(std::vector<at::Tensor> parameters, Access access = Access::read);

  // A whole copy of a parameter.
  at::Tensor full_parameter(const at::Tensor& parameter);

  // The whole reduced gradient of a parameter, a copy; undefined where it has none. Collective where gradients are
  // sharded: p.grad() is this rank's piece of it then.
  at::Tensor full_gradient(const at::Tensor& parameter);

  // The 2-norm over all reduced gradients, as step() would find it before clipping: a scalar on the parameters' device,
  // without the loss scale. Collective where gradients are sharded.
  at::Tensor grad_norm();

  // Forgets all gradients of this engine's parameters, as module.zero_grad() does.
  void zero_grad();

  // The learning rate of the parameters outside all groups, and of groups without their own; before the schedule's
  // factor. To be set alike on every rank: step() compares.
  double lr() const;
  void set_lr(double lr);
  // The same of Options::groups[group], which has a rate of its own once it was set.
  double lr(int group) const;
  void set_lr(int group, double lr);

  // Saves all that a run needs to go on bit for bit, as one new checkpoint in `folder`, which all ranks share; its path.
  // Complete or absent, whatever happens: an Error, on every rank, leaves the engine and earlier checkpoints as they were,
  // and training may go on. Collective; between steps.
  std::string save(const std::string& folder, const SaveOptions& options = {});
  // The same of the state right now, written while training goes on. One at a time: the next one ends this first. What
  // fails is thrown by the next step() or finish_save().
  void save_in_background(const std::string& folder, const SaveOptions& options = {});
  // Waits for it; its path, empty where nothing was saved. Collective.
  std::string finish_save();

  // Goes on from a checkpoint, or from the newest complete one in a folder of them, whatever world and strategy wrote it.
  // Unless every saved byte is read and every place is filled, an Error on every rank, before anything is changed.
  // Gradients are forgotten. Collective; between steps.
  LoadInfo load(const std::string& path, const LoadOptions& options = {});
  // Only the weights and buffers, of a checkpoint or a safetensors file (or a folder of them); other dtypes are converted.
  // The optimizer and the step stay as they are. Collective.
  LoadInfo load_weights(const std::string& path, const LoadOptions& options = {});

  int64_t steps() const;  // taken so far, by the runs before this one too

  // Writes to `path`, on rank 0, what every rank of this engine's world does until the trace is stopped. Collective.
  [[nodiscard]] Trace trace(const std::string& path);

  // In deterministic mode, what a share's mean loss counts: ranks / virtual_ranks. A rank's backwards of one step add up,
  // and only with this weight is the sum over all shares their mean, the same on every number of ranks. Otherwise 1.
  double share_weight() const;

  const World& world() const;
  const Options& options() const;

  Impl& impl() const { return *impl_; }

 private:
  friend class NoSync;
  friend class Pass;
  std::unique_ptr<Impl> impl_;
};

}  // namespace plumb
