// Ranks that run out of inputs at different times, whatever the others do: each pass adds what those bring who are still there.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

#include "engine/impl.h"
#include "engine/support/plain.h"
#include "plumb/plumb.h"

namespace plumb {
namespace {

using namespace test;

class AbsenceIn : public testing::TestWithParam<std::string> {};

// Drawn: who leaves when, what each backward reaches on which rank, whether it is reduced, whether gradients are cleared
// before it, in many buckets or one, whether they have a graph of their own, and whether sums are divided by all ranks or
// by those who are there.
TEST_P(AbsenceIn, EveryPassAddsWhatThoseBringWhoAreThere) {
  for (uint64_t seed = 1; seed <= 40 && !HasFailure(); ++seed) {
    Draw plan(seed);
    const int ranks = static_cast<int>(plan.whole(2, 4));
    std::vector<int64_t> leaves;  // by rank: after so many backwards; rank 0 stays
    for (int rank = 0; rank < ranks; ++rank) leaves.push_back(rank == 0 ? 6 : plan.whole(0, 5));
    const int64_t bucket_bytes = plan.of<int64_t>({100, 4 << 20});
    run_local(ranks, [&](World world) {
      SCOPED_TRACE(c10::str("seed ", seed, ", rank ", world.rank(), " of ", ranks));
      Draw draw(seed + 1000);  // the same on every rank
      const std::vector<std::vector<int64_t>> shapes = {{7}, {30}, {}, {3, 5}, {0}, {16}};
      std::vector<at::Tensor> parameters, wanted(shapes.size());
      NamedTensors named;
      for (const auto& shape : shapes) {
        parameters.push_back(at::zeros(shape, at::kDouble).requires_grad_());
        named.emplace_back(c10::str("p", named.size()), parameters.back());
      }
      Engine engine(world, named, {}, NoOptimizer{},
                    {.strategy = GetParam(), .bucket_bytes = bucket_bytes, .first_bucket_bytes = bucket_bytes});
      Reducer& reducer = *engine.impl().reducer;
      std::vector<at::Tensor> waiting(shapes.size());  // the sum of what was not reduced yet
      std::vector<bool> holds_own(static_cast<size_t>(ranks));
      const auto add = [](at::Tensor& sum, const at::Tensor& more) { sum = sum.defined() ? sum + more : more; };
      for (int64_t pass = 0; pass < 6; ++pass) {
        SCOPED_TRACE(c10::str("pass ", pass));
        const auto is_there = [&](int rank) { return pass < leaves[static_cast<size_t>(rank)]; };
        int there = 0;
        for (int rank = 0; rank < ranks; ++rank) there += is_there(rank) ? 1 : 0;
        bool left_with_own = false, held = false;
        for (int rank = 0; rank < ranks; ++rank) {
          held = held || holds_own[static_cast<size_t>(rank)];
          left_with_own = left_with_own || (!is_there(rank) && holds_own[static_cast<size_t>(rank)]);
        }
        const int divisor = draw.one_in(2) || left_with_own ? ranks : there;
        reducer.divide_by(divisor);
        const bool holds = pass < 5 && draw.one_in(3);
        const bool clears = draw.one_in(3) && !held, graphs = draw.one_in(3) && !holds;
        SCOPED_TRACE(
            c10::str("there ", there, ", divisor ", divisor, ", holds ", holds, ", held ", held, ", clears ", clears));
        if (clears) {
          for (at::Tensor& one : wanted) one.reset();
          if (is_there(world.rank())) engine.zero_grad();
        }
        at::Tensor loss;
        for (size_t i = 0; i < parameters.size(); ++i) {
          const bool reached = !draw.one_in(3);
          for (int rank = 0; rank < ranks; ++rank) {
            const bool uses = reached && !draw.one_in(3);
            const at::Tensor gradient = noise(shapes[i], draw.whole(0, 1 << 20));
            if (!uses || !is_there(rank)) continue;
            add(waiting[i], gradient);
            if (rank != world.rank()) continue;
            const at::Tensor part = (parameters[i] * gradient).sum();
            loss = loss.defined() ? loss + part : part;
          }
        }
        for (int rank = 0; rank < ranks; ++rank) {
          const auto r = static_cast<size_t>(rank);
          holds_own[r] = holds && (holds_own[r] || is_there(rank));
        }
        std::optional<NoSync> no_sync;
        if (holds) no_sync.emplace(engine);
        if (!holds) {
          for (size_t i = 0; i < wanted.size(); ++i) {
            if (waiting[i].defined()) add(wanted[i], waiting[i] / divisor);
            waiting[i].reset();
          }
        }
        if (!is_there(world.rank())) {
          std::vector<at::Tensor> before;
          for (const at::Tensor& parameter : parameters) before.push_back(parameter.grad());
          reducer.sit_out();
          if (left_with_own) continue;
          for (size_t i = 0; i < parameters.size(); ++i) {
            EXPECT_EQ(parameters[i].grad().defined(), before[i].defined()) << i;
            EXPECT_TRUE(!before[i].defined() || parameters[i].grad().is_same(before[i])) << i << ": the user's own";
          }
          continue;
        }
        if (graphs && loss.defined()) {
          // Gradients that have a graph of their own keep their tensors.
          (loss * at::ones({}, at::kDouble).requires_grad_())
              .backward({}, /*retain_graph=*/false, /*create_graph=*/true);
        } else {
          engine.backward(loss);
        }
        if (holds) continue;
        for (size_t i = 0; i < parameters.size(); ++i) {
          const at::Tensor& found = parameters[i].grad();
          ASSERT_EQ(found.defined(), wanted[i].defined()) << i;
          if (found.defined()) {
            EXPECT_LT(distance(found, wanted[i]), 1e-12) << i;
          }
        }
      }
    });
  }
}

// A gradient whose bucket is wider than its leaf asks for lies beside the bucket, on the absent rank as on the others.
TEST_P(AbsenceIn, TheMeanThatTheOthersAddToIsAsItWasBesideAWiderNeighbour) {
  run_local(2, [](World world) {
    at::Tensor a = at::zeros({7}).requires_grad_(), b = at::zeros({3}).requires_grad_();
    Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, NoOptimizer{}, {.strategy = GetParam()});
    (a.sum() + b.sum()).backward();  // their bucket is laid out for the last time
    engine.zero_grad();
    b.set_grad_dtype(at::kDouble);
    double wanted = 1.5;
    ((a.sum() + b.sum()) * (1.0 + world.rank())).backward();
    EXPECT_EQ(engine.impl().reducer->buckets()[0].dtype, at::kDouble);
    for (int pass = 0; pass < 3; ++pass) {
      if (world.rank() == 1) {
        engine.impl().reducer->sit_out();
        continue;
      }
      ((a.sum() + b.sum()) * 4).backward();
      wanted += 2;
      for (const at::Tensor& one : {a, b}) EXPECT_TRUE(one.grad().eq(wanted).all().item<bool>()) << one.grad();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Strategies, AbsenceIn, testing::Values("ddp", "zero1"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace plumb
