// Every way into one sum, in any order: whatever brings a gradient, in whatever dtype, held back or not, .grad is the mean of what
// the ranks brought, and a step takes it. Drawn programs, compared with plain sums after every move.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <random>

#include "engine/impl.h"
#include "errors.h"
#include "plumb/fused.h"
#include "plumb/nn.h"
#include "plumb/plumb.h"
#include "slowness.h"
#include "world/world_impl.h"

namespace plumb {
namespace {

// Runs an action when the backward comes by.
struct Passing : torch::autograd::Function<Passing> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, int64_t action) {
    context->saved_data["action"] = action;
    return x * 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    (*reinterpret_cast<const std::function<void()>*>(context->saved_data["action"].toInt()))();
    return {gradients[0], at::Tensor()};
  }
};

enum class Entrance { autograd, delivered, fused, put_off };

struct Contribution {
  size_t parameter = 0;
  Entrance entrance = Entrance::autograd;
  std::vector<at::Tensor> of_rank;  // undefined: this rank has none
};

struct Kind {
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kFloat;
  bool turned = false;
  std::optional<at::ScalarType> rule{};  // its grad_dtype
};

// Lengths around what is copied without ATen, cuts inside and between parameters, and one that lies the other way round.
const std::vector<Kind> kinds = {{{7, 5}},
                                 {{}},
                                 {{0}},
                                 {{64, 65}},
                                 {{33}, at::kDouble},
                                 {{4, 6}, at::kFloat, true},
                                 {{1}},
                                 {{17}, at::kBFloat16, false, at::kFloat},
                                 {{3, 11}, at::kFloat, false, at::kDouble}};

class Drawn {
 public:
  Drawn(uint64_t seed, World world) : seed_(seed), random_(seed), world_(std::move(world)) {
    const auto among = [&](auto... values) {
      const std::array all{values...};
      return all[random_() % all.size()];
    };
    Options options;
    options.strategy = strategy_ = strategies()[seed % strategies().size()].name;
    options.hold_unsharded = random_() % 2 == 0;
    options.bucket_bytes = among(100, 1000, 1 << 20);
    options.first_bucket_bytes = among(1, 500, 1 << 20);
    const bool dear = random_() % 2 == 0;
    if (dear && world_.size() > 1) world_.impl().data->native_reduce_scatter = false;
    for (size_t i = 0; i < kinds.size(); ++i) {
      const Kind& kind = kinds[i];
      at::Tensor memory = at::zeros(kind.shape, kind.dtype);
      if (kind.turned) memory = memory.t().contiguous().t();
      named_.emplace_back("p" + std::to_string(i), memory.requires_grad_());
      if (kind.rule) memory.set_grad_dtype(*kind.rule);
      values_.push_back(at::zeros(kind.shape, at::kDouble));
    }
    gradients_.assign(kinds.size(), std::vector<at::Tensor>(static_cast<size_t>(world_.size())));
    engine_ = std::make_unique<Engine>(world_, named_, NamedTensors{}, SGD{.lr = 0.5}, options);
    if (dear) engine_->impl().reducer->layout().small = 0;
    told_ = c10::str("seed ", seed, ", ", options.strategy, " on ", world_.size(), ", rank ", world_.rank(),
                     options.hold_unsharded ? ", held whole" : "", dear ? ", dear" : "", ":");
  }

  void run() {
    const int length = 4 + static_cast<int>(random_() % 8);
    try {
      for (int i = 0; i < length && !testing::Test::HasFailure(); ++i) move();
      step();
    } catch (const std::exception& error) {
      throw Error(told_ + "\n" + error.what());
    }
  }

