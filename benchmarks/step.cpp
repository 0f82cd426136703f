// The step time of one training program, done plainly and done by the engine, in alternating blocks of one run.
//
// One process is one rank, by the environment of torchrun; benchmarks/run.py starts the ranks and reads the one line of
// JSON that each prints:
//
//   bench_step --model gpt|tiny --device cpu|cuda --backend shm|gloo|nccl --variants plain,plain-fused,plumb,plumb-noledger,plumb-zero1,…
//              --rounds N --steps N --warmup N [--trace FILE] [--width N --layers N --context N of gpt]
//
// Each variant's line has the host's time in the parts of a step, too: on a device, what the host spends to start its work.
// --trace records three steps of the last variant after all timing, as torch's profiler writes it; trace.py reads it.
// plain steps neither communicate nor wait for the other ranks, but those run at the same time.
#include <c10/core/CachingDeviceAllocator.h>
#include <plumb/plumb.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/torch.h>

#include <signal.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "model/gpt.h"

namespace {

namespace nn = torch::nn;

constexpr int64_t kBatch = 8;    // samples per rank and step
constexpr int64_t kBatches = 8;  // different ones, in turn
constexpr int64_t kUntimed = 2;  // steps at the start of a block: they find the caches full of another variant's data
constexpr plumb::AdamW kAdamW{.lr = 3e-4};

struct Settings {
  std::string model = "gpt", device = "cpu", backend, trace;
  std::vector<std::string> variants = {"plain", "plain-fused", "plumb", "plumb-noledger"};
  int64_t rounds = 20, steps = 10, warmup = 10;
  int64_t width = 320, layers = 4, context = 64;  // of gpt
};

// What a variant trains: the same initial values for every variant and rank, other batches on every rank.
struct Model {
  std::shared_ptr<nn::Module> module;
  std::function<at::Tensor(int64_t step)> loss;
};

// Unless told otherwise: 53 tensors, 5.3 M parameters; 512 tokens per rank and step.
Model make_gpt(const Settings& settings, at::Device device, int rank) {
  const plumb::model::GptSize size{.layers = settings.layers,
                                   .heads = settings.width / 64,
                                   .width = settings.width,
                                   .context = settings.context,
                                   .vocabulary = 512};
  plumb::model::Gpt gpt(size, /*seed=*/1);
  gpt->to(device);
  torch::manual_seed(100 + rank);
  const auto tokens = torch::randint(size.vocabulary, {kBatches, kBatch, size.context + 1}, at::kLong).to(device);
  return {gpt.ptr(), [=](int64_t step) mutable {
            const auto batch = tokens[step % kBatches];
            const auto logits = gpt->forward(batch.narrow(1, 0, size.context));
            return nn::functional::cross_entropy(logits.flatten(0, 1), batch.narrow(1, 1, size.context).flatten());
          }};
}

// 24 blocks of 12 tiny parameters: what is left is the cost per parameter. Each block is a unit.
struct TinyBlock : nn::Module {
  static constexpr int64_t kLinears = 6, kWidth = 32;
  TinyBlock() {
    for (int64_t i = 0; i < kLinears; ++i) {
      linears.push_back(register_module("linear" + std::to_string(i), nn::Linear(kWidth, kWidth)));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x;
    for (auto& linear : linears) y = linear(y).relu();
    return x + y;
  }
  std::vector<nn::Linear> linears;
};

struct Tiny : nn::Module {
  explicit Tiny(int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      blocks.emplace_back(register_module("block" + std::to_string(i), std::make_shared<TinyBlock>()));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) x = block->forward(x);
    return x;
  }
  std::vector<plumb::Unit<TinyBlock>> blocks;
};

Model make_tiny(at::Device device, int rank, int64_t blocks = 24) {
  torch::manual_seed(1);
  const auto tiny = std::make_shared<Tiny>(blocks);
  tiny->to(device);
  torch::manual_seed(100 + rank);
  const auto data = torch::randn({kBatches, 2, kBatch, TinyBlock::kWidth}).to(device);
  return {tiny, [=](int64_t step) {
            const auto batch = data[step % kBatches];
            return at::mse_loss(tiny->forward(batch[0]), batch[1]);
          }};
}

double ms_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

// How one trains: what follows the backward.
struct Training {
  std::function<void()> update;
  std::function<void()> clear;  // forgets the gradients
};

struct Variant {
  std::string name;
  Model model;
  Training training;
  std::vector<std::vector<double>> rounds = {};   // milliseconds
  std::array<std::vector<double>, 4> parts = {};  // forward, backward, update, clear: the host's milliseconds, by step
  int64_t done = 0;

