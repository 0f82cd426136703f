// The programs: what users do with streams, and what torch lets them do without a word about order.
#include "sim/scenarios.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <optional>

#include "sim/actor.h"

namespace plumb::sim {
namespace {

// Both branches in one bucket, which is not the last; one weight that is larger than any bucket.
Options small_buckets() {
  Options options;
  options.bucket_bytes = 800;
  options.first_bucket_bytes = 256;
  options.clip_norm = 0.05;
  return options;
}

void step(Actor& actor) {
  const Scope scope("step()");
  actor.note(actor.engine().step().grad_norm);
  actor.name_gradients();
}

// Memory that was freed is handed out again, whoever still reads it.
void churn(Actor& actor) {
  for (int lane = 0; lane <= 3; ++lane) {
    actor.on(lane, [&] {
      for (const int64_t size : {8, 72, 144, 432}) (void)at::full({size}, 7.0, actor.options());
    });
  }
}

// Each branch has a weight and a bias that accumulate under different streams; after the first backward, in place, where
// that was called.
void several_streams(Actor& actor) {
  actor.build({1, 2, 3, 1, 0, 2, 3, 0, 1, 2});
  for (int number = 0; number < 2; ++number) {
    const at::Tensor loss = actor.branched_loss(actor.input(number), 1, 2);
    loss.backward();
    actor.note(loss);
    churn(actor);
    step(actor);
  }
}

// Three losses in one backward. The second time, the large gradient comes before those of the bucket in front of it, so
// that another stream than its own begins its reduction. The last time it is delivered, under a stream of its own.
void large_parameter(Actor& actor) {
  actor.build({0, 0, 0, 0, 0, 0, 3, 0, 0, 0});
  Net& net = actor.net();
  for (int number = 0; number < 3; ++number) {
    const at::Tensor x = actor.input(number);
    const at::Tensor one = x.sum(1, /*keepdim=*/true);
    const auto branches = [&] {
      const at::Tensor h = net.trunk->forward(x);
      return (net.left->forward(h) + net.right->forward(h)).square().mean();
    };
    const at::Tensor head = net.head->forward(one.expand({4, 48})).square().mean();
    at::Tensor large;
    if (number == 0) large = net.large->forward(one.expand({4, 9})).square().mean();
    const at::Tensor both = branches();
    if (number == 1) large = net.large->forward(one.expand({4, 9})).square().mean();
    const at::Tensor weight = net.large.get()->weight;
    if (number == 2) {
      head.register_hook([&](const at::Tensor&) {
        actor.on(3, [&] { actor.engine().deliver(weight, actor.raw_gradient(weight, number)); });
      });
    }
    (number == 2 ? head + both : head + large + both).backward();
    step(actor);
  }
}

// Backwards from two streams that know nothing of each other. In plain torch this is right, since a leaf accumulates
// where its accumulator was made.
void refill(Actor& actor) {
  actor.build({3, 0});
  for (const int lane : {1, 2}) actor.wait(lane, 0);
  for (int number = 0; number < 2; ++number) {
    for (const int lane : {1, 2}) {
      actor.on(lane, [&] {
        const at::Tensor loss = actor.loss(actor.input(3 * number + lane));
        loss.backward();
        actor.note(loss);
      });
    }
    step(actor);
    if (number == 0) actor.engine().zero_grad();
  }
}

// Casts to the bucket's dtype, gradients the user replaced, and everything freed at once.
void temporaries(Actor& actor) {
  actor.build({1, 2});
  for (int number = 0; number < 2; ++number) {
    actor.branched_loss(actor.input(number), 1, 3).backward();
    churn(actor);
    for (const at::Tensor& parameter : actor.net().parameters()) parameter.mutable_grad() = parameter.grad() * 0.5;
    churn(actor);
    step(actor);
    actor.engine().zero_grad();
    churn(actor);
  }
}

void step_elsewhere(Actor& actor) {
  actor.build();
  for (const int lane : {1, 2, 3}) actor.wait(lane, 0);
  for (int number = 0; number < 3; ++number) {
    actor.on(1, [&] { actor.loss(actor.input(number)).backward(); });
    actor.on(number == 1 ? 3 : 2, [&] {
      step(actor);
      actor.engine().zero_grad();
    });
  }
}

// Evaluation under another stream, in the middle of a training step.
void evaluate_beside(Actor& actor) {
  actor.build({1, 0});
  for (int number = 0; number < 2; ++number) {
    const at::Tensor loss = actor.loss(actor.input(number));
    actor.wait(2, 0);
    actor.on(2, [&] {
      const at::NoGradGuard no_grad;
      actor.note(actor.loss(actor.input(10 + number)));
    });
    loss.backward();
    churn(actor);
    actor.wait(0, 2);
    step(actor);
    actor.engine().zero_grad();
  }
}

void hold(Actor& actor) {
  actor.build({3, 0, 2});
  actor.wait(1, 0);
  for (int number = 0; number < 2; ++number) {
    {
      const NoSync held = actor.engine().no_sync();
      for (int micro = 0; micro < 2; ++micro) actor.loss(actor.input(3 * number + micro)).backward();
    }
    actor.on(1, [&] { actor.loss(actor.input(3 * number + 2)).backward(); });
    churn(actor);
    step(actor);
    actor.engine().zero_grad();
  }
}

void same_graph_twice(Actor& actor) {
  actor.build({2, 0});
  for (int number = 0; number < 2; ++number) {
    const at::Tensor loss = actor.branched_loss(actor.input(number), 1, 2);
    loss.backward({}, /*retain_graph=*/true);
    actor.wait(3, 0);
    actor.on(3, [&] {
      actor.uses(loss);
      loss.backward();
    });
    actor.wait(0, 3);
    step(actor);
    if (number == 0) actor.engine().zero_grad();
  }
}

// One module under two streams at once; each sees the other's gathered parameters, and neither frees them too soon.
void one_module_two_streams(Actor& actor) {
  actor.build({2, 0});
  for (int number = 0; number < 2; ++number) {
    const at::Tensor h = actor.net().trunk->forward(actor.input(number));
    for (const int lane : {1, 2}) actor.wait(lane, 0);
    std::vector<at::Tensor> branches;
    {
      const UnitScope whole(unit::door_of(actor.net().left.ptr()));
      for (const int lane : {1, 2}) {
        actor.on(lane, [&] {
          branches.push_back(actor.net().left->forward(h * lane));
          actor.uses(h);
        });
      }
    }
    churn(actor);
    for (const int lane : {1, 2}) actor.wait(0, lane);
    const at::Tensor both = branches[0] + branches[1] + actor.net().right->forward(h);
    for (const at::Tensor& branch : branches) actor.uses(branch);
    actor.net().head->forward(actor.net().large->forward(both)).square().mean().backward();
    churn(actor);
    step(actor);
    actor.engine().zero_grad();
  }
}

// Runs a part of the model again inside its backward, with a backward of its own, under the stream it ran on.
struct Again : torch::autograd::Function<Again> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, Actor* actor, const at::Tensor& x) {
    context->save_for_backward({x});
    context->saved_data["actor"] = reinterpret_cast<int64_t>(actor);
    const at::NoGradGuard no_grad;
    return actor->net().left->forward(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto* actor = reinterpret_cast<Actor*>(context->saved_data["actor"].toInt());
    const at::Tensor x = context->get_saved_variables()[0].detach().set_requires_grad(true);
    at::Tensor y;
    {
      const at::AutoGradMode on(true);
      y = actor->net().left->forward(x);
    }
    torch::autograd::backward({y}, {gradients[0]});
    return {at::Tensor(), x.grad()};
  }
};

void run_again(Actor& actor) {
  actor.build({2, 0, 1});
  for (int number = 0; number < 2; ++number) {
    for (int micro = 0; micro < 2; ++micro) {
      const at::Tensor h = actor.net().trunk->forward(actor.input(2 * number + micro));
      const at::Tensor both = Again::apply(&actor, h) + Again::apply(&actor, h * 2) + actor.net().right->forward(h);
      actor.net().head->forward(actor.net().large->forward(both)).square().mean().backward();
      churn(actor);
    }
    step(actor);
    actor.engine().zero_grad();
  }
}

// One weight whose gradient is written by nodes of three streams and accumulated plainly beside them, in passes that
// reduce and in passes that hold.
void fused_weight(Actor& actor) {
  actor.build({3, 0});
  Net& net = actor.net();
  const auto loss = [&](int micro) {
    const at::Tensor h = net.trunk->forward(actor.input(micro));
    at::Tensor sum = net.left->forward(h) + net.right->fused(h);
    for (const int lane : {1, 2, 3}) {
      actor.wait(lane, 0);
      const at::Tensor branch = actor.on(lane, [&] {
        actor.uses(h);
        return net.left->fused(h * lane);
      });
      actor.wait(0, lane);
      sum = sum + branch;
      actor.uses(branch);
    }
    return net.head->forward(net.large->forward(sum)).square().mean();
  };
  for (int number = 0; number < 2; ++number) {
    {
      const NoSync held = actor.engine().no_sync();
      loss(3 * number).backward();
      churn(actor);
      actor.wait(2, 0);
      actor.on(2, [&] { net.left->fused(actor.input(3 * number + 1)).square().mean().backward(); });
    }
    loss(3 * number + 2).backward();
    churn(actor);
    step(actor);
    if (number == 0) actor.engine().zero_grad();
  }
}

// The same by hand: streams that know nothing of each other deliver to one parameter, between backwards and inside one.
void delivered_weight(Actor& actor) {
  actor.build({3, 0});
  Net& net = actor.net();
  const at::Tensor weight = net.left.get()->weight;
  for (const int lane : {1, 2, 3}) actor.wait(lane, 0);
  const auto deliver = [&](int lane, int number) {
    actor.on(lane, [&] { actor.engine().deliver(weight, actor.raw_gradient(weight, number)); });
    churn(actor);
  };
  for (int number = 0; number < 2; ++number) {
    for (const bool holds : {true, false}) {
      std::optional<NoSync> held;
      if (holds) held.emplace(actor.engine());
      for (const int lane : {1, 2, 1}) deliver(lane, 10 * number + lane);
      actor.engine().end_pass();
    }
    const at::Tensor h = net.trunk->forward(actor.input(number));
    const at::Tensor both = net.left->forward(h) + net.right->forward(h);
    both.register_hook([&](const at::Tensor&) { deliver(2, 10 * number + 5); });  // before the plain one
    h.register_hook([&](const at::Tensor&) { deliver(1, 10 * number + 6); });     // most often after it
    net.head->forward(net.large->forward(both)).square().mean().backward();
    step(actor);
    if (number == 0) actor.engine().zero_grad();
  }
}

// Weight gradients that were put off, written under other streams than the backwards and than each other.
void put_off(Actor& actor) {
  actor.build({3, 0});
  Net& net = actor.net();
  for (int number = 0; number < 2; ++number) {
    const std::array stores{std::make_shared<nn::WgradStore>(), std::make_shared<nn::WgradStore>()};
    for (int micro = 0; micro < 2; ++micro) {
      const at::Tensor h = net.trunk->forward(actor.input(2 * number + micro));
      const at::Tensor both = net.left->fused(h, stores[0]) + net.left->fused(h * 2, stores[1]);
      net.head->forward(net.large->forward(both)).square().mean().backward();
      for (const int lane : {1, 2}) {
        actor.wait(lane, 0);
        actor.on(lane, [&] { stores[lane - 1]->flush(); });
      }
      churn(actor);
    }
    step(actor);
    actor.engine().zero_grad();
  }
}

Options deterministic() {
  Options options = small_buckets();
  options.deterministic = true;
  options.virtual_ranks = 8;
  return options;
}

void shares(Actor& actor) {
  actor.build({3, 0});
  for (const int lane : {1, 2}) actor.wait(lane, 0);
  const int count = 8 / actor.engine().world().size();
  for (int number = 0; number < 2; ++number) {
    for (int share = 0; share < count; ++share) {
      actor.on(1 + share % 2, [&] { actor.loss(actor.input(count * number + share)).backward(); });
    }
    churn(actor);
    step(actor);
    actor.engine().zero_grad();
  }
}

Options holding() {
  Options options = small_buckets();
  options.hold_unsharded = true;
  return options;
}

Options wide_sums() {
  Options options = small_buckets();
  options.accumulate_dtype = at::kFloat;
  return options;
}

}  // namespace

