// A piece of a sharded gradient knows that it is one: what it cannot do is an error, what is asked of it is asked of every rank, and it
// says what it is.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include "libtorch.h"

#include <limits>
#include <sstream>

#include "errors.h"
#include "grad/piece.h"
#include "plumb/plumb.h"

namespace plumb {
namespace {

using testing::AllOf;
using testing::HasSubstr;

struct One : torch::nn::Module {
  explicit One(at::IntArrayRef shape = {6, 10}) { p = register_parameter("p", torch::zeros(shape)); }
  at::Tensor p;
};

// What `program` throws on each of two ranks in zero2, and "none" where it does not.
std::vector<std::string> errors(const std::function<void(const at::Tensor& p, int rank, Engine& engine)>& program,
                                std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  return test::errors(
      2,
      [&](World world) {
        One model;
        Engine engine(world, model, SGD{.lr = 1}, {.strategy = "zero2"});
        (model.p * torch::arange(60).view({6, 10})).sum().backward();
        program(model.p, world.rank(), engine);
      },
      timeout);
}

TEST(Piece, WhatItCannotDoSaysWhatItIsAndWhatToCall) {
  const std::vector<std::pair<std::string, std::function<void(const at::Tensor&)>>> refused = {
      {"cumsum", [](const at::Tensor& g) { g.cumsum(-1); }},
      {"select", [](const at::Tensor& g) { g[0]; }},
      {"sort", [](const at::Tensor& g) { g.sort(); }},
      {"median", [](const at::Tensor& g) { g.median(); }},
      {"argmax", [](const at::Tensor& g) { g.argmax(); }},
      {"matmul", [](const at::Tensor& g) { at::matmul(g, torch::ones({30})); }},
      {"cat", [](const at::Tensor& g) { at::cat({g, g}); }},
      {"stack", [](const at::Tensor& g) { at::stack({g, g}); }},
      {"view", [](const at::Tensor& g) { g.view({6, 10}); }},
      {"view", [](const at::Tensor& g) { g.view({5, 6}); }},
      {"as_strided", [](const at::Tensor& g) { g.as_strided({2}, {1}); }},
      {"sum", [](const at::Tensor& g) { g.sum(0); }},
      {"norm", [](const at::Tensor& g) { g.norm(2, 1); }},
      {"linalg_vector_norm", [](const at::Tensor& g) { at::linalg_vector_norm(g, 2, std::nullopt, true); }},
      {"max", [](const at::Tensor& g) { g.max(1); }},
      {"rand_like", [](const at::Tensor& g) { at::rand_like(g); }},
      {"normal_", [](const at::Tensor& g) { at::Tensor(g).normal_(); }},
      {"item", [](const at::Tensor& g) { g.item(); }},
      {"add", [](const at::Tensor& g) { g.add(torch::ones({6, 10})); }},
      {"add", [](const at::Tensor& g) { torch::ones({6, 10}).add(g); }},
      {"add_", [](const at::Tensor& g) { torch::zeros(g.sizes()).add_(g); }},
      {"copy_", [](const at::Tensor& g) { g.clone().copy_(torch::ones({6, 10})); }},
      {"_foreach_add_", [](const at::Tensor& g) { at::_foreach_add_({g}, {torch::ones({6, 10})}); }},
      {"mul", [](const at::Tensor& g) { g.mul(torch::ones({}, torch::requires_grad())); }},
      {"mul", [](const at::Tensor& g) { g.mul(torch::ones(g.sizes(), torch::requires_grad())); }},
      {"where", [](const at::Tensor& g) { at::where(g > 0); }},
  };
  for (const auto& [name, program] : refused) {
    const auto texts = errors([&](const at::Tensor& p, int, Engine&) { program(p.grad()); });
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_THAT(texts[rank], AllOf(HasSubstr("rank " + std::to_string(rank)), HasSubstr(name), HasSubstr("'p'"),
                                     HasSubstr("full_gradient"), HasSubstr(rank ? "[32, 60) of 60" : "[0, 32) of 60")))
          << name;
    }
  }
}

TEST(Piece, TorchsOptimizersSayThatTheyNeedWholeGradients) {
  const auto texts = errors([](const at::Tensor& p, int, Engine&) { torch::optim::SGD({p}, 0.1).step(); });
  EXPECT_THAT(texts, testing::Each(AllOf(HasSubstr("'p'"), HasSubstr("full_gradient"))));
  EXPECT_THAT(errors([](const at::Tensor& p, int, Engine&) { torch::optim::AdamW({p}, 0.1).step(); }),
              testing::Each(AllOf(HasSubstr("'p'"), HasSubstr("full_gradient"))));
}

TEST(Piece, PiecesOfTwoGradientsAreNotMixed) {
  run_local(2, [](World world) {
    One a, b;
    Options options;
    options.strategy = "zero2";
    options.bucket_bytes = options.first_bucket_bytes = 200;  // each in a bucket of its own: cut alike, of one shape
    Engine engine(world, NamedTensors{{"a", a.p}, {"b", b.p}}, {}, SGD{.lr = 1}, options);
    ((a.p + b.p) * torch::arange(60).view({6, 10})).sum().backward();
    EXPECT_EQ(a.p.grad().sizes(), b.p.grad().sizes());
    try {
      a.p.grad().add(b.p.grad());
      ADD_FAILURE() << "pieces of two gradients were added";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("'a'"), HasSubstr("'b'")));
    }
  });
}