 private:
  // Small whole numbers, whose sums are exact in every dtype here but for the division by the ranks.
  std::vector<Contribution> draw(int least, int most) {
    std::vector<Contribution> all(static_cast<size_t>(least) + random_() % static_cast<size_t>(most - least + 1));
    for (Contribution& one : all) {
      one.parameter = random_() % kinds.size();
      one.entrance = static_cast<Entrance>(random_() % 4);
      const bool missing = random_() % 4 == 0;
      for (int rank = 0; rank < world_.size(); ++rank) {
        auto generator = at::detail::createCPUGenerator(random_());
        const at::Tensor numbers =
            at::randint(-4, 5, kinds[one.parameter].shape, generator, at::TensorOptions(at::kDouble));
        one.of_rank.push_back(missing && random_() % 2 == 0 ? at::Tensor() : numbers);
      }
    }
    return all;
  }

  void count(const std::vector<Contribution>& all, size_t dropped = kinds.size()) {
    for (const Contribution& one : all) {
      for (size_t rank = 0; rank < one.of_rank.size() && one.parameter != dropped; ++rank) {
        const at::Tensor& part = one.of_rank[rank];
        at::Tensor& sum = gradients_[one.parameter][rank];
        if (part.defined()) sum = sum.defined() ? sum + part : part;
      }
    }
  }
  // The mean of what the ranks hold; undefined where none holds anything.
  at::Tensor mean_of(size_t parameter) const {
    at::Tensor mean;
    for (const at::Tensor& sum : gradients_[parameter]) {
      if (sum.defined()) mean = (mean.defined() ? mean : at::zeros_like(sum)) + sum / world_.size();
    }
    return mean;
  }
  void set_all(size_t parameter, const at::Tensor& value) {
    for (at::Tensor& sum : gradients_[parameter]) sum = value;
  }

  const at::Tensor& parameter(const Contribution& one) const { return named_[one.parameter].second; }
  at::Tensor mine(const Contribution& one) const { return one.of_rank[static_cast<size_t>(world_.rank())]; }
  at::Tensor raw(const Contribution& one) const {
    const Kind& kind = kinds[one.parameter];
    return mine(one).to(kind.rule.value_or(kind.dtype));
  }

  void write(const Contribution& one) {
    const auto sink = sink_of(parameter(one));
    if (!sink) return engine_->deliver(parameter(one), raw(one));
    const GradTarget target = sink->open();
    at::NoGradGuard no_grad;
    const at::Tensor value = mine(one).to(target.buffer.scalar_type()).view(target.buffer.sizes());
    target.accumulate ? target.buffer.add_(value) : target.buffer.copy_(value);
    sink->wrote();
  }
  // Those of one pass that are no loss's: at once, or, of one that is put off, later.
  void bring(const Contribution& one, std::vector<const Contribution*>& later) {
    if (!mine(one).defined()) return;
    const auto sink = sink_of(parameter(one));
    if (one.entrance == Entrance::put_off && sink) {
      sink->put_off();
      later.push_back(&one);
    } else if (one.entrance == Entrance::delivered) {
      engine_->deliver(parameter(one), raw(one));
    } else {
      write(one);
    }
  }
  void make_up(const std::vector<const Contribution*>& later) {
    for (const Contribution* one : later) {
      write(*one);
      sink_of(parameter(*one))->made_up();
    }
  }
  at::Tensor loss_of(const Contribution& one) const {
    const at::Tensor& p = parameter(one);
    return (p.to(at::kDouble) * mine(one)).sum();
  }

