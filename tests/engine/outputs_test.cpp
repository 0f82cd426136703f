// Entrance 3 from inside a compiled backward: plumb::deliver.output, called by the backward of a function as torch.compile's
// graphs call it.
#include "engine/outputs.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include "libtorch.h"

#include "engine/impl.h"
#include "plumb/plumb.h"

namespace plumb {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

void deliver_output(const at::Tensor& gradient, int64_t argument) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("plumb::deliver", "output")
                             .typed<void(const at::Tensor&, int64_t)>();
  op.call(gradient, argument);
}

// x times w, whose backward hands w's gradient over and returns nothing for it.
struct Compiled : torch::autograd::Function<Compiled> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& w) {
    context->save_for_backward({x, w});
    return x.mm(w);
  }
  static tensor_list backward(AutogradContext* context, tensor_list gradients) {
    const auto saved = context->get_saved_variables();
    at::Tensor raw = saved[0].t().mm(gradients[0]);
    deliver_output(raw, 1);
    raw.fill_(777);  // the graph uses its memory again
    return {gradients[0].mm(saved[1].t()), at::Tensor()};
  }
};

// The same, which fails after that where it is told to.
struct Failing : torch::autograd::Function<Failing> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& w, int64_t fails) {
    context->saved_data["fails"] = fails;
    return Compiled::forward(context, x, w);
  }
  static tensor_list backward(AutogradContext* context, tensor_list gradients) {
    tensor_list result = Compiled::backward(context, std::move(gradients));
    if (*reinterpret_cast<const bool*>(context->saved_data["fails"].toInt())) throw std::runtime_error("planned");
    result.emplace_back();
    return result;
  }
};

struct Net : torch::nn::Module {
  Net() { w = register_parameter("w", torch::full({3, 3}, 0.5)); }
  at::Tensor w;
};

at::Tensor input(int rank) { return torch::full({2, 3}, 1.0 + rank); }

// Of the sum of x w, by one process: the mean over two ranks.
at::Tensor expected() { return torch::full({3, 3}, (2.0 + 4.0) / 2); }

class Outputs : public testing::TestWithParam<std::string> {};

TEST_P(Outputs, AreDeliveredWhereTheyAreMadeAndCountOnce) {
  run_local(2, [&](World world) {
    Net net;
    Engine engine(world, net, NoOptimizer{}, {.strategy = GetParam()});
    for (int pass = 0; pass < 3; ++pass) {
      const int64_t before = output_counts().handed_back;
      Compiled::apply(input(world.rank()), net.w).sum().backward();
      EXPECT_EQ(output_counts().handed_back, before);
      EXPECT_TRUE(engine.full_gradient(net.w).equal(expected()));
      EXPECT_EQ(engine.impl().reducer->sinks()[0].deliveries, 1);
      engine.zero_grad();
    }
  });
}

TEST_P(Outputs, OfTwoGraphsAndOfAutogradAreOneSum) {
  run_local(2, [&](World world) {
    Net net;
    Engine engine(world, net, NoOptimizer{}, {.strategy = GetParam()});
    for (int pass = 0; pass < 2; ++pass) {
      const at::Tensor x = input(world.rank());
      (Compiled::apply(x, net.w).sum() + Compiled::apply(x, net.w).sum() + x.mm(net.w).sum()).backward();
      EXPECT_TRUE(engine.full_gradient(net.w).equal(3 * expected()));
      engine.zero_grad();
    }
  });
}

TEST_P(Outputs, GoToAutogradWhereSomebodyElseWantsThem) {
  run_local(2, [&](World world) {
    Net net;
    Engine engine(world, net, NoOptimizer{}, {.strategy = GetParam()});
    const at::Tensor x = input(world.rank());
    const at::Tensor mine = torch::full({3, 3}, 2.0 * (1 + world.rank()));

    const auto asked = torch::autograd::grad({Compiled::apply(x, net.w).sum()}, {net.w});
    EXPECT_TRUE(asked[0].equal(mine));
    EXPECT_FALSE(net.w.grad().defined());

    int heard = 0;
    const auto hook = net.w.register_hook([&](const at::Tensor& gradient) {
      ++heard;
      EXPECT_TRUE(gradient.equal(2 * mine)) << "the sum of a backward, once";
    });
    (Compiled::apply(x, net.w).sum() + Compiled::apply(x, net.w).sum()).backward();
    net.w.remove_hook(hook);
    EXPECT_EQ(heard, 1);
    EXPECT_TRUE(engine.full_gradient(net.w).equal(2 * expected()));
    engine.zero_grad();

    const at::Tensor out = Compiled::apply(x, net.w).sum();
    out.backward({}, true);
    out.backward();
    EXPECT_TRUE(engine.full_gradient(net.w).equal(2 * expected())) << "a graph that is kept, walked twice";
  });
}

