// What an optimizer remembers goes with its parameter: through buckets that change, values that the user sets, and
// checkpoints, in every dtype. Drawn programs against a plain re-computation in f64.
#include <gtest/gtest.h>

#include <map>

#include "engine/impl.h"
#include "engine/support/plain.h"
#include "save/support/folder.h"

namespace plumb {
namespace {

using namespace test;

struct Program {
  uint64_t seed = 0;
  int ranks = 1;
  Optimizer optimizer;
  Options options;
  at::ScalarType dtype = at::kFloat;
  int64_t held_steps = 0;  // the first ones under no_sync: buckets take their order when there is state already
};

Program program(uint64_t seed) {
  Draw draw(seed);
  Program one;
  one.seed = seed;
  one.ranks = static_cast<int>(draw.whole(1, 3));
  one.optimizer = any_optimizer(draw);
  one.dtype = draw.of<at::ScalarType>({at::kDouble, at::kFloat, at::kBFloat16, at::kHalf, at::kComplexFloat});
  one.options.strategy = draw.of<std::string>({"ddp", "zero1", "zero2", "zero3", "hsdp"});
  one.options.bucket_bytes = draw.of<int64_t>({1, 300, 4 << 20});
  one.options.first_bucket_bytes = draw.of<int64_t>({1, 300, 1 << 20});
  one.options.master_weights = !draw.one_in(3);
  if (at::isReducedFloatingType(one.dtype)) one.options.accumulate_dtype = at::kFloat;
  one.options.groups.push_back({[](const std::string& name) { return name.ends_with("w1"); }, 0.03, 0.2});
  one.held_steps = draw.of<int64_t>({0, 0, 1, 2});
  return one;
}

// A parameter's elements as real numbers, in f64.
at::Tensor numbers_of(const at::Tensor& value) {
  const at::Tensor flat = value.detach().reshape(-1);
  return (flat.is_complex() ? at::view_as_real(flat).reshape(-1) : flat).to(at::kDouble).clone();
}

at::Tensor shaped(const at::Tensor& real, const at::Tensor& like) {
  if (!like.is_complex()) return real.to(like.scalar_type()).view(like.sizes());
  return at::view_as_complex(real.view({-1, 2})).to(like.scalar_type()).view(like.sizes());
}

class Player {
 public:
  Player(World world, const Program& program, const Scratch& scratch)
      : world_(world), program_(program), scratch_(scratch), draw_(program.seed + 1) {
    rebuild(program.seed);
    for (const at::Tensor& parameter : parameters_) {
      masters_.push_back(numbers_of(engine_->full_parameter(parameter)));
      plain_.emplace_back(program.optimizer);
    }
  }

  void play() {
    for (int64_t step = 0; step < 7 && !testing::Test::HasFailure(); ++step) {
      SCOPED_TRACE(c10::str("step ", step));
      train(step);
      compare("after the step");
      switch (draw_.whole(0, 6)) {
        case 0:
          change();
          break;
        case 1:
          come_back(step);
          break;
        case 2:
          go_back(step);
          break;
        case 3:
          take_weights(step);
          break;
        default:
          break;
      }
      compare("before the next step");
    }
  }

 private:
  void rebuild(uint64_t seed) {
    engine_.reset();
    model_ = std::make_unique<Parts>(seed, program_.dtype);
    engine_ = std::make_unique<Engine>(world_, *model_, program_.optimizer, program_.options);
    parameters_ = model_->parameters();
    names_ = model_->named_parameters().keys();
  }

