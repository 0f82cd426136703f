// Checkpoints of tensors whose memory lies in any order, and with gaps: what counts is the tensor.
#include <gtest/gtest.h>
#include "libtorch.h"

#include "plumb/plumb.h"
#include "save/support/folder.h"

namespace plumb::test {
namespace {

struct Laid : torch::nn::Module {
  explicit Laid(const at::Tensor& memory) {
    weight = register_parameter("weight", at::ones({3}));
    buffer = register_buffer("buffer", memory);
  }
  at::Tensor weight, buffer;
};

// Tensors of one shape.
std::vector<std::pair<std::string, at::Tensor>> layouts() {
  return {{"in order", at::zeros({3, 4})},
          {"transposed", at::zeros({4, 3}).t()},
          {"some columns", at::zeros({3, 8}).narrow(1, 2, 4)},
          {"every second column", at::zeros({3, 8}).slice(1, 0, 8, 2)},
          {"every second row", at::zeros({6, 4}).slice(0, 0, 6, 2)},
          {"some rows of a transposed one", at::zeros({4, 6}).t().narrow(0, 1, 3)}};
}

TEST(Layouts, OfBuffersMayDifferBetweenSaveAndLoad) {
  const Scratch scratch;
  const at::Tensor values = at::arange(12, at::kFloat).view({3, 4});
  for (const auto& [from, saved] : layouts()) {
    Laid model(saved);
    model.buffer.copy_(values);
    Engine engine(World(), model, SGD{});
    const std::string path = engine.save(scratch.path(from));
    for (const auto& [to, loaded] : layouts()) {
      Laid other(loaded);
      Engine second(World(), other, SGD{});
      second.load(path);
      EXPECT_TRUE(other.buffer.equal(values)) << from << " to " << to;
      EXPECT_EQ(other.buffer.strides(), loaded.strides()) << "where it was";
      other.buffer.zero_();
      second.load_weights(path);
      EXPECT_TRUE(other.buffer.equal(values)) << "weights alone, " << from << " to " << to;
    }
  }
}

}  // namespace
}  // namespace plumb::test