// Also a computed one, which lies nowhere in a bucket, and has the shape.
TEST(Piece, OneOfAnotherGradientIsNotTaken) {
  EXPECT_THAT(test::errors(2,
                           [](World world) {
                             One a, b;
                             Engine engine(world, NamedTensors{{"a", a.p}, {"b", b.p}}, {}, SGD{.lr = 1},
                                           {.strategy = "zero2", .bucket_bytes = 200, .first_bucket_bytes = 200});
                             ((a.p + b.p) * torch::arange(60).view({6, 10})).sum().backward();
                             b.p.mutable_grad() = a.p.grad() * 2;
                             engine.step();
                           }),
              testing::Each(AllOf(HasSubstr("'b' is another parameter's piece"), HasSubstr("'a'"))));
}

TEST(Piece, RanksThatAskForDifferentThingsAreTold) {
  EXPECT_THAT(errors([](const at::Tensor& p, int rank, Engine&) { rank ? p.grad().sum() : p.grad().norm(); }),
              testing::Each(AllOf(HasSubstr("'p'"), HasSubstr("something else"))));
}

TEST(Piece, RanksThatAskAboutDifferentListsAreTold) {
  const auto texts = test::errors(2, [](World world) {
    One a, b, c;
    Engine engine(world, NamedTensors{{"a", a.p}, {"b", b.p}, {"c", c.p}}, {}, SGD{.lr = 1}, {.strategy = "zero2"});
    (a.p + b.p + c.p).sum().backward();
    at::_foreach_norm({a.p.grad(), (world.rank() == 0 ? b : c).p.grad()}, 2);
  });
  EXPECT_THAT(texts, testing::Each(AllOf(HasSubstr("'a'"), HasSubstr("something else"))));
}

