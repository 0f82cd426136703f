// Whole parameters that graphs have on a device: no more of them than on the CPU; their memory is used neither before the kernels that
// wrote or read it have ended, nor by others before those of the graph have.
#include "unit/inside.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>

#include "engine/impl.h"
#include "lane/lane.h"
#include "plumb/plumb.h"
#include "scenarios/support/models.h"
#include "sim/support/support.h"

namespace plumb::sim {
namespace {

std::vector<at::Tensor> gather(const std::vector<at::Tensor>& parameters) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("plumb::gather", "")
                             .typed<std::vector<at::Tensor>(const std::vector<at::Tensor>&, int64_t)>();
  return op.call(parameters, 0);
}

// By rank: its units, and the most bytes of them that were whole when a graph used one.
struct Watched {
  Units* units = nullptr;
  int64_t most = 0;
};
std::array<Watched, 2> watched;

// A layer as a compiled graph computes it: gathered, freed behind its last use, and gathered again in the backward. The memory is the
// graph's, which it writes into before it frees it.
struct Layer : torch::autograd::Function<Layer> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
    context->save_for_backward({x});
    context->saved_data["weight"] = weight.detach();  // a shard: it has no memory of its own
    return used(weight, [&](const at::Tensor& whole) { return x.mm(whole.t()); });
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const at::Tensor x = context->get_saved_variables()[0];
    const at::Tensor of_x =
        used(context->saved_data["weight"].toTensor(), [&](const at::Tensor& whole) { return gradients[0].mm(whole); });
    return {of_x, gradients[0].t().mm(x)};
  }

 private:
  template <class Compute>
  static at::Tensor used(const at::Tensor& weight, const Compute& compute) {
    const at::Tensor whole = gather({weight})[0];
    Watched& mine = watched.at(static_cast<size_t>(weight.device().index()));
    mine.most = std::max(mine.most, mine.units->gathered_bytes());
    at::Tensor result = compute(whole);
    whole.fill_(99);
    return result;
  }
};

constexpr int layers = 4;

at::Tensor start_of(const at::Tensor& parameter, size_t number) {
  return (torch::arange(parameter.numel(), at::kFloat) + static_cast<double>(number)).sin().view(parameter.sizes()) / 2;
}

at::Tensor input_of(int rank) { return (torch::arange(12, at::kFloat) + rank).cos().view({2, 6}); }

void fill(torch::nn::Module& net) {
  const at::NoGradGuard no_grad;
  const auto parameters = net.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(start_of(parameters[i], i));
}

// Memory that was freed is handed out again, whoever still reads it.
void churn(int rank, const std::vector<c10::Stream>& streams) {
  for (const c10::Stream& stream : streams) {
    with(stream, [&] {
      for (const int64_t size : {16, 36, 48, 64}) (void)at::full({size}, 7.0, on(rank));
    });
  }
}

