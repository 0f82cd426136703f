// Whole runs against their plain re-computation: drawn histories of whatever a program may do between its first backward and its
// last step, under drawn options.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "engine/impl.h"
#include "engine/support/plain.h"
#include "save/support/folder.h"

namespace plumb {
namespace {

using namespace test;

struct Case {
  uint64_t seed = 0;
  int ranks = 1;
  bool users = false;  // the optimizer
  Options options;
};

Case draw_case(uint64_t seed) {
  Draw draw(seed);
  Case one;
  one.seed = seed;
  Options& options = one.options;
  options.strategy = draw.of<std::string>({"ddp", "zero1", "zero2", "zero3", "hsdp"});
  one.ranks = options.strategy == "hsdp" ? 4 : static_cast<int>(draw.of<int64_t>({1, 2, 2, 2, 3, 4}));
  options.deterministic = draw.one_in(3);
  if (options.deterministic && one.ranks == 3) one.ranks = 2;
  options.virtual_ranks = one.ranks * static_cast<int>(draw.of<int64_t>({1, 2, 4}));
  options.bucket_bytes = draw.of<int64_t>({100, 400, 4 << 20});
  options.first_bucket_bytes = draw.of<int64_t>({100, 1 << 20});
  options.hold_unsharded = draw.one_in(2);
  options.ask_before_gathers = draw.one_in(2);
  options.cut = draw.of<Cut>({Cut::anywhere, Cut::at_parameters, Cut::at_rows});
  options.nonfinite = draw.of<NonFinite>({NonFinite::proceed, NonFinite::skip, NonFinite::error});
  if (draw.one_in(4)) options.loss_scale = LossScale{.initial = 256, .interval = 2};
  if (draw.one_in(4)) options.clip_norm = draw.of<double>({0.5, 1e9});
  if (one.ranks == 4 && options.strategy != "hsdp" && draw.one_in(2)) options.mesh = {2, 2};
  one.users = draw.one_in(4);
  return one;
}

class History {
 public:
  History(const World& world, const Case& one, const std::string& folder, std::string& moves)
      : told_(moves), world_(world), one_(one), folder_(folder), draw_(one.seed + 1), model_(one.seed),
        parameters_(model_.parameters()), frozen_(freeze(parameters_, draw_)),
        engine_(world, model_, one.users ? Optimizer(UserOptimizer{}) : Optimizer(SGD{.lr = 1}), one.options),
        gradients_(Parts::kCount) {
    for (const auto& p : Parts(one.seed).parameters()) values_.push_back(p.detach().clone());
  }

  void play() {
    begin_step();
    for (int move = 0; move < 40 && !testing::Test::HasFailure(); ++move) {
      next();
      for (size_t i = 0; i < values_.size() && !testing::Test::HasFailure(); ++i) {
        if (!stepped_) continue;
        EXPECT_LT(distance(engine_.full_parameter(parameters_[i]), values_[i]), 1e-9) << i;
        if (!finite()) continue;
        const at::Tensor whole = engine_.full_gradient(parameters_[i]);
        ASSERT_EQ(whole.defined(), gradients_[i].defined()) << i;
        if (whole.defined()) {
          EXPECT_LT(distance(whole, gradients_[i]), 1e-9) << i;
        }
      }
      stepped_ = false;
    }
  }

 private:
  std::string& told_;  // so far

  static std::vector<bool> freeze(const std::vector<at::Tensor>& parameters, Draw& draw) {
    std::vector<bool> frozen(parameters.size());
    for (size_t i = 1; i < parameters.size(); ++i) {
      frozen[i] = draw.one_in(5);
      parameters[i].set_requires_grad(!frozen[i]);
    }
    return frozen;
  }
  bool shares() const { return one_.options.deterministic; }
  bool scales() const { return one_.options.loss_scale.has_value(); }
  int64_t count() const { return one_.options.virtual_ranks / world_.size(); }
  bool any() const {
    return std::ranges::any_of(gradients_, [](const auto& g) { return g.defined(); });
  }
  bool finite() const {
    return std::ranges::all_of(gradients_,
                               [](const auto& g) { return !g.defined() || g.isfinite().all().template item<bool>(); });
  }
  bool looks() const { return !held_ && !(shares() && passes_ > 0) && !scales() && finite(); }

  void begin_step() {
    passes_ = 0;
    held_ = weighed_ = false;
    if (things_ == 0) weighted_ = !any() && draw_.one_in(2);
  }

