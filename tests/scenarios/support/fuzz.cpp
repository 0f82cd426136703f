#include "scenarios/support/fuzz.h"

#include <array>
#include <random>

#include "scenarios/support/models.h"

namespace plumb::scenarios {
namespace {

// A chain of layers with a head after each; which head a loss reads decides which parameters it reaches.
struct Chain : torch::nn::Module {
  Chain(int depth, int width, int frozen) {
    for (int i = 0; i < depth; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(i == 0 ? 4 : width, width)));
      heads.push_back(register_module("head" + std::to_string(i), torch::nn::Linear(width, 2)));
    }
    if (frozen > 0) layers[frozen % depth]->weight.set_requires_grad(false);
  }
  int depth() const { return static_cast<int>(layers.size()); }
  at::Tensor trunk(at::Tensor x, int upto) {
    for (int i = 0; i <= upto % depth(); ++i) x = torch::tanh(layers[i]->forward(x));
    return x;
  }
  at::Tensor head(const at::Tensor& h, int upto) { return heads[upto % depth()]->forward(h).pow(2).mean(); }
  at::Tensor loss(const at::Tensor& x, int upto) { return head(trunk(x, upto), upto); }
  std::vector<Unit<torch::nn::Linear>> layers, heads;
};

struct Kind {
  const char* name;
  void (*play)(Stage&, Chain&, const Move&);
  int weight;
};

at::Tensor input(const Stage& stage, const Move& move) { return stage.input({3, 4}, move.a * 31 + move.b); }

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = {
      {"backward", [](Stage& s, Chain& m, const Move& v) { s.share(m.loss(input(s, v), v.a)).backward(); }, 8},
      {"backward of a head of the rank's own",
       [](Stage& s, Chain& m, const Move& v) { s.share(m.loss(input(s, v), v.a + s.rank)).backward(); }, 3},
      {"held backward",
       [](Stage& s, Chain& m, const Move& v) {
         auto guard = s.no_sync();
         s.share(m.loss(input(s, v), v.a)).backward();
       },
       4},
      {"backward twice over a retained graph",
       [](Stage& s, Chain& m, const Move& v) {
         auto loss = s.share(m.loss(input(s, v), v.a));
         loss.backward({}, true);
         if (v.b % 2 == 0) s.zero_grad();
         loss.backward();
       },
       2},
      {"two losses over one graph",
       [](Stage& s, Chain& m, const Move& v) {
         auto h = m.trunk(input(s, v), v.a);
         auto one = s.share(m.head(h, v.a)), two = s.share(m.head(h, v.b));
         one.backward({}, true);
         two.backward();
       },
       2},
      {"two forwards, two backwards",
       [](Stage& s, Chain& m, const Move& v) {
         auto one = s.share(m.loss(input(s, v), v.a)), two = s.share(m.loss(input(s, {0, v.b, v.a}), v.b));
         (v.b % 2 ? one : two).backward();
         (v.b % 2 ? two : one).backward();
       },
       2},
      {"backward into named inputs",
       [](Stage& s, Chain& m, const Move& v) {
         auto weight = m.layers[0]->bias;
         s.share(m.loss(input(s, v), v.a)).backward({}, false, false, std::vector<at::Tensor>{weight});
       },
       1},
      {"autograd::grad",
       [](Stage& s, Chain& m, const Move& v) {
         torch::autograd::grad({m.loss(input(s, v), v.a)}, {m.heads[v.a % m.depth()]->bias});
       },
       1},
      {"gradient penalty",
       [](Stage& s, Chain& m, const Move& v) {
         auto x = input(s, v).requires_grad_();
         auto loss = m.loss(x, v.a);
         s.share(loss + torch::autograd::grad({loss}, {x}, {}, true, true)[0].pow(2).sum()).backward();
       },
       1},
      {"checkpointed backward",
       [](Stage& s, Chain& m, const Move& v) {
         const Checkpoint::Body body = [&m](const at::Tensor& h) {
           return m.layers.size() > 1 ? torch::tanh(m.layers[1]->forward(h)) : h * 2;
         };
         auto h = m.trunk(input(s, v), 0);
         s.share(m.head(checkpoint(body, checkpoint(body, h)) + h, v.a)).backward();
       },
       2},
      {"checkpointed backward on some ranks, a head of the rank's own",
       [](Stage& s, Chain& m, const Move& v) {
         const Checkpoint::Body body = [&m](const at::Tensor& h) {
           return m.layers.size() > 1 ? torch::tanh(m.layers[1]->forward(h)) : h * 2;
         };
         auto h = m.trunk(input(s, v), 0);
         if ((s.rank + v.b) % 2 == 0) h = checkpoint(body, checkpoint(body, h));
         s.share(m.head(h, v.a + s.rank)).backward();
       },
       2},
      {"backward inside a hook on some ranks",
       [](Stage& s, Chain& m, const Move& v) {
         at::Tensor h = input(s, v);
         std::vector<at::Tensor> between;
         for (int i = 0; i <= v.a % m.depth(); ++i) between.push_back(h = torch::tanh(m.layers[i]->forward(h)));
         const Move inner{0, v.b, v.a};
         const Kind& backward = kinds().front();
         if ((s.rank + v.b) % 2 == 0) {
           between[v.b % between.size()].register_hook([&](const at::Tensor& gradient) {
             at::AutoGradMode on(true);
             backward.play(s, m, inner);
             return gradient;
           });
         }
         s.share(m.head(h, v.a)).backward();
       },
       2},
      {"delivered gradients",
       [](Stage& s, Chain& m, const Move& v) {
         for (int i : {v.a, v.b, v.a + 1}) {
           const at::Tensor& bias = m.heads[i % m.depth()]->bias;
           s.deliver(bias, s.input(bias.sizes(), v.a * 17 + v.b + i));
         }
         s.end_pass();
       },
       1},
      {"failing backward",
       [](Stage& s, Chain& m, const Move& v) {
         auto h = m.trunk(input(s, v), v.a);
         h.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("planned"); });
         try {
           s.share(m.head(h, v.a)).backward();
         } catch (const std::runtime_error&) {
         }
         if (v.b % 2 == 0) s.zero_grad();
       },
       1},
      {"engine backward, nothing on one rank",
       [](Stage& s, Chain& m, const Move& v) {
         s.backward(v.b % s.size == s.rank ? at::Tensor() : s.share(m.loss(input(s, v), v.a)));
       },
       2},
      {"zero_grad to none", [](Stage& s, Chain&, const Move&) { s.zero_grad(); }, 3},
      {"zero_grad to zero",
       [](Stage& s, Chain& m, const Move&) {
         s.all([&] {
           for (auto& p : m.parameters())
             if (p.grad().defined()) p.mutable_grad().detach().zero_();
         });
       },
       1},
      {"assign a gradient",
       [](Stage& s, Chain& m, const Move& v) {
         s.all([&] {
           auto p = m.parameters()[v.a % m.parameters().size()];
           p.mutable_grad() = at::full_like(p.detach(), 0.1 * (v.b + 1));
         });
       },
       2},
      {"scale gradients",
       [](Stage& s, Chain& m, const Move& v) {
         s.all([&] {
           for (auto& p : m.parameters())
             if (p.grad().defined()) p.mutable_grad().detach().mul_(v.b % 2 ? 0.5 : -1.5);
         });
       },
       1},
      {"clear one gradient",
       [](Stage& s, Chain& m, const Move& v) {
         s.all([&] { m.parameters()[v.a % m.parameters().size()].mutable_grad().reset(); });
       },
       1},
      {"freeze or unfreeze",
       [](Stage& s, Chain& m, const Move& v) {
         s.all([&] {
           auto& p = m.layers[v.a % m.depth()]->weight;
           p.set_requires_grad(!p.requires_grad());
         });
       },
       1},
      {"step", [](Stage& s, Chain&, const Move&) { s.step(); }, 6},
      {"step and zero_grad",
       [](Stage& s, Chain&, const Move&) {
         s.step();
         s.zero_grad();
       },
       4},
  };
  return all;
}

