#include "scenarios/support/fuzz.h"

#include <array>
#include <cmath>
#include <random>
#include <string_view>

#include "plumb/nn.h"
#include "scenarios/support/models.h"

namespace plumb::scenarios {
namespace {

// A linear layer, torch's or the one that writes its weight gradient itself.
class Layer {
 public:
  enum class Kind { plain, fused };
  Layer(torch::nn::Module& owner, const std::string& name, int64_t in, int64_t out, Kind kind) {
    if (kind == Kind::fused) {
      fused_ = owner.register_module(name, nn::Linear(nn::LinearOptions{.in = in, .out = out}));
    } else {
      plain_ = owner.register_module(name, torch::nn::Linear(in, out));
    }
  }
  at::Tensor forward(const at::Tensor& x) { return fused_ ? fused_->forward(x) : plain_->forward(x); }
  at::Tensor& weight() { return fused_ ? fused_->weight : plain_->weight; }
  at::Tensor& bias() { return fused_ ? fused_->bias : plain_->bias; }

 private:
  Unit<torch::nn::Linear> plain_{nullptr};
  Unit<nn::Linear> fused_{nullptr};
};

// A chain of layers with a head after each; which head a loss reads decides which parameters it reaches.
struct Chain : torch::nn::Module {
  // `fused`: which layers write their weight gradients themselves, as bits.
  Chain(int depth, int width, int frozen, uint64_t fused) {
    for (int i = 0; i < depth; ++i) {
      const auto kind = fused >> i & 1 ? Layer::Kind::fused : Layer::Kind::plain;
      layers.emplace_back(*this, "layer" + std::to_string(i), i == 0 ? 4 : width, width, kind);
      heads.emplace_back(*this, "head" + std::to_string(i), width, 2, Layer::Kind::plain);
    }
    if (frozen > 0) layers[frozen % depth].weight().set_requires_grad(false);
  }
  int depth() const { return static_cast<int>(layers.size()); }
  at::Tensor trunk(at::Tensor x, int upto) {
    for (int i = 0; i <= upto % depth(); ++i) x = torch::tanh(layers[i].forward(x));
    return x;
  }
  at::Tensor head(const at::Tensor& h, int upto) { return heads[upto % depth()].forward(h).pow(2).mean(); }
  at::Tensor loss(const at::Tensor& x, int upto) { return head(trunk(x, upto), upto); }
  // The second layer, as far as there is one.
  at::Tensor middle(const at::Tensor& h) { return depth() > 1 ? torch::tanh(layers[1].forward(h)) : h * 2; }
  std::vector<at::Tensor> with_gradients() const {
    std::vector<at::Tensor> some;
    for (const at::Tensor& p : parameters()) {
      if (p.grad().defined()) some.push_back(p);
    }
    return some;
  }
  std::vector<Layer> layers, heads;
};

struct Kind {
  // What a move does to gradients that no_sync held back, and whether it looks at gradients, which must be reduced then.
  enum class Held { stays, begins, ends };
  enum class Looks { no, at_reduced };

