// Parameters that lie one behind the other as their gradients do, for an optimizer of the user's own.
#include "optim/neighbours.h"

#include <gtest/gtest.h>

#include "engine/impl.h"
#include "plumb/plumb.h"

namespace plumb {
namespace {

// All of whole vectors, but `odd`.
struct Some : torch::nn::Module {
  Some() {
    for (const char* name : {"first", "second", "odd", "third", "fourth"}) {
      const int64_t numel = std::string(name) == "odd" ? 5 : 32;
      all.push_back(
          register_parameter(name, torch::arange(numel, at::kFloat).sin().add(static_cast<double>(all.size()))));
    }
  }
  void backward(int64_t count = 5) {
    at::Tensor loss = torch::zeros({});
    for (int64_t i = 0; i < count; ++i) loss = loss + all[i].square().sum();
    loss.backward();
  }
  std::vector<at::Tensor> all;
};

struct Lent {
  explicit Lent(Some& some) : engine(World(), some, NoOptimizer{}) {}
  const Stretches& lend() { return neighbours.lend(engine.impl().reducer->buckets()); }
  Engine engine;
  Neighbours neighbours;
};

TEST(Neighbours, AreTheSameTensorsOverTheSameStoragesAsOneStretch) {
  Some some;
  std::vector<c10::StorageImpl*> storages;
  std::vector<at::Tensor> values;
  for (const at::Tensor& one : some.all) {
    storages.push_back(one.storage().unsafeGetStorageImpl());
    values.push_back(one.detach().clone());
  }
  Lent lent(some);
  some.backward();
  lent.engine.step();
  const Stretches& stretches = lent.lend();
  size_t members = 0;
  for (const Stretch& stretch : stretches.all) {
    EXPECT_GE(stretch.members.size(), 2);
    for (const Stretch::Member& member : stretch.members) {
      ++members;
      const at::Tensor there = stretch.weight.narrow(0, member.offset, member.numel);
      EXPECT_EQ(there.const_data_ptr(), member.parameter.const_data_ptr());
      EXPECT_TRUE(stretch.gradient.narrow(0, member.offset, member.numel).equal(member.parameter.grad()));
    }
  }
  EXPECT_GE(members, 4);
  for (size_t i = 0; i < some.all.size(); ++i) {
    EXPECT_EQ(some.all[i].storage().unsafeGetStorageImpl(), storages[i]);
    EXPECT_EQ(some.all[i].storage().nbytes(), some.all[i].nbytes());
    EXPECT_TRUE(some.all[i].equal(values[i]));
  }
}

TEST(Neighbours, EndBehindOneThatIsNoWholeNumberOfVectors) {
  Some some;
  Lent lent(some);
  some.backward();
  lent.engine.step();
  for (const Stretch& stretch : lent.lend().all) {
    for (size_t i = 0; i + 1 < stretch.members.size(); ++i) EXPECT_EQ(stretch.members[i].numel, 32);
  }
}

TEST(Neighbours, AreNumberedAnewOnlyWhereTheyAreOthers) {
  Some some;
  Lent lent(some);
  some.backward();
  lent.engine.step();
  const int64_t number = lent.lend().number;
  EXPECT_EQ(lent.lend().number, number);
  lent.neighbours.take_back();
  lent.engine.zero_grad();
  some.backward(3);
  lent.engine.step();
  EXPECT_NE(lent.lend().number, number);
}

TEST(Neighbours, WhoseMemoryOthersKnowStayWhereTheyAre) {
  Some some;
  const at::Tensor alias = some.all[1].detach();
  some.all[3].storage().unsafeGetStorageImpl()->set_resizable(false);  // as a numpy array over it leaves it
  const void* known = some.all[1].const_data_ptr();
  const void* array = some.all[3].const_data_ptr();
  Lent lent(some);
  some.backward();
  lent.engine.step();
  for (const Stretch& stretch : lent.lend().all) {
    for (const Stretch::Member& member : stretch.members) {
      EXPECT_FALSE(member.parameter.is_same(some.all[1]) || member.parameter.is_same(some.all[3]));
    }
  }
  EXPECT_EQ(some.all[1].const_data_ptr(), known);
  EXPECT_EQ(some.all[3].const_data_ptr(), array);
}

TEST(Neighbours, WithoutAGradientOrWithAnotherThanTheBucketsAreInNoStretch) {
  Some some;
  Lent lent(some);
  some.backward();
  lent.engine.step();
  some.all[0].mutable_grad().reset();
  some.all[4].mutable_grad() = some.all[4].grad().clone();
  for (const Stretch& stretch : lent.lend().all) {
    for (const Stretch::Member& member : stretch.members) {
      EXPECT_FALSE(member.parameter.is_same(some.all[0]) || member.parameter.is_same(some.all[4]));
    }
  }
}

// As after a rebuild of the buckets: two change places, and each still lives where the other is to go.
TEST(Neighbours, WhoseGradientsChangePlacesMoveAlong) {
  Some some;
  std::vector<at::Tensor> values;
  for (const at::Tensor& one : some.all) values.push_back(one.detach().clone());
  Lent lent(some);
  some.backward();
  lent.engine.step();
  const int64_t number = lent.lend().number;
  lent.neighbours.take_back();
  Bucket& bucket = lent.engine.impl().reducer->buckets()[0];
  size_t i = 0;
  while (bucket.sinks[i]->parameter.numel() != 32 || bucket.sinks[i + 1]->parameter.numel() != 32) ++i;
  std::swap(bucket.sinks[i], bucket.sinks[i + 1]);
  const Slot one = bucket.sinks[i]->slot, other = bucket.sinks[i + 1]->slot;
  for (const auto& [sink, slot] : {std::pair(bucket.sinks[i], other), std::pair(bucket.sinks[i + 1], one)}) {
    sink->bind(slot, view_in(bucket.gradient, slot.offset, sink->parameter));
    sink->shown = sink->view;
    sink->grad() = sink->shown;
  }
  EXPECT_NE(lent.lend().number, number);
  for (size_t k = 0; k < some.all.size(); ++k) EXPECT_TRUE(some.all[k].equal(values[k])) << k;
  for (const Stretch& stretch : lent.neighbours.stretches().all) {
    for (const Stretch::Member& member : stretch.members) {
      EXPECT_TRUE(stretch.weight.narrow(0, member.offset, member.numel).equal(member.parameter));
    }
  }
}

TEST(Neighbours, OutliveTheirEngine) {
  Some some;
  const at::Tensor before = some.all[0].detach().clone();
  {
    Lent lent(some);
    some.backward();
    lent.engine.step();
    lent.lend();
  }
  EXPECT_TRUE(some.all[0].equal(before));
  some.all[0].set_requires_grad(false);
  some.all[0].resize_({64});  // gets memory of its own
  EXPECT_TRUE(some.all[0].narrow(0, 0, 32).equal(before));
}

// Another order of the same memory is another gradient.
TEST(Neighbours, WhoseGradientIsTurnedAreUpdatedByWhatItSays) {
  std::vector<at::Tensor> all;
  NamedTensors named;
  for (int i = 0; i < 4; ++i) {
    all.push_back((torch::arange(16, at::kFloat) * 0.3).sin().view({4, 4}).clone().requires_grad_());
    named.emplace_back("p" + std::to_string(i), all.back());
  }
  Engine engine(World(), named, {}, NoOptimizer{});
  Neighbours neighbours;
  (all[0].square().sum() + all[1].square().sum() + all[2].square().sum() + all[3].square().sum()).backward();
  engine.step();
  all[1].mutable_grad() = all[1].grad().t();
  size_t members = 0;
  for (const Stretch& stretch : neighbours.lend(engine.impl().reducer->buckets()).all) {
    for (const Stretch::Member& member : stretch.members) {
      ++members;
      EXPECT_TRUE(stretch.gradient.narrow(0, member.offset, member.numel).view({4, 4}).equal(member.parameter.grad()));
    }
  }
  EXPECT_GE(members, 2u) << "the others";
}

}  // namespace
}  // namespace plumb
