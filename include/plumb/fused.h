// The agreement between an operation that computes a weight gradient itself and whoever owns the gradient's buffer.
//
// An operation (plumb::nn::Linear, GroupedLinear, GroupedMLP) writes its weight gradient straight into the buffer of
// the parameter's sink: no temporary, no addition afterwards. The owner attaches a sink to a parameter:
//
//   auto sink = plumb::attach_main_grad(weight, {.main_grad = buffer});   // the convention of Megatron, without an engine
//   plumb::attach(weight, my_sink);                                      // or any FusedSink of the owner's own
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>

namespace plumb {

// The place of one write.
struct GradTarget {
  at::Tensor buffer;        // in the parameter's shape, contiguous; of the parameter's dtype or of f32
  bool accumulate = false;  // buffer += gradient; otherwise buffer = gradient, whatever it held
};

// What autograd is handed when the gradient went into the buffer.
enum class Tell {
  nothing,      // an undefined gradient: hooks of the accumulator still fire
  by_stand_in,  // zeros of the parameter's shape, which take no memory: hooks on the gradient fire, too
};

// One parameter's gradient buffer, as an operation sees it. Every call comes from the thread that runs the backward (or
// backward_dw), with the stream current that the write is enqueued on.
class FusedSink {
 public:
  virtual ~FusedSink() = default;

  // The parameter's name, for errors; empty where unknown.
  virtual std::string name() const { return {}; }
  // Where the next contribution goes. May prepare the buffer, but counts nothing: the target is checked first, and a
  // write may never come of it.
  virtual GradTarget open() = 0;
  // The write into the target of the last open() is enqueued on the current stream: one contribution is delivered.
  virtual void wrote() = 0;
  virtual Tell tell() const { return Tell::nothing; }
  // A backward put one contribution off; until made_up() it is missing, and the owner must not use the buffer.
  virtual void put_off() {}
  // A contribution that was put off has been written: follows its wrote().
  virtual void made_up() {}
};

// From now on, contributions to `parameter` (a leaf) from operations that write gradients themselves go to `sink`. Held
// weakly: without its owner there is no sink. A later attach replaces it; null takes it away.
void attach(const at::Tensor& parameter, const std::shared_ptr<FusedSink>& sink);

// The sink of `parameter`, or null.
std::shared_ptr<FusedSink> sink_of(const at::Tensor& parameter);

// The convention of Megatron and TransformerEngine, where a weight carries these as attributes.
struct MainGrad {
  at::Tensor main_grad;
  bool overwrite_main_grad = false;
  // Present: the owner asks to be told through autograd, by a stand-in. Set to true by every write; the owner resets it.
  std::optional<bool> grad_added_to_main_grad;
};

class MainGradSink : public FusedSink {
 public:
  explicit MainGradSink(MainGrad facts, std::string name = {}) : facts(std::move(facts)), name_(std::move(name)) {}

  std::string name() const override { return name_; }
  GradTarget open() override;
  void wrote() override;
  Tell tell() const override;
  void put_off() override { ++outstanding_; }
  void made_up() override { --outstanding_; }

  // Contributions put off and not yet made up.
  int outstanding() const { return outstanding_; }

  MainGrad facts;  // the owner's to change between backwards

 private:
  std::string name_;
  int outstanding_ = 0;
};

std::shared_ptr<MainGradSink> attach_main_grad(const at::Tensor& parameter, MainGrad facts, std::string name = {});

}  // namespace plumb
