// Device memory: reused at once, split, merged, poisoned, accounted for.
#include "sim/support/support.h"

namespace plumb::sim {
namespace {

at::Tensor bytes(int64_t count) { return torch::empty({count}, on(0).dtype(at::kByte)); }

TEST(Allocator, HandsFreedMemoryOutAgainAtOnce) {
  Session session(0);
  auto a = bytes(1000);
  const void* where = a.data_ptr();
  a = at::Tensor();
  const auto b = bytes(900);  // the same after rounding
  EXPECT_EQ(b.data_ptr(), where);
  EXPECT_EQ(session.statistics().reuses, 1u);
}

TEST(Allocator, SplitsALargerBlock) {
  Session session(0);
  auto a = bytes(8192);
  const auto keep = bytes(512);
  const char* where = static_cast<char*>(a.data_ptr());
  a = at::Tensor();
  const auto b = bytes(2048), c = bytes(2048);
  EXPECT_EQ(b.data_ptr(), where);
  EXPECT_EQ(static_cast<char*>(c.data_ptr()), where + 2048);
}

TEST(Allocator, MergesNeighbours) {
  Session session(0);
  auto a = bytes(1024), b = bytes(1024), c = bytes(1024);
  const auto keep = bytes(512);
  const void* where = a.data_ptr();
  a = c = at::Tensor();
  b = at::Tensor();
  EXPECT_EQ(bytes(3072).data_ptr(), where);
}

TEST(Allocator, KeepsOnePoolPerStream) {
  Session session(0);
  const auto side = new_stream(0);
  auto a = bytes(1024);
  const void* where = a.data_ptr();
  a = at::Tensor();
  const auto b = with(side, [&] { return bytes(1024); });
  EXPECT_NE(b.data_ptr(), where);
  EXPECT_EQ(bytes(1024).data_ptr(), where);
}

TEST(Allocator, PoisonsMemoryThatNobodyWrote) {
  Session session(0);
  {
    auto a = torch::ones({64}, on(0));
  }
  const auto b = torch::empty({64}, on(0));
  EXPECT_TRUE(torch::isnan(b).all().item<bool>());
  const auto c = torch::empty({100000}, on(0));
  EXPECT_TRUE(torch::isnan(c).all().item<bool>());
}

TEST(Allocator, HoldsRecordedMemoryBackUntilItsReaderHasPassed) {
  for (uint64_t seed = 0; seed < few_seeds; ++seed) {
    Session session(seed);
    const auto main = current_stream(0), side = new_stream(0);
    auto a = torch::ones({256}, on(0));
    const void* where = a.data_ptr();
    wait_for(side, main);
    bool ran = false;
    with(side, [&] { launch("slow reader", {a}, {}, [&](const Tensors&, const Tensors&) { ran = true; }); });
    a.record_stream(side);
    a = at::Tensor();
    const auto b = torch::empty({256}, on(0));
    EXPECT_TRUE(b.data_ptr() != where || ran);
    side.synchronize();
    const auto c = torch::empty({256}, on(0)), d = torch::empty({256}, on(0));
    EXPECT_TRUE(b.data_ptr() == where || c.data_ptr() == where || d.data_ptr() == where);
    session.finish();
    EXPECT_EQ(session.report(), "no races\n");
  }
}

TEST(Allocator, KeepsTensorsOverSessions) {
  at::Tensor kept;
  {
    Session session(0);
    const auto side = new_stream(0);
    kept = with(side, [&] { return torch::full({16}, 3, on(0)); });
  }
  Session session(1);
  EXPECT_EQ(kept.sum().item<float>(), 48);
  const auto side = new_stream(0);
  with(side, [&] { kept.add_(1); });  // what an earlier session did is over
  session.finish();
  EXPECT_EQ(session.report(), "no races\n");
}

TEST(Allocator, CountsThePeak) {
  Session session(0);
  const auto before = session.statistics().peak_bytes[0];
  {
    auto a = bytes(1 << 16), b = bytes(1 << 16);
  }
  const auto c = bytes(1 << 16);
  EXPECT_EQ(session.statistics().peak_bytes[0] - before, 2 << 16);
}

TEST(Allocator, LeavesTheOrderToTheSeedAlone) {
  const auto run = [](uint64_t seed) {
    Session session(seed);
    const auto side = new_stream(0);
    for (int i = 0; i < 20; ++i) {
      auto a = torch::ones({64 * (i % 5 + 1)}, on(0));
      wait_for(side, current_stream(0));
      with(side, [&] { a.add_(1); });
      a.record_stream(side);
    }
    session.finish();
    return session.statistics().order;
  };
  const auto first = run(7);
  {
    Session other(1);
    std::vector<at::Tensor> mess;
    for (int i = 0; i < 50; ++i) mess.push_back(bytes(512 * i + 1));
  }
  EXPECT_EQ(run(7), first);
}

}  // namespace
}  // namespace plumb::sim
