// Frames: what one checkpointed call saved, as numbers of tensors that running it again gives in the same order.
#include "plumb/checkpoint.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <array>
#include <exception>
#include <map>
#include <mutex>

#include "grad/backward.h"
#include "plumb/error.h"
#include "unit/saved.h"
#include "unit/units.h"

namespace plumb::recompute {
namespace {

// The default generators that a function over these inputs may draw from, and their states.
class Generators {
 public:
  explicit Generators(const std::vector<at::Tensor>& inputs) : all_{at::detail::getDefaultCPUGenerator()} {
    for (const at::Tensor& input : inputs) {
      if (!input.defined() || !input.is_cuda()) continue;
      const at::Generator one = at::globalContext().defaultGenerator(input.device());
      if (std::find(all_.begin(), all_.end(), one) == all_.end()) all_.push_back(one);
    }
  }
  std::vector<at::Tensor> get() const {
    std::vector<at::Tensor> states;
    for (at::Generator one : all_) {
      const std::lock_guard lock(one.mutex());
      states.push_back(one.get_state());
    }
    return states;
  }
  void set(const std::vector<at::Tensor>& states) const {
    for (size_t i = 0; i < states.size(); ++i) {
      at::Generator one = all_[i];
      const std::lock_guard lock(one.mutex());
      one.set_state(states[i]);
    }
  }

 private:
  std::vector<at::Generator> all_;
};

bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) { return x.equal(y); });
}

struct Autocast {
  static constexpr std::array kinds{at::kCPU, at::kCUDA, at::kPrivateUse1};
  std::array<bool, kinds.size()> enabled{};
  std::array<at::ScalarType, kinds.size()> dtypes{};
  bool cached = false;

  static Autocast now() {
    Autocast state;
    for (size_t i = 0; i < kinds.size(); ++i) {
      state.enabled[i] = at::autocast::is_autocast_enabled(kinds[i]);
      state.dtypes[i] = at::autocast::get_autocast_dtype(kinds[i]);
    }
    state.cached = at::autocast::is_autocast_cache_enabled();
    return state;
  }
  void set() const {
    for (size_t i = 0; i < kinds.size(); ++i) {
      at::autocast::set_autocast_enabled(kinds[i], enabled[i]);
      at::autocast::set_autocast_dtype(kinds[i], dtypes[i]);
    }
    at::autocast::set_autocast_cache_enabled(cached);
  }
};

// From here to the end of the scope everything is as it was in the first run.
class AsBefore {
 public:
  AsBefore(const Generators& generators, const std::vector<at::Tensor>& states, const Autocast& autocast)
      : generators_(generators), states_(generators.get()), autocast_(Autocast::now()) {
    generators.set(states);
    at::autocast::increment_nesting();
    autocast.set();
  }
  ~AsBefore() {
    // Casts of weights that were made in here are of this run alone.
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    autocast_.set();
    generators_.set(states_);
  }
  AsBefore(const AsBefore&) = delete;
  AsBefore& operator=(const AsBefore&) = delete;

 private:
  const Generators& generators_;
  const std::vector<at::Tensor> states_;
  const Autocast autocast_;
  at::AutoGradMode grad_{true};
};

// Enters the scopes that were around the first run.
class Around {
 public:
  explicit Around(const std::vector<saved::Scope>& scopes) {
    try {
      for (const saved::Scope& scope : scopes) {
        auto units = scope.units.lock();
        if (!units) continue;
        if (scope.unit >= 0) {
          units->enter(scope.unit);
        } else {
          units->hold(scope.parameters);
        }
        entered_.emplace_back(std::move(units), &scope);
      }
    } catch (...) {
      leave();
      throw;
    }
  }
  ~Around() { leave(); }
  Around(const Around&) = delete;
  Around& operator=(const Around&) = delete;

 private:
  void leave() {
    for (; !entered_.empty(); entered_.pop_back()) {
      const auto& [units, scope] = entered_.back();
      if (scope->unit >= 0) {
        units->leave(scope->unit);
      } else {
        units->let_go(scope->parameters);
      }
    }
  }
  std::vector<std::pair<std::shared_ptr<Units>, const saved::Scope*>> entered_;
};

struct Stop {  // thrown through the function when it has given all that is wanted
  const Frame* frame;
};

struct Shape {
  at::ScalarType dtype;
  c10::Device device;
  std::vector<int64_t> sizes;
  bool operator==(const Shape&) const = default;
};

Shape shape_of(const at::Tensor& tensor) { return {tensor.scalar_type(), tensor.device(), tensor.sizes().vec()}; }

std::string describe(const Shape& shape) {
  return c10::str(shape.dtype, " ", at::IntArrayRef(shape.sizes), " on ", shape.device);
}

}  // namespace

class Frame final : public saved::Saver, public std::enable_shared_from_this<Frame> {
 public:
  Frame(const std::vector<at::Tensor>& inputs, Body again)
      : again_(std::move(again)), generators_(inputs), before_(generators_.get()), autocast_(Autocast::now()),
        scopes_(saved::scopes()) {
    for (const at::Tensor& input : inputs) {
      requires_grad_.push_back(input.defined() && input.requires_grad());
      inputs_.emplace_back(input, /*is_output=*/false);  // saved as everything around this call is
    }
  }

  // The first run has ended.
  void close() {
    auto after = generators_.get();
    if (!same(after, before_)) after_ = std::move(after);
  }

  saved::Hooks make() override;
  at::Tensor take(size_t number);
  void forget() {
    const std::lock_guard lock(mutex_);
    made_.clear();
  }

 private:
  struct Number;
  struct Kept;
  struct Again;
  struct Sweep;
  using Made = std::vector<saved::Hooks>;  // by number; null: taken

  Made run(int task);

