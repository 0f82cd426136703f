#include "grad/manifest.h"

#include <ATen/MemoryOverlap.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <span>
#include <sstream>
#include <unordered_map>

#include "layout/digest.h"
#include "world/outcome.h"

namespace plumb {
namespace {

std::string describe(const at::Tensor& tensor) {
  return c10::str(tensor.scalar_type(), " ", tensor.sizes(), " with strides ", tensor.strides(), " on ",
                  c10::DeviceTypeName(tensor.device().type(), /*lower_case=*/true),
                  tensor.requires_grad() ? ", trained" : ", frozen");
}

std::string written(bool value) { return value ? "true" : "false"; }
std::string written(double value) { return shortest(value); }
std::string written(int64_t value) { return std::to_string(value); }
std::string written(int value) { return std::to_string(value); }
std::string written(at::ScalarType value) { return c10::toString(value); }
template <class T>
std::string written(const std::optional<T>& value) {
  return value ? written(*value) : "unset";
}

using Lines = std::vector<std::string>;

template <class T>
void say(Lines& lines, const std::string& name, const T& value) {
  lines.push_back(name + " is " + written(value));
}

template <class Adams>
void say_adam(Lines& lines, const std::string& name, const Adams& adam) {
  say(lines, name + "'s lr", adam.lr);
  say(lines, name + "'s beta1", adam.beta1);
  say(lines, name + "'s beta2", adam.beta2);
  say(lines, name + "'s eps", adam.eps);
  say(lines, name + "'s weight_decay", adam.weight_decay);
}

void say_values(Lines& lines, const AdamW& adam) { say_adam(lines, "AdamW", adam); }
void say_values(Lines& lines, const Adam& adam) { say_adam(lines, "Adam", adam); }
void say_values(Lines& lines, const SGD& sgd) {
  say(lines, "SGD's lr", sgd.lr);
  say(lines, "SGD's momentum", sgd.momentum);
  say(lines, "SGD's dampening", sgd.dampening);
  say(lines, "SGD's weight_decay", sgd.weight_decay);
  say(lines, "SGD's nesterov", sgd.nesterov);
}
void say_values(Lines& lines, const RMSprop& rms) {
  say(lines, "RMSprop's lr", rms.lr);
  say(lines, "RMSprop's alpha", rms.alpha);
  say(lines, "RMSprop's eps", rms.eps);
  say(lines, "RMSprop's momentum", rms.momentum);
  say(lines, "RMSprop's weight_decay", rms.weight_decay);
  say(lines, "RMSprop's centered", rms.centered);
}
void say_values(Lines&, const NoOptimizer&) {}
void say_values(Lines&, const UserOptimizer&) {}

// All but the ledger, which each rank may keep for itself.
Lines settings(const Optimizer& optimizer, const Options& options) {
  Lines lines = {"strategy is '" + options.strategy + "'"};
  say(lines, "mesh.replicate", options.mesh.replicate);
  say(lines, "mesh.shard", options.mesh.shard);
  say(lines, "cut at parameters", options.cut == Cut::at_parameters);
  say(lines, "cut at rows", options.cut == Cut::at_rows);
  lines.push_back(c10::str("bucket caps are ", options.first_bucket_bytes, " and ", options.bucket_bytes, " bytes"));
  say(lines, "accumulate_dtype", options.accumulate_dtype);
  say(lines, "master_weights", options.master_weights);
  say(lines, "clip_norm", options.clip_norm);
  say(lines, "nonfinite", static_cast<int>(options.nonfinite));
  say(lines, "hold_unsharded", options.hold_unsharded);
  say(lines, "gather_ahead_bytes", options.gather_ahead_bytes);
  say(lines, "ask_before_gathers", options.ask_before_gathers);
  say(lines, "deterministic", options.deterministic);
  say(lines, "virtual_ranks", options.virtual_ranks);
  lines.push_back(std::string("loss_scale is ") + (options.loss_scale ? "on" : "unset"));
  if (options.loss_scale) {
    say(lines, "loss_scale.initial", options.loss_scale->initial);
    say(lines, "loss_scale.growth", options.loss_scale->growth);
    say(lines, "loss_scale.backoff", options.loss_scale->backoff);
    say(lines, "loss_scale.interval", options.loss_scale->interval);
    say(lines, "loss_scale.minimum", options.loss_scale->minimum);
    say(lines, "loss_scale.hysteresis", options.loss_scale->hysteresis);
    say(lines, "loss_scale.recovery at a good step",
        options.loss_scale->recovery == LossScale::Recovery::at_a_good_step);
    say(lines, "loss_scale.delay", options.loss_scale->delay);
  }
  say(lines, "schedule.warmup", options.schedule.warmup);
  say(lines, "schedule.total", options.schedule.total);
  say(lines, "schedule.floor", options.schedule.floor);
  lines.push_back(std::string("optimizer is ") +
                  std::array{"AdamW", "Adam", "SGD", "RMSprop", "none", "the user's own"}[optimizer.index()]);
  std::visit([&](const auto& one) { say_values(lines, one); }, optimizer);
  say(lines, "the number of groups", static_cast<int64_t>(options.groups.size()));
  for (size_t i = 0; i < options.groups.size(); ++i) {
    say(lines, c10::str("the lr of group ", i), options.groups[i].lr);
    say(lines, c10::str("the weight_decay of group ", i), options.groups[i].weight_decay);
  }
  return lines;
}

// One line per fact, so that the first line that differs is the first difference.
std::vector<std::string> manifest(const NamedTensors& parameters, const std::vector<int>& unit_of,
                                  const NamedTensors& buffers, const Optimizer& optimizer, const Options& options) {
  std::vector<std::string> lines = settings(optimizer, options);
  lines.push_back(c10::str("the number of parameters is ", parameters.size()));
  for (size_t i = 0; i < parameters.size(); ++i) {
    const std::string& name = parameters[i].first;
    const auto group = std::ranges::find_if(options.groups, [&](const auto& g) { return g.match(name); });
    const std::string in = group == options.groups.end() ? "" : c10::str(", in group ", group - options.groups.begin());
    const std::string of = unit_of[i] < 0 ? "" : c10::str(", of unit ", unit_of[i]);
    lines.push_back(c10::str("parameter ", i, " is '", name, "', ", describe(parameters[i].second), of, in));
  }
  lines.push_back(c10::str("the number of buffers is ", buffers.size()));
  for (size_t i = 0; i < buffers.size(); ++i) {
    lines.push_back(c10::str("buffer ", i, " is '", buffers[i].first, "', ", describe(buffers[i].second)));
  }
  return lines;
}

// Where the bytes of a parameter lie, from its first to behind its last.
struct Extent {
  const std::string* name;
  const at::Tensor* parameter;
  const char* begin;
  const char* end;
};

template <class Visit>
void for_each_byte(const at::Tensor& tensor, const char* at, int64_t dimension, const Visit& visit) {
  const int64_t item = tensor.element_size();
  if (dimension == tensor.dim()) {
    for (int64_t i = 0; i < item; ++i) visit(at + i);
    return;
  }
  for (int64_t i = 0; i < tensor.size(dimension); ++i) {
    for_each_byte(tensor, at + i * tensor.stride(dimension) * item, dimension + 1, visit);
  }
}

// Of tensors whose extents meet, in the order of their begins.
void check_elements(int rank, std::span<const Extent> extents, const char* end) {
  std::vector<bool> taken(end - extents[0].begin);
  for (const Extent& one : extents) {
    for_each_byte(*one.parameter, one.begin, 0, [&](const char* byte) {
      if (!taken[byte - extents[0].begin]) {
        taken[byte - extents[0].begin] = true;
        return;
      }
      for (const Extent& other : extents) {
        for_each_byte(*other.parameter, other.begin, 0, [&](const char* same) {
          if (same != byte) return;
          throw Error(rank, "parameters '" + *other.name + "' and '" + *one.name +
                                "' share memory but are two tensors; tie weights by registering the same tensor twice");
        });
      }
    });
  }
}

// Two tensors over the same bytes would be two gradients of one thing. Tensors that lie between each other (every second
// column) only look like it: where extents meet, elements are compared.
void check_memory(int rank, const NamedTensors& parameters) {
  std::vector<Extent> extents;
  for (const auto& [name, parameter] : parameters) {
    if (parameter.numel() == 0 || parameter.storage().nbytes() == 0) continue;  // deferred: no memory yet
    const auto* begin = static_cast<const char*>(parameter.const_data_ptr());
    int64_t span = 1;
    for (int64_t d = 0; d < parameter.dim(); ++d) span += (parameter.size(d) - 1) * parameter.stride(d);
    extents.push_back({&name, &parameter, begin, begin + span * parameter.element_size()});
  }
  std::stable_sort(extents.begin(), extents.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
  for (size_t first = 0; first < extents.size();) {
    const char* end = extents[first].end;
    size_t last = first + 1;
    for (; last < extents.size() && extents[last].begin < end; ++last) end = std::max(end, extents[last].end);
    if (last - first > 1) check_elements(rank, std::span(extents).subspan(first, last - first), end);
    first = last;
  }
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

}  // namespace

std::string shortest(double value) {
  std::array<char, 32> text;
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr};
}

int64_t digest_of(const at::Tensor& tensor) {
  at::NoGradGuard no_grad;
  const at::Tensor values = tensor.detach().cpu().contiguous();
  const auto* words = static_cast<const char*>(values.const_data_ptr());
  const size_t bytes = values.nbytes();
  Digest digest;
  size_t at = 0;
  for (; at + sizeof(uint64_t) <= bytes; at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, words + at, sizeof word);
    digest.add(word);
    digest.add(word >> 32);
  }
  digest.add(std::span(words + at, bytes - at));
  return digest.value();
}

void check_same_model(const World& world, const NamedTensors& parameters, const std::vector<int>& unit_of,
                      const NamedTensors& buffers, const Optimizer& optimizer, const Options& options) {
  if (world.size() == 1) return;
  const Where where{Where::Kind::setup, 0, 0, "the comparison of the models"};
  const std::vector<std::string> mine = manifest(parameters, unit_of, buffers, optimizer, options);
  std::string text;
  for (const std::string& line : mine) text += line + '\n';
  Digest digest;
  digest.add(text);
  const int64_t word = digest.value();
  const Group::Combined said = control_group(world).combine(std::span(&word, 1), {}, where);
  if (said.any == said.every) return;  // who differs, and in what, is asked for only now

  const std::vector<std::string> texts = exchange_text(world, text, where);
  const std::vector<std::string> first = split(texts[0]);
  for (int rank = 1; rank < world.size(); ++rank) {
    const std::vector<std::string> other = split(texts[rank]);
    if (other == first) continue;
    const auto [here, there] = std::mismatch(first.begin(), first.end(), other.begin(), other.end());
    const std::string nothing = "there is nothing";
    throw Error(world.rank(), "the ranks built different models: " + (there == other.end() ? nothing : *there) +
                                  " on rank " + std::to_string(rank) + ", where " +
                                  (here == first.end() ? nothing : *here) +
                                  " on rank 0; every rank must build the same model with the same options");
  }
}

void check_together(const World& world, std::exception_ptr failure) {
  const Where where{Where::Kind::setup, 0, 0, "the check of the model"};
  const int64_t word = failure ? 1 : 0;
  // Who failed, and why, is asked for only when somebody did.
  if (world.size() > 1 && control_group(world).combine(std::span(&word, 1), {}, where).any[0] != 0) {
    try {
      share_outcome(world, attempt([&] {
                      if (failure) std::rethrow_exception(failure);
                      return std::string();
                    }),
                    where);
    } catch (const RankFailed& theirs) {
      if (failure) std::rethrow_exception(failure);
      throw Error(world.rank(), "rank " + std::to_string(theirs.rank) + " could not set up its engine: " + theirs.why);
    }
  }
  if (failure) std::rethrow_exception(failure);
}

void check_model(int rank, const NamedTensors& parameters) {
  std::unordered_map<const void*, std::string> seen;
  std::unordered_map<std::string, int> names;
  std::optional<at::Device> device;
  bool trainable = false;
  for (const auto& [name, parameter] : parameters) {
    if (!parameter.defined()) throw Error(rank, "parameter '" + name + "' is undefined");
    if (++names[name] > 1) throw Error(rank, "two parameters are called '" + name + "'; names must differ");
    if (!parameter.is_leaf()) {
      throw Error(rank,
                  "parameter '" + name + "' is the result of an operation, not a leaf; register the leaf instead");
    }
    if (parameter.is_inference()) {
      throw Error(rank, "parameter '" + name +
                            "' was made under InferenceMode and can never be trained; build the model outside of it");
    }
    if (parameter.layout() != at::kStrided) {
      throw Error(rank, c10::str("parameter '", name, "' has layout ", parameter.layout(),
                                 "; only dense parameters can be "
                                 "trained"));
    }
    if (at::has_internal_overlap(parameter) == at::MemOverlap::Yes) {
      throw Error(rank, c10::str("parameter '", name,
                                 "' uses the same memory for several of its elements (an expanded tensor, sizes ",
                                 parameter.sizes(), ", strides ", parameter.strides(), "); register a clone of it"));
    }
    if (device && parameter.device() != *device) {
      throw Error(rank, c10::str("parameter '", name, "' is on ", parameter.device(), ", the ones before it are on ",
                                 *device, "; a rank's parameters must be on one device"));
    }
    device = parameter.device();
    trainable = trainable || parameter.requires_grad();
  }
  if (parameters.empty()) throw Error(rank, "the model has no parameters");
  if (!trainable) throw Error(rank, "the model has nothing to train: no parameter requires a gradient");

  check_memory(rank, parameters);
}

}  // namespace plumb
