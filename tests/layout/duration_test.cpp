// How long a step takes by the formula: what it must come to at its edges, and what may grow with the ranks.
#include "layout/duration.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cmath>
#include <functional>

namespace plumb {
namespace {

const ModelShape kModel{.units = std::vector<int64_t>(10, 100'000'000), .others = 0, .largest = 10'000'000};

Plan plan_of(const std::string& name, int ranks) {
  const Strategy& row = strategy(name);
  return {.row = row, .mesh = mesh_of(row, {}, ranks), .recipe = kFloat32};
}

TEST(Duration, OnOneRankIsComputeAlone) {
  const Load load{.flops = 1e12, .tokens = 1000};
  for (const Strategy& row : strategies()) {
    const Duration found = duration(kModel, plan_of(row.name, 1), {.latency = 1, .bytes_per_second = 1}, load);
    EXPECT_DOUBLE_EQ(found.step, 6.0 * 1e9 * 1000 / 1e12) << row.name;
    EXPECT_EQ(found.exposed, 0) << row.name;
  }
}

TEST(Duration, OverLinksThatCostNothingIsComputeAlone) {
  for (const Strategy& row : strategies()) {
    const Duration found = duration(kModel, plan_of(row.name, 64), {}, {.flops = 1e12, .tokens = 1000});
    EXPECT_NEAR(found.step, 6.0, 1e-9) << row.name;
  }
}

// Bytes alone: 2(N-1)/N of all gradients for ddp, the same for zero2, and half as much again for zero3 without a window.
TEST(Duration, WithoutComputeIsWhatTravels) {
  const Link link{.latency = 0, .bytes_per_second = 1e9};
  const Load load{.gather_ahead_bytes = 0};
  EXPECT_NEAR(duration(kModel, plan_of("ddp", 4), link, load).step, 2 * 0.75 * 4, 1e-9);
  EXPECT_NEAR(duration(kModel, plan_of("zero1", 4), link, load).step, 3 * 0.75 * 4, 1e-9);
  EXPECT_NEAR(duration(kModel, plan_of("zero2", 4), link, load).step, 2 * 0.75 * 4, 1e-9);
  EXPECT_NEAR(duration(kModel, plan_of("zero3", 4), link, load).step, 3 * 0.75 * 4 - 0.75 * 0.4, 1e-9);  // one stays
}

TEST(Duration, HidesBehindTheBackwardWhatFitsThere) {
  const Load load{.flops = 1e12, .tokens = 3000};  // 6 s forwards, 12 s backwards
  const Duration found = duration(kModel, plan_of("ddp", 4), {.bytes_per_second = 1e9}, load);
  EXPECT_NEAR(found.data, 6, 1e-9);
  EXPECT_NEAR(found.exposed, 1.5 * (4'000'000'000 % (4 << 20)) / 1e9, 1e-9);  // the last bucket
  EXPECT_NEAR(duration(kModel, plan_of("ddp", 4), {.bytes_per_second = 0.4e9}, load).exposed, 15 - 12, 1e-9);
}

TEST(Duration, HostMessagesGrowWithTheLogarithm) {
  EXPECT_EQ(rounds_of_control(1), 0);
  EXPECT_EQ(rounds_of_control(2), 1);
  EXPECT_EQ(rounds_of_control(3), 3);
  EXPECT_EQ(rounds_of_control(1024), 10);
  EXPECT_EQ(rounds_of_control(1025), 12);
  const Duration small = duration(kModel, plan_of("zero3", 64), {.latency = 1e-3}, {});
  const Duration large = duration(kModel, plan_of("zero3", 4096), {.latency = 1e-3}, {});
  EXPECT_NEAR(small.control, 2 * 6e-3, 1e-12);
  EXPECT_NEAR(large.control, 2 * 12e-3, 1e-12);
}

// The page's table once more (docs/scale.md), for any model, mesh and load, over links of which now the latency, now the
// bandwidth, now neither counts.
TEST(Duration, IsThatOfAPlainRecomputation) {
  EXPECT_TRUE(rc::check("everything", [] {
    ModelShape model;
    const auto count = *rc::gen::inRange(0, 4);
    for (int i = 0; i < count; ++i) model.units.push_back(*rc::gen::inRange<int64_t>(1, 1000) * 1000);
    model.others = *rc::gen::inRange<int64_t>(count == 0 ? 1 : 0, 1000) * 1000;
    model.largest = 1;
    Plan plan;
    plan.row = *rc::gen::elementOf(strategies());
    plan.mesh = {*rc::gen::inRange(1, 4), *rc::gen::inRange(1, 6)};
    plan.recipe = *rc::gen::element(kFloat32, kHalf);
    plan.bucket_bytes = *rc::gen::element<int64_t>(10'000, 100'000, 1'000'000, 1 << 30);
    plan.backwards = *rc::gen::inRange<int64_t>(1, 5);
    plan.reductions = *rc::gen::inRange<int64_t>(1, plan.backwards + 1);
    const double latency = *rc::gen::element(0.0, 1e-3, 1e-1), bandwidth = *rc::gen::element(1e6, 1e8, 1e10);
    const Load load{.flops = *rc::gen::element(1e6, 1e9, 1e15),
                    .tokens = *rc::gen::element(1.0, 30.0),
                    .gather_ahead_bytes = *rc::gen::element<int64_t>(0, 500'000, 1 << 30),
                    .norm = *rc::gen::arbitrary<bool>()};

    const double R = plan.mesh.replicate, S = plan.mesh.shard, N = R * S;
    const auto cut = [&](Placement placement) { return placement == Placement::sharded && plan.mesh.shard > 1; };
    double in_units = 0;
    for (const int64_t unit : model.units) in_units += static_cast<double>(unit);
    const double all = in_units + static_cast<double>(model.others);
    if (!cut(plan.row.parameter)) in_units = 0;
    const auto p = static_cast<double>(plan.recipe.parameter), g = static_cast<double>(plan.recipe.gradient);
    const double forward = 2 * all * load.tokens / load.flops, backward = 4 * all * load.tokens / load.flops;

    int rounds = 0;
    while ((2 << rounds) <= static_cast<int>(N)) ++rounds;
    if ((1 << rounds) != static_cast<int>(N)) rounds += 2;
    const double message = rounds * latency;

    // Rings, where every bucket is a message. The last one is a whole bucket, or what is left for it.
    const auto cap = static_cast<double>(plan.bucket_bytes);
    const double rest = (all - in_units) * g, buckets = std::ceil(rest / cap);
    const double last_bytes = buckets > 0 ? rest - (buckets - 1) * cap : static_cast<double>(model.units.back()) * g;
    double hops = 2 * (N - 1),
           one_by_one = N > 1 ? hops : 0;  // one_by_one: of all messages, what nothing of them hides
    std::function<double(double)> sent = [&](double bytes) { return 2 * bytes * (N - 1) / N; };
    if (cut(plan.row.gradient)) {
      sent = [&](double bytes) { return bytes * (S - 1) / S + 2 * (bytes / S) * (R - 1) / R; };
      hops = (S - 1) + 2 * (R - 1);
      // Two at a time are scattered; what is scattered crosses to the replicas beside that, eight at a time.
      const double messages = in_units > 0 ? static_cast<double>(model.units.size()) : buckets;
      const double inside = S - 1, across = 2 * (R - 1);
      one_by_one = std::max(std::ceil(messages / 2) * inside + across, inside + std::ceil(messages / 8) * across);
    }
    const double reduction = sent(all * g) / bandwidth + one_by_one * latency;
    const double last = sent(last_bytes) / bandwidth + hops * latency;

    double before = 0, again = 0, first = 0;
    if (in_units > 0) {
      const double kept =
          std::max(static_cast<double>(load.gather_ahead_bytes), static_cast<double>(model.units.back()) * p);
      const double left = std::max(0.0, in_units * p - kept);
      before = in_units * p * (S - 1) / S / bandwidth + std::ceil(in_units * p / kept) * latency;
      again = left * (S - 1) / S / bandwidth + std::ceil(left / kept) * latency;
      first = static_cast<double>(model.units[0]) * p * (S - 1) / S / bandwidth + latency;
    }
    double updated = 0, norm = 0;
    if (cut(plan.row.state) && all > in_units)
      updated = (all - in_units) * p * (S - 1) / S / bandwidth + std::ceil(buckets / 3) * (S - 1) * latency;
    if (load.norm && cut(plan.row.gradient)) norm = 2 * (S - 1) * latency;

    const auto F = static_cast<double>(plan.backwards), B = static_cast<double>(plan.reductions);
    double exposed = F * std::max(first, before - forward) + updated + norm + message;
    if (N > 1) exposed += B * (std::max(0.0, reduction - last + again - backward) + std::max(last, message));
    exposed += (F - B) * std::max(again - backward, 0.0);

    const Duration found =
        duration(model, plan, {.latency = latency, .bytes_per_second = bandwidth, .carriage = Carriage::ring}, load);
    const auto same = [](double a, double b) {
      return std::abs(a - b) <= 1e-9 * std::max({std::abs(a), std::abs(b), 1e-9});
    };
    RC_ASSERT(same(found.compute, F * (forward + backward)));
    RC_ASSERT(same(found.data, B * reduction + updated + norm));
    RC_ASSERT(same(found.gathers, F * (before + again)));
    RC_ASSERT(same(found.control, (B + 1) * message));
    RC_ASSERT(same(found.exposed, exposed));
    RC_ASSERT(same(found.step, F * (forward + backward) + exposed));
    // One after the other: of every bucket, of what is gathered after the update, and of the norm; messages of the host by
    // passes that reduce, not by backwards.
    const double messages = in_units > 0 ? static_cast<double>(model.units.size()) + buckets : buckets;
    double data_rounds = N > 1 ? B * messages * hops : 0;
    if (cut(plan.row.state) && all > in_units) data_rounds += buckets * (S - 1);
    if (load.norm && cut(plan.row.gradient)) data_rounds += 2 * (S - 1);
    RC_ASSERT(static_cast<double>(found.data_rounds) == data_rounds);
    RC_ASSERT(static_cast<double>(found.control_rounds) == (N > 1 ? (B + 1) * rounds : 0));
  }));
}

// Where messages are dear, small neighbours share one as long as all of it fits; what is gathered after the update does not.
TEST(Duration, OfSharedMessagesIsThatOfAPlainRecomputation) {
  EXPECT_TRUE(rc::check("messages", [] {
    ModelShape model;
    const auto count = *rc::gen::inRange(0, 12);
    for (int i = 0; i < count; ++i) model.units.push_back(*rc::gen::inRange<int64_t>(1, 200'000));
    model.others = *rc::gen::inRange<int64_t>(count == 0 ? 1 : 0, 400'000);
    model.largest = 1;
    Plan plan;
    plan.row = *rc::gen::elementOf(strategies());
    plan.mesh = {*rc::gen::inRange(1, 4), *rc::gen::inRange(1, 6)};
    plan.recipe = *rc::gen::element(kFloat32, kHalf);
    plan.bucket_bytes = *rc::gen::element<int64_t>(10'000, 100'000, 300'000, 1'000'000);
    const int64_t ranks = plan.mesh.replicate * plan.mesh.shard;
    const auto cut = [&](Placement placement) { return placement == Placement::sharded && plan.mesh.shard > 1; };
    const bool by_unit = cut(plan.row.parameter) && !model.units.empty();

    std::vector<int64_t> all;
    for (const int64_t unit : by_unit ? model.units : std::vector<int64_t>{})
      all.push_back(unit * plan.recipe.gradient);
    const size_t units = all.size();
    for (int64_t rest = (by_unit ? model.others : model.params()) * plan.recipe.gradient; rest > 0;) {
      all.push_back(std::min(rest, plan.bucket_bytes));
      rest -= all.back();
    }
    for (const Carriage carriage : {Carriage::direct, Carriage::memory, Carriage::ring}) {
      int64_t sent = 0, last = 0;
      for (const int64_t bucket : all) {
        const bool shares =
            carriage != Carriage::ring && cut(plan.row.gradient) && sent > 0 && last + bucket <= 524'288;
        last = shares ? last + bucket : bucket;
        if (!shares) ++sent;
      }
      const Messages found = messages_of(model, plan, {}, carriage);
      if (ranks == 1) {
        RC_ASSERT(found.reductions == 0 && found.updates == 0);
        continue;
      }
      RC_ASSERT(found.reductions == sent);
      const auto whole = static_cast<int64_t>(all.size() - units);
      RC_ASSERT(found.updates == (cut(plan.row.state) ? whole : 0));
      const double shards = plan.mesh.shard, replicas = plan.mesh.replicate, bytes = static_cast<double>(last);
      const double wanted = cut(plan.row.gradient)
                                ? bytes * (shards - 1) / shards + 2 * bytes / shards * (replicas - 1) / replicas
                                : 2 * bytes * static_cast<double>(ranks - 1) / static_cast<double>(ranks);
      RC_ASSERT(std::abs(found.last_bytes - wanted) <= 1e-9 * bytes);
    }
  }));
}

// Latency alone, of a model of one bucket: rings take as many rounds as ranks, messages from each to each do not.
TEST(Duration, OfRingsGrowsWithTheRanksAndOfDirectMessagesWithTheirLogarithm) {
  const ModelShape model{.units = {1000, 1000}, .others = 500, .largest = 1000};
  const auto milliseconds = [&](const std::string& name, int ranks, Carriage carriage) {
    return 1e3 * duration(model, plan_of(name, ranks), {.latency = 1e-3, .carriage = carriage}, {}).exposed;
  };
  EXPECT_NEAR(milliseconds("ddp", 64, Carriage::direct), 6 + 6, 1e-9);  // facts beside two rounds; facts of the step
  EXPECT_NEAR(milliseconds("ddp", 2, Carriage::direct), 2 + 1, 1e-9);
  EXPECT_NEAR(milliseconds("ddp", 64, Carriage::ring), 126 + 6, 1e-9);
  EXPECT_NEAR(milliseconds("zero1", 64, Carriage::ring), 126 + 6 + 63, 1e-9);
  EXPECT_NEAR(milliseconds("zero2", 64, Carriage::ring), 63 + 6 + 63, 1e-9);
  // A gather; two units at a time, and what is outside of them; facts; and the updated parameters outside of units.
  EXPECT_NEAR(milliseconds("zero3", 64, Carriage::ring), 1 + 63 + 6 + 63, 1e-9);
  const ModelShape deep{.units = std::vector<int64_t>(5, 1000), .others = 0, .largest = 1000};
  const Plan plan = plan_of("zero3", 64);
  EXPECT_NEAR(duration(deep, plan, {.latency = 1e-3, .carriage = Carriage::ring}, {}).exposed,
              0.001 + 3 * 0.063 + 0.006, 1e-9);
  EXPECT_NEAR(milliseconds("zero3", 2, Carriage::direct), 1 + 1 + 1 + 1, 1e-9);  // one message of all three
}

TEST(Duration, ANormOfShardedGradientsIsOneMoreReduction) {
  const Link link{.latency = 1e-3};
  for (const char* name : {"ddp", "zero1", "zero2", "zero3"}) {
    const double more = duration(kModel, plan_of(name, 8), link, {.norm = true}).step -
                        duration(kModel, plan_of(name, 8), link, {.norm = false}).step;
    const bool sharded = strategy(name).gradient == Placement::sharded;
    EXPECT_NEAR(more, sharded ? 2e-3 : 0, 1e-12) << name;
  }
}

}  // namespace
}  // namespace plumb