// Of several engines' gradients in one list, too: one that is not finite on one rank is heard of everywhere.
TEST(Piece, ANumberThatIsNotFiniteIsFoundWhicheverEngineHasIt) {
  for (const int which : {0, 1}) {
    for (const int64_t place : {0, 59}) {
      run_local(2, [&](World world) {
        One one, other;
        Engine first(world, NamedTensors{{"a", one.p}}, {}, SGD{.lr = 1}, {.strategy = "zero2"});
        Engine second(world, NamedTensors{{"b", other.p}}, {}, SGD{.lr = 1}, {.strategy = "zero2"});
        at::Tensor gradient = torch::ones({6, 10});
        gradient.view(-1)[place] = std::numeric_limits<float>::infinity();
        (one.p * (which == 0 ? gradient : torch::ones({6, 10}))).sum().backward();
        (other.p * (which == 1 ? gradient : torch::ones({6, 10}))).sum().backward();
        at::Tensor found = torch::zeros({});
        at::_amp_foreach_non_finite_check_and_unscale_({one.p.mutable_grad(), other.p.mutable_grad()}, found,
                                                       torch::full({}, 0.5));
        EXPECT_EQ(found.item<float>(), 1) << which << ", " << place << ", rank " << world.rank();
      });
    }
  }
}

// All of the numbers lie on rank 0: on rank 1 torch would not have looked at the dtype.
TEST(Piece, WhatTorchRefusesIsRefusedOnRanksThatHoldNothing) {
  const std::vector<std::pair<std::string, std::function<void(const at::Tensor&)>>> refused = {
      {"norm", [](const at::Tensor& g) { g.norm(2, at::kLong); }},
      {"_foreach_norm", [](const at::Tensor& g) { at::_foreach_norm({g}, 2, at::kLong); }},
      {"_foreach_max", [](const at::Tensor& g) { at::_foreach_max({at::complex(g, g)}); }},
  };
  for (const auto& [name, program] : refused) {
    run_local(2, [&](World world) {
      One model({3, 4});
      Engine engine(world, model, SGD{.lr = 1}, {.strategy = "zero2"});
      (2 * model.p).sum().backward();
      const at::Tensor g = model.p.grad();
      EXPECT_EQ(g.numel(), world.rank() == 0 ? 12 : 0);
      EXPECT_ANY_THROW(program(g)) << name;
      EXPECT_FLOAT_EQ(g.norm().item<float>(), std::sqrt(48.0F)) << name;
      EXPECT_FLOAT_EQ((g * 3).norm().item<float>(), 3 * std::sqrt(48.0F)) << name;
    });
  }
}

// What torch refused on one rank alone was asked by the others: what is asked next is none of theirs.
TEST(Piece, RanksThatAreOneQuestionApartAreTold) {
  EXPECT_THAT(errors([](const at::Tensor& p, int rank, Engine&) {
                const at::Tensor g = p.grad();
                if (rank == 0) {
                  EXPECT_ANY_THROW(g.equal(torch::ones(g.sizes(), at::kMeta)));
                }
                EXPECT_TRUE(g.equal(rank == 0 ? g : g + 1));
              }),
              testing::Each(AllOf(HasSubstr("'p'"), HasSubstr("something else"))));
}

TEST(Piece, RanksThatAskForOtherNumbersAreTold) {
  using Program = std::function<void(const at::Tensor& g)>;
  const std::vector<std::pair<Program, Program>> asked = {
      {[](const at::Tensor& g) { (g * 0).sum(); }, [](const at::Tensor& g) { g.sum(); }},
      {[](const at::Tensor& g) { (g * 3).norm(); }, [](const at::Tensor& g) { (g + 3).norm(); }},
      {[](const at::Tensor& g) { at::_foreach_norm({g * g}); }, [](const at::Tensor& g) { at::_foreach_norm({g}); }},
      {[](const at::Tensor& g) { g.sum(at::kLong); }, [](const at::Tensor& g) { g.sum(); }},
  };
  for (const auto& [one, other] : asked) {
    EXPECT_THAT(errors([&](const at::Tensor& p, int rank, Engine&) { (rank ? one : other)(p.grad()); }),
                testing::Each(AllOf(HasSubstr("'p'"), HasSubstr("something else"))));
  }
}

