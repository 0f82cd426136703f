// Updates on a device, where the counts of updates lie on it, too: those of the CPU, whichever gradients come, and in few calls.
#include <ATen/record_function.h>

#include <functional>
#include <map>
#include <string_view>

#include "lane/lane.h"
#include "plumb/plumb.h"
#include "save/support/folder.h"
#include "sim/support/support.h"

namespace plumb::sim {
namespace {

using RunRanks = std::function<void(const std::function<void(World)>&)>;

// Three parameters in one bucket; in step s, parameter i has a gradient where bit i of `used[s]` says so.
std::vector<at::Tensor> updated(const RunRanks& run, const std::function<at::Device(int rank)>& device_of,
                                const Optimizer& optimizer, const std::string& strategy,
                                const std::vector<unsigned>& used) {
  std::vector<at::Tensor> found(3);
  run([&](World world) {
    const at::Device device = device_of(world.rank());
    std::vector<at::Tensor> parameters;
    NamedTensors named;
    for (int i = 0; i < 3; ++i) {
      parameters.push_back((torch::arange(10 + i, at::kFloat) * 0.3).sin().to(device).requires_grad_());
      named.emplace_back("p" + std::to_string(i), parameters.back());
    }
    Engine engine(world, named, {}, optimizer, {.strategy = strategy});
    for (size_t step = 0; step < used.size(); ++step) {
      for (int i = 0; i < 3; ++i) {
        if ((used[step] >> i & 1U) == 0) continue;
        const double phase = static_cast<double>(step) + world.rank();
        engine.deliver(parameters[i], (torch::arange(10 + i, at::kFloat) + phase).cos().to(device));
      }
      engine.end_pass();
      (void)engine.step();
      engine.zero_grad();
    }
    for (int i = 0; i < 3; ++i) {
      const at::Tensor whole = engine.full_parameter(parameters[i]).cpu();
      if (world.rank() == 0) found[i] = whole;
    }
  });
  return found;
}

TEST(Updates, OnADeviceAreThoseOfTheCpuWhicheverGradientsCome) {
  const std::vector<Optimizer> optimizers = {SGD{.lr = 0.1, .momentum = 0.9}, Adam{.lr = 0.05}, AdamW{.lr = 0.05},
                                             RMSprop{.lr = 0.05, .centered = true}};
  const std::vector<std::vector<unsigned>> rows = {{7, 7, 7}, {1, 7, 3, 6}, {5, 2, 5, 7}, {4, 4, 7, 1}};
  for (const char* strategy : {"ddp", "zero2"}) {
    for (size_t which = 0; which < optimizers.size(); ++which) {
      for (size_t row = 0; row < rows.size(); ++row) {
        const auto expected = updated([](const auto& body) { run_local(2, body); }, [](int) { return at::kCPU; },
                                      optimizers[which], strategy, rows[row]);
        Session session(row);
        const auto found = updated([](const auto& body) { run_world(2, body); }, [](int rank) { return device(rank); },
                                   optimizers[which], strategy, rows[row]);
        session.finish();
        EXPECT_TRUE(session.races().empty()) << session.report();
        for (int i = 0; i < 3; ++i) {
          EXPECT_TRUE(at::allclose(found[i], expected[i], 1e-5, 1e-6))
              << strategy << ", optimizer " << which << ", row " << row << ", parameter " << i << ": " << found[i]
              << "\ninstead of " << expected[i];
        }
      }
    }
  }
}

// The host's calls of operations on devices, by name, on this thread and those of its backwards.
// A parameter that was not updated yet when a checkpoint was saved begins anew with it, as on the CPU.
TEST(Updates, OnADeviceBeginAnewWithACheckpointThatHasNone) {
  const test::Scratch scratch;
  const auto run = [&](const World& world, c10::Device device) {
    std::vector<at::Tensor> parameters;
    NamedTensors named;
    for (int i = 0; i < 2; ++i) {
      parameters.push_back((torch::arange(10 + i, at::kFloat) * 0.3).sin().to(device).requires_grad_());
      named.emplace_back("p" + std::to_string(i), parameters.back());
    }
    Engine engine(world, named, {}, AdamW{.lr = 0.05});
    const auto train = [&](int steps, int count) {
      for (int step = 0; step < steps; ++step) {
        for (int i = 0; i < count; ++i) {
          engine.deliver(parameters[i], (torch::arange(10 + i, at::kFloat) + step).cos().to(device));
        }
        engine.end_pass();
        (void)engine.step();
        engine.zero_grad();
      }
    };
    train(2, 1);
    const std::string path = engine.save(scratch.path(device.str().substr(0, 3)));
    train(9, 2);
    engine.load(path);
    train(2, 2);
    return std::vector{parameters[0].detach().cpu(), parameters[1].detach().cpu()};
  };
  const auto expected = run(World(), at::kCPU);
  Session session(1);
  std::vector<at::Tensor> found;
  run_world(1, [&](World world) { found = run(world, device(0)); });
  session.finish();
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(found[i].allclose(expected[i], 1e-5, 1e-6)) << i << found[i] << expected[i];
}

class Calls {
 public:
  Calls() {
    found.clear();
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&count, &end).needsInputs(true));
  }
  ~Calls() { at::removeCallback(handle_); }
  Calls(const Calls&) = delete;
  Calls& operator=(const Calls&) = delete;

