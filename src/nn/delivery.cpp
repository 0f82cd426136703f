#include "nn/delivery.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <mutex>
#include <unordered_map>

#include "lane/lane.h"
#include "plumb/error.h"

namespace plumb::nn {

namespace autograd = torch::autograd;

namespace {

// A hook of an accumulator, behind all hooks on the gradient: the leaf never accumulates a stand-in.
class StandIns final : public autograd::FunctionPreHook {
 public:
  // The one of this accumulator.
  static StandIns& of(autograd::Node& accumulator) {
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    for (const auto& hook : accumulator.pre_hooks()) {
      if (auto* const found = dynamic_cast<StandIns*>(hook.get())) return *found;
    }
    auto made = std::make_unique<StandIns>();
    StandIns& result = *made;
    accumulator.add_pre_hook(std::move(made));
    return result;
  }

  // False if the running backward has one already.
  bool give(const at::Tensor& stand_in) {
    const std::lock_guard lock(mutex_);
    return given_.emplace(autograd::get_current_graph_task_id(), stand_in).second;
  }

  autograd::variable_list operator()(const autograd::variable_list& gradients) override {
    const std::lock_guard lock(mutex_);
    const auto given = given_.extract(autograd::get_current_graph_task_id());
    const at::Tensor& gradient = gradients[0];
    const bool stand_in = given && gradient.defined() && gradient.has_storage() && gradient.is_alias_of(given.mapped());
    return stand_in ? autograd::variable_list{at::Tensor()} : gradients;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int, at::Tensor> given_;  // by graph task; one that failed leaves its scalar here
};

// Whether one shape becomes the other by joining neighbouring dimensions: then their elements lie in the same order.
bool joins(at::IntArrayRef fine, at::IntArrayRef coarse) {
  size_t next = 0;
  for (const int64_t size : coarse) {
    int64_t joined = 1;
    while (next < fine.size() && joined < size) joined *= fine[next++];
    if (joined != size) return false;
  }
  while (next < fine.size() && fine[next] == 1) ++next;
  return next == fine.size();
}

}  // namespace

Weight weight_of_running_node(size_t input) {
  Weight weight;
  const auto node = autograd::get_current_node();
  weight.wanted = node->task_should_compute_output(input);
  if (!weight.wanted) return weight;
  autograd::Node* const next = node->next_edge(input).function.get();
  if (auto* const accumulator = dynamic_cast<autograd::AccumulateGrad*>(next)) {
    weight.accumulator = accumulator;
    weight.leaf = accumulator->variable;
    weight.sink = sink_of(weight.leaf);
  }
  if (const auto* tasks = autograd::get_current_graph_task_exec_info()) {
    const auto found = tasks->find(next);
    weight.demanded = found != tasks->end() && found->second.captures_ != nullptr;
  }
  // Frozen since the forward: a leaf drops such a gradient.
  if (weight.leaf.defined() && !weight.leaf.requires_grad() && !weight.demanded) weight.wanted = false;
  return weight;
}

Delivery decide(const Weight& weight, When asked) {
  // autograd::grad leaves every buffer alone; so does a backward whose gradients are to be differentiated again.
  if (weight.demanded || at::GradMode::is_enabled()) return {false, When::now, Returned::gradient};
  if (!weight.sink) {
    return {false, asked, asked == When::delayed ? Returned::nothing : Returned::gradient};
  }
  return {true, asked, weight.sink->tell() == Tell::by_stand_in ? Returned::stand_in : Returned::nothing};
}

GradTarget open_checked(FusedSink& sink, const Like& weight) {
  GradTarget target = sink.open();
  const auto dtype = c10::typeMetaToScalarType(weight.options.dtype());
  const std::string name = sink.name();
  const std::string whose = name.empty() ? "the gradient buffer of a weight" : "the gradient buffer of '" + name + "'";
  at::Tensor& buffer = target.buffer;
  if (!buffer.defined()) {
    throw Error(whose + " is missing; give its sink a buffer, or take the sink away");
  }
  const at::IntArrayRef sizes(weight.sizes);
  if (!joins(sizes, buffer.sizes()) && !joins(buffer.sizes(), sizes)) {
    throw Error(c10::str(whose, " has shape ", buffer.sizes(), "; expected ", sizes,
                         ", the weight's, or neighbouring dimensions of it joined or split"));
  }
  if (buffer.device() != weight.options.device()) {
    throw Error(
        c10::str(whose, " is on ", buffer.device(), "; expected ", weight.options.device(), ", where the weight is"));
  }
  if (buffer.scalar_type() != dtype && buffer.scalar_type() != at::kFloat) {
    throw Error(
        c10::str(whose, " is ", buffer.scalar_type(), "; expected ", dtype, ", the weight's dtype, or ", at::kFloat));
  }
  if (buffer.scalar_type() == at::kFloat && dtype == at::kDouble) {
    throw Error(
        c10::str(whose, " is ", at::kFloat, " and would round; expected ", at::kDouble, ", the weight's dtype"));
  }
  if (buffer.layout() != at::kStrided || !buffer.is_contiguous()) {
    throw Error(c10::str(whose, " is not contiguous; expected one dense block in the weight's shape"));
  }
  if (buffer.sizes() != sizes) buffer = buffer.view(sizes);
  return target;
}

at::Tensor stand_in(const Weight& weight, const Like& like) {
  // In the dtype that autograd would cast it to, which would be a copy.
  const auto dtype = weight.leaf.grad_dtype().value_or(c10::typeMetaToScalarType(like.options.dtype()));
  const at::Tensor zeros = at::zeros({}, like.options.dtype(dtype)).expand(like.sizes);
  return StandIns::of(*weight.accumulator).give(zeros) ? zeros : at::Tensor();
}

void order_accumulator(const Weight& weight) {
  const auto stream = weight.accumulator != nullptr ? weight.accumulator->stream() : std::nullopt;
  if (!stream || *stream == current_stream(stream->device())) return;
  LaneSet writer;
  writer.add(stream->device());
  const c10::StreamGuard guard(*stream);
  writer.join(stream->device());
}

}  // namespace plumb::nn