// Every layer under another stream than the one before it: what is gathered ahead is asked for under one and used under the next.
TEST(Inside, AGraphOnADeviceHasAUnitAtATimeAndNoneBetween) {
  std::vector<at::Tensor> expected;
  {
    scenarios::Alike net(layers);
    fill(net);
    torch::optim::SGD optimizer(net.parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      for (int rank = 0; rank < 2; ++rank) {
        at::Tensor h = input_of(rank);
        for (auto& layer : net.layers) h = torch::tanh(h.mm(layer.get()->weight.t()));
        (h.square().sum() / 2).backward();
      }
      optimizer.step();
    }
    for (auto& layer : net.layers) expected.push_back(layer.get()->weight.detach().clone());
  }
  for (uint64_t seed = 0; seed < few_seeds; ++seed) {
    Session session(seed);
    run_world(2, [&](World world) {
      const int rank = world.rank();
      scenarios::Alike net(layers);
      fill(net);
      net.to(device(rank));
      // A window of nothing: the unit in use, and the next one on its way.
      Engine engine(world, net, SGD{.lr = 0.1}, {.strategy = "zero3", .gather_ahead_bytes = 0});
      const std::vector<c10::Stream> streams = {new_stream(rank, "even"), new_stream(rank, "odd"),
                                                sim::current_stream(rank)};
      Units& units = *engine.impl().units;
      Watched& mine = watched.at(static_cast<size_t>(rank));
      const int64_t one = engine.impl().reducer->buckets()[0].numel * 4;
      for (int step = 0; step < 3; ++step) {
        mine = {&units, 0};
        at::Tensor h = input_of(rank).to(device(rank));
        for (int i = 0; i < layers; ++i) {
          const c10::Stream &now = streams[static_cast<size_t>(i % 2)], &before = streams[i == 0 ? 2 : 1 - i % 2];
          wait_for(now, before);
          with(now, [&] {
            keep_for_current(h);
            h = torch::tanh(Layer::apply(h, net.layers[static_cast<size_t>(i)].get()->weight));
          });
          churn(rank, streams);
        }
        wait_for(streams[2], streams[1]);
        keep_for_current(h);
        const at::Tensor loss = h.square().sum();
        EXPECT_LE(mine.most, 2 * one) << "one, and the next on its way";
        EXPECT_LE(units.gathered_bytes(), step == 0 ? 0 : one) << "between forward and backward, step " << step;
        mine.most = 0;
        loss.backward();
        EXPECT_LE(mine.most, 2 * one);
        EXPECT_GE(mine.most, one);
        EXPECT_EQ(units.gathered_bytes(), 0);
        churn(rank, streams);
        (void)engine.step();
        engine.zero_grad();
      }
      for (size_t i = 0; i < layers; ++i) {
        const at::Tensor found = engine.full_parameter(net.layers[i].get()->weight).cpu();
        EXPECT_TRUE(at::allclose(found, expected[i], 1e-5, 1e-6)) << "layer " << i << ", seed " << seed;
      }
    });
    session.finish();
    ASSERT_TRUE(session.races().empty()) << session.report();
  }
}

// In the middle of a backward, a unit that an eager node has just read, and that the backward will come back to, is whole and nobody's:
// a graph under another stream takes that memory, and writes into it no sooner than the node's kernels have read it.
TEST(Inside, AGraphTakesMemoryOnlyAfterTheKernelsThatReadIt) {
  at::Tensor expected;
  {
    torch::nn::Linear layer(6, 6);
    fill(*layer);
    const at::Tensor x = input_of(0).requires_grad_();
    layer->forward(layer->forward(x)).sum().backward();
    expected = x.grad();
  }
  for (uint64_t seed = 0; seed < few_seeds; ++seed) {
    Session session(seed);
    run_world(2, [&](World world) {
      const int rank = world.rank();
      scenarios::Alike net(1);
      fill(net);
      net.to(device(rank));
      Engine engine(world, net, SGD{.lr = 0.1}, {.strategy = "zero3"});
      const c10::Stream side = new_stream(rank, "graph");
      auto& layer = net.layers[0];
      const at::Tensor x = input_of(0).to(device(rank)).requires_grad_();
      const at::Tensor h = layer->forward(x);
      int64_t whole = -1;
      h.register_hook([&](const at::Tensor&) {
        with(side, [&] {
          gather({layer.get()->weight})[0].fill_(99);
          whole = engine.impl().units->gathered_bytes();
        });
      });
      const at::Tensor loss = layer->forward(h).sum();
      loss.backward();
      EXPECT_EQ(whole, 0) << "a copy was made, and the unit stayed";
      churn(rank, {side, sim::current_stream(rank)});
      EXPECT_TRUE(at::allclose(x.grad().cpu(), expected, 1e-5, 1e-6)) << seed;
    });
    session.finish();
    ASSERT_TRUE(session.races().empty()) << session.report();
  }
}

}  // namespace
}  // namespace plumb::sim
