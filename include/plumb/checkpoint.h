// Activation checkpointing: what a part of the forward would save for its backward is computed again there instead.
//
//   x = plumb::checkpoint([block](const at::Tensor& h) mutable { return block(h); }, x);   // block: a holder, or a Unit
//
// Saves memory for the time of one more forward. The result is the function's own, and so is the graph: every pattern of
// backwards that is legal without it (retained graphs, several losses, gradients of gradients, named inputs, nested and
// inside or around units) gives the same bits with it. The function runs again when a backward first needs something it
// saved, once per backward, as far as needed: on the same inputs, with the default generators and autocast as they were.
//
// The function must do the same both times, and must live on its own: capture holders by value, and nothing that changes
// until the backward. Tensors that are inputs (also in a vector or an optional) are kept by this; those it captures, by
// it. What else it does happens twice: counters, statistics of a batch norm. A function that saved other tensors the
// second time, or that drew random numbers while another thread drew, too, is an Error in the backward.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

namespace plumb {
namespace recompute {

class Frame;
using Body = std::function<void(std::span<const at::Tensor>)>;

// While it lives, what is saved for a backward on this thread is `again`'s to make.
class Region {
 public:
  Region(const std::vector<at::Tensor>& inputs, Body again);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

 private:
  std::shared_ptr<Frame> frame_;
  int exceptions_;
};

// The tensors of an argument, in order; `visit` may replace them.
template <class Argument, class Visit>
void for_tensors(Argument& argument, const Visit& visit) {
  using Plain = std::remove_cvref_t<Argument>;
  if constexpr (std::is_same_v<Plain, at::Tensor>) {
    visit(argument);
  } else if constexpr (std::is_same_v<Plain, std::optional<at::Tensor>>) {
    if (argument) visit(*argument);
  } else if constexpr (std::is_same_v<Plain, std::vector<at::Tensor>>) {
    for (at::Tensor& tensor : argument) visit(tensor);
  }
}

}  // namespace recompute

// body(inputs...), which saves nothing but its inputs.
template <class Body, class... Inputs>
auto checkpoint(Body body, Inputs... inputs) {
  if (!at::GradMode::is_enabled()) return body(inputs...);
  const auto shared = std::make_shared<Body>(std::move(body));
  std::vector<at::Tensor> tensors;
  std::tuple<Inputs...> others(inputs...);  // without the tensors
  std::apply(
      [&](auto&... all) {
        (recompute::for_tensors(all, [&](at::Tensor& one) { tensors.push_back(std::exchange(one, at::Tensor())); }),
         ...);
      },
      others);
  const recompute::Region region(tensors, [shared, others](std::span<const at::Tensor> saved) {
    auto again = others;
    std::apply(
        [&](auto&... all) {
          (recompute::for_tensors(all,
                                  [&](at::Tensor& one) {
                                    one = saved.front();
                                    saved = saved.subspan(1);
                                  }),
           ...);
          (*shared)(all...);
        },
        again);
  });
  tensors.clear();
  return (*shared)(inputs...);
}

}  // namespace plumb
