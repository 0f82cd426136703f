// The loop: plain forwards and backwards, and engine.step().
#include "cli/train.h"

#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include <bit>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <limits>
#include <optional>

#include "cli/checkpoints.h"
#include "cli/console.h"
#include "cli/digest.h"
#include "cli/estimate.h"
#include "cli/job.h"
#include "cli/memory.h"
#include "cli/nonfinite.h"
#include "cli/process.h"
#include "cli/record.h"
#include "cli/replayed.h"
#include "cli/verify.h"
#include "cli/wire_account.h"
#include "engine/not_finite.h"
#include "plumb/engine.h"
#include "report/folder.h"
#include "report/run.h"
#include "watch/report.h"
#include "watch/road.h"
#include "watch/strike.h"
#include "watch/timeline.h"
#include "world/group.h"

namespace plumb::cli {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

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

nlohmann::ordered_json or_null(double value) {
  return std::isfinite(value) ? nlohmann::ordered_json(value) : nlohmann::ordered_json();
}

// The parts that a step passes through.
struct Parts {
  Engine& engine;
  Job& job;
  Checkpoints& checkpoints;
  Recorder& recorder;
  Verifier& verifier;
  Replayed* replayed;  // null: every step runs as it is
};

StepInfo try_step(const Parts& parts, const Settings& s, int64_t samples, const std::vector<model::Batch>& batches,
                  std::vector<double>& losses) {
  const World& world = parts.engine.world();
  const int64_t step = parts.engine.steps();
  if (parts.replayed != nullptr) {
    losses = parts.replayed->run(batches);
  } else {
    parts.engine.zero_grad();
    for (size_t i = 0; i < batches.size(); ++i) {
      parts.verifier.before(step, static_cast<int64_t>(i));
      losses.push_back(parts.job.run(batches[i], static_cast<int64_t>(i)));
    }
    parts.verifier.after(step, samples);
  }
  if (s.nonfinite == "error") check_losses(world, losses, step);
  const StepInfo info = parts.checkpoints.step();
  timeline_of(world).enter("between steps");
  return info;
}

// One step of the run; `losses` of its micro-batches here. A NaN or an inf that ends it is followed to its origin, where that is
// asked for.
StepInfo take_step(const Parts& parts, const Settings& s, int64_t samples, std::vector<double>& losses) {
  const std::vector<model::Batch> batches = parts.job.batches(samples);
  const std::vector<at::Tensor> generators =
      s.record.empty() && !s.trace_nonfinite ? std::vector<at::Tensor>() : generator_states();
  parts.recorder.begin(samples, batches, generators);
  try {
    return try_step(parts, s, samples, batches, losses);
  } catch (const NotFinite& error) {
    if (!s.trace_nonfinite) throw;
    const std::string origin = trace_origin(parts.engine, parts.job, batches, generators, parts.engine.steps());
    throw Error(std::string(without_prefix(error.what())) + "; " + origin);
  }
}

// In milliseconds, of every rank.
nlohmann::ordered_json to_json(const std::vector<TimeSpent>& everybody) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const TimeSpent& spent : everybody) {
    nlohmann::ordered_json waited_for = nlohmann::ordered_json::array();
    for (const double seconds : spent.waited_for) waited_for.push_back(seconds * 1e3);
    all.push_back({{"step", spent.step * 1e3},
                   {"compute", spent.compute * 1e3},
                   {"data", spent.data * 1e3},
                   {"gathers", spent.gathers * 1e3},
                   {"control", spent.control * 1e3},
                   {"optimizer", spent.optimizer * 1e3},
                   {"waited_for", waited_for}});
  }
  return all;
}

}  // namespace

int train(const World& world, const Settings& s, const model::Task& task) {
  const int ranks = world.size();
  check_world(s, ranks);
  const at::Device device = device_of(s, world);
  const int64_t before = quiet_tensor_bytes(world);
  model::Gpt model = build_model(s, task.vocabulary(), device);
  Engine engine(world, *model, optimizer_of(s), engine_options(s));

  const ModelShape shape = shape_of(*model);
  const int64_t params = shape.params();
  Console console(s, world.rank() == 0);
  report::Folder folder(world.rank() == 0 ? s.out : "");
  console.begin(s.model + " with " + report::human_count(params) + " parameters learns " + task.name() + " on " +
                std::to_string(ranks) + (ranks == 1 ? " rank" : " ranks") + " (" + s.strategy + ", " + world.backend() +
                ", " + s.dtype + ")");

  Job job(s, task, engine, model);
  const int64_t eval_every = s.eval_every >= 0 ? s.eval_every : s.steps >= 100 ? s.steps / 10 : 0;
  Checkpoints checkpoints(engine, s);
  Recorder recorder(engine, s, task.vocabulary());
  Verifier verifier(engine, job, s.verify);
  int64_t samples = checkpoints.resume();
  std::optional<Replayed> replayed;
  if (s.graph) replayed.emplace(engine, job, device);
  const int64_t resumed = engine.steps();
  const auto begun = Clock::now();
  std::optional<Trace> trace;
  if (!s.trace.empty()) trace.emplace(world, s.trace);
  WireAccount wire(world);
  // Of the lives before this one, for the page.
  const std::vector<report::Step> earlier = restarts_before() > 0 ? folder.go_on(resumed) : std::vector<report::Step>();
  std::vector<report::Step> steps;
  int signal = 0;
  try {
    for (int64_t step = resumed; step < s.steps && signal == 0; ++step) {
      const auto start = Clock::now();
      wire.begin();
      std::vector<double> losses;
      const StepInfo info = take_step({engine, job, checkpoints, recorder, verifier, replayed ? &*replayed : nullptr},
                                      s, samples, losses);
      samples += s.batch;
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
  } catch (const std::exception& error) {
    recorder.write(error.what());
    throw;
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
  std::vector<TimeSpent> spent;
  std::string untraced;  // why, where that failed: the rest of what was learned is told all the same
  try {
    if (trace) spent = trace->stop();
  } catch (const Error& error) {
    untraced = without_prefix(error.what());
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
    if (trace && untraced.empty()) summary["time_spent_ms"] = to_json(spent);
    for (const model::Sample& sample : score.samples) {
      summary["samples"].push_back({{"prompt", sample.prompt},
                                    {"output", sample.output},
                                    {"expected", sample.expected},
                                    {"right", sample.right}});
    }
    std::vector<report::Step> whole = earlier;
    whole.insert(whole.end(), steps.begin(), steps.end());
    folder.finish(whole, summary);
    console.end(summary);
  }
  checkpoints.check_last(signal);
  if (!untraced.empty()) throw Error(untraced);
  road_of(world).pass(Point::exit);
  return signal == 0 ? 0 : 128 + signal;
}

}  // namespace plumb::cli
