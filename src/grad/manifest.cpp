#include "grad/manifest.h"

#include <ATen/MemoryOverlap.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <sstream>
#include <unordered_map>

#include "layout/digest.h"
#include "world/group.h"

namespace plumb {
namespace {

std::string describe(const at::Tensor& tensor) {
  return c10::str(tensor.scalar_type(), " ", tensor.sizes(), " with strides ", tensor.strides(), " on ",
                  c10::DeviceTypeName(tensor.device().type(), /*lower_case=*/true),
                  tensor.requires_grad() ? ", trained" : ", frozen");
}

// One line per fact, so that the first line that differs is the first difference.
std::vector<std::string> manifest(const NamedTensors& parameters, const NamedTensors& buffers,
                                  const Optimizer& optimizer, const Options& options) {
  std::vector<std::string> lines;
  lines.push_back("strategy is '" + options.strategy + "'");
  lines.push_back(c10::str("bucket caps are ", options.first_bucket_bytes, " and ", options.bucket_bytes, " bytes"));
  lines.push_back("accumulate_dtype is " + (options.accumulate_dtype ? c10::str(*options.accumulate_dtype) : "unset"));
  lines.push_back(std::string("optimizer is ") + std::array{"AdamW", "SGD", "none"}[optimizer.index()]);
  lines.push_back(c10::str("the number of parameters is ", parameters.size()));
  for (size_t i = 0; i < parameters.size(); ++i) {
    lines.push_back(c10::str("parameter ", i, " is '", parameters[i].first, "', ", describe(parameters[i].second)));
  }
  lines.push_back(c10::str("the number of buffers is ", buffers.size()));
  for (size_t i = 0; i < buffers.size(); ++i) {
    lines.push_back(c10::str("buffer ", i, " is '", buffers[i].first, "', ", describe(buffers[i].second)));
  }
  return lines;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

}  // namespace

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

void check_same_model(const World& world, const NamedTensors& parameters, const NamedTensors& buffers,
                      const Optimizer& optimizer, const Options& options) {
  if (world.size() == 1) return;
  const Where where{Where::Kind::setup, 0, 0, "the comparison of the models"};
  const std::vector<std::string> mine = manifest(parameters, buffers, optimizer, options);
  std::string text;
  for (const std::string& line : mine) text += line + '\n';
  Digest digest;
  digest.add(text);
  const int64_t word = digest.value();
  const auto digests = exchange(world, std::span(&word, 1), where);
  if (std::all_of(digests.begin(), digests.end(), [&](const auto& other) { return other[0] == word; })) return;

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
  if (world.size() > 1) {
    std::string mine;
    try {
      if (failure) std::rethrow_exception(failure);
    } catch (const std::exception& error) {
      mine = error.what();
    }
    const auto all = exchange_text(world, mine, {Where::Kind::setup, 0, 0, "the check of the model"});
    for (int rank = 0; rank < world.size() && !failure; ++rank) {
      if (!all[rank].empty()) {
        throw Error(world.rank(), "rank " + std::to_string(rank) + " could not set up its engine: " + all[rank]);
      }
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

  // Two tensors over the same bytes would be two gradients of one thing.
  std::map<const char*, std::pair<const char*, std::string>> extents;
  for (const auto& [name, parameter] : parameters) {
    if (parameter.numel() == 0 || parameter.storage().nbytes() == 0) continue;  // deferred: no memory yet
    const auto* begin = static_cast<const char*>(parameter.const_data_ptr());
    int64_t span = 1;
    for (int64_t d = 0; d < parameter.dim(); ++d) span += (parameter.size(d) - 1) * parameter.stride(d);
    const char* end = begin + span * static_cast<int64_t>(parameter.element_size());
    auto after = extents.upper_bound(begin);
    const auto overlaps = [&](const auto& it) { return it->first < end && begin < it->second.first; };
    auto clash = extents.end();
    if (after != extents.end() && overlaps(after)) clash = after;
    if (after != extents.begin() && overlaps(std::prev(after))) clash = std::prev(after);
    if (clash != extents.end()) {
      throw Error(rank, "parameters '" + clash->second.second + "' and '" + name +
                            "' share memory but are two tensors; tie weights by registering the same tensor twice");
    }
    extents[begin] = {end, name};
  }
}

}  // namespace plumb
