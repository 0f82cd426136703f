// The estimate against the formulas of the placement table, for any model and world.
#include "layout/estimate.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cstdlib>

namespace plumb {
namespace {

struct Case {
  ModelShape model;
  int ranks = 1;
  Recipe recipe;
};

// Sizes that divide evenly, so that the formulas hold to the byte.
rc::Gen<Case> cases() {
  return rc::gen::exec([] {
    Case c;
    c.ranks = *rc::gen::element(1, 2, 3, 4, 6, 8);
    const auto count = *rc::gen::inRange(1, 20);
    for (int i = 0; i < count; ++i) c.model.units.push_back(48 * *rc::gen::inRange<int64_t>(1, 100'000));
    c.model.largest = *std::max_element(c.model.units.begin(), c.model.units.end());
    c.recipe = *rc::gen::element(kFloat32, kHalf);
    return c;
  });
}

void holds(const std::string& what, const std::function<void(const Case&)>& property) {
  EXPECT_TRUE(rc::check(what, [&] { property(*cases()); }));
}

Plan plan_of(const Case& c, const std::string& name, Mesh asked = {}) {
  Plan plan;
  plan.row = strategy(name);
  plan.mesh = mesh_of(plan.row, asked, c.ranks);
  plan.recipe = c.recipe;
  return plan;
}

TEST(Estimate, HoldsWhatThePlacementTableSays) {
  holds("memory", [](const Case& c) {
    const int64_t n = c.ranks;
    const int64_t m = c.model.params();
    const auto [p, g, s] = c.recipe;
    RC_ASSERT(estimate(c.model, plan_of(c, "ddp")).held() == m * (p + g + s));
    RC_ASSERT(estimate(c.model, plan_of(c, "zero1")).held() == m * (p + g) + m / n * s);
    RC_ASSERT(estimate(c.model, plan_of(c, "zero2")).held() == m * p + m / n * (g + s));
    RC_ASSERT(estimate(c.model, plan_of(c, "zero3")).held() == m / n * (p + g + s));
  });
}

TEST(Estimate, SendsWhatThePlacementTableSays) {
  holds("wire", [](const Case& c) {
    const int64_t n = c.ranks;
    const int64_t p = c.model.params() / n * (n - 1) * c.recipe.parameter;
    const int64_t g = c.model.params() / n * (n - 1) * c.recipe.gradient;
    RC_ASSERT(estimate(c.model, plan_of(c, "ddp")).wire == 2 * g);
    RC_ASSERT(estimate(c.model, plan_of(c, "zero1")).wire == 2 * g + p);
    RC_ASSERT(estimate(c.model, plan_of(c, "zero2")).wire == g + p);
    RC_ASSERT(estimate(c.model, plan_of(c, "zero3")).wire == g + 2 * p);
  });
}

TEST(Estimate, AloneEveryStrategyIsTheSame) {
  holds("one rank", [](Case c) {
    c.ranks = 1;
    for (const Strategy& row : strategies()) {
      const Estimate e = estimate(c.model, plan_of(c, row.name));
      RC_ASSERT(e.held() == estimate(c.model, plan_of(c, "ddp")).held());
      RC_ASSERT(e.wire == 0 && e.gathered == 0 && e.buckets == 0);
    }
  });
}

TEST(Estimate, AMeshHoldsWhatOneOfItsGroupsHoldsAndSendsTheShardsOnceMore) {
  holds("hsdp", [](Case c) {
    const Estimate inside = estimate(c.model, plan_of(c, "zero3"));
    const int64_t shards = c.ranks;
    c.ranks *= 2;
    const Estimate both = estimate(c.model, plan_of(c, "hsdp", {.replicate = 2, .shard = c.ranks / 2}));
    RC_ASSERT(both.held() == inside.held());
    RC_ASSERT(both.gathered == inside.gathered);
    RC_ASSERT(both.wire == inside.wire + c.model.params() / shards * c.recipe.gradient);
  });
}

TEST(Estimate, ParametersOutsideOfUnitsStayWhole) {
  holds("others", [](const Case& c) {
    Case more = c;
    more.model.others = 48 * *rc::gen::inRange<int64_t>(1, 1000);
    const int64_t n = c.ranks;
    const Estimate without = estimate(c.model, plan_of(c, "zero3"));
    const Estimate with = estimate(more.model, plan_of(more, "zero3"));
    RC_ASSERT(with.parameters - without.parameters == more.model.others * c.recipe.parameter);
    RC_ASSERT(with.gradients - without.gradients == more.model.others / n * c.recipe.gradient);
    RC_ASSERT(with.state - without.state == more.model.others / n * c.recipe.state);
  });
}

TEST(Estimate, MicroBatchesGatherEachTimeAndReduceAsOftenAsTold) {
  holds("micro-batches", [](const Case& c) {
    const auto times = *rc::gen::inRange<int64_t>(1, 10);
    const int64_t n = c.ranks;
    const int64_t p = c.model.params() / n * (n - 1) * c.recipe.parameter;
    const int64_t g = c.model.params() / n * (n - 1) * c.recipe.gradient;
    Plan plan = plan_of(c, "zero3");
    plan.backwards = times;
    RC_ASSERT(estimate(c.model, plan).wire == g + times * 2 * p);
    plan.reductions = times;
    RC_ASSERT(estimate(c.model, plan).wire == times * (g + 2 * p));
  });
}

TEST(Estimate, WhatComesAndGoesIsNeverMoreThanTheModel) {
  holds("transient", [](const Case& c) {
    for (const Strategy& row : strategies()) {
      const Estimate e = estimate(c.model, plan_of(c, row.name));
      RC_ASSERT(e.gathered <= c.model.params() * c.recipe.parameter);
      RC_ASSERT(e.buckets <= c.model.params() * c.recipe.gradient);
    }
  });
}

// Any sizes, meshes and micro-batches, with nothing that divides: whole numbers and fractions, as the page has them.
TEST(Estimate, IsThatOfAPlainRecomputation) {
  EXPECT_TRUE(rc::check("everything", [] {
    ModelShape model;
    const auto count = *rc::gen::inRange(0, 6);
    for (int i = 0; i < count; ++i) model.units.push_back(*rc::gen::inRange<int64_t>(1, 3'000'000));
    model.others = *rc::gen::inRange<int64_t>(count == 0 ? 1 : 0, 3'000'000);
    int64_t params = model.others, unit = 0;
    for (const int64_t each : model.units) {
      params += each;
      unit = std::max(unit, each);
    }
    model.largest = *rc::gen::inRange<int64_t>(1, params + 1);
    Plan plan;
    plan.row = *rc::gen::elementOf(strategies());
    plan.mesh = {*rc::gen::inRange(1, 5), *rc::gen::inRange(1, 9)};
    plan.recipe = {*rc::gen::element<int64_t>(2, 4, 8), *rc::gen::element<int64_t>(2, 4, 8),
                   *rc::gen::element<int64_t>(0, 4, 8, 12, 16)};
    plan.bucket_bytes = *rc::gen::inRange<int64_t>(1, 8 << 20);
    plan.backwards = *rc::gen::inRange<int64_t>(1, 5);
    plan.reductions = *rc::gen::inRange<int64_t>(1, 5);
    const auto [p, g, s] = plan.recipe;
    const int64_t cuts = plan.mesh.shard, copies = plan.mesh.replicate;
    const auto cut = [&](Placement placement) { return placement == Placement::sharded && cuts > 1; };
    const auto share = [&](int64_t whole, bool is_cut) { return is_cut ? whole / cuts + (whole % cuts > 0) : whole; };
    const bool gathers = cut(plan.row.parameter) && params > model.others;
    const int64_t whole = cut(plan.row.parameter) ? model.others : params;

    const Estimate e = estimate(model, plan);
    RC_ASSERT(e.parameters == (whole + share(params - whole, true)) * p);
    RC_ASSERT(e.gradients == share(params, cut(plan.row.gradient)) * g);
    RC_ASSERT(e.state == share(params, cut(plan.row.state)) * s);
    RC_ASSERT(e.held() == e.parameters + e.gradients + e.state);
    RC_ASSERT(e.gathered == (gathers ? unit * p : 0));
    int64_t bucket = 0;
    if (cut(plan.row.gradient)) bucket = gathers ? unit * g : std::max(plan.bucket_bytes, model.largest * g);
    RC_ASSERT(e.buckets == std::min(2 * bucket, params * g));

    // Sent bytes as a fraction over shard × replicate; the estimate rounds to the nearest.
    const int64_t over = cuts * copies;
    int64_t sent = 0;
    if (cut(plan.row.gradient)) {
      sent += (cuts - 1) * copies * params * g * plan.reductions;
      sent += 2 * (copies - 1) * params * g * plan.reductions;
    } else {
      sent += 2 * (over - 1) * params * g * plan.reductions;
    }
    if (cut(plan.row.state)) sent += (cuts - 1) * copies * whole * p;
    sent += 2 * (cuts - 1) * copies * (params - whole) * p * plan.backwards;
    RC_ASSERT(2 * std::abs(e.wire * over - sent) <= over + 2);  // a double may be a bit below one half
  }));
}

TEST(Estimate, SevenBillionParametersOnEightRanks) {
  ModelShape model;
  model.units.assign(32, 218'750'000);
  Plan plan;
  plan.row = strategy("zero3");
  plan.mesh = mesh_of(plan.row, {}, 8);
  plan.recipe = kHalf;
  const Estimate e = estimate(model, plan);
  EXPECT_EQ(e.parameters, 1'750'000'000);
  EXPECT_EQ(e.gradients, 3'500'000'000);
  EXPECT_EQ(e.state, 10'500'000'000);
  EXPECT_EQ(e.gathered, 437'500'000);
  EXPECT_EQ(e.buckets, 1'750'000'000);
}

}  // namespace
}  // namespace plumb
