// Grouped products of memory that lies anywhere: a batch that is cut out of a larger one begins where it begins.
#include "nn/product.h"

#include "libtorch.h"

#include "nn/support/fused.h"

namespace plumb::test {
namespace {

bool lies_at_16_bytes(const at::Tensor& tensor) {
  return reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}

// The same values, `skipped` elements behind the begin of their memory.
at::Tensor shifted(const at::Tensor& values, int64_t skipped) {
  const at::Tensor flat = at::empty({values.numel() + skipped}, values.options().requires_grad(false));
  return flat.narrow(0, skipped, values.numel()).view(values.sizes()).copy_(values.detach());
}

TEST(At16Bytes, IsTheTensorItselfWhereItLiesSoAndACopyWhereNot) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const at::Tensor rows = at::randn({5, 8}, dtype), experts = at::randn({3, 16, 8}, dtype);
    const at::Tensor wide = at::randn({5, 12}, dtype);
    const std::vector<at::Tensor> fit = {rows,
                                         rows.t(),
                                         shifted(rows, 8),
                                         experts,
                                         experts.transpose(1, 2),
                                         experts.narrow(1, 3, 8),  // with gaps between experts
                                         at::randn({5, 16}, dtype).narrow(1, 8, 8)};
    const std::vector<at::Tensor> misfit = {shifted(rows, 1),
                                            shifted(rows, 3),
                                            shifted(rows, 7),
                                            shifted(rows, 3).t(),
                                            shifted(experts, 4),
                                            wide.narrow(1, 0, 8),
                                            at::randn({5, 16}, dtype).narrow(1, 4, 8),
                                            at::randn({5, 8, 2}, dtype).select(2, 0),
                                            at::randn({8}, dtype).expand({5, 8})};
    for (size_t i = 0; i < fit.size(); ++i) {
      EXPECT_TRUE(nn::at_16_bytes(fit[i]).is_alias_of(fit[i])) << i;
      EXPECT_TRUE(nn::at_16_bytes(fit[i]).equal(fit[i])) << i;
    }
    for (size_t i = 0; i < misfit.size(); ++i) {
      const at::Tensor copy = nn::at_16_bytes(misfit[i]);
      EXPECT_FALSE(copy.is_alias_of(misfit[i])) << i;
      EXPECT_TRUE(copy.equal(misfit[i]) && copy.is_contiguous() && lies_at_16_bytes(copy)) << i;
    }
  }
}

// Input, weights, gradient and buffer each at a place of its own: the numbers do not depend on it.
TEST(Grouped, TakesRowsAndWeightsThatLieAnywhere) {
  for (const at::Device& device : devices()) {
    for (const auto kind : {nn::Experts::grouped, nn::Experts::separate}) {
      for (const bool owned : {false, true}) {
        for (const bool delayed : {false, true}) {
          const auto results = [&](int64_t skipped) {
            torch::manual_seed(8);
            nn::GroupedLinear layer(nn::GroupedLinearOptions{
                .experts = 2, .in = 8, .out = 16, .weights = kind, .delay_wgrad_compute = delayed});
            layer->to(device, at::kBFloat16);
            std::vector<std::shared_ptr<MainGradSink>> sinks;
            for (const at::Tensor& weight : layer->weights) {
              weight.set_data(shifted(weight, skipped));
              if (owned)
                sinks.push_back(attach_main_grad(weight, {.main_grad = shifted(at::zeros_like(weight), skipped)}));
            }
            const at::Tensor x = shifted(at::randn({7, 8}, at::kBFloat16).to(device), skipped).requires_grad_();
            const at::Tensor dy = shifted(at::randn({7, 16}, at::kBFloat16).to(device), skipped);
            const at::Tensor y = layer->forward(x, nn::Tokens::sizes(at::tensor({3, 4}, at::kLong)));
            y.backward(dy);
            if (delayed) layer->backward_dw();
            std::vector<at::Tensor> found = {y, x.grad()};
            for (size_t i = 0; i < layer->weights.size(); ++i) {
              found.push_back(owned ? sinks[i]->facts.main_grad : layer->weights[i].grad());
            }
            return found;
          };
          const auto wanted = results(0);
          for (const int64_t skipped : {1, 3, 8}) {
            const auto found = results(skipped);
            for (size_t i = 0; i < found.size(); ++i) expect_close(f64(found[i]), f64(wanted[i]), 1e-2);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace plumb::test
