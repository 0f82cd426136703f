// Lanes: who waits for whom, seen by the simulated accelerator.
#include "lane/lane.h"

#include <ATen/native/SparseTensorUtils.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_values_native.h>
#include <c10/core/StreamGuard.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/library.h>
#include "libtorch.h"

#include "plumb/sim.h"

// The simulated device has no sparse tensors of its own; these two say what one is made of.
TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, library) {
  library.impl("_indices", at::native::_indices_sparse);
  library.impl("_values", at::native::_values_sparse);
}

namespace plumb {
namespace {

struct Accelerator final : testing::Environment {
  void SetUp() override {
    at::set_num_threads(1);
    sim::init(1);
  }
};
const auto* const accelerator = testing::AddGlobalTestEnvironment(new Accelerator);

class LaneTest : public testing::Test {
 protected:
  sim::Session session{1};
  c10::Device device = sim::device(0);
  c10::Stream main = sim::current_stream(0), left = sim::new_stream(0, "left"), right = sim::new_stream(0, "right");
  at::Tensor memory = at::zeros({64}, at::device(device).dtype(at::kFloat));
  Lanes lanes;

  void SetUp() override { lanes.end_all(device); }
  void produce(c10::Stream stream, int64_t begin) {
    const c10::StreamGuard guard(stream);
    lanes.begin_part(device);
    memory.narrow(0, begin, 32).fill_(static_cast<double>(begin + 1));
    lanes.end_part(device);
  }
  std::string report() {
    session.finish();
    return session.report();
  }
};

TEST_F(LaneTest, AUseOfAllWaitsForEveryProducer) {
  produce(left, 0);
  produce(right, 32);
  const Alone alone(lanes, device);
  EXPECT_EQ(memory.sum().item<float>(), 32 * 1 + 32 * 33);
  EXPECT_EQ(report(), "no races\n");
}

// Whoever comes first: what was written is waited for until somebody says that he was the last.
TEST_F(LaneTest, EveryUseOfAllWaitsForTheProducers) {
  produce(left, 0);
  lanes.begin_all(device);
  const c10::StreamGuard guard(right);
  lanes.begin_all(device);
  EXPECT_EQ(memory.narrow(0, 0, 32).sum().item<float>(), 32);
  EXPECT_EQ(report(), "no races\n");
}

TEST_F(LaneTest, AProducerWaitsForTheUseOfAll) {
  for (int pass = 0; pass < 3; ++pass) {
    produce(left, 0);
    produce(right, 32);
    const c10::StreamGuard guard(pass == 1 ? left : main);
    const Alone alone(lanes, device);
    memory.mul_(2);
  }
  EXPECT_EQ(report(), "no races\n");
}

TEST_F(LaneTest, ProducersDoNotWaitForEachOther) {
  produce(left, 0);
  produce(right, 0);  // the same part: nothing orders them
  EXPECT_THAT(report(), testing::HasSubstr("write after write"));
}

TEST_F(LaneTest, ProducersOfOnePlaceDo) {
  for (const c10::Stream stream : {left, right, main, left}) {
    const c10::StreamGuard guard(stream);
    lanes.begin_part(device, 7);
    memory.narrow(0, 0, 32).add_(1);
    lanes.end_part(device, 7);
  }
  lanes.begin_all(device);
  EXPECT_EQ(memory.sum().item<float>(), 4 * 32);
  EXPECT_EQ(report(), "no races\n");
}

TEST_F(LaneTest, AWriteAfterTheUseWasNotedIsStillWaitedFor) {
  {
    const c10::StreamGuard guard(left);
    lanes.begin_part(device);
    lanes.end_part(device);
    memory.fill_(3);
  }
  lanes.begin_all(device);
  EXPECT_EQ(memory.sum().item<float>(), 64 * 3);
  EXPECT_EQ(report(), "no races\n");
}

TEST_F(LaneTest, MemoryIsKeptForItsReaders) {
  for (const bool kept : {true, false}) {
    sim::Session one(2);
    Lanes readers;
    {
      const at::Tensor temporary = at::ones({64}, memory.options());
      readers.end_all(device);
      const c10::StreamGuard guard(left);
      readers.begin_part(device);
      (void)temporary.sum();
      readers.end_part(device);
      if (kept) readers.keep(temporary.storage().data_ptr());
    }
    (void)at::ones({64}, memory.options());
    one.finish();
    EXPECT_EQ(one.races().empty(), kept) << one.report();
  }
}

// Whoever used it last: readers, or the one that used all of it.
TEST_F(LaneTest, MemoryIsKeptForEverybodyWhoUsedIt) {
  enum class Who { all, one_reader, two_readers };
  for (const Who who : {Who::all, Who::one_reader, Who::two_readers}) {
    for (const bool kept : {true, false}) {
      sim::Session one(3);
      const c10::Stream first = sim::new_stream(0, "first"), second = sim::new_stream(0, "second");
      Lanes users;
      {
        const at::Tensor temporary = at::ones({64}, memory.options());
        users.end_all(device);
        const auto read = [&](const c10::Stream& stream, bool alone) {
          const c10::StreamGuard guard(stream);
          alone ? users.begin_all(device) : users.begin_part(device);
          (void)temporary.sum();
          alone ? users.end_all(device) : users.end_part(device);
        };
        read(first, who == Who::all);
        if (who == Who::two_readers) read(second, false);
        if (kept) users.keep(temporary.storage().data_ptr());
      }
      (void)at::ones({64}, memory.options());
      one.finish();
      EXPECT_EQ(one.races().empty(), kept) << one.report();
    }
  }
}

TEST_F(LaneTest, WhatOthersMadeIsKeptForTheCurrentStream) {
  for (const bool kept : {true, false}) {
    sim::Session one(4);
    const c10::Stream side = sim::new_stream(0);
    {
      const at::Tensor temporary = at::ones({64}, memory.options());
      sim::wait_for(side, sim::current_stream(0));
      const c10::StreamGuard guard(side);
      (void)temporary.sum();
      if (kept) keep_for_current(temporary);
    }
    (void)at::ones({64}, memory.options());
    one.finish();
    EXPECT_EQ(one.races().empty(), kept) << one.report();
  }
}

// Both tensors of a sparse one: the indices are freed with it, too.
TEST_F(LaneTest, WhatOthersMadeIsKeptForTheCurrentStreamWhereItIsSparse) {
  const auto make = [&](const at::Tensor& indices, const at::Tensor& values) {
    at::Tensor sparse = at::detail::make_tensor<at::SparseTensorImpl>(
        c10::DispatchKeySet(c10::DispatchKey::SparsePrivateUse1), values.dtype());
    at::sparse::get_sparse_impl(sparse)->raw_resize_(1, 0, {1000});
    at::sparse::alias_into_sparse(sparse, indices, values);
    return sparse;
  };
  for (const bool reads_indices : {true, false}) {
    for (const bool kept : {true, false}) {
      sim::Session one(5);
      const c10::Stream side = sim::new_stream(0);
      {
        const at::Tensor sparse =
            make(at::ones({1, 64}, memory.options().dtype(at::kLong)), at::ones({64}, memory.options()));
        sim::wait_for(side, sim::current_stream(0));
        const c10::StreamGuard guard(side);
        (void)(reads_indices ? sparse._indices() : sparse._values()).sum();
        if (kept) keep_for_current(sparse);
      }
      (void)at::ones({1, 64}, memory.options().dtype(at::kLong));
      (void)at::ones({64}, memory.options());
      one.finish();
      EXPECT_EQ(one.races().empty(), kept) << (reads_indices ? "indices: " : "values: ") << one.report();
    }
  }
}

TEST_F(LaneTest, LanesCanBeMadeToFollow) {
  LaneSet callers;
  {
    const c10::StreamGuard guard(left);
    callers.add(device);
  }
  memory.fill_(5);
  callers.follow(device);
  const c10::StreamGuard guard(left);
  EXPECT_EQ(memory.sum().item<float>(), 64 * 5);
  EXPECT_EQ(report(), "no races\n");
}

TEST(LanesOnTheCpu, DoNothing) {
  Lanes lanes;
  lanes.begin_part(at::kCPU);
  lanes.end_part(at::kCPU);
  const Alone alone(lanes, at::kCPU);
  keep_for_current(at::ones({4}));
  keep_for_current(at::Tensor());
}

}  // namespace
}  // namespace plumb