  // This rank's gradients of a backward that counts or fails, and how much it weighs.
  std::pair<std::vector<at::Tensor>, double> bring(bool counts, bool poisoned) {
    std::vector<at::Tensor> mine(Parts::kCount);
    std::vector<double> weights(world_.size(), 1);
    if (weighted_) {
      for (double& weight : weights) weight = static_cast<double>(draw_.whole(0, 4));
      if (counts)
        for (const double weight : weights) things_ += weight;
    }
    for (size_t i = 0; i < mine.size(); ++i) {
      const bool nobody = i > 0 && draw_.one_in(3), last_alone = i > 0 && draw_.one_in(3);
      for (int rank = 0; rank < world_.size(); ++rank) {
        const int64_t seed = draw_.whole(0, 1 << 20);
        if (nobody || frozen_[i] || weights[rank] == 0 || (last_alone && rank + 1 < world_.size())) continue;
        at::Tensor gradient = noise(values_[i].sizes(), seed).abs() + 0.1;
        if (poisoned && i == 0 && rank == 0) gradient.view(-1)[0] = INFINITY;
        if (rank == world_.rank()) mine[i] = gradient;
        if (counts)
          gradients_[i] = gradients_[i].defined() ? gradients_[i] + gradient / world_.size() : gradient / world_.size();
      }
    }
    return {mine, weights[world_.rank()]};
  }

  void clear(bool aloud) {
    told_ += aloud ? " clear" : " drop";
    if (aloud) {
      engine_.zero_grad();
    } else {
      for (const at::Tensor& p : parameters_) p.mutable_grad().reset();
    }
    for (at::Tensor& one : gradients_) one.reset();
    things_ = 0;
  }

  void one_backward(bool poisoned, bool retained) {
    const auto [mine, weight] = bring(true, poisoned);
    const bool plainly = draw_.one_in(2);
    const at::Tensor loss = model_.loss(mine);
    if (weighted_) {
      engine_.backward(loss, false, weight);
    } else if (plainly && loss.defined()) {
      engine_.scale(loss).backward({}, retained, retained);
    } else {
      engine_.backward(loss);
    }
  }

  void backward() {
    const bool poisons = (one_.options.nonfinite != NonFinite::proceed || scales()) && draw_.one_in(6);
    std::optional<NoSync> quiet;
    const bool held = draw_.one_in(3);
    if (held) quiet.emplace(engine_);
    weighed_ = weighed_ || weighted_;
    const int64_t kind = draw_.whole(0, 4);
    told_ += c10::str(held ? " held" : " ", poisons ? "poisoned" : "", weighted_ ? "weighted" : "", kind);
    if (kind == 1) {
      const auto pass = engine_.pass();
      one_backward(poisons, false);
      one_backward(false, false);
    } else if (kind == 2 && !weighted_) {
      const auto mine = bring(true, poisons).first;
      bool delivered = false;
      for (size_t i = 0; i < mine.size(); ++i) {
        if (!mine[i].defined()) continue;
        engine_.deliver(parameters_[i], mine[i] * engine_.loss_scale());
        delivered = true;
      }
      delivered ? engine_.end_pass() : engine_.backward({});
    } else if (kind == 3 && !weighted_) {
      one_backward(poisons, true);
    } else {
      one_backward(poisons, false);
    }
    ++passes_;
    const Strategy& row = strategy(one_.options.strategy);
    held_ = shares() ||
            (held && (row.gradient == Placement::replicated || one_.options.hold_unsharded || world_.size() == 1));
  }