  void step() {
    auto start = std::chrono::steady_clock::now();
    const auto part = [&](size_t index) {
      parts.at(index).push_back(ms_since(start));
      start = std::chrono::steady_clock::now();
    };
    const at::Tensor loss = model.loss(done++);
    part(0);
    loss.backward();
    part(1);
    training.update();
    part(2);
    training.clear();
    part(3);
  }
};

// libtorch's own optimizer: five operations or more per parameter.
Training plain(const Model& model) {
  const auto optimizer = std::make_shared<torch::optim::AdamW>(
      model.module->parameters(), torch::optim::AdamWOptions(kAdamW.lr).weight_decay(kAdamW.weight_decay));
  return {[optimizer] { optimizer->step(); }, [optimizer] { optimizer->zero_grad(); }};
}

// What torch.optim.AdamW(fused=True) does: one call over the list of all parameters.
Training plain_fused(const Model& model) {
  struct State {
    std::vector<at::Tensor> parameters, first, second, counts;
  };
  const auto state = std::make_shared<State>();
  state->parameters = model.module->parameters();
  for (const at::Tensor& p : state->parameters) {
    state->first.push_back(at::zeros_like(p));
    state->second.push_back(at::zeros_like(p));
    state->counts.push_back(at::zeros({}, p.options().dtype(at::kFloat)));
  }
  const auto update = [state] {
    torch::NoGradGuard no_grad;
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& p : state->parameters) gradients.push_back(p.grad());
    at::_foreach_add_(state->counts, 1);
    at::_fused_adamw_(state->parameters, gradients, state->first, state->second, {}, state->counts, kAdamW.lr,
                      kAdamW.beta1, kAdamW.beta2, kAdamW.weight_decay, kAdamW.eps, /*amsgrad=*/false,
                      /*maximize=*/false);
  };
  return {update, [state] {
            for (at::Tensor& p : state->parameters) p.mutable_grad().reset();
          }};
}

Training engine(const plumb::World& world, const Model& model, const std::string& strategy, bool ledger) {
  plumb::Options options;
  options.strategy = strategy;
  options.ledger = ledger;
  const auto engine = std::make_shared<plumb::Engine>(world, *model.module, kAdamW, options);
  return {[engine] { engine->step(); }, [engine] { engine->zero_grad(); }};
}

at::Device device_of(const Settings& settings, const plumb::World& world) {
  if (settings.device == "cpu") return at::kCPU;
  // Ranks that talk over gloo may share a device.
  return {at::kCUDA, static_cast<c10::DeviceIndex>(world.local_rank() % torch::cuda::device_count())};
}

Variant make_variant(const std::string& name, const Model& model, const plumb::World& world) {
  if (name == "plain") return {name, model, plain(model)};
  if (name == "plain-fused") return {name, model, plain_fused(model)};
  if (name == "plumb") return {name, model, engine(world, model, "ddp", true)};
  if (name == "plumb-noledger") return {name, model, engine(world, model, "ddp", false)};
  if (name.rfind("plumb-", 0) == 0) return {name, model, engine(world, model, name.substr(6), true)};
  throw plumb::Error("variant '" + name +
                     "' is unknown; there are plain, plain-fused, plumb, plumb-noledger and plumb-STRATEGY");
}