  void train(int64_t step) {
    std::optional<NoSync> quiet;
    if (step < program_.held_steps) quiet.emplace(*engine_);
    std::vector<at::Tensor> means(parameters_.size());
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (draw_.one_in(3)) continue;
      for (int rank = 0; rank < world_.size(); ++rank) {
        const uint64_t seed = program_.seed * 1000 + step * 100 + i * 3 + rank;
        const at::Tensor gradient = shaped(noise({masters_[i].numel()}, seed), like(i));
        means[i] =
            means[i].defined() ? means[i] + numbers_of(gradient) / world_.size() : numbers_of(gradient) / world_.size();
        if (rank == world_.rank()) engine_->deliver(parameters_[i], gradient);
      }
    }
    engine_->end_pass();
    quiet.reset();
    engine_->step();
    engine_->zero_grad();
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!means[i].defined()) continue;
      const bool grouped = names_[i].ends_with("w1");
      const auto [lr, decay] = std::visit(
          [](const auto& o) {
            if constexpr (requires { o.lr; }) return std::pair{o.lr, o.weight_decay};
            return std::pair{0.0, 0.0};
          },
          program_.optimizer);
      plain_[i].update(masters_[i], means[i], grouped ? 0.03 : lr, grouped ? 0.2 : decay);
      ++updates_[names_[i]];
      if (!has_masters()) masters_[i] = masters_[i].to(wide()).to(at::kDouble);
    }
  }

  // The user sets some elements of some parameters: the others keep what they had gathered below their rounding.
  void change() {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (draw_.one_in(2) || masters_[i].numel() == 0) continue;
      const int64_t at = draw_.whole(0, parameters_[i].numel() - 1);
      const double value = static_cast<double>(draw_.whole(-8, 8)) / 4;
      const Gathered scope = engine_->gathered({parameters_[i]}, Access::write);
      at::NoGradGuard no_grad;
      parameters_[i].view(-1)[at] = value;
      if (parameters_[i].is_complex()) {
        masters_[i][2 * at] = value;
        masters_[i][2 * at + 1] = 0;
      } else {
        masters_[i][at] = value;
      }
    }
  }

  // Another engine of other values goes on from a checkpoint.
  void come_back(int64_t step) {
    const std::string path = engine_->save(scratch_.path("run"));
    compare_counts();
    rebuild(program_.seed + 500 + step);
    engine_->load(path);
    compare_counts();
  }

  // The same engine goes back to where it was some steps ago, with state of its own.
  void go_back(int64_t step) {
    const std::string path = engine_->save(scratch_.path("run"));
    compare_counts();
    const auto masters = [&] {
      std::vector<at::Tensor> copies;
      for (const at::Tensor& one : masters_) copies.push_back(one.clone());
      return copies;
    }();
    const auto plain = plain_;
    const auto updates = updates_;
    for (int i = 0; i < 2; ++i) train(step + 50 + i);
    engine_->load(path);
    masters_ = masters;
    plain_ = plain;
    updates_ = updates;
    compare_counts();
  }

  // The weights alone of some steps ago. What a master had gathered since stays where it rounds to the same value.
  void take_weights(int64_t step) {
    const std::string path = engine_->save(scratch_.path("run"));
    std::vector<at::Tensor> saved;
    for (const at::Tensor& parameter : parameters_) saved.push_back(numbers_of(engine_->full_parameter(parameter)));
    train(step + 70);
    engine_->load_weights(path);
    for (size_t i = 0; i < saved.size(); ++i) {
      const at::Tensor shows = has_masters() ? masters_[i].to(program_.dtype).to(at::kDouble) : masters_[i];
      masters_[i] = at::where(shows == saved[i], masters_[i], saved[i]);
    }
    compare_counts();
  }

  void compare_counts() {
    for (const Sink& sink : engine_->impl().reducer->sinks()) {
      EXPECT_EQ(engine_->impl().updater->memory_of(sink).updates, updates_[sink.name]) << sink.name;
    }
  }

  void compare(const std::string& when) {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor found = engine_->full_parameter(parameters_[i]);
      ASSERT_EQ(found.scalar_type(), program_.dtype);
      EXPECT_LT(distance(numbers_of(found), masters_[i]), tolerance()) << names_[i] << ' ' << when;
    }
  }

  bool has_masters() const { return program_.options.master_weights && at::isReducedFloatingType(program_.dtype); }
  at::ScalarType wide() const { return program_.dtype == at::kComplexFloat ? at::kFloat : program_.dtype; }
  at::Tensor like(size_t i) const { return at::empty(shapes()[i], program_.dtype); }
  static std::vector<std::vector<int64_t>> shapes() {
    auto all = Parts::kInside;
    all.insert(all.end(), Parts::kOutside.begin(), Parts::kOutside.end());
    return all;
  }
  double tolerance() const {
    const double rounding = program_.dtype == at::kBFloat16 ? 4e-3 : program_.dtype == at::kHalf ? 5e-4 : 0;
    // Without masters a rounding may fall to the other side now and then.
    return wide() == at::kDouble ? 1e-9 : 2e-5 + rounding * (has_masters() ? 1.1 : 4);
  }

  World world_;
  const Program& program_;
  const Scratch& scratch_;
  Draw draw_;  // the same on every rank
  std::unique_ptr<Parts> model_;
  std::unique_ptr<Engine> engine_;
  std::vector<at::Tensor> parameters_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> masters_;  // what every parameter should be, before its rounding
  std::vector<Plain> plain_;
  std::map<std::string, int64_t> updates_;
};

TEST(State, GoesWithItsParameterWhateverHappensToIt) {
  for (uint64_t seed = 1; seed <= 80 && !HasFailure(); ++seed) {
    const Program one = program(seed);
    const Scratch scratch;
    run_local(one.ranks, [&](World world) {
      SCOPED_TRACE(c10::str("seed ", seed, ": ", one.options.strategy, ", rank ", world.rank(), " of ", world.size(),
                            ", optimizer ", one.optimizer.index(), ", ", one.dtype));
      Player(world, one, scratch).play();
    });
  }
}

}  // namespace
}  // namespace plumb