  const char* name;
  void (*play)(Stage&, Chain&, const Move&);
  int weight;
  Held held = Held::stays;
  Looks looks = Looks::no;
};
using enum Kind::Held;
using enum Kind::Looks;

at::Tensor input(const Stage& stage, const Move& move) { return stage.input({3, 4}, move.a * 31 + move.b); }

// The loss as it counts, with loss scaling where there is one.
at::Tensor counted(const Stage& stage, const at::Tensor& loss) { return stage.scale(stage.share(loss)); }

double scale_of(const Stage& stage) { return stage.reference() ? *stage.reference_scale : stage.engine->loss_scale(); }

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = {
      {"backward", [](Stage& s, Chain& m, const Move& v) { counted(s, m.loss(input(s, v), v.a)).backward(); }, 8, ends},
      {"backward of a head of the rank's own",
       [](Stage& s, Chain& m, const Move& v) { counted(s, m.loss(input(s, v), v.a + s.rank)).backward(); }, 3},
      {"held backward",
       [](Stage& s, Chain& m, const Move& v) {
         auto guard = s.no_sync();
         counted(s, m.loss(input(s, v), v.a)).backward();
       },
       4, begins},
      {"backward twice over a retained graph",
       [](Stage& s, Chain& m, const Move& v) {
         auto loss = counted(s, m.loss(input(s, v), v.a));
         loss.backward({}, true);
         if (v.b % 2 == 0) s.zero_grad();
         loss.backward();
       },
       2},
      {"two losses over one graph",
       [](Stage& s, Chain& m, const Move& v) {
         auto h = m.trunk(input(s, v), v.a);
         auto one = counted(s, m.head(h, v.a)), two = counted(s, m.head(h, v.b));
         one.backward({}, true);
         two.backward();
       },
       2},
      {"two forwards, two backwards",
       [](Stage& s, Chain& m, const Move& v) {
         auto one = counted(s, m.loss(input(s, v), v.a)), two = counted(s, m.loss(input(s, {0, v.b, v.a}), v.b));
         (v.b % 2 ? one : two).backward();
         (v.b % 2 ? two : one).backward();
       },
       2},
      {"backward into named inputs",
       [](Stage& s, Chain& m, const Move& v) {
         auto weight = m.layers[0].bias();
         counted(s, m.loss(input(s, v), v.a)).backward({}, false, false, std::vector<at::Tensor>{weight});
       },
       1},
      {"autograd::grad",
       [](Stage& s, Chain& m, const Move& v) {
         torch::autograd::grad({m.loss(input(s, v), v.a)}, {m.heads[v.a % m.depth()].bias()});
       },
       1},
      {"gradient penalty",
       [](Stage& s, Chain& m, const Move& v) {
         auto x = input(s, v).requires_grad_();
         auto loss = m.loss(x, v.a);
         counted(s, loss + torch::autograd::grad({loss}, {x}, {}, true, true)[0].pow(2).sum()).backward();
       },
       1},
      {"checkpointed backward",
       [](Stage& s, Chain& m, const Move& v) {
         const Checkpoint::Body body = [&m](const at::Tensor& h) { return m.middle(h); };
         auto h = m.trunk(input(s, v), 0);
         counted(s, m.head(checkpoint(body, checkpoint(body, h)) + h, v.a)).backward();
       },
       2},
      {"checkpointed backward on some ranks, a head of the rank's own",
       [](Stage& s, Chain& m, const Move& v) {
         const Checkpoint::Body body = [&m](const at::Tensor& h) { return m.middle(h); };
         auto h = m.trunk(input(s, v), 0);
         if ((s.rank + v.b) % 2 == 0) h = checkpoint(body, checkpoint(body, h));
         counted(s, m.head(h, v.a + s.rank)).backward();
       },
       2},
      {"backward inside a hook on some ranks",
       [](Stage& s, Chain& m, const Move& v) {
         at::Tensor h = input(s, v);
         std::vector<at::Tensor> between;
         for (int i = 0; i <= v.a % m.depth(); ++i) between.push_back(h = torch::tanh(m.layers[i].forward(h)));
         const Move inner{0, v.b, v.a};
         const Kind& backward = kinds().front();
         if ((s.rank + v.b) % 2 == 0) {
           between[v.b % between.size()].register_hook([&](const at::Tensor& gradient) {
             at::AutoGradMode on(true);
             backward.play(s, m, inner);
             return gradient;
           });
         }
         counted(s, m.head(h, v.a)).backward();
       },
       2},
      {"delivered gradients",
       [](Stage& s, Chain& m, const Move& v) {
         for (int i : {v.a, v.b, v.a + 1}) {
           const at::Tensor& bias = m.heads[i % m.depth()].bias();
           s.deliver(bias, s.input(bias.sizes(), v.a * 17 + v.b + i) * scale_of(s));
         }
         s.end_pass();
       },
       1},
      {"failing backward",
       [](Stage& s, Chain& m, const Move& v) {
         auto h = m.trunk(input(s, v), v.a);
         h.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("planned"); });
         try {
           counted(s, m.head(h, v.a)).backward();
         } catch (const std::runtime_error&) {
         }
         if (v.b % 2 == 0) s.zero_grad();
       },
       1},
      {"engine backward, nothing on one rank",
       [](Stage& s, Chain& m, const Move& v) {
         const at::Tensor loss = s.share(m.loss(input(s, v), v.a));
         s.backward(v.b % s.size == s.rank ? at::Tensor() : s.reference() ? s.scale(loss) : loss);
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
           auto& p = m.layers[v.a % m.depth()].weight();
           p.set_requires_grad(!p.requires_grad());
         });
       },
       1},
      {"recomputed backward",
       [](Stage& s, Chain& m, const Move& v) {
         auto h = m.trunk(input(s, v), 0);
         h = plumb::checkpoint([&m](const at::Tensor& x) { return m.middle(x); }, h) + h;
         counted(s, m.head(h, v.a)).backward();
       },
       2},
      {"a gradient that overflows on one rank",
       [](Stage& s, Chain& m, const Move& v) {
         if (scale_of(s) == 1.0) return;
         const double factor = v.b % s.size == s.rank ? INFINITY : 1.0;
         counted(s, m.loss(input(s, v), v.a) * factor).backward();
       },
       1},
      {"clip all gradients",
       [](Stage& s, Chain& m, const Move& v) {
         s.all([&] {
           if (!m.with_gradients().empty()) torch::nn::utils::clip_grad_norm_(m.with_gradients(), 0.1 * (v.b + 1));
         });
       },
       2, stays, at_reduced},
      {"normalise one gradient",
       [](Stage& s, Chain& m, const Move& v) {
         s.all([&] {
           const auto some = m.with_gradients();
           if (some.empty()) return;
           at::Tensor& gradient = some[v.a % some.size()].mutable_grad();
           at::NoGradGuard no_grad;
           // Not all of the mean: what is left of a gradient that is the same everywhere would be rounding, and differ.
           if (v.b % 2) gradient.detach().sub_(gradient.detach().mean() * 0.5);
           gradient.detach().div_(gradient.detach().norm() + 0.1);
         });
       },
       2, stays, at_reduced},
      {"step", [](Stage& s, Chain&, const Move&) { s.step(); }, 6, ends},
      {"step and zero_grad",
       [](Stage& s, Chain&, const Move&) {
         s.step();
         s.zero_grad();
       },
       4, ends},
  };
  return all;
}

