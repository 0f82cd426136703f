// A backend at its worst: what a collective gives is there when it was waited for, and is no number before. Whoever uses it without
// waiting, or forgets one of several, has other bits than over a backend that is quick.
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cmath>

#include "engine/impl.h"
#include "engine/support/plain.h"
#include "world/world_impl.h"

namespace plumb {
namespace {

using namespace test;

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct LateWork final : c10d::Work {
  bool wait(std::chrono::milliseconds limit) override {
    inner->wait(limit);
    const at::NoGradGuard no_grad;
    for (const auto& [to, from] : std::exchange(arriving, {})) to.copy_(from);
    arrived = true;
    return true;
  }
  bool isCompleted() override { return arrived; }

  WorkPtr inner;
  std::vector<std::pair<at::Tensor, at::Tensor>> arriving;
  std::atomic<bool> arrived = false;
};

class Late final : public c10d::Backend {
 public:
  explicit Late(c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  const std::string getBackendName() const override { return "late"; }
  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    return later(tensors, [&](std::vector<at::Tensor>& own) { return inner_->allreduce(own, options); });
  }
  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    return later(tensors, [&](std::vector<at::Tensor>& own) { return inner_->broadcast(own, options); });
  }
  WorkPtr _allgather_base(at::Tensor& full, at::Tensor& shard, const c10d::AllgatherOptions& options) override {
    at::Tensor mine = shard.clone();
    return later({full}, [&](std::vector<at::Tensor>& own) { return inner_->_allgather_base(own[0], mine, options); });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& shard, at::Tensor& full,
                               const c10d::ReduceScatterOptions& options) override {
    at::Tensor mine = full.clone();
    return later({shard},
                 [&](std::vector<at::Tensor>& own) { return inner_->_reduce_scatter_base(own[0], mine, options); });
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override {
    at::Tensor mine = input.clone();
    return later({output}, [&](std::vector<at::Tensor>& own) {
      return inner_->alltoall_base(own[0], mine, output_splits, input_splits, options);
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override { return inner_->barrier(options); }

 private:
  static WorkPtr later(const std::vector<at::Tensor>& outputs,
                       const std::function<WorkPtr(std::vector<at::Tensor>& own)>& call) {
    const at::NoGradGuard no_grad;
    const auto work = c10::make_intrusive<LateWork>();
    std::vector<at::Tensor> own;
    for (const at::Tensor& output : outputs) {
      own.push_back(output.clone());
      work->arriving.emplace_back(output, own.back());
      output.fill_(output.is_floating_point() || output.is_complex() ? NAN : 77);
    }
    work->inner = call(own);
    return work;
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
};

// The first engine of this world is carried late; what the host tells comes as ever.
void carry_late(const World& world) {
  const auto late = [](std::shared_ptr<Group::Impl> group) {
    group->backend = c10::make_intrusive<Late>(group->backend);
    return group;
  };
  World::Impl& impl = world.impl();
  late(impl.data);
  impl.part = [late, before = impl.part](const std::string& name, const std::vector<int>& members, int rank,
                                         int index) {
    const auto group = before(name, members, rank, index);
    return index == data_index ? late(group) : group;
  };
}

using Way = std::tuple<std::string, const char*>;  // a strategy, and what else there is to it

class LateIn : public testing::TestWithParam<Way> {};

TEST_P(LateIn, NothingIsUsedBeforeItWasWaitedFor) {
  const auto& [strategy, kind] = GetParam();
  const int ranks = strategy == "hsdp" ? 4 : 2;
  Options options{.strategy = strategy, .clip_norm = 0.5};
  options.bucket_bytes = options.first_bucket_bytes = 100;  // more of them than are on their way at a time
  options.ask_before_gathers = std::string(kind) == "asking";
  options.deterministic = std::string(kind) == "deterministic";
  options.virtual_ranks = 2 * ranks;
  const auto train = [&](bool is_late) {
    std::vector<std::vector<at::Tensor>> by_rank(ranks);
    run_local(ranks, [&](World world) {
      if (is_late) carry_late(world);
      Parts model(9);
      model.register_buffer("count", at::full({3}, 1.0 + world.rank()));
      Engine engine(world, model, AdamW{.lr = 0.1}, options);
      std::vector<at::Tensor>& found = by_rank[world.rank()];
      const auto note = [&](const at::Tensor& value) {
        if (value.defined()) found.push_back(value.detach().clone());
      };
      for (int step = 0; step < 3; ++step) {
        for (int micro = 0; micro < 2; ++micro) {
          const std::optional<NoSync> quiet =
              step == 1 && micro == 0 ? std::optional<NoSync>(std::in_place, engine) : std::nullopt;
          std::vector<at::Tensor> gradients;
          for (const at::Tensor& one : ones(1)) {
            gradients.push_back(noise(one.sizes(), 100 * step + 10 * micro + world.rank()));
          }
          engine.backward(model.loss(gradients));
          if (options.deterministic || quiet) continue;
          note(engine.grad_norm());
          for (const at::Tensor& parameter : model.parameters()) note(engine.full_gradient(parameter));
        }
        note(engine.step().grad_norm);
        engine.zero_grad();
        for (const at::Tensor& parameter : model.parameters()) note(engine.full_parameter(parameter));
        for (const at::Tensor& buffer : model.buffers()) note(buffer);
      }
    });
    return by_rank;
  };
  const auto quick = train(false), late = train(true);
  for (int rank = 0; rank < ranks; ++rank) {
    ASSERT_EQ(late[rank].size(), quick[rank].size());
    EXPECT_GT(quick[rank].size(), 30U);
    for (size_t i = 0; i < quick[rank].size(); ++i) {
      EXPECT_TRUE(late[rank][i].equal(quick[rank][i])) << "value " << i << " of rank " << rank << ": " << late[rank][i];
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, LateIn,
                         testing::Combine(testing::Values("ddp", "zero1", "zero2", "zero3", "hsdp"),
                                          testing::Values("plain", "asking", "deterministic")),
                         [](const auto& info) { return std::get<0>(info.param) + "_" + std::get<1>(info.param); });

}  // namespace
}  // namespace plumb
