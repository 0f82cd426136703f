// Flags in, a table out.
#include "cli/estimate.h"

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <tuple>

#include "cli/flags.h"
#include "layout/duration.h"
#include "model/gpt.h"
#include "plumb/error.h"
#include "report/run.h"
#include "watch/wire.h"

namespace plumb::cli {

namespace {

// Settings of a run, plus what only an estimate is told.
struct Question {
  Settings run;
  std::string strategy;  // empty: every row of the table
  std::string params;    // empty: the built-in gpt
  int64_t units = 32;
  int64_t vocabulary = 12;  // of the addition task
  // What is not given costs no time, and the table says so; none of them: no times are told.
  std::string latency;
  double bandwidth = 0;  // Gbit/s
  double flops = 0;
  int64_t tokens = 2048;
  std::string backend = "tcp";
  bool times() const { return !latency.empty() || bandwidth > 0 || flops > 0; }
};

std::vector<Flag> table_of(Question& q) {
  Settings& s = q.run;
  return {
      {"params", "Model", "N", "parameters of any model: 124439808, 124M, 7B (otherwise: the built-in gpt)", &q.params},
      {"units", "Model", "N", "equal units that such a model is made of", &q.units},
      {"layers", "Model", "N", "of the gpt: blocks", &s.layers},
      {"heads", "Model", "N", "of the gpt: attention heads per block", &s.heads},
      {"width", "Model", "N", "of the gpt: size of the residual stream", &s.width},
      {"context", "Model", "N", "of the gpt: longest sequence", &s.context},
      {"vocabulary", "Model", "N", "of the gpt: tokens (12: addition; 256: bytes)", &q.vocabulary},
      {"dtype", "Model", "NAME", "f32; bf16 or f16 (with f32 sums and master weights); AdamW", &s.dtype},
      {"ranks", "World", "N", "ranks", &s.ranks},
      {"strategy", "World", "NAME", "ddp, zero1, zero2, zero3 or hsdp (otherwise: all of them)", &q.strategy},
      {"mesh", "World", "AXES", "replicate=R,shard=S: shards inside groups of S ranks", &s.mesh},
      {"bucket-mb", "World", "MB", "cap of a gradient bucket", &s.bucket_mb},
      {"accumulate", "World", "N", "micro-batches per step and rank", &s.accumulate},
      {"hold-unsharded", "World", "", "sharded gradients of micro-batches travel once a step", &s.hold_unsharded},
      {"latency", "Time", "T", "of a message between two ranks: 30us, 1ms", &q.latency},
      {"bandwidth", "Time", "GBPS", "Gbit/s that a rank sends with", &q.bandwidth},
      {"flops", "Time", "X", "operations per second that a rank computes with: 4e14", &q.flops},
      {"backend", "Time", "NAME", "tcp (each sends to each), or rings: nccl, gloo, local", &q.backend},
      {"tokens", "Time", "N", "of one micro-batch on one rank", &q.tokens},
      {"json", "Output", "", "one machine-readable line", &s.json},
  };
}

int64_t read_params(const std::string& text) {
  char* end = nullptr;
  double number = std::strtod(text.c_str(), &end);
  const std::string suffix = end;
  if (suffix == "K") number *= 1e3;
  if (suffix == "M") number *= 1e6;
  if (suffix == "B") number *= 1e9;
  const bool known = suffix.empty() || suffix == "K" || suffix == "M" || suffix == "B";
  if (end == text.c_str() || !known || !(number >= 1) || number > 1e15) {
    throw UsageError("--params takes a number such as 124439808, 124M or 7B, not " + in_quotes(text));
  }
  return std::llround(number);
}

ModelShape shape_for(const Question& q) {
  if (q.params.empty()) {
    return model::shape_of({.layers = q.run.layers,
                            .heads = q.run.heads,
                            .width = q.run.width,
                            .context = q.run.context,
                            .vocabulary = q.vocabulary});
  }
  const int64_t params = read_params(q.params);
  const int64_t each = params / q.units;
  ModelShape shape;
  for (int64_t i = 0; i < q.units; ++i) shape.units.push_back(each + (i < params % q.units ? 1 : 0));
  shape.largest = each;
  return shape;
}

std::string mb(int64_t bytes) {
  if (bytes == 0) return "-";
  if (bytes >= 10'000'000) return report::human_bytes(bytes);
  char text[32];
  std::snprintf(text, sizeof(text), "%.2f MB", static_cast<double>(bytes) / 1e6);
  return text;
}

double seconds_of(const std::string& latency) {
  try {
    if (latency.find(',') != std::string::npos) throw Error("more than a time");
    return std::chrono::duration<double>(read_shape("latency=" + latency).latency).count();
  } catch (const Error&) {
    throw UsageError("--latency takes a time such as 30us or 1ms, not " + in_quotes(latency));
  }
}

Duration duration_of(const Question& q, const ModelShape& shape, const Settings& run) {
  Link link;
  if (!q.latency.empty()) link.latency = seconds_of(q.latency);
  if (q.bandwidth > 0) link.bytes_per_second = q.bandwidth * 1e9 / 8;
  link.carriage = carriage_of(q.backend);
  Load load{.tokens = static_cast<double>(q.tokens), .norm = true};
  if (q.flops > 0) load.flops = q.flops;
  return duration(shape, plan_for(run, run.ranks), link, load);
}

nlohmann::ordered_json to_json(const Duration& d) {
  return {{"compute_s", d.compute},
          {"data_s", d.data},
          {"gathers_s", d.gathers},
          {"control_s", d.control},
          {"exposed_s", d.exposed},
          {"step_s", d.step},
          {"rounds", {{"data", d.data_rounds}, {"control", d.control_rounds}}}};
}

void print_times(const Question& q, const ModelShape& shape, const std::vector<Settings>& runs) {
  std::printf("\nmilliseconds of a step, hidden or not, and what is left when computation hides what it can:\n\n");
  std::printf("  %-8s %11s %11s %11s %11s   %11s %11s\n", "strategy", "compute", "data", "gathers", "control",
              "exposed", "step");
  for (const Settings& run : runs) {
    const Duration d = duration_of(q, shape, run);
    std::printf("  %-8s %11.3f %11.3f %11.3f %11.3f   %11.3f %11.3f\n", run.strategy.c_str(), d.compute * 1e3,
                d.data * 1e3, d.gathers * 1e3, d.control * 1e3, d.exposed * 1e3, d.step * 1e3);
  }
  std::string left_out;
  for (const auto& [flag, given] :
       {std::pair{"--latency", !q.latency.empty()}, {"--bandwidth", q.bandwidth > 0}, {"--flops", q.flops > 0}}) {
    if (!given) left_out += std::string(left_out.empty() ? "" : " and ") + flag;
  }
  if (!left_out.empty()) std::printf("\n%s: not given, so what it tells of costs nothing here.\n", left_out.c_str());
}

void print(const Question& q, const ModelShape& shape, const std::vector<Settings>& runs) {
  int64_t largest = 0;
  for (const int64_t unit : shape.units) largest = std::max(largest, unit);
  std::printf("%s with %s parameters in %zu units (the largest %s) on %lld %s, %s, AdamW, bytes per rank:\n\n",
              q.params.empty() ? "gpt" : "a model", report::human_count(shape.params()).c_str(), shape.units.size(),
              report::human_count(largest).c_str(), static_cast<long long>(q.run.ranks),
              q.run.ranks == 1 ? "rank" : "ranks", q.run.dtype.c_str());
  std::printf("  %-8s %-6s %11s %11s %11s %11s   %11s %11s   %11s\n", "strategy", "mesh", "parameters", "gradients",
              "state", "together", "gathered", "buckets", "wire/step");
  for (const Settings& run : runs) {
    const Plan plan = plan_for(run, run.ranks);
    const Estimate e = estimate(shape, plan);
    const std::string mesh = std::to_string(plan.mesh.replicate) + "x" + std::to_string(plan.mesh.shard);
    std::printf("  %-8s %-6s %11s %11s %11s %11s   %11s %11s   %11s\n", run.strategy.c_str(), mesh.c_str(),
                mb(e.parameters).c_str(), mb(e.gradients).c_str(), mb(e.state).c_str(), mb(e.held()).c_str(),
                mb(e.gathered).c_str(), mb(e.buckets).c_str(), mb(e.wire).c_str());
  }
  std::printf(
      "\nmesh: replicate x shard. Gathered units and buckets come and go within a step; activations are not "
      "counted.\n");
  if (q.times()) print_times(q, shape, runs);
}

}  // namespace

Plan plan_for(const Settings& s, int64_t ranks) {
  Plan plan;
  plan.row = strategy(s.strategy);
  plan.mesh = mesh_for(s.strategy, s.mesh, ranks);
  plan.recipe = s.dtype == "f32" ? kFloat32 : kHalf;
  plan.bucket_bytes = bucket_bytes(s);
  plan.backwards = micro_batches(s, ranks);
  const bool each_time = plan.row.gradient == Placement::sharded && !s.hold_unsharded && !s.deterministic;
  plan.reductions = each_time ? plan.backwards : 1;
  return plan;
}

nlohmann::ordered_json to_json(const Estimate& e) {
  return {{"parameters", e.parameters}, {"gradients", e.gradients}, {"state", e.state}, {"held", e.held()},
          {"gathered", e.gathered},     {"buckets", e.buckets},     {"wire", e.wire}};
}

int estimate(const std::vector<std::string>& words) {
  Question q;
  q.run.ranks = 1;
  const std::vector<Flag> table = table_of(q);
  const std::string page =
      "Usage: plumb estimate [flags]\n\n"
      "Bytes that each rank holds and sends in a step, before anything runs.\n" +
      describe(table) + "  -h, --help            this page\n";
  if (parse("estimate", words, table).help) {
    std::fputs(page.c_str(), stdout);
    return 0;
  }
  if (!q.strategy.empty()) q.run.strategy = q.strategy;
  check_sizes(q.run);
  for (const auto& [flag, value, most] : {std::tuple{"ranks", q.run.ranks, int64_t{1'000'000'000}},
                                          {"units", q.units, int64_t{1'000'000}},
                                          {"tokens", q.tokens, int64_t{1'000'000'000'000}},
                                          {"vocabulary", q.vocabulary, int64_t{1'000'000'000}}}) {
    if (value < 1 || value > most) {
      throw UsageError(std::string("--") + flag + " is " + std::to_string(value) +
                       "; it must be at least 1 and at most " + std::to_string(most));
    }
  }
  for (const auto& [flag, value] : {std::pair{"bandwidth", q.bandwidth}, {"flops", q.flops}}) {
    if (value < 0) throw UsageError(std::string("--") + flag + " is negative; it must be more than 0");
  }
  if (!q.latency.empty()) seconds_of(q.latency);
  one_of("backend", q.backend, {"tcp", "nccl", "gloo", "local"});
  const ModelShape shape = shape_for(q);
  // Some twenty bytes for each of these are sent.
  if (static_cast<double>(shape.params()) * static_cast<double>(q.run.accumulate) > 1e17) {
    throw UsageError("--accumulate " + std::to_string(q.run.accumulate) + " of a model with " +
                     report::human_count(shape.params()) +
                     " parameters are more bytes than a number holds; make one of them smaller");
  }
  // Each is listed where times are told.
  if (q.times() && shape.params() / bucket_bytes(q.run) > 10'000'000) {
    std::ostringstream text;
    text << "--bucket-mb " << q.run.bucket_mb << " is too small for a model with "
         << report::human_count(shape.params()) << " parameters: its gradients would be more than ten million buckets";
    throw UsageError(text.str());
  }
  const double messages = static_cast<double>(shape.params()) / static_cast<double>(bucket_bytes(q.run)) * 4 +
                          static_cast<double>(shape.units.size()) + 1;
  if (q.times() && 4.0 * static_cast<double>(q.run.ranks) * messages * static_cast<double>(q.run.accumulate) > 9e18) {
    throw UsageError("--ranks " + std::to_string(q.run.ranks) + " and --accumulate " +
                     std::to_string(q.run.accumulate) + " make more rounds than a number holds; make one smaller");
  }
  std::vector<Settings> runs;
  for (const Strategy& row : strategies()) {
    if (!q.strategy.empty() && row.name != q.strategy) continue;
    runs.push_back(q.run);
    runs.back().strategy = row.name;
    mesh_for(row.name, q.run.mesh, q.run.ranks);
  }
  if (!q.run.json) {
    print(q, shape, runs);
    return 0;
  }
  nlohmann::ordered_json all = {{"params", shape.params()},
                                {"units", shape.units.size()},
                                {"ranks", q.run.ranks},
                                {"dtype", q.run.dtype},
                                {"estimates", nlohmann::ordered_json::array()}};
  for (const Settings& run : runs) {
    const Plan plan = plan_for(run, run.ranks);
    nlohmann::ordered_json one = {{"strategy", run.strategy},
                                  {"mesh", {{"replicate", plan.mesh.replicate}, {"shard", plan.mesh.shard}}}};
    one.update(to_json(estimate(shape, plan)));
    if (q.times()) one["time"] = to_json(duration_of(q, shape, run));
    all["estimates"].push_back(one);
  }
  std::puts(report::one_line(all).c_str());
  return 0;
}

}  // namespace plumb::cli
