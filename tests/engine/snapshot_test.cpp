// A snapshot has every byte of what was there, whichever threads copy it.
#include "engine/snapshot.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

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
      snapshot.take(pointers(now), pointers(later));
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
    snapshot.take({}, pointers(later));
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

TEST(Snapshot, LetsGoOfWhatItCopied) {
  Snapshot snapshot;
  const at::Tensor original = at::ones({100});
  std::vector<at::Tensor> now = {original}, later = {original};
  snapshot.take(pointers(now), pointers(later));
  EXPECT_EQ(original.use_count(), 2);  // it still has to copy one of them
  snapshot.finish();
  snapshot.let_go();
  EXPECT_EQ(original.use_count(), 1);
  snapshot.finish();
}

}  // namespace
}  // namespace plumb
