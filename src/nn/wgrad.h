// The weight gradient of one operation in one backward: dyᵀx, written where each weight's delivery says, now or later.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "lane/lane.h"
#include "nn/delivery.h"
#include "nn/groups.h"

namespace plumb::nn {

// target (+)= dyᵀ x, for dy [rows, out] and x [rows, in]; with groups, for each group's rows and its own target, or its
// part of one target [groups, out, in]. Targets without a buffer are passed over. No rows: zeros, or nothing added.
void write_wgrad(const std::vector<GradTarget>& targets, const at::Tensor& dy, const at::Tensor& x,
                 const Groups* groups);

class WgradJob {
 public:
  // One weight, or one per expert.
  struct Slot {
    Weight weight;
    Like like;
    Delivery delivery;
  };

  WgradJob(at::Tensor dy, at::Tensor x, std::shared_ptr<const Groups> groups, std::vector<Slot> slots)
      : dy_(std::move(dy)), x_(std::move(x)), groups_(std::move(groups)), slots_(std::move(slots)) {}

  const std::vector<Slot>& slots() const { return slots_; }

  // What it is computed from is there once the current stream has run what it was given.
  void put_off();

  // Computes and writes the gradients whose time is `when`. Every buffer is checked before any is written. The result
  // has a tensor for each slot whose gradient went into no buffer.
  std::vector<at::Tensor> run(When when);

 private:
  at::Tensor dy_, x_;
  std::shared_ptr<const Groups> groups_;
  std::vector<Slot> slots_;
  LaneSet made_on_;
};

// Weight gradients that were put off. Keeps inputs and output gradients alive until flush().
class WgradStore {
 public:
  void put(WgradJob job);
  // Runs all, in the order in which they came, and lets each go. A job that throws stays, with those behind it.
  void flush();

 private:
  std::mutex mutex_;
  std::vector<WgradJob> jobs_;
};

// One backward's weight gradients of one matrix product: decides, runs or stores, and says what autograd gets.
std::vector<at::Tensor> deliver(at::Tensor dy, at::Tensor x, std::shared_ptr<const Groups> groups,
                                const std::vector<Weight>& weights, const std::vector<Like>& likes,
                                const std::shared_ptr<WgradStore>& store);

}  // namespace plumb::nn
