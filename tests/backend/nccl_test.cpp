// NCCL, where there is a device: one rank is enough to see that every verb of a group goes through.
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include "libtorch.h"

#include "backend/nccl.h"
#include "world/world_impl.h"

namespace plumb {
namespace {

TEST(Nccl, CarriesEveryVerbOnOneRank) {
  if (!has_nccl() || !torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device, or a build without NCCL";
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto backend = make_nccl(store, 0, 1, 0, std::chrono::seconds(60));
  const auto options = torch::device(at::kCUDA).dtype(at::kFloat);
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    at::Tensor x = torch::arange(32, options).to(dtype);
    const at::Tensor before = x.clone();
    std::vector<at::Tensor> list{x};
    backend->allreduce(list)->wait();
    EXPECT_TRUE(x.equal(before));
    at::Tensor out = torch::empty_like(x);
    backend->_allgather_base(out, x)->wait();
    EXPECT_TRUE(out.equal(before));
    at::Tensor part = torch::empty_like(x);
    backend->_reduce_scatter_base(part, x)->wait();
    EXPECT_TRUE(part.equal(before));
    backend->broadcast(list)->wait();
    EXPECT_TRUE(x.equal(before));
  }
  torch::cuda::synchronize();
}

}  // namespace
}  // namespace plumb
