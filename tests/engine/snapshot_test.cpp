// A snapshot has every byte of what was there, whichever threads copy it.
#include "engine/snapshot.h"

#include <ATen/Parallel.h>
#include <c10/core/impl/COW.h>
#include <gtest/gtest.h>
#include "libtorch.h"

#include <latch>
#include <thread>

namespace plumb {
namespace {

std::vector<at::Tensor> tensors_of(int64_t seed) {
  std::vector<at::Tensor> all;
  for (const int64_t elements : {0, 1, 3, 15, 16, 17, 63, 64, 65, 1000, (1 << 20) - 1, (3 << 20) + 5}) {
    for (const at::ScalarType dtype : {at::kByte, at::kBFloat16, at::kDouble}) {
      if (elements > 1 << 20 && dtype == at::kDouble) continue;
      // The memory that is copied begins anywhere.
      all.push_back(at::randint(0, 100, {elements + 1}, dtype).narrow(0, 1, elements).add_(seed));
    }
  }
  all.push_back(at::randint(0, 100, {50, 4}, at::kFloat).select(1, 2));
  return all;
}

std::vector<at::Tensor*> pointers(std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor*> all;
  for (at::Tensor& tensor : tensors) all.push_back(&tensor);
  return all;
}

void expect_equal(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].scalar_type(), expected[i].scalar_type());
    EXPECT_TRUE(found[i].equal(expected[i])) << i << ": " << found[i].numel() << " elements";
  }
}

std::vector<at::Tensor> clones(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& tensor : tensors) all.push_back(tensor.clone());
  return all;
}

// While it lives, so many threads may be used. Nothing but the snapshot runs meanwhile: a pool of torch's own would not outlive
// the forks of other tests.
struct Threads {
  explicit Threads(int count) { at::set_num_threads(count); }
  ~Threads() { at::set_num_threads(before); }
  const int before = at::get_num_threads();
};

TEST(Snapshot, HasEveryByteOfWhatWasThere) {
  Snapshot snapshot;
  for (int64_t round = 0; round < 3; ++round) {
    std::vector<at::Tensor> now = tensors_of(round), later = tensors_of(round + 7);
    const std::vector<at::Tensor> live = now, kept = later, first = clones(now), second = clones(later);
    if (round == 1) now.resize(4);  // less than before
    {
      const Threads threads(round == 2 ? 1 : 4);
      snapshot.take({.now = pointers(now), .held = {}, .later = pointers(later)});
    }
    for (const at::Tensor& tensor : live) tensor.fill_(120);  // nobody waits for what may change at any moment
    snapshot.finish();
    for (const at::Tensor& tensor : kept) tensor.fill_(121);
    expect_equal(now, {first.begin(), first.begin() + static_cast<int64_t>(now.size())});
    expect_equal(later, second);
  }
}

TEST(Snapshot, WhoeverFinishesItReturnsWhenAllOfItIsCopied) {
  Snapshot snapshot;
  for (int i = 0; i < 200; ++i) {
    std::vector<at::Tensor> later = {at::full({1 << 20}, i % 100, at::kByte)};
    snapshot.take({.now = {}, .held = {}, .later = pointers(later)});
    std::latch together(2);
    uint8_t last[2] = {255, 255};
    const auto finish = [&](int who) {
      together.arrive_and_wait();
      snapshot.finish();
      last[who] = static_cast<const uint8_t*>(later[0].const_data_ptr())[(1 << 20) - 1];
    };
    std::thread other(finish, 1);
    finish(0);
    other.join();
    ASSERT_EQ(last[0], i % 100);
    ASSERT_EQ(last[1], i % 100);
  }
}

bool is_plain_memory(const at::Tensor& tensor) { return !c10::impl::cow::is_cow_data_ptr(tensor.storage().data_ptr()); }

// Writes come before anything is copied: whole tensors, views of them, one of two that lie in the same memory.
TEST(Snapshot, HoldsWhatIsWrittenThroughTorchMeanwhile) {
  for (int round = 0; round < 2; ++round) {  // one that is finished by the writer, one by whoever steps
    Snapshot snapshot;
    const at::Tensor flat = at::randn({1 << 18}), alone = at::randn({300, 300});
    const std::vector<at::Tensor> live = {flat.narrow(0, 3, 1 << 16), flat.narrow(0, 1 << 17, 1 << 16),
                                          alone.view({-1})};
    std::vector<at::Tensor> held = live;
    const std::vector<at::Tensor> then = clones(live);
    snapshot.take({.now = {}, .held = pointers(held), .later = {}});
    live[0].add_(1);
    alone.t().select(0, 7).zero_();
    flat.mul_(2);
    if (round == 0) snapshot.finish();
    snapshot.settle();
    expect_equal(held, then);
    EXPECT_TRUE(live[0].equal((then[0] + 1) * 2));
    EXPECT_TRUE(live[1].equal(then[1] * 2));
    EXPECT_EQ(alone.select(1, 7).count_nonzero().item<int64_t>(), 0);
    snapshot.let_go();
    live[0].fill_(5);  // the copies are no business of the originals any more
    expect_equal(held, then);
  }
}

TEST(Snapshot, GivesBackWhatItHeldAsItWas) {
  Snapshot snapshot;
  const at::Tensor original = at::randn({1 << 16});
  const void* place = original.const_data_ptr();
  std::vector<at::Tensor> held = {original};
  snapshot.take({.now = {}, .held = pointers(held), .later = {}});
  EXPECT_FALSE(is_plain_memory(original));
  snapshot.settle();
  EXPECT_TRUE(is_plain_memory(original));
  original.add_(1);
  EXPECT_EQ(original.const_data_ptr(), place);
  EXPECT_EQ(original.storage().use_count(), 1);
  // Whoever forgets to settle leaves nothing behind, either.
  {
    Snapshot other;
    held = {original};
    other.take({.now = {}, .held = pointers(held), .later = {}});
  }
  EXPECT_TRUE(is_plain_memory(original));
  EXPECT_EQ(original.const_data_ptr(), place);
}

TEST(Snapshot, CopiesAtOnceWhatItCannotHold) {
  Snapshot snapshot;
  std::vector<float> of_others(1 << 16, 3);
  const std::vector<at::Tensor> live = {at::from_blob(of_others.data(), {1 << 16}, at::kFloat), at::randn({10}),
                                        at::randn({1 << 16, 2}).select(1, 1)};
  std::vector<at::Tensor> held = live;
  const std::vector<at::Tensor> then = clones(live);
  snapshot.take({.now = {}, .held = pointers(held), .later = {}});
  for (const at::Tensor& one : live) {
    EXPECT_TRUE(is_plain_memory(one));
    one.fill_(7);
  }
  snapshot.settle();
  expect_equal(held, then);
}

TEST(Snapshot, LetsGoOfWhatItCopied) {
  Snapshot snapshot;
  const at::Tensor original = at::ones({100});
  std::vector<at::Tensor> now = {original}, later = {original};
  snapshot.take({.now = pointers(now), .held = {}, .later = pointers(later)});
  EXPECT_EQ(original.use_count(), 2);  // it still has to copy one of them
  snapshot.finish();
  snapshot.let_go();
  EXPECT_EQ(original.use_count(), 1);
  snapshot.finish();
}

}  // namespace
}  // namespace plumb
