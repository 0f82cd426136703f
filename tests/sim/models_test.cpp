// Models trained on the simulated accelerator have the CPU's bits, whatever the order of execution.
#include "sim/support/support.h"

namespace plumb::sim {
namespace {

class Models : public testing::TestWithParam<std::tuple<size_t, std::string>> {};

TEST_P(Models, TrainToTheBitsOfTheCpuUnderEverySeed) {
  const auto& [index, optimizer] = GetParam();
  const ModelCase& model = models()[index];
  const auto expected = train(model, at::kCPU, 4, optimizer);
  for (uint64_t seed = 0; seed < 6; ++seed) {
    Session session(seed);
    const auto found = train(model, device(0), 4, optimizer);
    session.finish();
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(same_bits(found[i], expected[i])) << model.name << ", result " << i << ", seed " << seed;
    }
    EXPECT_EQ(session.report(), "no races\n") << model.name << ", seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(All, Models, testing::Combine(testing::Range<size_t>(0, 4), testing::Values("sgd", "adamw")));

TEST(Operations, HaveTheBitsOfTheCpu) {
  using Function = std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>;
  const std::vector<std::pair<const char*, Function>> cases = {
      {"mm", [](auto& a, auto& b) { return a.mm(b); }},
      {"scalars", [](auto& a, auto&) { return a * 2 + 1; }},
      {"cat", [](auto& a, auto& b) { return torch::cat({a.t(), b}, 1); }},
      {"in place on a view",
       [](auto& a, auto&) {
         auto c = a.clone();
         c.slice(1, 1, 3).mul_(2);
         return c;
       }},
      {"reductions", [](auto& a, auto& b) { return a.sum(0) + b.mean(1); }},
      {"topk", [](auto& a, auto&) { return std::get<0>(a.topk(2)); }},
      {"sort", [](auto& a, auto&) { return std::get<1>(a.sort(1)); }},
      {"nonzero", [](auto& a, auto&) { return (a > 0).nonzero(); }},
      {"index by mask", [](auto& a, auto&) { return a.index({a > 0}); }},
      {"index_put",
       [](auto& a, auto&) {
         auto c = a.clone();
         c.index_put_({torch::tensor({0, 2}, a.options().dtype(at::kLong))}, 7.);
         return c;
       }},
      {"where", [](auto& a, auto&) { return torch::where(a > 0, a, torch::zeros({}, a.options())); }},
      {"bf16", [](auto& a, auto& b) { return a.to(at::kBFloat16).mm(b.to(at::kBFloat16)).to(at::kFloat); }},
      {"einsum", [](auto& a, auto& b) { return torch::einsum("ij,jk->ki", {a, b}); }},
      {"svd", [](auto& a, auto&) { return std::get<1>(torch::linalg_svd(a)); }},
      {"cholesky", [](auto& a, auto&) { return torch::linalg_cholesky(a.mm(a.t()) + torch::eye(3, a.options())); }},
      {"norms", [](auto& a, auto& b) { return a.norm() + torch::linalg_vector_norm(b); }},
      {"foreach",
       [](auto& a, auto&) {
         auto v = torch::_foreach_add({a, a * 2}, 1.0);
         return v[0] + v[1];
       }},
      {"foreach norm", [](auto& a, auto& b) { return torch::_foreach_norm({a, b})[1]; }},
      {"out= of size 0",
       [](auto& a, auto& b) {
         auto o = torch::empty({0}, a.options());
         torch::mm_out(o, a, b);
         return o;
       }},
      {"out= as scratch",
       [](auto& a, auto&) {
         auto o = torch::empty({}, a.options());
         torch::mse_loss_out(o, a, a * 2);
         return o;
       }},
      {"resize_",
       [](auto& a, auto&) {
         auto c = a.clone();
         c.resize_({2, 8}).slice(1, 6, 8).zero_();
         c.slice(0, 1, 2).zero_();
         return c;
       }},
      {"conv2d",
       [](auto& a, auto&) {
         return torch::conv2d(a.view({1, 1, 3, 4}), a.slice(1, 0, 3).contiguous().view({1, 1, 3, 3}));
       }},
      {"random",
       [](auto& a, auto&) {
         torch::manual_seed(3);
         return torch::randn({3, 3}, a.options()) + torch::rand({3, 3}, a.options());
       }},
      {"bernoulli",
       [](auto& a, auto&) {
         torch::manual_seed(3);
         return torch::bernoulli(torch::full_like(a, 0.5));
       }},
      {"multinomial",
       [](auto& a, auto&) {
         torch::manual_seed(3);
         return torch::multinomial(a.abs(), 2);
       }},
      {"poisson then normal",
       [](auto& a, auto&) {
         torch::manual_seed(3);
         return torch::poisson(a.abs()) + torch::randn_like(a);
       }},
      {"attention",
       [](auto& a, auto&) {
         auto q = a.view({1, 1, 3, 4});
         return at::scaled_dot_product_attention(q, q, q);
       }},
      {"batch norm", [](auto& a, auto&) { return torch::batch_norm(a, {}, {}, {}, {}, true, .1, 1e-5, false); }},
      {"complex", [](auto& a, auto&) { return torch::real(torch::fft_fft(a)); }},
      {"conjugate copies",
       [](auto& a, auto&) { return torch::real(torch::view_as_complex(a.view({3, 2, 2})).conj().clone()); }},
      {"unique", [](auto& a, auto&) { return std::get<0>(at::_unique(a)); }},
      {"cumsum", [](auto& a, auto&) { return a.cumsum(1).std(1); }},
      // Calls that differ in one argument alone, whose results differ in shape, order or dtype.
      {"a range up to 3.0", [](auto& a, auto&) { return torch::arange(3.0, a.options()); }},
      {"a range up to 5.0", [](auto& a, auto&) { return torch::arange(5.0, a.options()); }},
      {"a sum", [](auto& a, auto&) { return a.sum(at::IntArrayRef{1}, false); }},
      {"a sum that keeps its dimension", [](auto& a, auto&) { return a.sum(at::IntArrayRef{1}, true); }},
      {"a number", [](auto& a, auto&) { return a.to(at::kLong) * 2.5; }},
      {"a number in a tensor", [](auto& a, auto&) { return a.to(at::kLong) * torch::full({}, 2.5, at::kDouble); }},
      {"in order", [](auto& a, auto&) { return at::tensor((a.slice(1, 0, 3) + 1).strides()); }},
      {"turned", [](auto& a, auto&) { return at::tensor((a.slice(1, 0, 3).t() + 1).strides()); }},
      {"index by bytes", [](auto& a, auto&) { return a.index({(a > 0).to(at::kByte)}); }},
      {"conv_transpose2d",
       [](auto& a, auto&) {
         const auto x = a.view({1, 3, 2, 2}), weight = a.slice(1, 0, 2).contiguous().view({3, 2, 1, 1});
         const auto bias = torch::ones({2}, a.options()).requires_grad_();
         torch::conv_transpose2d(x, weight, bias).square().sum().backward();
         return bias.grad();
       }},
  };
  torch::manual_seed(11);
  const auto a = torch::randn({3, 4}), b = torch::randn({4, 5});
  for (const auto& [name, function] : cases) {
    Session session(3);
    const at::Tensor expected = function(a, b);
    const at::Tensor found = function(a.to(device(0)), b.to(device(0)));
    EXPECT_TRUE(same_bits(found, expected)) << name << ":\n" << found.cpu() << "\nexpected\n" << expected;
    session.finish();
    EXPECT_EQ(session.report(), "no races\n") << name;
  }
}

TEST(Operations, OverTwoDevicesAreRefused) {
  const Session session(0);
  EXPECT_THAT([] { torch::ones({2}, on(0)) + torch::ones({2}, on(1)); },
              testing::Throws<std::exception>(testing::Property(
                  &std::exception::what, testing::AllOf(testing::HasSubstr("sim:0"), testing::HasSubstr("sim:1")))));
}

TEST(Operations, RunTheFusedOptimizerInPlace) {
  const auto run = [](const at::Device& where) {
    torch::manual_seed(5);
    std::vector<at::Tensor> p{torch::randn({40}).to(where)}, g{torch::randn({40}).to(where)},
        m{torch::zeros({40}).to(where)}, v{torch::zeros({40}).to(where)}, step{torch::ones({}).to(where)};
    at::_fused_adamw_(p, g, m, v, {}, step, 1e-3, 0.9, 0.999, 0.01, 1e-8, false, false);
    return torch::cat({p[0], m[0], v[0]}).cpu();
  };
  Session session(1);
  const at::Tensor found = run(device(0));
  EXPECT_TRUE(same_bits(found, run(at::kCPU)));
  EXPECT_EQ(session.report(), "no races\n");
}

TEST(Operations, DrawTheSameRandomNumbersOnTwoStreamsUnderEverySeed) {
  at::Tensor first;
  for (uint64_t seed = 0; seed < few_seeds; ++seed) {
    Session session(seed);
    const auto main = current_stream(0), side = new_stream(0);
    torch::manual_seed(3);
    const auto x = torch::ones({64}, on(0));
    const auto y = torch::dropout(x, .5, true);
    wait_for(side, main);
    const auto z = with(side, [&] { return torch::dropout(x, .5, true); });
    const auto noise = torch::randn({64}, on(0));
    wait_for(main, side);
    const auto result = torch::cat({y, z, noise}).cpu();
    if (seed == 0) first = result;
    EXPECT_TRUE(same_bits(result, first)) << "seed " << seed;
    session.finish();
  }
}

TEST(Operations, ThatFailInAKernelAreThrownAtTheNextSynchronisation) {
  Session session(0);
  const auto table = torch::ones({4, 2}, on(0));
  const auto index = torch::full({1}, 9, on(0).dtype(at::kLong));
  const Scope scope("look up a word");
  const auto row = at::index_select(table, 0, index);
  while (!current_stream(0).query()) {
  }
  synchronize(1);  // what has failed elsewhere is not told here
  try {
    synchronize(0);
    FAIL() << "the fault was not thrown";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("index_select"));
    EXPECT_THAT(error.what(), testing::HasSubstr("look up a word"));
  }
  EXPECT_EQ(session.faults().size(), 1u);
  synchronize(0);
}

}  // namespace
}  // namespace plumb::sim
