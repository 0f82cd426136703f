// The digest of a model.
#include "cli/digest.h"

#include <torch/torch.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstdio>
#include <map>
#include <memory>

namespace plumb::cli {

std::string model_digest(Engine& engine, const torch::nn::Module& model) {
  torch::NoGradGuard no_grad;
  std::map<std::string, at::Tensor> by_name;
  for (const auto& item : model.named_parameters()) by_name.emplace(item.key(), item.value());
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(), &XXH3_freeState);
  XXH3_128bits_reset(state.get());
  // Neighbours by name mostly share a unit: it stays gathered from one to the next.
  std::unique_ptr<Gathered> scope;
  for (const auto& [name, parameter] : by_name) {
    scope = std::make_unique<Gathered>(engine, std::vector<at::Tensor>{parameter}, Access::read);
    const auto bits = parameter.to(at::kCPU, at::kFloat).contiguous();
    XXH3_128bits_update(state.get(), bits.data_ptr(), bits.nbytes());
  }
  const XXH128_hash_t hash = XXH3_128bits_digest(state.get());
  char hex[33];
  std::snprintf(hex, sizeof(hex), "%016llx%016llx", static_cast<unsigned long long>(hash.high64),
                static_cast<unsigned long long>(hash.low64));
  return hex;
}

}  // namespace plumb::cli