  // All of them in one backward: what a loss does not bring comes while it is on its way.
  void one_backward(const std::vector<Contribution>& all) {
    std::vector<const Contribution*> later;
    std::deque<std::function<void()>> actions;
    at::Tensor loss = at::zeros({}, at::TensorOptions(at::kDouble)).requires_grad_() * 1;
    for (const Contribution& one : all) {
      if (!mine(one).defined()) continue;
      if (one.entrance == Entrance::autograd) {
        loss = loss + loss_of(one);
      } else {
        actions.emplace_back([&] { bring(one, later); });
        loss = Passing::apply(loss, reinterpret_cast<int64_t>(&actions.back()));
      }
    }
    // The oldest node runs last: then all have been put off.
    engine_->backward(loss);
    waits_ = waits_ && engine_->impl().reducer->holds();
    make_up(later);
    for (const Contribution& one : all) {
      const bool made_up = one.entrance == Entrance::put_off && sink_of(parameter(one)) != nullptr;
      waits_ = waits_ || (made_up && std::ranges::any_of(one.of_rank, &at::Tensor::defined));
    }
  }
  void one_scope(const std::vector<Contribution>& all) {
    std::vector<const Contribution*> later;
    const Pass pass = engine_->pass();
    for (const Contribution& one : all) {
      if (one.entrance != Entrance::autograd) {
        bring(one, later);
      } else if (mine(one).defined()) {
        loss_of(one).backward();
      }
    }
    make_up(later);
  }
  void deliveries(const std::vector<Contribution>& all) {
    engine_->backward({});  // a rank may have none of them
    {
      const Pass pass = engine_->pass();
      for (const Contribution& one : all) {
        if (mine(one).defined()) engine_->deliver(parameter(one), raw(one));
      }
    }
  }

  void move() {
    const uint64_t what = random_() % 16;
    told_ += c10::str(" ", what);
    if (what < 6) {
      const std::vector<Contribution> all = draw(1, 6);
      const bool held = random_() % 3 == 0;
      const uint64_t way = random_() % 3;
      told_ += held ? "h" : "";
      told_ += std::string(1, "bsd"[way]);
      {
        std::optional<NoSync> quiet;
        if (held) quiet.emplace(*engine_);
        if (way == 0) one_backward(all);
        if (way == 1) one_scope(all);
        if (way == 2) deliveries(all);
      }
      if (way != 0) waits_ = waits_ && engine_->impl().reducer->holds();
      count(all);
    } else if (what == 6) {
      engine_->zero_grad();
      for (size_t i = 0; i < kinds.size(); ++i) set_all(i, {});
    } else if (what == 7) {
      if (waits_ && strategy_ == "hsdp") return;  // refused: what waits would not be scaled
      const bool anew = random_() % 2 == 0;
      told_ += anew ? "a" : "";
      for (size_t i = 0; i < kinds.size(); ++i) {
        at::Tensor& gradient = named_[i].second.mutable_grad();
        if (gradient.defined()) anew ? gradient = gradient.detach() * 0.5 : gradient.detach().mul_(0.5);
        for (at::Tensor& sum : gradients_[i]) {
          if (sum.defined()) sum = sum * 0.5;
        }
      }
    } else if (what == 8) {
      const size_t i = random_() % kinds.size();
      set_all(i, at::full(kinds[i].shape, 3.0, at::kDouble));
      named_[i].second.mutable_grad() =
          gradients_[i][0].to(kinds[i].rule.value_or(kinds[i].dtype)).contiguous().clone();
    } else if (what == 9) {
      const size_t i = random_() % kinds.size();
      set_all(i, {});
      named_[i].second.mutable_grad().reset();
    } else if (what == 10) {
      swap_memory();
    } else if (what == 11) {
      change_alone();
    } else if (what < 14) {
      with_a_graph(what == 13);
    } else {
      step();
      return;
    }
    compare_where_reduced();
  }

  bool is_whole() const { return strategy_ == "ddp" || strategy_ == "zero1"; }

  // A tensor in .grad is given other memory, with other values.
  void swap_memory() {
    const size_t i = random_() % kinds.size();
    at::Tensor& gradient = named_[i].second.mutable_grad();
    if (!is_whole() || waits_ || engine_->impl().reducer->holds() || !gradient.defined()) return;
    gradient.set_data(gradient.detach() * 0.5);
    set_all(i, mean_of(i) * 0.5);
  }