const std::vector<Scenario>& scenarios() {
  static const std::vector<Scenario> all = {
      {"T1", "several-streams", "backward kernels on several streams fill one bucket", small_buckets(),
       AdamW{.lr = 1e-2}, several_streams},
      {"T2", "large-parameter", "a parameter larger than the bucket size is produced on another stream",
       small_buckets(), AdamW{.lr = 1e-2}, large_parameter},
      {"T3", "refill", "the next pass, from another stream, refills a buffer that is still being reduced",
       small_buckets(), SGD{.lr = 0.1, .momentum = 0.9}, refill},
      {"T4", "temporaries", "casts, replaced gradients and temporaries are freed while another stream reads them",
       wide_sums(), AdamW{.lr = 1e-2}, temporaries, /*half=*/true},
      {"T5", "step-elsewhere", "forward and backward on a side stream, step() on others", small_buckets(),
       AdamW{.lr = 1e-2}, step_elsewhere},
      {"", "evaluate-beside", "evaluation on another stream between a forward and its backward", small_buckets(),
       AdamW{.lr = 1e-2}, evaluate_beside},
      {"A2", "hold", "micro-batches under no_sync, held whole where gradients are sharded", holding(),
       AdamW{.lr = 1e-2}, hold},
      {"G1", "same-graph-twice", "two backwards over one graph, from two streams", small_buckets(),
       SGD{.lr = 0.1, .momentum = 0.9}, same_graph_twice},
      {"G6", "one-module-two-streams", "a module called twice in one forward, under two streams", small_buckets(),
       AdamW{.lr = 1e-2}, one_module_two_streams},
      {"G5", "run-again", "checkpoints that run a module again inside the backward: gradients that come late",
       small_buckets(), AdamW{.lr = 1e-2}, run_again},
      {"", "fused-weight", "nodes of several streams write one weight's gradient, and it is accumulated plainly too",
       holding(), AdamW{.lr = 1e-2}, fused_weight},
      {"", "delivered-weight", "several streams deliver gradients of one parameter, also inside a backward", holding(),
       SGD{.lr = 0.1, .momentum = 0.9}, delivered_weight},
      {"", "put-off", "one weight's gradients that were put off are written under several streams", holding(),
       AdamW{.lr = 1e-2}, put_off},
      {"", "deterministic", "shares of a deterministic step, from two streams", deterministic(), AdamW{.lr = 1e-2},
       shares},
  };
  return all;
}

std::vector<const Scenario*> scenarios_called(const std::string& name) {
  std::vector<const Scenario*> found;
  std::string known;
  for (const Scenario& scenario : scenarios()) {
    if (name.empty() || scenario.name == name || scenario.id == name) found.push_back(&scenario);
    known += (known.empty() ? "" : ", ") + scenario.name;
  }
  if (found.empty()) throw Error("unknown scenario '" + name + "'; there are: " + known);
  return found;
}

}  // namespace plumb::sim
