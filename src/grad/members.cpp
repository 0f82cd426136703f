#include "grad/members.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <memory>
#include <typeinfo>
#include <utility>

#include "layout/digest.h"

namespace plumb {
namespace {

// A hook of the parameter itself: it stays when the accumulator is replaced, and runs first. It lies beside the user's;
// registering it through the tensor would take those away that Python registered.
struct LeafHook final : torch::autograd::FunctionPreHook {
  LeafHook(std::weak_ptr<Entrances> entrances, Sink* target) : entrances(std::move(entrances)), target(target) {}
  variable_list operator()(const variable_list& gradients) override {
    if (const auto alive = entrances.lock()) alive->accumulator_changed(*target);
    return gradients;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { refuse_compiled_autograd(); }
  static bool is_of(const torch::autograd::FunctionPreHook& hook, const Sink& sink) {
    return typeid(hook) == typeid(LeafHook) &&
           static_cast<const LeafHook&>(hook).target == &sink;  // asked for every gradient
  }
  std::weak_ptr<Entrances> entrances;
  Sink* target;
};

}  // namespace

Members::Members(int rank, NamedTensors candidates, std::vector<int> unit_of, std::optional<at::ScalarType> accumulate)
    : rank_(rank), accumulate_(accumulate), candidates_(std::move(candidates)), unit_of_(std::move(unit_of)),
      sink_of_(candidates_.size(), -1) {
  for (size_t i = 0; i < candidates_.size(); ++i) candidate_of_[candidates_[i].second.unsafeGetTensorImpl()] = i;
}

std::vector<int> Members::newcomers() const {
  std::vector<int> result;
  for (size_t i = 0; i < candidates_.size(); ++i) {
    const at::Tensor& parameter = candidates_[i].second;
    const bool wanted = parameter.requires_grad() || parameter.grad().defined() || unit_of_[i] >= 0;
    if (sink_of_[i] < 0 && wanted) result.push_back(static_cast<int>(i));
  }
  return result;
}

int64_t Members::newcomers_digest() const {
  const std::vector<int> candidates = newcomers();
  if (candidates.empty()) return 0;
  Digest digest;
  for (int candidate : candidates) digest.add(static_cast<uint64_t>(candidate));
  return digest.value();
}

std::vector<int> Members::admit(const std::vector<int>& candidates) {
  std::vector<int> indices;
  for (int candidate : candidates) {
    const auto& [name, parameter] = candidates_[candidate];
    Sink& sink = sinks_.emplace_back();
    sink.index = static_cast<int>(sinks_.size()) - 1;
    sink.name = name;
    names_.push_back(name);
    sink.parameter = parameter;
    sink.order = order_of(parameter);
    sink.unit = unit_of_[candidate];
    sink.rule = grad_rule(parameter, accumulate_);
    sink_of_[candidate] = sink.index;
    indices.push_back(sink.index);
    hook(sink);
  }
  return indices;
}

// A frozen parameter has an accumulator only while it can be asked for one.
void Members::hook(Sink& sink) {
  if (sink.accumulator || !torch::autograd::isDifferentiableType(sink.parameter.scalar_type())) return;
  const bool frozen = !sink.parameter.requires_grad();
  if (frozen) sink.parameter.set_requires_grad(true);
  listen_to(sink, torch::autograd::impl::grad_accumulator(sink.parameter));
  watch(sink);
  if (frozen) sink.parameter.set_requires_grad(false);
  offer_fused(sink);
}

Members::~Members() {
  for (const Sink& sink : sinks_) {
    if (!sink.accumulator) continue;
    std::erase_if(torch::autograd::impl::hooks(sink.parameter),
                  [&](const auto& hook) { return LeafHook::is_of(*hook, sink); });
  }
}

bool Members::alone(const Sink& sink, const torch::autograd::Node& accumulator) const {
  if (&accumulator != sink.accumulator.get() || accumulator.pre_hooks().size() != 1 ||
      accumulator.post_hooks().size() != 1 || torch::autograd::impl::post_acc_grad_hooks(sink.parameter)) {
    return false;
  }
  const auto& hooks = torch::autograd::impl::hooks(sink.parameter);
  return hooks.size() == 1 && LeafHook::is_of(*hooks[0], sink);
}

void Members::watch(Sink& sink) {
  auto& hooks = torch::autograd::impl::hooks(sink.parameter);
  if (std::ranges::any_of(hooks, [&](const auto& hook) { return LeafHook::is_of(*hook, sink); })) return;
  hooks.push_back(std::make_unique<LeafHook>(entrances_, &sink));
}

void Members::follow_accumulator(Sink& sink) {
  const NodePtr now = torch::autograd::impl::try_get_grad_accumulator(sink.parameter);
  if (now && now != sink.accumulator) listen_to(sink, now);
}

// Hooks cannot be taken off again, and may outlive this object in a graph the user keeps.
void Members::listen_to(Sink& sink, const NodePtr& accumulator) {
  sink.accumulator = accumulator;
  sink.accumulator->add_pre_hook(
      std::make_unique<PreHook>([weak = entrances_, target = &sink](const at::Tensor& gradient) {
        auto alive = weak.lock();
        return alive ? alive->before_accumulation(*target, gradient) : gradient;
      }));
  sink.accumulator->add_post_hook(
      std::make_unique<PostHook>([weak = entrances_, target = &sink](const at::Tensor& gradient) {
        if (auto alive = weak.lock()) alive->after_accumulation(*target, gradient);
      }));
}

size_t Members::candidate(const at::Tensor& parameter) const {
  const auto it = candidate_of_.find(parameter.unsafeGetTensorImpl());
  if (it == candidate_of_.end()) throw Error(rank_, "a tensor that is no parameter of this engine");
  return it->second;
}

const std::string& Members::name_of(const at::Tensor& parameter) const {
  return candidates_[candidate(parameter)].first;
}

Sink* Members::find(const at::Tensor& parameter) {
  const int sink = sink_of_[candidate(parameter)];
  return sink < 0 ? nullptr : &sinks_[sink];
}

// ---- entrance 2: operations that write a weight gradient themselves

namespace {

class BucketSink final : public FusedSink {
 public:
  BucketSink(std::weak_ptr<Entrances> entrances, Sink& sink)
      : entrances_(std::move(entrances)), sink_(sink), name_(sink.name) {}

