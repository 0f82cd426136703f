// The state of an optimizer that is not the engine's: in pieces, whole, or of shapes of its own, from any world to any other.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include "libtorch.h"

#include <future>

#include "engine/loading.h"
#include "engine/saving.h"
#include "save/support/folder.h"
#include "save/support/trained.h"

namespace plumb {
namespace {

using namespace test;
using testing::HasSubstr;
using testing::StartsWith;
using testing::ThrowsMessage;

// Who updates: somebody over pieces, or somebody over whole parameters.
struct Way {
  const char* strategy;
  bool pieces;
};
constexpr Way kWays[] = {{"ddp", false}, {"ddp", true}, {"zero1", true}, {"zero2", true}, {"zero3", true}};

// Another number for every element of every parameter, in the order of memory.
at::Tensor average(const at::Tensor& parameter, int64_t index) {
  return at::arange(parameter.numel(), at::kDouble) + static_cast<double>(1000 * (index + 1));
}

struct Trained {
  Trained(const World& world, const Way& way)
      : model(3), pieces(way.pieces),
        engine(world, model, way.pieces ? Optimizer(UserOptimizer{}) : Optimizer(NoOptimizer{}),
               Options{.strategy = way.strategy, .bucket_bytes = 200, .first_bucket_bytes = 100}) {
    for (const auto& item : model.named_parameters()) names.push_back(item.key());
  }

  // One step, in which every parameter has a piece.
  Outer step() {
    Outer outer;
    const auto parameters = model.parameters();
    engine.backward(model.loss(ones(1)));
    if (pieces) {
      engine.begin_step();
      for (const Piece& piece : engine.pieces()) {
        const auto same = [&](const at::Tensor& one) { return one.is_same(piece.parameter); };
        const int64_t i = std::ranges::find_if(parameters, same) - parameters.begin();
        const at::Tensor mine = average(parameters[i], i).narrow(0, piece.begin, piece.weight.numel());
        outer.tensors.push_back({OuterTensor::Place::piece, names[i], "average", mine, piece.begin});
      }
      engine.end_step();
    } else {
      engine.step();
      for (size_t i = 0; i < parameters.size(); ++i) {
        at::Tensor whole = average(parameters[i], static_cast<int64_t>(i)).view(parameters[i].sizes());
        if (whole.dim() == 2) whole = whole.t().contiguous().t();  // in another order of memory
        outer.tensors.push_back({OuterTensor::Place::whole, names[i], "average", whole});
      }
    }
    if (engine.world().rank() == 0) {
      for (size_t i = 0; i < names.size(); ++i) {
        const at::Tensor own = at::tensor({static_cast<int64_t>(i), int64_t{7}, int64_t{8}}).view({3, 1});
        outer.tensors.push_back({OuterTensor::Place::other, names[i], "count", own});
      }
    }
    outer.text = R"({"beta": 0.5})";
    engine.zero_grad();
    return outer;
  }

