// What the tests of fused modules share: the three modules behind one face, unfused references, and owners of buffers.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "plumb/fused.h"
#include "plumb/nn.h"

namespace plumb::test {

using Counts = std::vector<int64_t>;

enum class Kind { linear, grouped_linear, grouped_mlp };

struct Setup {
  Kind kind = Kind::linear;
  nn::Experts experts = nn::Experts::grouped;
  nn::Activation activation = nn::Activation::swiglu;
  bool delayed = false;
  at::Device device = at::kCPU;
  at::ScalarType dtype = at::kFloat;
  Counts counts = {5, 0, 17, 1, 3};
};

// A module, what it takes, and the same function out of plain operations.
struct Subject {
  explicit Subject(const Setup& setup);

  at::Tensor forward(const at::Tensor& x) const { return run(x); }
  void backward_dw() const { flush(); }
  // The weight gradients that plain operations give for dy, one per weight; in f32 at least.
  std::vector<at::Tensor> reference(const at::Tensor& x, const at::Tensor& dy) const;

  Setup setup;
  std::shared_ptr<torch::nn::Module> module;
  std::vector<at::Tensor> weights;  // those that a sink can serve
  at::Tensor x, dy;
  std::function<at::Tensor(const at::Tensor& x)> run;
  // With f64 copies of the weights: plain.
  std::function<at::Tensor(const at::Tensor& x, const std::vector<at::Tensor>& weights)> plain;
  std::function<void()> flush;
};

// An owner as an engine is one: the first contribution of a step overwrites, later ones accumulate.
class StepSink : public FusedSink {
 public:
  explicit StepSink(at::Tensor buffer, Tell how = Tell::nothing) : buffer(std::move(buffer)), how(how) {}
  std::string name() const override { return "a.weight"; }
  GradTarget open() override { return {buffer, delivered > 0}; }
  void wrote() override { ++delivered; }
  Tell tell() const override { return how; }
  void put_off() override { ++outstanding; }
  void made_up() override { --outstanding; }

  at::Tensor buffer;
  Tell how;
  int delivered = 0, outstanding = 0;
};

// Counts how often the parameter's accumulator fired, and keeps the gradients that came.
struct Watch {
  explicit Watch(const at::Tensor& parameter);
  struct Seen {
    int fired = 0;
    std::vector<at::Tensor> gradients;
  };
  std::shared_ptr<Seen> seen = std::make_shared<Seen>();
  std::shared_ptr<void> node;  // held, or the hook would be lost
};

std::vector<at::Device> devices();
at::Tensor f64(const at::Tensor& tensor);
// ‖a − b‖ ≤ tolerance · ‖b‖, and exactly equal where b is zero throughout.
void expect_close(const at::Tensor& a, const at::Tensor& b, double tolerance);

}  // namespace plumb::test