  std::string name() const override { return name_; }
  GradTarget open() override;
  void wrote() override;
  void put_off() override {
    if (const auto alive = entrances_.lock()) ++sink_.put_off;
  }
  void made_up() override {
    if (const auto alive = entrances_.lock()) alive->made_up_fused(sink_);
  }

 private:
  std::shared_ptr<Entrances> alive() const {
    auto entrances = entrances_.lock();
    if (!entrances) throw Error("the gradient of parameter '" + name_ + "' comes after its engine has ended");
    return entrances;
  }

  std::weak_ptr<Entrances> entrances_;  // whose owner owns this, and the sink
  Sink& sink_;
  std::string name_;
  GradTarget place_;    // in the bucket
  at::Tensor scratch_;  // what the operation writes instead, where the rule asks for another dtype
};

// Contract 3: a contribution obeys the leaf's rule before it is summed, from this entrance as from the others. So the
// operation writes the bucket itself only where that is of the rule's dtype, and of one that operations write.
GradTarget BucketSink::open() {
  const auto entrances = alive();
  place_ = entrances->open_fused(sink_);
  scratch_.reset();
  const at::ScalarType own = sink_.parameter.scalar_type(), sums = place_.buffer.scalar_type();
  const auto written = [&](at::ScalarType dtype) {
    return dtype == own || (dtype == at::kFloat && own != at::kDouble);
  };
  const std::optional<at::ScalarType> cast = grad_rule(sink_.parameter, std::nullopt).cast;
  if (cast.value_or(sums) == sums && written(sums)) return place_;
  const at::ScalarType dtype = cast && written(*cast) ? *cast : own;
  scratch_ = at::empty(sink_.parameter.sizes(), sink_.parameter.options().dtype(dtype).requires_grad(false));
  return {scratch_, false};
}

void BucketSink::wrote() {
  const auto entrances = alive();
  if (scratch_.defined()) {
    at::NoGradGuard no_grad;
    const auto cast = grad_rule(sink_.parameter, std::nullopt).cast;
    const at::Tensor ruled = cast ? scratch_.to(*cast) : scratch_;
    place_.accumulate ? place_.buffer.add_(ruled) : place_.buffer.copy_(ruled);
    scratch_.reset();
  }
  place_ = {};
  entrances->wrote_fused(sink_);
}

}  // namespace

void Members::offer_fused(Sink& sink) {
  if (!sink.parameter.is_contiguous()) return;  // kernels write rows; such a gradient goes through autograd
  sink.entrance = std::make_shared<BucketSink>(entrances_, sink);
  attach(sink.parameter, sink.entrance);
}

}  // namespace plumb
