// What this program was built with and what it finds.
#include "cli/info.h"

#include <torch/torch.h>
#include <torch/version.h>
#include <nlohmann/json.hpp>

#include <dlfcn.h>

#include <cstdio>

#include "cli/process.h"
#include "cli/settings.h"
#include "plumb/strategy.h"

namespace plumb::cli {

namespace {

// Whether libtorch, as loaded, carries NCCL: asked of the loader, so that one program serves every wheel.
bool has_nccl() { return torch::cuda::is_available() && dlsym(RTLD_DEFAULT, "ncclGetVersion") != nullptr; }

}  // namespace

int info(const std::vector<std::string>& words) {
  bool json = false;
  for (const auto& word : words) {
    if (word == "--json") {
      json = true;
    } else if (word == "--help" || word == "-h") {
      std::puts("Usage: plumb info [--json]\n\nVersions, devices and backends.");
      return 0;
    } else {
      throw UsageError("unknown argument " + in_quotes(word) + "; `plumb info` takes --json only");
    }
  }
  nlohmann::ordered_json all;
  all["plumb"] = PLUMB_VERSION;
  all["torch"] = TORCH_VERSION;
  all["compiler"] = std::string("g++ ") + __VERSION__;
  all["cores"] = usable_cores();
  all["devices"] = {"cpu"};
  const auto gpus = torch::cuda::is_available() ? static_cast<int64_t>(torch::cuda::device_count()) : 0;
  for (int64_t i = 0; i < gpus; ++i) all["devices"].push_back("cuda:" + std::to_string(i));
  all["backends"] = {"shm", "tcp", "gloo", "local"};
  if (has_nccl()) all["backends"].push_back("nccl");
  for (const auto& row : strategies()) all["strategies"].push_back(row.name);
  if (json) {
    std::puts(all.dump().c_str());
    return 0;
  }
  for (const auto& [key, value] : all.items()) {
    std::string text;
    if (value.is_array()) {
      for (const auto& item : value) text += (text.empty() ? "" : ", ") + item.get<std::string>();
    } else {
      text = value.is_string() ? value.get<std::string>() : value.dump();
    }
    std::printf("%-11s %s\n", key.c_str(), text.c_str());
  }
  return 0;
}

}  // namespace plumb::cli