  static inline std::map<std::string, int> found;

 private:
  static std::unique_ptr<at::ObserverContext> count(const at::RecordFunction& call) {
    if (!is_operation(call) || depth++ > 0 || call.inputs().empty()) return nullptr;
    const c10::IValue& first = call.inputs()[0];
    const bool list = first.isTensorList() && first.toTensorList().size() > 0;
    if (!list && !first.isTensor()) return nullptr;
    const at::Tensor tensor = list ? first.toTensorList().get(0) : first.toTensor();
    if (tensor.defined() && !tensor.is_cpu()) ++found[call.name()];
    return nullptr;
  }
  static void end(const at::RecordFunction& call, at::ObserverContext*) {
    if (is_operation(call)) --depth;
  }
  static bool is_operation(const at::RecordFunction& call) {
    return std::string_view(call.name()).starts_with("aten::");
  }

  static inline thread_local int depth = 0;  // what an operation calls is its own business
  at::CallbackHandle handle_;
};

int questions = 0;  // whether a graph is being captured

TEST(Updates, OfManyBucketsAreFewCallsOfTheDevice) {
  Session session(1);
  ask_about_graphs([](const c10::Stream&) -> uint64_t { return ++questions, 0; });
  torch::nn::Sequential model;
  for (int i = 0; i < 5; ++i) model->push_back(torch::nn::Linear(8, 8));
  model->to(device(0));
  Options options;
  options.bucket_bytes = options.first_bucket_bytes = 1;  // a bucket each
  options.groups = {{[](const std::string& name) { return name.ends_with("bias"); }, std::nullopt, 0.0}};
  Engine engine(World(), *model, AdamW{.lr = 0.01, .weight_decay = 0.1}, options);
  const auto step = [&] {
    model->forward(at::ones({2, 8}, on(0))).square().mean().backward();
    (void)engine.step();
    engine.zero_grad();
  };
  for (int i = 0; i < 2; ++i) step();
  const Statistics before = session.statistics();
  {
    const Calls calls;
    questions = 0;
    step();
  }
  ask_about_graphs(nullptr);
  const Statistics after = session.statistics();
  EXPECT_EQ(after.events, before.events) << "on one stream, nothing waits for anything";
  EXPECT_EQ(after.stream_waits, before.stream_waits);
  EXPECT_EQ(after.device_waits, before.device_waits);
  EXPECT_EQ(Calls::found["aten::_foreach_copy_"], 1) << "gradients that come to their places";
  EXPECT_EQ(Calls::found["aten::_foreach_add_"], 1) << "counts";
  EXPECT_EQ(Calls::found["aten::_fused_adamw_"], 2) << "one for each group of parameters";
  EXPECT_LE(questions, 3) << "when a pass opens, when it closes, at the step";
  // All that a step gives the device and the same backward without an engine does not.
  const auto with_engine = Calls::found;
  engine.zero_grad();
  torch::nn::Sequential plain;
  for (int i = 0; i < 5; ++i) plain->push_back(torch::nn::Linear(8, 8));
  plain->to(device(0));
  {
    const Calls calls;
    plain->forward(at::ones({2, 8}, on(0))).square().mean().backward();
  }
  std::map<std::string, int> more;
  for (const auto& [name, count] : with_engine) {
    if (const int own = count - Calls::found[name]; own != 0) more[name] = own;
  }
  EXPECT_EQ(
      more,
      (std::map<std::string, int>{
          {"aten::_foreach_copy_", 1}, {"aten::_foreach_add_", 1}, {"aten::_fused_adamw_", 2}, {"aten::narrow", 1}}))
      << "the last: of the counts, those that are updated";
  session.finish();
  EXPECT_EQ(session.report(), "no races\n");
}

}  // namespace
}  // namespace plumb::sim
