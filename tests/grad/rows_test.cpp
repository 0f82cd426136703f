// Parameters of units that are cut at rows: each rank has those that torch.chunk would give it, whatever the shape, and gradients and
// updates follow.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "engine/impl.h"
#include "plumb/plumb.h"

namespace plumb {
namespace {

struct Shaped : torch::nn::Module {
  Shaped() {
    const std::vector<std::vector<int64_t>> shapes = {{1},    {2},    {5},    {9}, {4, 3}, {7, 2, 3},
                                                      {1, 8}, {0, 4}, {3, 0}, {},  {6, 1}};
    for (const auto& shape : shapes) {
      const int64_t count = c10::multiply_integers(shape);
      weights.push_back(
          register_parameter("w" + std::to_string(weights.size()), at::arange(count, at::kFloat).view(shape)));
    }
    weights.push_back(register_parameter("turned", at::arange(10, at::kFloat).view({5, 2}).t()));
  }
  at::Tensor forward(int rank) {
    at::Tensor loss = at::zeros({});
    for (const at::Tensor& w : weights) {
      loss = loss + (w * at::arange(w.numel(), at::kFloat).view(w.sizes()).add(rank)).sum();
    }
    return loss;
  }
  std::vector<at::Tensor> weights;
};

struct Holder : torch::nn::Module {
  Holder() { unit = register_module("unit", std::make_shared<Shaped>()); }
  Unit<Shaped> unit{nullptr};
};

// In the order of their memory: of a turned one, columns.
at::Tensor rows_of(const at::Tensor& whole, int rank, int ranks) {
  const at::Tensor laid = whole.dim() == 2 && whole.stride(0) < whole.stride(1) ? whole.t() : whole;
  if (laid.dim() == 0) return rank == 0 ? laid.reshape(-1) : at::empty({0});
  const int64_t each = (laid.size(0) + ranks - 1) / ranks;
  const int64_t begin = std::min(each * rank, laid.size(0)), end = std::min(begin + each, laid.size(0));
  return laid.narrow(0, begin, end - begin).reshape(-1);
}

TEST(Rows, OfAUnitsParametersAreWhatTorchsChunkGives) {
  for (const int ranks : {2, 3, 4}) {
    run_local(ranks, [&](World world) {
      Holder model, plain;
      Engine engine(world, model, SGD{.lr = 1}, {.strategy = "zero3", .cut = Cut::at_rows});
      std::map<std::string, at::Tensor> wanted;
      for (const auto& item : plain.named_parameters()) wanted[item.key()] = item.value().detach();
      const auto compare = [&](const std::string& when) {
        for (const auto& [name, shard] : engine.shards()) {
          const at::Tensor rows = rows_of(wanted.at(name), world.rank(), ranks);
          EXPECT_TRUE(shard.sizes() == rows.sizes() && shard.allclose(rows)) << name << " of " << ranks << when;
        }
      };
      compare("");
      EXPECT_EQ(engine.shards().size(), wanted.size());
      for (const Bucket& bucket : engine.impl().reducer->buckets()) {
        EXPECT_EQ(bucket.sinks.size(), 1u) << "each alone";
        EXPECT_LE(bucket.numel,
                  ranks * std::max<int64_t>(rows_of(wanted.at(bucket.sinks[0]->name), 0, ranks).numel(), 1));
      }
      model.unit->forward(world.rank()).backward();
      engine.step();
      const double mean = (ranks - 1) / 2.0;
      for (auto& [name, value] : wanted) {
        value = at::empty_like(value).copy_(value - at::arange(value.numel(), at::kFloat).view(value.sizes()) - mean);
      }
      compare(", after a step");
    });
  }
}

}  // namespace
}  // namespace plumb