Scenario scenario_of(const FuzzCase& one) {
  std::mt19937_64 random(one.seed);
  const int depth = 1 + static_cast<int>(random() % 5);
  const int width = 3 + static_cast<int>(random() % 6);
  const int frozen = static_cast<int>(random() % 3);
  Scenario scenario{"F", "fuzz", [=] { return std::make_shared<Chain>(depth, width, frozen); },
                    [moves = one.moves](Stage& stage) {
                      for (const Move& move : moves) kinds()[move.kind].play(stage, stage.as<Chain>(), move);
                      stage.step();
                    }};
  scenario.options.bucket_bytes = std::array{64, 200, 1 << 20}[random() % 3];
  scenario.options.first_bucket_bytes = std::array{1, 100, 1 << 20}[random() % 3];
  if (random() % 4 == 0) scenario.options.clip_norm = 0.5;
  scenario.options.hold_unsharded = random() % 4 == 0;
  scenario.optimizer = SGD{.lr = 0.05, .momentum = random() % 2 ? 0.9 : 0.0};
  scenario.tolerance = 2e-4;
  return scenario;
}

}  // namespace

FuzzCase random_case(uint64_t seed) {
  std::mt19937_64 random(seed * 0x9e3779b97f4a7c15u + 1);
  FuzzCase one;
  one.seed = seed;
  one.ranks = 1 + static_cast<int>(random() % 4);
  one.strategy = strategies()[random() % strategies().size()].name;
  int total = 0;
  for (const Kind& kind : kinds()) total += kind.weight;
  const int length = 2 + static_cast<int>(random() % 12);
  for (int i = 0; i < length; ++i) {
    int pick = static_cast<int>(random() % total);
    int kind = 0;
    while (pick >= kinds()[kind].weight) pick -= kinds()[kind++].weight;
    one.moves.push_back({kind, static_cast<int>(random() % 12), static_cast<int>(random() % 12)});
  }
  return one;
}

std::string play(const FuzzCase& one) {
  const Scenario scenario = scenario_of(one);
  Outcome expected;
  try {
    expected = play_reference(scenario, one.ranks);
  } catch (const std::exception&) {
    return {};  // plain libtorch refuses this program
  }
  try {
    return difference(
        expected,
        play_engine(scenario, one.ranks, one.strategy, static_cast<int>(one.seed % one.ranks), one.seed % 3 == 0),
        scenario.tolerance);
  } catch (const std::exception& error) {
    return std::string("the engine raised: ") + error.what();
  }
}

FuzzCase shrink(FuzzCase failing) {
  for (bool shorter = true; shorter;) {
    shorter = false;
    for (size_t i = 0; i < failing.moves.size(); ++i) {
      FuzzCase candidate = failing;
      candidate.moves.erase(candidate.moves.begin() + static_cast<std::ptrdiff_t>(i));
      if (!play(candidate).empty()) {
        failing = candidate;
        shorter = true;
        break;
      }
    }
  }
  return failing;
}

std::string tell(const FuzzCase& one) {
  std::string text =
      "seed " + std::to_string(one.seed) + ", " + one.strategy + " on " + std::to_string(one.ranks) + " ranks:";
  for (const Move& move : one.moves) {
    text += "\n  " + std::string(kinds()[move.kind].name) + " (" + std::to_string(move.a) + ", " +
            std::to_string(move.b) + ")";
  }
  return text + "\n  step";
}

}  // namespace plumb::scenarios