// On the CPU each step is timed; on a device, which runs behind the host, the block as a whole.
std::vector<double> run_block(Variant& variant, const Settings& settings) {
  using Clock = std::chrono::steady_clock;
  const bool cuda = settings.device == "cuda";
  const auto before = variant.parts;
  for (int64_t i = 0; i < kUntimed; ++i) variant.step();
  if (cuda) torch::cuda::synchronize();
  variant.parts = before;
  std::vector<double> times;
  auto start = Clock::now();
  for (int64_t i = 0; i < settings.steps; ++i) {
    variant.step();
    if (cuda) continue;
    times.push_back(ms_since(start));
    start = Clock::now();
  }
  if (!cuda) return times;
  torch::cuda::synchronize();
  return {ms_since(start) / static_cast<double>(settings.steps)};
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

int64_t status_kib(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(key, 0) == 0) return std::stoll(line.substr(key.size()));
  }
  return 0;
}

// The most bytes that tensors held at one time.
int64_t peak_on_device(int index) {
  auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(at::kCUDA));
  return allocator ? allocator->getDeviceStats(static_cast<c10::DeviceIndex>(index)).allocated_bytes[0].peak : 0;
}

// Brings up what the variants need, so that it counts for none: autograd's threads, the BLAS, the device, connections.
// torch_peers.py does the same.
void bring_up(const Settings& settings, const plumb::World& world) {
  for (const std::string& name : settings.variants) {
    make_variant(name, make_tiny(device_of(settings, world), world.rank(), /*blocks=*/1), world).step();
  }
  if (settings.device == "cuda") torch::cuda::synchronize();
  std::ofstream("/proc/self/clear_refs") << 5;  // the peak of memory begins anew
}

Settings parse(int argc, char** argv) {
  Settings settings;
  if (argc % 2 == 0) throw plumb::Error("every option takes a value: --option value …");
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string key = argv[i], value = argv[i + 1];
    if (key == "--model") {
      settings.model = value;
    } else if (key == "--device") {
      settings.device = value;
    } else if (key == "--backend") {
      settings.backend = value;
    } else if (key == "--trace") {
      settings.trace = value;
    } else if (key == "--width") {
      settings.width = std::stoll(value);
    } else if (key == "--layers") {
      settings.layers = std::stoll(value);
    } else if (key == "--context") {
      settings.context = std::stoll(value);
    } else if (key == "--rounds") {
      settings.rounds = std::stoll(value);
    } else if (key == "--steps") {
      settings.steps = std::stoll(value);
    } else if (key == "--warmup") {
      settings.warmup = std::stoll(value);
    } else if (key == "--variants") {
      settings.variants.clear();
      std::istringstream names(value);
      for (std::string name; std::getline(names, name, ',');) settings.variants.push_back(name);
    } else {
      throw plumb::Error(
          "option '" + key +
          "' is unknown; there are --model, --device, --backend, --variants, --rounds, --steps, --warmup, --trace, "
          "--width, --layers and --context");
    }
  }
  if (settings.model != "gpt" && settings.model != "tiny") {
    throw plumb::Error("model '" + settings.model + "' is unknown; there are gpt and tiny");
  }
  if (settings.device != "cpu" && settings.device != "cuda") {
    throw plumb::Error("device '" + settings.device + "' is unknown; there are cpu and cuda");
  }
  return settings;
}

