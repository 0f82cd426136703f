// In deterministic mode a run ends with the same bits on whatever worlds, and under whatever strategies, its parts were trained.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include "libtorch.h"

#include "save/support/folder.h"
#include "save/support/trained.h"

namespace plumb {
namespace {

using namespace test;

constexpr int kShares = 12;  // of a step's batch: 3 on each of 4 ranks, so that the tree of their sums is uneven

// Gradients whose sums are rounded, so that their order matters.
void train_shares(Engine& engine, Model& model, const World& world, int64_t steps, at::ScalarType dtype) {
  const std::vector<at::Tensor> parameters = model.parameters();
  const int mine = kShares / world.size();
  for (int64_t i = 0; i < steps; ++i) {
    for (int share = world.rank() * mine; share < (world.rank() + 1) * mine; ++share) {
      std::vector<at::Tensor> gradients;
      for (size_t p = 0; p < parameters.size(); ++p) {
        const auto seed = static_cast<uint64_t>((engine.steps() * kShares + share) * 100 + static_cast<int64_t>(p));
        gradients.push_back(p == 1 ? at::Tensor() : noise(parameters[p].sizes(), seed));
      }
      engine.backward((model.loss(gradients) / mine).to(dtype));  // the mean of this rank's shares
    }
    model.running.add_(1.5);
    engine.step();
    engine.zero_grad();
  }
}

struct Stop {
  int ranks;
  std::string strategy;
  std::string name() const { return strategy + " on " + std::to_string(ranks); }
};

std::vector<Stop> stops() {
  std::vector<Stop> all;
  for (const int ranks : {1, 2, 4}) {  // a tree cannot be cut into three
    for (const char* strategy : {"ddp", "zero1", "zero2", "zero3", "hsdp"}) all.push_back({ranks, strategy});
  }
  return all;
}

class WholeRun : public testing::TestWithParam<at::ScalarType> {
 protected:
  // Trains some steps from where `from` was saved (empty: from the beginning), and saves to `to`.
  void goes(const Stop& stop, const std::vector<std::string>& from, const std::string& to, int64_t steps,
            std::vector<Everything>& ends) const {
    const at::ScalarType dtype = GetParam();
    Options options;
    options.strategy = stop.strategy;
    options.bucket_bytes = options.first_bucket_bytes = 300;
    options.deterministic = true;
    options.virtual_ranks = kShares;
    options.clip_norm = 3.0;
    if (dtype != at::kFloat) options.accumulate_dtype = at::kFloat;
    run_local(stop.ranks, [&](World world) {
      Model model(from.empty() ? 3 : 4, dtype);
      Engine engine(world, model, AdamW{.lr = 0.05}, options);
      for (size_t i = 0; i < std::max<size_t>(1, from.size()); ++i) {
        if (!from.empty()) engine.load(from[i]);
        train_shares(engine, model, world, steps, dtype);
        ends[i].add(engine);
        world.barrier();
        if (!to.empty()) engine.save(to);
      }
    });
  }
};

// From every world and strategy to every other.
TEST_P(WholeRun, EndsWithTheSameBitsByEveryPath) {
  const Scratch scratch;
  std::vector<Everything> undisturbed(1);
  goes({1, "ddp"}, {}, "", 3, undisturbed);
  std::vector<std::string> saved;
  for (const Stop& stop : stops()) {
    std::vector<Everything> then(1);
    saved.push_back(scratch.path(stop.name()));
    goes(stop, {}, saved.back(), 2, then);
  }
  for (const Stop& stop : stops()) {
    std::vector<Everything> ends(saved.size());
    goes(stop, saved, "", 1, ends);
    for (size_t i = 0; i < ends.size(); ++i) {
      ASSERT_EQ(undisturbed[0].difference(ends[i]), "") << stops()[i].name() << ", then " << stop.name();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Numbers, WholeRun, testing::Values(at::kFloat, at::kBFloat16),
                         [](const auto& info) { return std::string(info.param == at::kFloat ? "f32" : "bf16"); });

}  // namespace
}  // namespace plumb
