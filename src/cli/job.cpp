#include "cli/job.h"

#include <torch/torch.h>

#include <limits>

namespace plumb::cli {

at::Device device_of(const Settings& s, const World& world) {
  if (s.device != "cuda") return at::Device(at::kCPU);
  return {at::kCUDA, static_cast<c10::DeviceIndex>(world.local_rank() % torch::cuda::device_count())};
}

model::Gpt build_model(const Settings& s, int64_t vocabulary, const at::Device& device) {
  model::Gpt model(model::GptSize{.layers = s.layers,
                                  .heads = s.heads,
                                  .width = s.width,
                                  .context = s.context,
                                  .vocabulary = vocabulary,
                                  .experts = s.model == "moe" ? s.experts : 0,
                                  .top_k = s.top_k},
                   static_cast<uint64_t>(s.seed));
  model->to(device, s.dtype == "bf16" ? at::kBFloat16 : s.dtype == "f16" ? at::kHalf : at::kFloat);
  if (s.dtype != "f32") model->sum_experts_in(at::kFloat);
  if (s.recompute) model->recompute_blocks();
  return model;
}

AdamW optimizer_of(const Settings& s) { return {.lr = s.lr, .beta2 = 0.99, .weight_decay = s.weight_decay}; }

Options engine_options(const Settings& s) {
  Options options;
  options.strategy = s.strategy;
  options.mesh = read_mesh(s.mesh);
  options.hold_unsharded = s.hold_unsharded;
  options.deterministic = s.deterministic;
  options.virtual_ranks = static_cast<int>(s.virtual_ranks);
  options.bucket_bytes = bucket_bytes(s);
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

Job::Job(const Settings& s, const model::Task& task, Engine& engine, model::Gpt model)
    : task_(task), engine_(engine), model_(std::move(model)), device_(device_of(s, engine.world())), batch_(s.batch),
      micros_(micro_batches(s, engine.world().size())), micro_(s.batch / (engine.world().size() * micros_)) {}

model::Batch Job::batch(int64_t samples, int rank, int64_t micro) const {
  const model::Batch batch = task_.batch(samples / batch_, (rank * micros_ + micro) * micro_, micro_);
  return {batch.input.to(device_), batch.target.to(device_)};
}

std::vector<model::Batch> Job::batches(int64_t samples) const {
  std::vector<model::Batch> all;
  for (int64_t i = 0; i < micros_; ++i) all.push_back(batch(samples, engine_.world().rank(), i));
  return all;
}

at::Tensor Job::share_of(const at::Tensor& loss) const { return engine_.scale(loss / static_cast<double>(micros_)); }

double Job::run(const model::Batch& batch, int64_t micro) { return backward(batch, micro).item<double>(); }

at::Tensor Job::backward(const model::Batch& batch, int64_t micro) {
  timeline_of(engine_.world()).enter(doing::forward);
  const at::Tensor one = loss(batch);
  if (micro + 1 < micros_) {
    const auto quiet = engine_.no_sync();
    share_of(one).backward();
  } else {
    share_of(one).backward();
  }
  return one.detach();
}

}  // namespace plumb::cli
