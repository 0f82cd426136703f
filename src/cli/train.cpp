// The loop: plain forwards and backwards, and engine.step().
#include "cli/train.h"

#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <limits>

#include "cli/console.h"
#include "cli/digest.h"
#include "cli/estimate.h"
#include "cli/memory.h"
#include "cli/process.h"
#include "plumb/engine.h"
#include "report/folder.h"
#include "report/run.h"
#include "save/folder.h"
#include "world/group.h"
#include "world/road.h"
#include "world/strike.h"
#include "world/timeline.h"
#include "world/wire.h"

namespace plumb::cli {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

Options engine_options(const Settings& s) {
  Options options;
  options.strategy = s.strategy;
  options.mesh = read_mesh(s.mesh);
  options.hold_unsharded = s.hold_unsharded;
  options.deterministic = s.deterministic;
  options.virtual_ranks = static_cast<int>(s.virtual_ranks);
  options.bucket_bytes = std::max<int64_t>(1, static_cast<int64_t>(s.bucket_mb * (1 << 20)));
  options.first_bucket_bytes = std::min(options.first_bucket_bytes, options.bucket_bytes);
  if (s.dtype != "f32") options.accumulate_dtype = at::kFloat;
  if (s.dtype == "f16") options.loss_scale.emplace();
  options.master_weights = true;
  // An infinite limit clips nothing, and the norm is still measured.
  options.clip_norm = s.clip > 0 ? s.clip : std::numeric_limits<double>::infinity();
  options.schedule = {.warmup = s.warmup, .total = s.steps, .floor = 0.1};
  options.nonfinite = s.nonfinite == "error"  ? NonFinite::error
                      : s.nonfinite == "skip" ? NonFinite::skip
                                              : NonFinite::proceed;
  // Biases and norms are not pulled towards zero.
  options.groups = {
      {.match =
           [](const std::string& name) { return name.ends_with(".bias") || name.find("norm") != std::string::npos; },
       .lr = {},
       .weight_decay = 0.0}};
  return options;
}

// What every rank learns of the others after a step, in one small message.
struct Shared {
  double loss = 0.0;  // mean over all micro-batches, added in their order: the same bits however they are dealt out
  int signal = 0;     // the largest noted by any rank
  std::vector<int64_t> rss_bytes;
};

Shared share(const World& world, const std::vector<double>& losses, int64_t step) {
  std::vector<int64_t> mine = {noted_signal(), rss_bytes()};
  for (const double loss : losses) mine.push_back(std::bit_cast<int64_t>(loss));
  Shared all;
  const auto count = static_cast<double>(losses.size()) * world.size();
  for (const auto& theirs :
       exchange(world, mine, {.kind = Where::Kind::step, .step = step, .pass = 0, .detail = "loss"})) {
    all.signal = std::max(all.signal, static_cast<int>(theirs[0]));
    all.rss_bytes.push_back(theirs[1]);
    for (size_t i = 2; i < theirs.size(); ++i) all.loss += std::bit_cast<double>(theirs[i]) / count;
  }
  return all;
}

// Everybody's number, in rank order.
std::vector<int64_t> everybodys(const World& world, int64_t mine, const std::string& what) {
  std::vector<int64_t> all;
  for (const auto& theirs : exchange(world, std::span(&mine, 1), {.kind = Where::Kind::step, .detail = what})) {
    all.push_back(theirs[0]);
  }
  return all;
}

// The bytes of this process's tensors while no rank is about to change them.
int64_t quiet_tensor_bytes(const World& world) {
  world.barrier();
  const int64_t bytes = tensor_bytes();
  world.barrier();
  return bytes;
}

// The questions are dealt out evenly, so that every rank asks the same number, a few at a time. A signal that any rank
// has noted ends the evaluation of all after the same ones; `signal` then holds it.
model::Score evaluate(const World& world, const model::Task& task, model::Gpt& model, int64_t questions,
                      int64_t samples, int64_t step, int& signal) {
  constexpr int64_t kAtOnce = 64;
  const int64_t each = std::max<int64_t>(1, questions / world.size());
  model::Score score;
  for (int64_t first = 0; first < each && (first == 0 || signal == 0); first += kAtOnce) {
    const int64_t count = std::min(kAtOnce, each - first);
    road_of(world).pass(Point::evaluate);
    const int64_t shown = first == 0 ? std::min(samples, count) : 0;
    model::Score part = task.evaluate(model, each * world.rank() + first, count, shown);
    if (first == 0) score.samples = std::move(part.samples);
    const int64_t mine[] = {part.asked, part.right, noted_signal()};
    for (const auto& theirs :
         exchange(world, mine, {.kind = Where::Kind::step, .step = step, .pass = 0, .detail = "accuracy"})) {
      score.asked += theirs[0];
      score.right += theirs[1];
      signal = std::max(signal, static_cast<int>(theirs[2]));
    }
  }
  return score;
}

double ratio(const model::Score& score) { return static_cast<double>(score.right) / static_cast<double>(score.asked); }

model::Batch to(const model::Batch& batch, const at::Device& device) {
  return {batch.input.to(device), batch.target.to(device)};
}

// The checkpoints of one run, as its flags ask for them.
class Checkpoints {
 public:
  Checkpoints(Engine& engine, const Settings& settings) : engine_(engine), settings_(settings) {}