  void fail() {
    const int64_t where = draw_.whole(-1, world_.size() - 1);
    const int64_t at = draw_.whole(-1, static_cast<int64_t>(Parts::kCount) - 1);  // -1: before anything came
    std::optional<NoSync> quiet;
    const bool held = draw_.one_in(3);
    if (held) quiet.emplace(engine_);
    weighed_ = weighed_ || weighted_;
    const bool mine_fails = where < 0 || where == world_.rank();
    const auto [mine, weight] = bring(shares(), false);
    told_ += c10::str(" fail(", where, ",", at, held ? ",held)" : ")");
    const bool at_root = at < 0 || frozen_[at] || !mine[at].defined();
    const auto run = [&](bool fails) {
      at::Tensor loss = model_.loss(mine);
      std::optional<unsigned> hook;
      const auto thrower = [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("planned"); };
      if (fails && at_root) {
        loss = loss.defined() ? loss * 1 : at::ones({}).requires_grad_() * 1;
        loss.register_hook(thrower);
      } else if (fails) {
        hook = parameters_[at].register_hook(thrower);
      }
      std::string text;
      try {
        engine_.backward(loss, false, weighted_ ? std::optional(weight) : std::nullopt);
      } catch (const std::exception& error) {
        text = error.what();
      }
      if (hook) parameters_[at].remove_hook(*hook);
      return text;
    };
    if (shares()) {
      for (int i = 0; i < 2 && mine_fails; ++i) EXPECT_NE(run(true), "");
      EXPECT_EQ(run(false), "");
      ++passes_;
      held_ = true;
      return;
    }
    const std::string text = run(mine_fails);
    const Strategy& row = strategy(one_.options.strategy);
    const bool stays =
        held && (row.gradient == Placement::replicated || one_.options.hold_unsharded || world_.size() == 1);
    if (mine_fails || !stays) {
      EXPECT_NE(text, "");
    } else {
      EXPECT_EQ(text, "");
    }
    ++passes_;
    held_ = stays;
    clear(draw_.one_in(2));
  }

  void next() {
    if (shares() && passes_ == count()) {
      if (!(weighed_ && things_ == 0)) return step();
    }
    switch (draw_.whole(0, 15)) {
      case 0:
      case 1:
      case 2:
      case 3:
      case 4:
      case 5:
        return backward();
      case 6:
        return fail();
      case 7:
        return clear(draw_.one_in(2));
      case 8: {
        if (shares() && passes_ > 0) return;
        told_ += " scale";
        for (size_t i = 0; i < parameters_.size(); ++i) {
          if (parameters_[i].grad().defined()) parameters_[i].mutable_grad().detach().mul_(0.5);
          if (gradients_[i].defined()) gradients_[i] = gradients_[i] * 0.5;
        }
        return;
      }
      case 9: {
        if (weighted_ || scales() || things_ > 0) return;
        const size_t i = draw_.whole(0, Parts::kCount - 1);
        told_ += c10::str(" assign", i);
        gradients_[i] = at::full_like(values_[i], 0.75);
        parameters_[i].mutable_grad() = gradients_[i].clone();
        // What is shown until the next reduction is this rank's.
        held_ = true;
        return;
      }
      case 10: {
        const size_t i = draw_.whole(1, Parts::kCount - 1);
        told_ += c10::str(" freeze", i);
        frozen_[i] = !frozen_[i];
        parameters_[i].set_requires_grad(!frozen_[i]);
        return;
      }
      case 11: {
        if (!looks()) return;
        told_ += " look";
        double squares = 0;
        for (size_t i = 0; i < parameters_.size(); ++i) {
          const at::Tensor whole = engine_.full_gradient(parameters_[i]);
          if (whole.defined() != gradients_[i].defined()) ADD_FAILURE() << i << " is there: " << whole.defined();
          if (!whole.defined() || !gradients_[i].defined()) continue;
          EXPECT_LT(distance(whole, gradients_[i]), 1e-9) << i;
          squares += gradients_[i].square().sum().item<double>();
        }
        EXPECT_NEAR(engine_.grad_norm().item<double>(), std::sqrt(squares), 1e-9 * std::sqrt(squares) + 1e-12);
        return;
      }
      case 12: {
        if (any() || (passes_ > 0 && held_ && weighed_)) return;
        told_ += " save";
        path_ = engine_.save(folder_);
        saved_.clear();
        for (const at::Tensor& one : values_) saved_.push_back(one.clone());
        if (world_.rank() == 0) {
          namespace fs = std::filesystem;
          const fs::path bad = folder_ + "-bad";
          fs::remove_all(bad);
          fs::copy(path_, bad, fs::copy_options::recursive);
          for (const auto& entry : fs::directory_iterator(bad)) {
            if (entry.path().extension() != ".safetensors" || !entry.path().filename().string().starts_with("weights"))
              continue;
            std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
            file.seekg(-1, std::ios::end);
            const char last = static_cast<char>(file.get());
            file.seekp(-1, std::ios::end);
            file.put(static_cast<char>(last ^ 1));
          }
        }
        world_.barrier();
        return;
      }
      case 13: {
        if (path_.empty() || any()) return;
        if (draw_.one_in(3)) {
          told_ += " bad load";
          EXPECT_THROW(engine_.load(folder_ + "-bad"), Error);
          return;
        }
        const bool all = draw_.one_in(2);
        told_ += all ? " load" : " load_weights";
        all ? engine_.load(path_) : engine_.load_weights(path_);
        for (size_t i = 0; i < values_.size(); ++i) values_[i] = saved_[i].clone();
        things_ = 0;
        return begin_step();
      }
      default:
        if (shares() && passes_ > 0) return;
        if (weighed_ && things_ == 0) return;
        return step();
    }
  }