  const Body again_;
  std::vector<torch::autograd::SavedVariable> inputs_;
  std::vector<bool> requires_grad_;
  const Generators generators_;
  const std::vector<at::Tensor> before_;
  std::vector<at::Tensor> after_;  // where the first run drew random numbers
  const Autocast autocast_;
  const std::vector<saved::Scope> scopes_;
  std::vector<Shape> saved_;  // by the first run
  std::recursive_mutex mutex_;
  std::map<int, Made> made_;  // by graph task
};

// In the place of a tensor.
struct Frame::Number final : torch::autograd::SavedVariableHooks {
  explicit Number(std::shared_ptr<Frame> frame) : frame(std::move(frame)) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    number = frame->saved_.size();
    frame->saved_.push_back(shape_of(tensor));
  }
  at::Tensor call_unpack_hook() override { return frame->take(number); }
  const std::shared_ptr<Frame> frame;
  size_t number = 0;
};

// Saves in the second run: for the first one's nodes, and for a backward inside the function.
struct Frame::Again final : saved::Saver {
  Again(const Frame& frame, bool to_the_end) : frame(frame), wanted(frame.saved_.size()), to_the_end(to_the_end) {}
  saved::Hooks make() override;
  const Frame& frame;
  const size_t wanted;
  const bool to_the_end;
  Made made;
};

struct Frame::Kept final : torch::autograd::SavedVariableHooks {
  explicit Kept(Again& again) : again(again) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    own = saved::make_plainly();
    own->call_pack_hook(tensor);
    if (again.made.size() == again.wanted) return;
    const Shape now = shape_of(tensor);
    const Shape& first = again.frame.saved_[again.made.size()];
    if (now != first) {
      throw Error("plumb::checkpoint: tensor " + std::to_string(again.made.size()) +
                  " that the function saved for its backward is " + describe(now) + " when it runs again, and was " +
                  describe(first) + " the first time; it must do the same both times");
    }
    // Without its graph, which is nobody's.
    auto kept = saved::make_plainly();
    kept->call_pack_hook(tensor.detach());
    again.made.push_back(std::move(kept));
    // No std::exception, which the function may catch. NOLINTNEXTLINE(bugprone-std-exception-baseclass)
    if (again.made.size() == again.wanted && !again.to_the_end) throw Stop{&again.frame};
  }
  at::Tensor call_unpack_hook() override { return own->call_unpack_hook(); }
  Again& again;
  saved::Hooks own;
};

saved::Hooks Frame::make() { return std::make_unique<Number>(shared_from_this()); }
saved::Hooks Frame::Again::make() { return std::make_unique<Kept>(*this); }

// What no node asked for goes when the backward has ended.
struct Frame::Sweep final : backward::Listener {
  explicit Sweep(std::weak_ptr<Frame> frame) : frame(std::move(frame)) {}
  void backward_ended(std::exception_ptr) override {
    if (const auto alive = frame.lock()) alive->forget();
  }
  std::weak_ptr<Frame> frame;
};

// Each tensor once per graph task: its memory is the node's then. Whoever asks again has it made again.
at::Tensor Frame::take(size_t number) {
  saved::Hooks taken;
  {
    const std::lock_guard lock(mutex_);
    const int task = torch::autograd::get_current_graph_task_id();
    auto found = task < 0 ? made_.end() : made_.find(task);
    if (found == made_.end() || found->second.size() <= number || !found->second[number]) {
      Made fresh = run(task);
      if (task < 0) return fresh[number]->call_unpack_hook();  // somebody looks at a graph
      found = made_.insert_or_assign(task, std::move(fresh)).first;
    }
    taken = std::move(found->second[number]);
    if (std::none_of(found->second.begin(), found->second.end(), [](const auto& one) { return one != nullptr; })) {
      made_.erase(found);
    }
  }
  return taken->call_unpack_hook();
}

Frame::Made Frame::run(int task) {
  std::vector<at::Tensor> inputs;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    at::Tensor input = inputs_[i].unpack();
    if (input.defined()) input = input.detach().set_requires_grad(requires_grad_[i]);
    inputs.push_back(std::move(input));
  }
  if (task >= 0 && !made_.contains(task)) {
    backward::listen(std::make_shared<Sweep>(weak_from_this()));
  }
  const saved::Fresh fresh;
  // Where numbers were drawn, all of it runs: at its end the generators must stand where they stood.
  Again again(*this, /*to_the_end=*/!after_.empty());
  const AsBefore as_before(generators_, before_, autocast_);
  const Around around(scopes_);
  saved::push(again);
  struct Pop {
    ~Pop() { saved::pop(); }
  } const pop;
  try {
    again_(inputs);
  } catch (const Stop& stop) {
    if (stop.frame != this) throw;
    return std::move(again.made);
  }
  if (again.made.size() < again.wanted) {
    throw Error("plumb::checkpoint: the function saved " + std::to_string(again.wanted) +
                " tensors for its backward the first time and " + std::to_string(again.made.size()) +
                " when it ran again; it must do the same both times");
  }
  const auto now = generators_.get();
  if (!after_.empty() && !same(now, after_) && !same(now, before_)) {
    throw Error(
        "plumb::checkpoint: the function drew other random numbers when it ran again: another thread drew from the "
        "default generators meanwhile, or it does not do the same both times; give it a generator of its own");
  }
  return std::move(again.made);
}

Region::Region(const std::vector<at::Tensor>& inputs, Body again) : exceptions_(std::uncaught_exceptions()) {
  saved::install();
  frame_ = std::make_shared<Frame>(inputs, std::move(again));
  saved::push(*frame_);
}

Region::~Region() {
  saved::pop();
  if (std::uncaught_exceptions() == exceptions_) frame_->close();
}

}  // namespace plumb::recompute
