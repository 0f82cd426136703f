// Stage: where a scenario is played. The same program runs on the engine, one thread per rank, and on the one-process
// reference, where every rank's part works on one shared model and plain libtorch does the rest.
#pragma once

#include "libtorch.h"

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "plumb/plumb.h"

namespace plumb::scenarios {

class Baton;

// What a scenario sees of the world.
class Stage {
 public:
  int rank = 0;
  int size = 1;
  at::Device device = at::kCPU;
  std::shared_ptr<torch::nn::Module> model;

  // Inputs of this rank for micro-batch `micro`: different on every rank, the same in engine and reference.
  at::Tensor input(at::IntArrayRef shape, int micro = 0) const;

  // The loss as it counts: each rank's weighs 1/N. Only for losses whose backward follows.
  at::Tensor share(const at::Tensor& loss) const;

  // Does something to the model as a whole (its gradients, its requires_grad): every rank does it to its copy; the
  // reference does it once, when all ranks have come this far.
  void all(const std::function<void()>& action);

  void step();
  void zero_grad() {
    all([this] {
      if (engine != nullptr && clears_by_engine) return engine->zero_grad();
      for (auto& p : model->parameters()) p.mutable_grad().reset();
    });
  }
  // loss.backward(), counted even when it reaches nothing.
  void backward(const at::Tensor& loss, bool retain_graph = false);
  std::unique_ptr<NoSync> no_sync();
  // A gradient from a backward that is not autograd's, and the end of that backward.
  void deliver(const at::Tensor& parameter, const at::Tensor& gradient);
  void end_pass();
  // The loss as loss scaling wants it.
  at::Tensor scale(const at::Tensor& loss) const;
  bool reference() const { return engine == nullptr; }

  template <class T>
  T& as() const {
    return dynamic_cast<T&>(*model);
  }

  Engine* engine = nullptr;
  bool clears_by_engine = false;  // engine.zero_grad() instead of the model's: it lets memory go
  Baton* baton = nullptr;
  std::function<void()> reference_step;
  const double* reference_scale = nullptr;
};

using Program = std::function<void(Stage&)>;
using Build = std::function<std::shared_ptr<torch::nn::Module>()>;

struct Scenario {
  std::string id;    // of the table: "A1"
  std::string name;  // a sentence
  Build build;
  Program program;
  Optimizer optimizer = SGD{.lr = 0.1, .momentum = 0.9};
  Options options = {};
  double tolerance = 1e-5;
  // Where gradients are sharded, ranks hold pieces, and this ends in an Error that says so. Empty: it comes out right.
  std::string refused_with_pieces = {};
};

// Every parameter and every buffer's and gradient's final value, by name; an undefined tensor for no gradient.
struct Outcome {
  NamedTensors parameters;
  NamedTensors gradients;
};

// What carries the ranks' messages. `dear`: messages are, so that small ones travel together, and memory is, so that gradients
// that were cleared keep none. `asking`: units are gathered by collectives that cannot say what they gather, so that ranks ask
// before each; and every wait blocks the host.
enum class Medium { plain, dear, asking };

Outcome play_reference(const Scenario& scenario, int ranks);
// Rank `of`'s outcome; the ranks are threads over the local backend.
Outcome play_engine(const Scenario& scenario, int ranks, const std::string& strategy, int of = 0,
                    Medium medium = Medium::plain);
// On a world that exists: for real processes, and for other devices.
Outcome play_on(const World& world, const Scenario& scenario, const std::string& strategy, at::Device device = at::kCPU,
                Medium medium = Medium::plain);

// Empty, or the first difference in words.
std::string difference(const Outcome& expected, const Outcome& found, double tolerance);

}  // namespace plumb::scenarios