  // Where the data goes on: samples that were used by the runs before this one.
  int64_t resume() {
    const World& world = engine_.world();
    std::string from = settings_.resume == "never" ? "" : settings_.resume;
    // Started again by the launcher, a run goes on from what it saved itself, if anything.
    if (from == "auto" || restarts_before() > 0) {
      const bool mine = !settings_.checkpoint.empty() && save::newest_in(settings_.checkpoint).has_value();
      const bool any = everybodys(world, mine ? 1 : 0, "checkpoints")[0] != 0;  // as rank 0 sees it
      from = any ? settings_.checkpoint : from == "auto" ? "" : from;
    }
    if (from.empty()) return 0;
    const LoadInfo info = engine_.load(from);
    if (world.rank() == 0 && !settings_.quiet && !settings_.json) {
      std::fprintf(stderr, "plumb: goes on from '%s' (step %lld)\n", info.path.c_str(),
                   static_cast<long long>(info.step));
    }
    if (info.samples % settings_.batch != 0) {
      throw UsageError("--batch " + std::to_string(settings_.batch) + " does not divide the " +
                       std::to_string(info.samples) + " samples that '" + info.path + "' has used");
    }
    return info.samples;
  }

  // After a step: in the background, at the end of the run at once.
  void after(int64_t step, int64_t samples, bool last) {
    if (settings_.checkpoint.empty()) return;
    const bool due = settings_.save_every > 0 && step % settings_.save_every == 0;
    if (!due && !last) return;
    const SaveOptions options{.samples = samples, .keep = settings_.keep};
    try {
      if (last) {
        engine_.save(settings_.checkpoint, options);
      } else {
        engine_.save_in_background(settings_.checkpoint, options);
      }
    } catch (const SaveError& error) {
      complain(error);
    }
  }

  // A step, which may learn that the last checkpoint failed.
  StepInfo step() {
    try {
      return engine_.step();
    } catch (const SaveError& error) {
      complain(error);
    }
    return engine_.step();
  }

  bool failed() const { return failed_; }

 private:
  void complain(const SaveError& error) {
    failed_ = true;
    if (engine_.world().rank() != 0) return;
    std::fprintf(stderr, "%s; training goes on, earlier checkpoints are intact\n", error.what());
  }

  Engine& engine_;
  const Settings& settings_;
  bool failed_ = false;
};

// With --nonfinite error, names where it began: the first micro-batch whose loss is not finite, of the lowest rank.
void check_losses(const World& world, const Settings& s, const std::vector<double>& losses, int64_t step) {
  if (s.nonfinite != "error") return;
  int64_t first = -1;
  for (size_t i = losses.size(); i-- > 0;) {
    if (!std::isfinite(losses[i])) first = static_cast<int64_t>(i);
  }
  const auto all = everybodys(world, first, "losses that are not finite");
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] < 0) continue;
    throw Error(world.rank(), "step " + std::to_string(step) + ": the loss of micro-batch " +
                                  std::to_string(all[rank]) + " on rank " + std::to_string(rank) +
                                  " is not finite (--nonfinite error)");
  }
}

nlohmann::ordered_json or_null(double value) {
  return std::isfinite(value) ? nlohmann::ordered_json(value) : nlohmann::ordered_json();
}

// What the engine's communication cost this rank in the steps that are counted: from the second on, which finds its buckets.
class WireAccount {
 public:
  explicit WireAccount(const World& world) : world_(world) {}