// A copy has the same numbers.
TEST(Piece, RanksMayAskACopy) {
  EXPECT_THAT(errors([](const at::Tensor& p, int rank, Engine&) {
                const at::Tensor g = rank ? p.grad().detach().clone().view({-1}) : p.grad();
                EXPECT_EQ(g.sum().item<float>(), 59 * 30);
              }),
              testing::Each("none"));
}

TEST(Piece, ARankThatDoesNotAskEndsInAnErrorThatNamesTheQuestion) {
  const auto texts = errors(
      [](const at::Tensor& p, int rank, Engine& engine) {
        if (rank == 0) p.grad().norm();
        engine.step();
      },
      std::chrono::milliseconds(1500));
  EXPECT_THAT(texts[0], HasSubstr("2-norm of the gradient of parameter 'p'"));
  EXPECT_NE(texts[1], "none");
}

TEST(Piece, OneThatOutlivesItsEngineIsStillOne) {
  run_local(2, [](World world) {
    One model;
    at::Tensor kept;
    {
      Engine engine(world, model, SGD{.lr = 1}, {.strategy = "zero2"});
      model.p.sum().backward();
      kept = model.p.grad();
    }
    EXPECT_TRUE(piece_of(kept + 1));
    try {
      kept.norm();
      ADD_FAILURE() << "nobody answers any more";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("'p'"), HasSubstr("ended")));
    }
  });
}

TEST(Piece, InsideABackwardNobodyIsAsked) {
  const auto texts = errors([](const at::Tensor& p, int, Engine& engine) {
    const at::Tensor x = p * 2;
    x.register_hook([&](const at::Tensor&) { p.grad().norm(); });
    try {
      engine.backward(x.sum());
    } catch (const std::exception& error) {
      throw Error(error.what());
    }
  });
  EXPECT_THAT(texts, testing::Each(HasSubstr("is asked for inside a backward")));
}

TEST(Piece, ItsNumbersAreCopiedOutAsThisRanksOwn) {
  EXPECT_THAT(
      errors([](const at::Tensor& p, int rank, Engine&) {
        const at::Tensor mine = torch::empty(p.grad().sizes());
        mine.copy_(p.grad());
        EXPECT_FALSE(piece_of(mine));
        const at::Tensor wanted = rank ? torch::arange(32, 60) : torch::arange(0, 32);
        EXPECT_TRUE(mine.view({-1}).equal(wanted.to(at::kFloat)));
        EXPECT_TRUE(piece_of(p.grad().detach()) && piece_of(p.grad().data()) && piece_of(p.grad().to(at::kHalf)));
      }),
      testing::Each("none"));
}

// Without an engine: a holder that counts what it is asked.
TEST(Piece, AListIsOneMessage) {
  std::vector<std::string> questions;
  const auto holders = std::make_shared<const Holders>(Group(), [&](const std::string& what) {
    questions.push_back(what);
    return Where{};
  });
  std::vector<at::Tensor> gradients;
  for (int64_t i = 0; i < 50; ++i) {
    gradients.push_back(mark_piece(torch::full({1, i}, 2.0), std::make_shared<PieceOf>(PieceOf{
                                                                 holders, 0, "p" + std::to_string(i), {i}, {0, i}})));
  }
  const auto norms = at::_foreach_norm(gradients);
  for (int64_t i = 0; i < 50; ++i) EXPECT_NEAR(norms[i].item<double>(), 2 * std::sqrt(1.0 * i), 1e-5);
  EXPECT_THAT(questions, testing::ElementsAre(AllOf(HasSubstr("'p0'"), HasSubstr("49 more"))));
  const at::Tensor found = torch::zeros({1});
  at::_amp_foreach_non_finite_check_and_unscale_(gradients, const_cast<at::Tensor&>(found), torch::ones({}));
  at::_foreach_mul_(gradients, 0.5);
  EXPECT_EQ(questions.size(), 2);
}