  void step() {
    told_ += " step";
    stepped_ = true;
    const bool good = finite();
    if (!good && one_.options.nonfinite == NonFinite::error) {
      told_ += "(error)";
      EXPECT_THROW(one_.users ? engine_.begin_step() : engine_.step(), Error);
      held_ = false;
      clear(draw_.one_in(2));
      if (shares()) passes_ = 0;
      return;
    }
    const StepInfo info = one_.users ? engine_.begin_step() : engine_.step();
    EXPECT_EQ(info.skipped, !good);
    if (!good) {
      told_ += "(skipped)";
      held_ = false;
      if (!scales() && draw_.one_in(2)) {
        told_ += " repair";
        for (size_t i = 0; i < parameters_.size(); ++i) {
          if (parameters_[i].grad().defined()) parameters_[i].mutable_grad().detach().nan_to_num_(0, 8, 8);
          if (gradients_[i].defined()) gradients_[i] = gradients_[i].nan_to_num(0, 8, 8);
        }
      } else {
        clear(draw_.one_in(2));
      }
      return begin_step();
    }
    double factor = weighted_ && things_ > 0 ? world_.size() / things_ : 1;
    double squares = 0;
    for (const at::Tensor& one : gradients_)
      squares += one.defined() ? (one * factor).square().sum().item<double>() : 0;
    const double norm = std::sqrt(squares);
    if (one_.options.clip_norm) {
      EXPECT_NEAR(info.grad_norm.item<double>(), norm, 1e-9 * norm + 1e-12);
      factor *= std::min(1.0, *one_.options.clip_norm / (norm + 1e-6));
    }
    for (size_t i = 0; i < values_.size(); ++i) {
      if (!gradients_[i].defined()) continue;
      gradients_[i] = gradients_[i] * factor;
      values_[i] = values_[i] - gradients_[i];
    }
    if (one_.users) {
      for (Piece& piece : engine_.pieces()) {
        if (piece.gradient.defined() && piece.weight.numel() > 0) piece.weight.sub_(piece.gradient);
      }
      engine_.end_step();
    }
    things_ = 0;
    held_ = false;
    if (!draw_.one_in(3)) clear(draw_.one_in(2));
    begin_step();
  }

  const World& world_;
  const Case& one_;
  const std::string folder_;
  Draw draw_;  // the same on every rank
  Parts model_;
  const std::vector<at::Tensor> parameters_;
  std::vector<bool> frozen_;  // some of them when the engine is built already
  Engine engine_;
  // One process.
  std::vector<at::Tensor> values_, gradients_, saved_;
  double things_ = 0;  // that the gradients are sums over; 0: they are none
  bool weighted_ = false, weighed_ = false, held_ = false, stepped_ = false;
  int64_t passes_ = 0;
  std::string path_;
};

std::string tell(const Case& one) {
  const Options& options = one.options;
  return c10::str("seed ", one.seed, ", ", options.strategy, " on ", one.ranks, ", mesh ", options.mesh.replicate,
                  ", cut ", static_cast<int>(options.cut), ", not finite ", static_cast<int>(options.nonfinite),
                  options.deterministic ? c10::str(", ", options.virtual_ranks, " shares") : "",
                  options.hold_unsharded ? ", held whole" : "", options.ask_before_gathers ? ", asking" : "",
                  options.loss_scale ? ", scaled" : "", options.clip_norm ? ", clipped" : "",
                  one.users ? ", stepped by the user" : "", ":");
}

TEST(History, OfAnyKindIsThatOfOneProcess) {
  for (uint64_t seed = 1; seed <= 24 && !HasFailure(); ++seed) {
    const Case one = draw_case(seed);
    const Scratch scratch;
    std::vector<std::string> told(one.ranks);
    const auto texts = errors(one.ranks, [&](World world) {
      History history(world, one, scratch.path("all"), told[world.rank()]);
      history.play();
    });
    EXPECT_THAT(texts, testing::Each("none")) << tell(one) << told[0];
    if (HasFailure()) ADD_FAILURE() << tell(one) << told[0];
  }
}

}  // namespace
}  // namespace plumb