  void begin() { before_ = wire_counts(world_); }
  void end() {
    if (steps_++ == 0) return;
    const Wire::Counts now = wire_counts(world_);
    for (size_t kind = 0; kind < now.size(); ++kind) {
      const Wire::Count more = now[kind] - before_[kind];
      Wire::Count& sum = sums_[kind];
      sum = {sum.rounds + more.rounds, sum.messages + more.messages, sum.bytes + more.bytes, sum.waits + more.waits,
             sum.blocked + more.blocked};
    }
  }

  nlohmann::ordered_json to_json() const {
    const double steps = static_cast<double>(std::max<int64_t>(1, steps_ - 1));
    nlohmann::ordered_json kinds;
    double bytes = 0;
    constexpr std::array names = {"data", "control", "gather", "store"};
    for (size_t kind = 0; kind < names.size(); ++kind) {
      const Wire::Count& sum = sums_[kind];
      const auto each = [&](int64_t count) { return static_cast<double>(count) / steps; };
      bytes += each(sum.bytes);
      kinds[names[kind]] = {{"rounds", each(sum.rounds)},
                            {"messages", each(sum.messages)},
                            {"bytes", each(sum.bytes)},
                            {"waits", each(sum.waits)},
                            {"blocked", each(sum.blocked)}};
    }
    nlohmann::ordered_json all = {{"blocking_waits_per_step", kinds["control"]["waits"]},
                                  {"control_rounds_per_step", kinds["control"]["rounds"]},
                                  {"bytes_per_step", bytes}};
    all.update(kinds);
    return all;
  }

 private:
  const World& world_;
  Wire::Counts before_{}, sums_{};
  int64_t steps_ = 0;
};

// On rank 0.
void write_trace(const std::string& path, const std::string& trace) {
  std::ofstream file(path);
  file << trace;
  if (!file.flush()) throw Error("cannot write the trace to '" + path + "'");
}

}  // namespace