void print(const Settings& settings, const plumb::World& world, const std::vector<Variant>& variants, double peak_mib,
           double device_peak_mib) {
  torch::NoGradGuard no_grad;
  const auto parameters = variants.at(0).model.module->parameters();
  int64_t numel = 0;
  for (const at::Tensor& p : parameters) numel += p.numel();
  std::ostringstream out;
  out << "{\"language\": \"c++\", \"torch\": \"" << TORCH_VERSION << "\", \"rank\": " << world.rank()
      << ", \"world\": " << world.size() << ", \"model\": \"" << settings.model << "\", \"device\": \""
      << settings.device << "\", \"backend\": \"" << world.backend() << "\", \"tensors\": " << parameters.size()
      << ", \"parameters\": " << numel << ", \"peak_mib\": " << peak_mib << ", \"device_peak_mib\": " << device_peak_mib
      << ", \"variants\": [";
  for (const Variant& variant : variants) {
    out << (&variant == variants.data() ? "" : ", ") << "{\"name\": \"" << variant.name
        << "\", \"loss\": " << variant.model.loss(0).item<double>() << ", \"rounds\": [";
    for (const auto& round : variant.rounds) {
      out << (&round == variant.rounds.data() ? "[" : ", [");
      for (const double& ms : round) out << (&ms == round.data() ? "" : ", ") << ms;
      out << "]";
    }
    out << "], \"parts\": {";
    for (size_t i = 0; i < variant.parts.size(); ++i) {
      out << (i == 0 ? "" : ", ") << '"' << std::array{"forward", "backward", "update", "clear"}.at(i)
          << "\": " << median(variant.parts.at(i));
    }
    out << "}}";
  }
  std::printf("%s]}\n", out.str().c_str());
}

void record(Variant& variant, const Settings& settings, const plumb::World& world) {
  using torch::profiler::impl::ActivityType;
  using torch::profiler::impl::ProfilerConfig;
  using torch::profiler::impl::ProfilerState;
  const bool cuda = settings.device == "cuda";
  std::set<ActivityType> activities = {ActivityType::CPU};
  if (cuda) activities.insert(ActivityType::CUDA);
  const ProfilerConfig config(ProfilerState::KINETO);
  torch::autograd::profiler::prepareProfiler(config, activities);
  torch::autograd::profiler::enableProfiler(config, activities,
                                            {at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE});
  for (int64_t i = 0; i < 3; ++i) {
    RECORD_USER_SCOPE("step");
    variant.step();
  }
  if (cuda) torch::cuda::synchronize();
  const auto result = torch::autograd::profiler::disableProfiler();
  if (world.rank() == 0) result->save(settings.trace);
  world.barrier();
}

void run(const Settings& settings) {
  at::set_num_threads(1);
  const plumb::World world = plumb::World::join({.backend = settings.backend, .device = settings.device});
  bring_up(settings, world);
  world.barrier();
  const int64_t start_kib = status_kib("VmRSS:");
  const bool cuda = settings.device == "cuda";

  std::vector<Variant> variants;
  for (const auto& name : settings.variants) {
    const at::Device device = device_of(settings, world);
    Model model = settings.model == "gpt" ? make_gpt(settings, device, world.rank()) : make_tiny(device, world.rank());
    variants.push_back(make_variant(name, model, world));
  }
  for (Variant& variant : variants) {
    for (int64_t i = 0; i < settings.warmup; ++i) variant.step();
    variant.parts = {};
  }
  for (int64_t round = 0; round < settings.rounds; ++round) {
    for (size_t i = 0; i < variants.size(); ++i) {
      // Every other round runs backwards: no variant always follows the same one.
      Variant& variant = variants[round % 2 == 0 ? i : variants.size() - 1 - i];
      if (cuda) torch::cuda::synchronize();
      world.barrier();
      variant.rounds.push_back(run_block(variant, settings));
    }
  }
  world.barrier();
  if (!settings.trace.empty()) record(variants.back(), settings, world);

  const int64_t peak_kib = status_kib("VmHWM:") - start_kib;
  const int64_t device_bytes = cuda ? peak_on_device(device_of(settings, world).index()) : 0;
  print(settings, world, variants, static_cast<double>(peak_kib) / (1 << 10),
        static_cast<double>(device_bytes) / (1 << 20));
}

}  // namespace

int main(int argc, char** argv) {
  signal(SIGPIPE, SIG_IGN);
  try {
    run(parse(argc, argv));
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bench_step: %s\n", e.what());
    return 1;
  }
  return 0;
}