// Each engine's ranks are asked by themselves, in the order in which the list names them.
TEST(Piece, AListMayBeOfSeveralEngines) {
  run_local(3, [](World world) {
    std::vector<at::Tensor> all;
    for (const int64_t size : {50, 3, 70, 20}) all.push_back(torch::zeros({size}).requires_grad_());
    Engine one(world, NamedTensors{{"a", all[0]}, {"c", all[2]}}, {}, SGD{.lr = 1}, {.strategy = "zero2"});
    Engine other(world, NamedTensors{{"b", all[1]}, {"d", all[3]}}, {}, SGD{.lr = 1}, {.strategy = "zero2"});
    (1 * all[0].sum() + 2 * all[1].sum() + 3 * all[2].sum() + 4 * all[3].sum()).backward();
    const double norm = std::sqrt(50 + 4.0 * 3 + 9.0 * 70 + 16.0 * 20);
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : all) gradients.push_back(parameter.grad());
    const auto largest = at::_foreach_max(gradients);
    for (size_t i = 0; i < 4; ++i) EXPECT_EQ(largest[i].item<double>(), 1.0 + static_cast<double>(i));
    EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(all, 1.0), norm, 1e-4);
    one.step();
    other.step();
    for (size_t i = 0; i < 4; ++i) {
      Engine& engine = i % 2 == 0 ? one : other;
      const double wanted = -(1.0 + static_cast<double>(i)) / norm;
      EXPECT_LT((engine.full_parameter(all[i]) - wanted).abs().max().item<double>(), 1e-5) << i;
    }
  });
}

TEST(Piece, AListOfTwoDtypesIsAskedInEachOnesOwn) {
  for (const bool wide_first : {false, true}) {
    run_local(2, [&](World world) {
      const at::Tensor narrow = torch::zeros({40}).requires_grad_(),
                       wide = torch::zeros({40}, at::kDouble).requires_grad_();
      Engine engine(world, NamedTensors{{"narrow", narrow}, {"wide", wide}}, {}, SGD{}, {.strategy = "zero2"});
      (narrow.sum() + 1.1 * wide.sum()).backward();
      std::vector<at::Tensor> gradients = {narrow.grad(), wide.grad()};
      if (wide_first) std::swap(gradients[0], gradients[1]);
      for (const double order : {1.0, 2.0, 3.0}) {
        const auto norms = at::_foreach_norm(gradients, order);
        EXPECT_EQ(norms[wide_first ? 1 : 0].scalar_type(), at::kFloat);
        const at::Tensor found = norms[wide_first ? 0 : 1];
        EXPECT_EQ(found.scalar_type(), at::kDouble);
        EXPECT_NEAR(found.item<double>(), 1.1 * std::pow(40.0, 1 / order), 1e-12) << order;
      }
    });
  }
}

struct Warnings : c10::WarningHandler {
  void process(const c10::Warning& warning) override { text += warning.msg(); }
  std::string text;
};

TEST(Piece, PrintingOneSaysWhatItIs) {
  errors([](const at::Tensor& p, int rank, Engine&) {
    Warnings warnings;
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    std::ostringstream out;
    out << p.grad();
    EXPECT_THAT(out.str(), HasSubstr(rank ? "59" : "31"));
    EXPECT_THAT(warnings.text, AllOf(HasSubstr("'p'"), HasSubstr(rank ? "[32, 60) of 60" : "[0, 32) of 60"),
                                     HasSubstr("full_gradient")));
  });
}

TEST(Piece, ChangesInPlaceCountAsVersionsOfTheEnginesView) {
  run_local(2, [](World world) {
    One model;
    Options options;
    options.strategy = "zero2";
    options.deterministic = true;
    options.virtual_ranks = 4;
    Engine engine(world, model, SGD{.lr = 1}, options);
    model.p.sum().backward();
    model.p.mutable_grad().mul_(2);
    EXPECT_THROW(model.p.sum().backward(), Error);
  });
}

}  // namespace
}  // namespace plumb