int train(const World& world, const Settings& s, const model::Task& task) {
  const int ranks = world.size();
  check_world(s, ranks);
  const at::Device device =
      s.device == "cuda"
          ? at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(world.local_rank() % torch::cuda::device_count()))
          : at::Device(at::kCPU);
  const int64_t before = quiet_tensor_bytes(world);
  model::Gpt model(model::GptSize{.layers = s.layers,
                                  .heads = s.heads,
                                  .width = s.width,
                                  .context = s.context,
                                  .vocabulary = task.vocabulary(),
                                  .experts = s.model == "moe" ? s.experts : 0,
                                  .top_k = s.top_k},
                   static_cast<uint64_t>(s.seed));
  model->to(device, s.dtype == "bf16" ? at::kBFloat16 : s.dtype == "f16" ? at::kHalf : at::kFloat);
  if (s.dtype != "f32") model->sum_experts_in(at::kFloat);
  if (s.recompute) model->recompute_blocks();
  Engine engine(world, *model, AdamW{.lr = s.lr, .beta2 = 0.99, .weight_decay = s.weight_decay}, engine_options(s));

  const ModelShape shape = shape_of(*model);
  const int64_t params = shape.params();
  Console console(s, world.rank() == 0);
  report::Folder folder(world.rank() == 0 ? s.out : "");
  console.begin(s.model + " with " + report::human_count(params) + " parameters learns " + task.name() + " on " +
                std::to_string(ranks) + (ranks == 1 ? " rank" : " ranks") + " (" + s.strategy + ", " + world.backend() +
                ", " + s.dtype + ")");

  const int64_t micros = micro_batches(s, ranks);
  const int64_t micro = s.batch / (ranks * micros);  // samples
  const int64_t eval_every = s.eval_every >= 0 ? s.eval_every : s.steps >= 100 ? s.steps / 10 : 0;
  Checkpoints checkpoints(engine, s);
  int64_t samples = checkpoints.resume();
  const int64_t resumed = engine.steps();
  const auto begun = Clock::now();
  Timeline& timeline = timeline_of(world);
  if (!s.trace.empty()) timeline.start();
  WireAccount wire(world);
  std::vector<report::Step> steps;
  int signal = 0;
  for (int64_t step = resumed; step < s.steps && signal == 0; ++step) {
    const auto start = Clock::now();
    wire.begin();
    engine.zero_grad();
    std::vector<double> losses;
    for (int64_t i = 0; i < micros; ++i) {
      const int64_t first = (world.rank() * micros + i) * micro;
      const auto forward = Clock::now();
      const auto loss = model::loss_of(model, to(task.batch(samples / s.batch, first, micro), device));
      timeline.span("program", "forward", forward);
      const Timeline::Scope backward(timeline, "program", [] { return "backward"; });
      const auto part = engine.scale(loss / static_cast<double>(micros));
      if (i + 1 < micros) {
        const auto quiet = engine.no_sync();
        part.backward();
      } else {
        part.backward();
      }
      losses.push_back(loss.item<double>());
    }
    check_losses(world, s, losses, step);
    const auto stepping = Clock::now();
    const StepInfo info = checkpoints.step();
    samples += s.batch;
    timeline.span("program", "step", stepping);
    wire.end();
    Shared all = share(world, losses, step);
    signal = all.signal;

    report::Step record;
    record.step = step + 1;
    record.loss = all.loss;
    record.grad_norm = info.skipped ? std::numeric_limits<double>::infinity() : info.grad_norm.item<double>();
    record.skipped = info.skipped;
    record.lr = info.lr;
    record.ms = seconds_since(start) * 1e3;
    record.tokens_per_s = static_cast<double>(s.batch * task.length()) / (record.ms / 1e3);
    record.rss_bytes = std::move(all.rss_bytes);
    if (eval_every > 0 && (step + 1) % eval_every == 0 && step + 1 < s.steps && signal == 0) {
      const model::Score score = evaluate(world, task, model, 256, 0, step, signal);
      if (signal == 0) record.accuracy = ratio(score);
    }
    checkpoints.after(step + 1, samples, step + 1 == s.steps || signal != 0);
    console.step(record);
    folder.add(report::to_json(record));
    steps.push_back(std::move(record));
  }
  const double seconds = seconds_since(begun);

  // Ranks that are threads share an allocator, and count alike.
  const int64_t sharing = world.backend() == "local" ? ranks : 1;
  const int64_t held = (quiet_tensor_bytes(world) - before) / sharing + uncounted_bytes(engine);
  const std::vector<int64_t> measured = everybodys(world, held, "memory");
  const Estimate predicted = estimate(shape, plan_for(s, ranks));

  const model::Score score = evaluate(world, task, model, s.questions, 8, s.steps, signal);
  if (signal == 0 && !steps.empty()) steps.back().accuracy = ratio(score);
  const std::vector<int64_t> peaks = everybodys(world, peak_rss_bytes(), "memory");
  const std::string digest = model_digest(engine, *model);
  if (!s.trace.empty()) {
    const std::string trace = trace_of(world, begun);
    if (world.rank() == 0) write_trace(s.trace, trace);
  }
  if (world.rank() == 0) {
    std::vector<double> ms;
    for (const auto& step : steps) ms.push_back(step.ms);
    const double median = ms.empty() ? 0.0 : report::median(ms);
    nlohmann::ordered_json summary = {
        {"steps", static_cast<int64_t>(steps.size())},
        {"resumed_from_step", resumed},
        {"samples_used", samples},
        {"loss", steps.empty() ? nlohmann::ordered_json() : or_null(steps.back().loss)},
        {"ranks", ranks},
        {"strategy", s.strategy},
        {"model_digest", digest},
        {"step_ms_median", median},
        {"peak_rss_bytes", peaks},
        {"predicted_bytes", to_json(predicted)},
        {"measured_bytes", nlohmann::ordered_json()},
        {"accuracy", ratio(score)},
        {"asked", score.asked},
        {"tokens_per_s", median > 0 ? static_cast<double>(s.batch * task.length()) / (median / 1e3) : 0.0},
        {"wire", wire.to_json()},
        {"backend", world.backend()},
        {"device", s.device},
        {"dtype", s.dtype},
        {"params", params},
        {"task", task.name()},
        {"held_out", task.held_out()},
        {"first_loss", steps.empty() ? nlohmann::ordered_json() : or_null(steps.front().loss)},
        {"seconds", seconds},
        {"stopped", signal != 0},
        {"settings", to_json(s)},
        {"samples", nlohmann::ordered_json::array()}};
    // The allocator of another device is not ours to count.
    if (device.is_cpu()) summary["measured_bytes"] = measured;
    for (const model::Sample& sample : score.samples) {
      summary["samples"].push_back({{"prompt", sample.prompt},
                                    {"output", sample.output},
                                    {"expected", sample.expected},
                                    {"right", sample.right}});
    }
    folder.finish(steps, summary);
    console.end(summary);
  }
  road_of(world).pass(Point::exit);
  return signal == 0 ? 0 : 128 + signal;
}

}  // namespace plumb::cli