  // What is held is this rank's own, and may be changed or cleared by one rank alone.
  void change_alone() {
    const size_t i = random_() % kinds.size(), rank = random_() % static_cast<size_t>(world_.size());
    const bool clears = random_() % 3 == 0;
    if (!is_whole() || !engine_->impl().reducer->holds()) return;
    at::Tensor& sum = gradients_[i][rank];
    if (sum.defined()) sum = clears ? at::Tensor() : sum * 2;
    at::Tensor& gradient = named_[i].second.mutable_grad();
    if (static_cast<int>(rank) != world_.rank() || !gradient.defined()) return;
    if (clears) {
      gradient.reset();
    } else {
      gradient.detach().mul_(2);
    }
  }

  // A backward whose gradients have a graph of their own; one of its parameters may have been frozen since the forward.
  void with_a_graph(bool freezes) {
    std::vector<Contribution> all = draw(1, 6);
    at::Tensor loss = at::zeros({}, at::TensorOptions(at::kDouble)).requires_grad_() * 1;
    for (const Contribution& one : all) {
      if (mine(one).defined()) loss = loss + loss_of(one);
    }
    at::Tensor frozen = freezes ? parameter(all[0]) : at::Tensor();
    if (freezes) frozen.set_requires_grad(false);
    if (freezes) {
      engine_->backward(loss);
    } else {
      const Pass pass = engine_->pass();  // a rank may have none of them
      (loss * at::ones({}, at::kDouble).requires_grad_()).backward({}, /*retain_graph=*/false, /*create_graph=*/true);
    }
    if (freezes) frozen.set_requires_grad(true);
    waits_ = waits_ && engine_->impl().reducer->holds();
    count(all, freezes ? all[0].parameter : kinds.size());
  }

  void step() {
    told_ += " step";
    engine_->step();
    waits_ = false;
    for (size_t i = 0; i < kinds.size(); ++i) {
      set_all(i, mean_of(i));
      if (gradients_[i][0].defined()) values_[i] = values_[i] - 0.5 * gradients_[i][0];
      const double tolerance = kinds[i].dtype == at::kBFloat16 ? 1e-2 : 1e-5;
      const at::Tensor found = engine_->full_parameter(named_[i].second).to(at::kDouble);
      EXPECT_TRUE(at::allclose(found, values_[i], tolerance, tolerance))
          << told_ << "\nparameter " << i << " is off by " << (found - values_[i]).abs().max();
    }
    compare_where_reduced();
  }

  void compare_where_reduced() {
    if (waits_ || engine_->impl().reducer->holds()) return;
    for (size_t i = 0; i < kinds.size(); ++i) {
      set_all(i, mean_of(i));
      const at::Tensor found = engine_->full_gradient(named_[i].second), &wanted = gradients_[i][0];
      ASSERT_EQ(found.defined(), wanted.defined()) << told_ << "\ngradient " << i;
      if (!found.defined()) continue;
      EXPECT_TRUE(at::allclose(found.to(at::kDouble), wanted, 1e-5, 1e-5))
          << told_ << "\ngradient " << i << " is off by " << (found - wanted).abs().max();
    }
  }

  const uint64_t seed_;
  std::string strategy_;
  std::mt19937_64 random_;  // draws the same on every rank
  World world_;
  NamedTensors named_;
  std::vector<at::Tensor> values_;                  // of one process
  std::vector<std::vector<at::Tensor>> gradients_;  // by parameter and rank, as if .grad were whole; undefined: none
  std::unique_ptr<Engine> engine_;
  bool waits_ = false;  // what was put off on some rank has come between two passes
  std::string told_;
};

void write_into(const at::Tensor& parameter, double value) {
  const GradTarget target = sink_of(parameter)->open();
  at::NoGradGuard no_grad;
  target.accumulate ? target.buffer.add_(value) : target.buffer.fill_(value);
  sink_of(parameter)->wrote();
}