  Model model;
  bool pieces;
  Engine engine;
  std::vector<std::string> names;
};

std::string save(Trained& run, const std::string& folder, const Outer* outer) {
  auto saving = std::make_shared<Saving>(run.engine.impl());
  run.engine.impl().saving = saving;
  saving->begin(folder, {}, outer, Copy::no);
  return saving->finish();
}

// The thread that writes comes to nothing before the user has changed his state, and before the next step.
TEST(OuterState, IsSavedInTheBackgroundAsItWasAtTheCall) {
  const Scratch scratch;
  torch::nn::Linear model(torch::nn::LinearOptions(300, 300).bias(false));
  Engine engine(World(), *model, NoOptimizer{});
  const auto step = [&](const at::Tensor& state) {
    engine.backward(model->forward(at::ones({2, 300})).square().sum());
    engine.step();
    state.add_(1);
    engine.zero_grad();
  };
  const at::Tensor average = at::randn({300, 300}), untouched = at::randn({300, 300});
  const at::Tensor then = average.clone(), same = untouched.clone();
  std::promise<void> changed;
  auto saving = std::make_shared<Saving>(engine.impl());
  engine.impl().saving = saving;
  saving->before_writing = [&] { changed.get_future().wait(); };
  const Outer outer{{{OuterTensor::Place::whole, "weight", "average", average},
                     {OuterTensor::Place::whole, "weight", "untouched", untouched}},
                    "{}"};
  saving->begin(scratch.path("all"), {}, &outer, Copy::yes);
  average.mul_(2);  // between the call and the step, which settles the rest
  step(average);
  step(untouched);
  EXPECT_TRUE(average.equal(then * 2 + 1));
  changed.set_value();
  saving->finish();
  Loading loading(engine.impl(), scratch.path("all"), {}, OuterState::taken);
  ASSERT_EQ(loading.outer().tensors.size(), 2u);
  EXPECT_TRUE(loading.outer().tensors[0].value.equal(then));
  EXPECT_TRUE(loading.outer().tensors[1].value.equal(same));
}

TEST(OuterState, GoesFromAnyWorldAndPlaceToAnyOther) {
  const Scratch scratch;
  for (const Way& from : kWays) {
    for (const int before : {1, 3}) {
      const std::string folder = scratch.path(c10::str(from.strategy, from.pieces, before));
      run_local(before, [&](World world) {
        Trained run(world, from);
        const Outer outer = run.step();
        save(run, folder, &outer);
      });
      for (const Way& to : kWays) {
        run_local(2, [&](World world) {
          SCOPED_TRACE(c10::str(from.strategy, from.pieces ? " in pieces" : "", " on ", before, " to ", to.strategy,
                                to.pieces ? " in pieces" : ""));
          Trained run(world, to);
          const Outer mine = run.step();  // has what a rank of this run needs, and where
          Loading loading(run.engine.impl(), folder, {}, OuterState::taken);
          loading.apply();
          EXPECT_EQ(loading.outer().text, mine.text);
          std::map<std::string, OuterTensor> found;
          for (const OuterTensor& one : loading.outer().tensors) found[one.key + " " + one.parameter] = one;
          EXPECT_EQ(found.size(), 2 * run.names.size());
          for (const OuterTensor& wanted : mine.tensors) {
            const OuterTensor& got = found.at(wanted.key + " " + wanted.parameter);
            EXPECT_EQ(got.place, wanted.place) << wanted.parameter;
            EXPECT_TRUE(got.value.equal(wanted.value)) << wanted.key << " " << wanted.parameter;
            if (wanted.value.numel() > 0) {
              EXPECT_EQ(got.begin, wanted.begin) << wanted.parameter;
            }
          }
          for (size_t i = 0; i < run.names.size(); ++i) {  // on every rank, whoever gave them
            EXPECT_EQ(found.at("count " + run.names[i]).value[0].item<int64_t>(), static_cast<int64_t>(i));
          }
        });
      }
    }
  }
}

// Whole values are of the parameter's elements, whatever order either's memory is in.
TEST(OuterState, OfAParameterInAnotherOrderOfMemoryIsByItsElements) {
  const Scratch scratch;
  const at::Tensor value = at::arange(12, at::kDouble).view({3, 4});
  const std::vector<std::pair<std::string, std::function<at::Tensor()>>> orders = {
      {"rows", [] { return at::zeros({3, 4}); }},
      {"columns", [] { return at::zeros({4, 3}).t(); }},
      {"gaps", [] { return at::zeros({3, 8}).narrow(1, 0, 4); }}};
  for (const auto& [from, parameter] : orders) {
    for (const auto& [of_value, order] : orders) {
      const std::string folder = scratch.path(from + of_value);
      {
        at::Tensor weight = parameter().requires_grad_();
        Engine engine(World(), NamedTensors{{"w", weight}}, {}, NoOptimizer{});
        const at::Tensor state = order().to(at::kDouble).copy_(value);
        const Outer outer{{{OuterTensor::Place::whole, "w", "average", state}}, "{}"};
        auto saving = std::make_shared<Saving>(engine.impl());
        engine.impl().saving = saving;
        saving->begin(folder, {}, &outer, Copy::no);
        saving->finish();
      }
      for (const auto& [to, other] : orders) {
        at::Tensor weight = other().requires_grad_();
        Engine engine(World(), NamedTensors{{"w", weight}}, {}, NoOptimizer{});
        Loading loading(engine.impl(), folder, {}, OuterState::taken);
        ASSERT_EQ(loading.outer().tensors.size(), 1U);
        EXPECT_TRUE(loading.outer().tensors[0].value.equal(value)) << from << ", " << of_value << " to " << to;
      }
    }
  }
}

// What nobody trains has no pieces: its state is whole on every rank, wherever others' is cut.
TEST(OuterState, OfAFrozenParameterIsWholeBesidePieces) {
  const Scratch scratch;
  for (const std::string strategy : {"ddp", "zero2"}) {
    run_local(2, [&](World world) {
      at::Tensor trained = at::zeros({40}).requires_grad_(), frozen = at::zeros({5, 3});
      Engine engine(world, NamedTensors{{"frozen", frozen}, {"trained", trained}}, {}, UserOptimizer{},
                    {.strategy = strategy});
      const at::Tensor state = at::arange(15, at::kDouble).view({5, 3});
      Outer outer{{{OuterTensor::Place::whole, "frozen", "average", state}}, "{}"};
      trained.sum().backward();
      engine.begin_step();
      for (const Piece& piece : engine.pieces()) {
        const at::Tensor mine = at::arange(40, at::kDouble).narrow(0, piece.begin, piece.weight.numel());
        outer.tensors.push_back({OuterTensor::Place::piece, "trained", "average", mine, piece.begin});
      }
      engine.end_step();
      auto saving = std::make_shared<Saving>(engine.impl());
      engine.impl().saving = saving;
      saving->begin(scratch.path(strategy), {}, &outer, Copy::no);
      saving->finish();
      Loading loading(engine.impl(), scratch.path(strategy), {}, OuterState::taken);
      ASSERT_EQ(loading.outer().tensors.size(), 2U);
      for (const OuterTensor& one : loading.outer().tensors) {
        if (one.parameter == "frozen") {
          EXPECT_EQ(one.place, OuterTensor::Place::whole);
          EXPECT_TRUE(one.value.equal(state));
        } else {
          EXPECT_EQ(one.place, OuterTensor::Place::piece);
          EXPECT_TRUE(one.value.equal(at::arange(40, at::kDouble).narrow(0, one.begin, one.value.numel())));
        }
      }
    });
  }
}

// Whoever takes some files of a checkpoint alone, finds by their names what is in them.
TEST(OuterState, LiesInTheFilesOfTheOptimizer) {
  const Scratch scratch;
  for (const Way& way : kWays) {
    run_local(2, [&](World world) {
      Trained run(world, way);
      const Outer outer = run.step();
      const std::string path = save(run, scratch.path(c10::str(way.strategy, way.pieces)), &outer);
      if (world.rank() != 0) return;
      const save::Checkpoint checkpoint(path);
      std::map<save::Kind, int> seen;
      for (const save::SavedTensor& tensor : checkpoint.manifest().tensors) {
        ++seen[tensor.kind];
        const bool state = tensor.kind == save::Kind::optimizer || tensor.kind == save::Kind::optimizer_value;
        const std::string file = tensor.kind == save::Kind::weight ? "weights-" : state ? "optimizer-" : "rest-";
        for (const save::Part& part : tensor.parts) {
          EXPECT_THAT(checkpoint.manifest().files[part.file].name, StartsWith(file)) << tensor.title();
        }
      }
      for (const auto kind : {save::Kind::weight, save::Kind::optimizer, save::Kind::optimizer_value,
                              save::Kind::buffer, save::Kind::generator}) {
        EXPECT_GT(seen[kind], 0) << save::to_string(kind);
      }
    });
  }
}

TEST(OuterState, ThatIsMissingOrLeftOverIsAMismatch) {
  const Scratch scratch;
  Trained run(World(), kWays[1]);
  const Outer outer = run.step();
  save(run, scratch.path("with"), &outer);
  save(run, scratch.path("without"), nullptr);
  const auto load = [&](const char* folder, OuterState taken, bool strict = true) {
    Loading loading(run.engine.impl(), scratch.path(folder), {.strict = strict}, taken);
    return loading.info().mismatches;
  };
  EXPECT_THAT([&] { load("with", OuterState::none); },
              ThrowsMessage<Error>(HasSubstr("the state of a torch.optim optimizer")));
  EXPECT_THAT([&] { load("without", OuterState::taken); },
              ThrowsMessage<Error>(HasSubstr("the state of the torch.optim optimizer")));
  EXPECT_TRUE(load("with", OuterState::taken).empty());
  EXPECT_TRUE(load("without", OuterState::none).empty());
  ASSERT_EQ(load("without", OuterState::taken, false).size(), 1U);
  EXPECT_EQ(load("without", OuterState::taken, false)[0].kind, Mismatch::Kind::missing);
  // Every value that nobody takes is named, beside the text.
  const auto left = load("with", OuterState::none, false);
  EXPECT_EQ(left.size(), 2 * run.names.size() + 1);
  for (const Mismatch& one : left) EXPECT_EQ(one.kind, Mismatch::Kind::extra) << one.what;
}

// Values of shapes of their own, each given by the ranks that own its parameter: replicas give the same ones.
TEST(OuterState, OfItsOwnShapesComesFromWhoeverOwnsTheParameter) {
  const Scratch scratch;
  for (const Mesh mesh : {Mesh{1, 2}, Mesh{1, 4}, Mesh{2, 2}}) {
    const std::string folder = scratch.path(c10::str(mesh.replicate, mesh.shard));
    run_local(mesh.replicate * mesh.shard, [&](World world) {
      NamedTensors named;
      for (int i = 0; i < 4; ++i) named.emplace_back("p" + std::to_string(i), at::zeros({6}).requires_grad_());
      Engine engine(world, named, {}, UserOptimizer{}, {.strategy = "zero1", .mesh = mesh, .cut = Cut::at_parameters});
      engine.backward((named[0].second + named[1].second + named[2].second + named[3].second).sum());
      engine.begin_step();
      Outer outer{{}, "{}"};
      for (const Piece& piece : engine.pieces()) {
        if (piece.weight.numel() == 0) continue;
        for (const auto& [name, parameter] : named) {
          if (!parameter.is_same(piece.parameter)) continue;
          outer.tensors.push_back({OuterTensor::Place::other, name, "factor", at::tensor({name.back() - '0', 7})});
        }
      }
      engine.end_step();
      auto saving = std::make_shared<Saving>(engine.impl());
      engine.impl().saving = saving;
      saving->begin(folder, {}, &outer, Copy::no);
      saving->finish();
      Loading loading(engine.impl(), folder, {}, OuterState::taken);
      ASSERT_EQ(loading.outer().tensors.size(), 4u) << "on every rank";
      for (const OuterTensor& one : loading.outer().tensors) {
        EXPECT_EQ(one.value[0].item<int64_t>(), one.parameter.back() - '0');
      }
    });
  }
}

}  // namespace
}  // namespace plumb