// Gradients of a rank's own making count as they are, and kept ones are true already: under loss scaling a plain program
// would divide both once more. So such programs set none, and keep none over a step.
void play_moves(const std::vector<Move>& moves, Stage& stage, bool scales) {
  auto& model = stage.as<Chain>();
  bool held = false;
  for (const Move& move : moves) {
    const Kind& kind = kinds()[move.kind];
    if ((kind.looks == at_reduced && held) || (scales && kind.name == std::string_view("assign a gradient"))) continue;
    kind.play(stage, model, move);
    if (scales && kind.name == std::string_view("step")) stage.zero_grad();
    if (kind.held != stays) held = kind.held == begins;
  }
  stage.step();
  if (scales) stage.zero_grad();  // a step that was skipped leaves what is not finite
}

Scenario scenario_of(const FuzzCase& one) {
  std::mt19937_64 random(one.seed);
  const int depth = 1 + static_cast<int>(random() % 5);
  const int width = 3 + static_cast<int>(random() % 6);
  const int frozen = static_cast<int>(random() % 3);
  const uint64_t fused = random() % 2 ? random() : 0;
  const bool scales = random() % 4 == 0;
  Scenario scenario{"F", "fuzz", [=] { return std::make_shared<Chain>(depth, width, frozen, fused); },
                    [moves = one.moves, scales](Stage& stage) { play_moves(moves, stage, scales); }};
  Options& options = scenario.options;
  options.bucket_bytes = std::array{64, 200, 1 << 20}[random() % 3];
  options.first_bucket_bytes = std::array{1, 100, 1 << 20}[random() % 3];
  if (random() % 4 == 0) options.clip_norm = 0.5;
  options.hold_unsharded = random() % 4 == 0;
  if (scales) options.loss_scale = LossScale{.initial = 1024, .interval = 2};
  if (random() % 3 == 0) options.schedule = {.warmup = 2, .total = 5, .floor = 0.1};
  if (random() % 3 == 0) {
    options.groups.push_back({[](const std::string& name) { return name.ends_with("bias"); }, 0.02, 0.0});
    options.groups.push_back({[](const std::string& name) { return name.starts_with("head"); }, std::nullopt, 0.3});
  }
  const double decay = random() % 2 ? 0.1 : 0.0;
  scenario.optimizer = SGD{.lr = 0.05, .momentum = random() % 2 ? 0.9 : 0.0, .weight_decay = decay};
  if (random() % 4 == 0) scenario.optimizer = AdamW{.lr = 0.01, .eps = 1e-2, .weight_decay = decay};
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
    constexpr std::array media{Medium::dear, Medium::plain, Medium::asking};
    const int of = static_cast<int>(one.seed % one.ranks);
    return difference(expected, play_engine(scenario, one.ranks, one.strategy, of, media[one.seed % media.size()]),
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
      "seed " + std::to_string(one.seed) + ", " + one.strategy + " on " + std::to_string(one.ranks) + " ranks";
  const Scenario scenario = scenario_of(one);
  const Options& options = scenario.options;
  text += c10::str(", buckets of ", options.first_bucket_bytes, " and ", options.bucket_bytes, " bytes, ",
                   options.groups.size(), " groups", options.schedule.total > 0 ? ", a schedule" : "",
                   options.clip_norm ? ", clipped" : "", options.loss_scale ? ", scaled losses" : "",
                   options.hold_unsharded ? ", held whole" : "",
                   std::holds_alternative<AdamW>(scenario.optimizer) ? ", AdamW:" : ", SGD:");
  for (const Move& move : one.moves) {
    text += "\n  " + std::string(kinds()[move.kind].name) + " (" + std::to_string(move.a) + ", " +
            std::to_string(move.b) + ")";
  }
  return text + "\n  step";
}

}  // namespace plumb::scenarios