// What it handed back is of the walk that failed, also where a graph is kept and another walk delivers.
TEST_P(Outputs, OfAWalkThatFailedAreNotInTheNext) {
  run_local(2, [&](World world) {
    Net net;
    Engine engine(world, net, NoOptimizer{}, {.strategy = GetParam()});
    for (const bool keeps : {false, true}) {
      bool fails = true;
      const at::Tensor x = input(world.rank());
      const at::Tensor out = Failing::apply(x, net.w, reinterpret_cast<int64_t>(&fails)).sum();
      EXPECT_THAT([&] { out.backward({}, true); },
                  testing::ThrowsMessage<std::exception>(testing::HasSubstr("planned")));
      engine.zero_grad();
      fails = false;
      out.backward({}, keeps);
      EXPECT_TRUE(engine.full_gradient(net.w).equal(expected())) << keeps;
      engine.zero_grad();
    }
  });
}

// The other operator is told whose gradient it is; of several engines, each gets its own.
TEST_P(Outputs, OfNamedParametersGoToTheEnginesThatOwnThem) {
  static const auto deliver =
      c10::Dispatcher::singleton().findSchemaOrThrow("plumb::deliver", "").typed<void(at::Tensor, const at::Tensor&)>();
  static const auto end_pass =
      c10::Dispatcher::singleton().findSchemaOrThrow("plumb::end_pass", "").typed<void(at::Tensor)>();
  run_local(2, [&](World world) {
    Net one, other;
    Engine first(world, one, NoOptimizer{}, {.strategy = GetParam()});
    Engine second(world, other, NoOptimizer{}, {.strategy = GetParam()});
    at::Tensor raw = torch::full({3, 3}, 2.0 * (1 + world.rank()));
    deliver.call(one.w, raw);
    deliver.call(other.w, 2 * raw);
    deliver.call(other.w.detach(), raw);  // as a graph may hold it
    raw.fill_(777);
    end_pass.call(one.w);
    end_pass.call(other.w);
    EXPECT_TRUE(first.full_gradient(one.w).equal(expected()));
    EXPECT_TRUE(second.full_gradient(other.w).equal(3 * expected()));
    EXPECT_THROW(deliver.call(torch::ones({3, 3}), raw), Error) << "nobody's";
    EXPECT_THROW(end_pass.call(torch::ones({3, 3})), Error);
  });
}

INSTANTIATE_TEST_SUITE_P(Strategies, Outputs, testing::Values("ddp", "zero1", "zero2"),
                         [](const auto& info) { return info.param; });

TEST(OutputsAlone, OfNoEngineAreAutograds) {
  Net net;
  Compiled::apply(input(0), net.w).sum().backward();
  EXPECT_TRUE(net.w.grad().equal(torch::full({3, 3}, 2.0)));
}

TEST(OutputsAlone, RefuseADifferentiationOfKeptGraphs) {
  Net net;
  const at::Tensor x = input(0).requires_grad_();
  const auto first = torch::autograd::grad({Compiled::apply(x, net.w).sum()}, {net.w}, {}, true, true);
  EXPECT_THROW(first[0].sum().backward(), std::exception);
}

TEST(OutputsAlone, OutsideOfABackwardAreAnError) { EXPECT_THROW(deliver_output(torch::ones({2}), 0), Error); }

// A gradient that is to be differentiated stays autograd's, which refuses it: a penalty of it would be left out in silence.
TEST(OutputsAlone, RefuseADifferentiationOfGradientsThatAnEngineHas) {
  Net net;
  Engine engine(World(), net, NoOptimizer{});
  for (const bool leaf : {false, true}) {
    const at::Tensor x = input(0).requires_grad_(leaf);
    const int64_t before = output_counts().handed_back;
    const at::Tensor loss = Compiled::apply(x, net.w).sum();
    loss.backward({}, /*retain_graph=*/c10::nullopt, /*create_graph=*/true);
    EXPECT_EQ(output_counts().handed_back, before + 1);
    EXPECT_THROW((net.w.grad().square().sum() + net.w.sum()).backward(), std::exception);
    engine.zero_grad();
  }
}

}  // namespace
}  // namespace plumb
