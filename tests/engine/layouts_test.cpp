// Checkpoints of tensors whose memory lies in any order, and with gaps: what counts is the tensor.
#include <gtest/gtest.h>
#include "libtorch.h"

#include "plumb/plumb.h"
#include "save/file.h"
#include "save/support/folder.h"
#include "save/tensors.h"

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

// A file alone, as others read it: a tensor of the parameter's shape has its elements in the order of that shape.
TEST(Layouts, OfFilesThatOthersReadAreThoseOfTheirShapes) {
  const Scratch scratch;
  const at::Tensor values = at::arange(12, at::kFloat).view({3, 4});
  for (const auto& [from, memory] : layouts()) {
    at::Tensor weight = memory.clone(at::MemoryFormat::Preserve).copy_(values).requires_grad_();
    Engine engine(World(), NamedTensors{{"weight", weight}}, {}, SGD{});
    const std::string path = engine.save(scratch.path(from));
    for (const std::string& name : save::names_in(path)) {
      if (!name.starts_with("weights")) continue;
      const save::TensorFile file(path + "/" + name);
      ASSERT_EQ(file.tensors().size(), 1u);
      const save::TensorInFile& tensor = file.tensors()[0];
      const at::Tensor found = at::empty({12}, at::kFloat);
      file.read(tensor, 0, found.mutable_data_ptr(), found.nbytes());
      const bool shaped = tensor.shape == values.sizes().vec();
      EXPECT_TRUE(shaped ? found.view({3, 4}).equal(values) : tensor.shape == std::vector<int64_t>{12}) << from;
      EXPECT_EQ(shaped, weight.is_contiguous()) << from;
    }
  }
}

}  // namespace
}  // namespace plumb::test