// One that comes between two backwards, beside a reduced gradient, and others that are written in the backward after it.
TEST(PutOff, CountsOnceBesideWhatTheNextBackwardWrites) {
  for (const Strategy& row : strategies()) {
    for (const int writes : {0, 1, 2}) {
      for (const bool plainly : {false, true}) {
        run_local(4, [&](World world) {
          SCOPED_TRACE(c10::str(row.name, ", ", writes, plainly ? ", plainly, too" : ""));
          const bool held = writes == 1;  // one more backward, beside what waits
          at::Tensor w = at::zeros({5, 7}).requires_grad_();
          Options options{.strategy = row.name, .hold_unsharded = held};
          if (options.strategy == "hsdp") options.mesh = {.replicate = 2, .shard = 2};
          Engine engine(world, NamedTensors{{"w", w}}, {}, NoOptimizer{}, options);
          const double rank = world.rank(), mean = 1.5;
          (w.sum() * rank).backward();
          write_into(w, 4 * rank);
          if (held) {
            const auto quiet = engine.no_sync();
            (w.sum() * 32 * rank).backward();
          }
          {
            const Pass pass = engine.pass();
            for (int i = 0; i < writes; ++i) write_into(w, 8 * rank);
            if (plainly) (w.sum() * 16 * rank).backward();
          }
          const double wanted = mean * (1 + 4 + 8 * writes + (plainly ? 16 : 0) + (held ? 32 : 0));
          const at::Tensor found = engine.full_gradient(w);
          EXPECT_TRUE(at::allclose(found, at::full_like(found, wanted))) << found.max() << " instead of " << wanted;
        });
      }
    }
  }
}

// Which of the two came first is not known: the next backward says so, whatever its sums wait for.
TEST(PutOff, BesideAPieceThatIsChangedSinceIsAnError) {
  for (const bool held : {false, true}) {
    for (const bool anew : {false, true}) {
      const auto texts = test::errors(4, [&](World world) {
        at::Tensor w = at::zeros({5, 7}).requires_grad_();
        Engine engine(world, NamedTensors{{"w", w}}, {}, NoOptimizer{},
                      {.strategy = "hsdp", .mesh = {.replicate = 2, .shard = 2}, .hold_unsharded = held});
        w.sum().backward();
        write_into(w, 4);
        anew ? w.mutable_grad() = w.grad() * 0.5 : w.mutable_grad().mul_(0.5);
        std::optional<NoSync> quiet;
        if (held) quiet.emplace(engine);
        w.sum().backward();
      });
      EXPECT_THAT(texts, testing::Each(testing::HasSubstr("while a weight gradient that was put off waits")))
          << held << anew;
    }
  }
}

// Kernels write rows, one behind the other.
TEST(FusedWrites, OfAWeightThatLiesTheOtherWayRoundGoThroughAutograd) {
  for (const Strategy& row : strategies()) {
    run_local(2, [&](World world) {
      nn::Linear linear(nn::LinearOptions{.in = 6, .out = 5, .bias = false});
      linear->weight.set_data(at::arange(30, at::kFloat).sin().view({6, 5}).t());
      const at::Tensor plain = linear->weight.detach().clone().requires_grad_();
      Engine engine(world, *linear, NoOptimizer{}, {.strategy = row.name});
      for (int pass = 0; pass < 2; ++pass) {
        const at::Tensor x = at::arange(18, at::kFloat).cos().view({3, 6});
        linear(x * (1.0 + world.rank())).pow(2).sum().backward();
        (at::linear(x, plain).pow(2).sum() * 2.5).backward();  // the mean of 1 and 4
        EXPECT_TRUE(at::allclose(engine.full_gradient(linear->weight), plain.grad(), 1e-4, 1e-5)) << row.name;
      }
    });
  }
}

class EntrancesInto : public testing::TestWithParam<int> {};

TEST_P(EntrancesInto, OneSumGiveTheMeanOfWhatTheRanksBrought) {
  for (uint64_t seed = 0; seed < 60 / slowness; ++seed) {
    run_local(GetParam(), [&](World world) { Drawn(seed, std::move(world)).run(); },
              {.timeout = std::chrono::seconds(30 * patience)});
    if (HasFailure()) break;
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, EntrancesInto, testing::Values(1, 2, 3, 4));

}  // namespace
}  // namespace plumb
