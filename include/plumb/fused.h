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
  // Contiguous; of the parameter's dtype or of f32; in the parameter's shape, or with neighbouring dimensions of it joined
  // or split: [out * in] or [experts * out, in], but never [in, out].
  at::Tensor buffer;
  bool accumulate = false;  // buffer += gradient; otherwise buffer = gradient, whatever it held
};

// What autograd is handed when the gradient went into the buffer.
enum class Tell {
  nothing,  // an undefined gradient: hooks of the accumulator still fire
  // Zeros of the parameter's shape, which take no memory: hooks on the gradient fire, too. Then it is taken away again:
  // .grad stays as it was, and nothing is copied or added.
  by_stand_in,
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
  // A backward hands autograd a stand-in for one contribution, which is written, or put off, by now: hooks come next.
  virtual void stood_in() {}
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
  // Present: the owner asks to be told through autograd, by a stand-in. Set to true with every stand-in, before its hooks
  // run, so that none of them adds it; also for a gradient that is put off, and not again when that one comes, when the
  // owner may have reset it.
  std::optional<bool> grad_added_to_main_grad;
};

class Lanes;

// Writes on several streams come one after another; the accumulator's hooks, and whoever comes after the backward, see
// all of them.
class MainGradSink : public FusedSink {
 public:
  explicit MainGradSink(MainGrad facts, std::string name = {});

  std::string name() const override { return name_; }
  GradTarget open() override;
  void wrote() override;
  Tell tell() const override;
  void stood_in() override;
  void put_off() override { ++outstanding_; }
  void made_up() override { --outstanding_; }

  // Contributions put off and not yet made up.
  int outstanding() const { return outstanding_; }

  MainGrad facts;  // the owner's to change between backwards

 private:
  std::string name_;
  int outstanding_ = 0;
  std::shared_ptr<Lanes> lanes_;  // of main_grad
};

std::shared_ptr<MainGradSink> attach_main_grad(const at::Tensor& parameter, MainGrad facts, std::string name = {});

}  // namespace plumb
