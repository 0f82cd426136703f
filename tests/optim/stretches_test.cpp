// Stretches of flat memory for optimizers of the user's own: the pieces once more, joined where they are neighbours.
#include <gtest/gtest.h>

#include <map>

#include "engine/impl.h"
#include "engine/support/plain.h"

namespace plumb {
namespace {

using namespace test;

struct Drawn {
  std::vector<int64_t> sizes;
  std::vector<unsigned> used;  // by step, one bit for each parameter
  at::ScalarType dtype = at::kFloat;
  int64_t cap = 0;
  int ranks = 1;
};

Drawn drawn(uint64_t seed) {
  Draw draw(seed);
  Drawn one;
  const int64_t count = draw.whole(1, 7);
  for (int64_t i = 0; i < count; ++i) one.sizes.push_back(draw.one_in(4) ? draw.whole(0, 2) : draw.whole(3, 50));
  const auto any = [&] { return static_cast<unsigned>(draw.whole(0, (1 << count) - 1)); };
  one.used = {any(), any()};
  one.used.push_back(one.used.back());  // once more the same
  one.used.push_back(any());
  one.used.push_back((1U << count) - 1);
  one.dtype = draw.of<at::ScalarType>({at::kFloat, at::kDouble, at::kBFloat16, at::kHalf});
  one.cap = draw.of<int64_t>({1, 200, 1 << 20});
  one.ranks = static_cast<int>(draw.whole(1, 3));
  return one;
}

// By parameter, in the bucket's order: where its piece lies, and whether it has a gradient.
struct Lying {
  at::Tensor parameter;
  int64_t begin = 0, size = 0;
  bool active = false;
};

class StretchesIn : public testing::TestWithParam<std::string> {};

TEST_P(StretchesIn, AreThePiecesJoinedWhereNothingLiesBetweenThem) {
  for (uint64_t seed = 1; seed <= 60 && !HasFailure(); ++seed) {
    const Drawn one = drawn(seed);
    run_local(one.ranks, [&](World world) {
      SCOPED_TRACE(c10::str("seed ", seed, ", rank ", world.rank(), " of ", one.ranks));
      std::vector<at::Tensor> parameters, wanted;
      NamedTensors named;
      for (size_t i = 0; i < one.sizes.size(); ++i) {
        parameters.push_back(noise({one.sizes[i]}, seed + i).to(one.dtype).requires_grad_());
        named.emplace_back("p" + std::to_string(i), parameters.back());
        wanted.push_back(parameters.back().detach().to(at::kDouble));
      }
      Engine engine(world, named, {}, UserOptimizer{},
                    {.strategy = GetParam(),
                     .bucket_bytes = one.cap,
                     .first_bucket_bytes = one.cap,
                     .accumulate_dtype = at::promoteTypes(one.dtype, at::kFloat)});
      Engine::Impl& impl = engine.impl();
      int64_t number = -1;
      std::vector<const void*> before;
      for (size_t step = 0; step < one.used.size(); ++step) {
        SCOPED_TRACE(c10::str("step ", step, ", used ", one.used[step]));
        const auto gradient = [&](size_t i, int rank) {
          return noise({one.sizes[i]}, 1000 * seed + 100 * step + 10 * i + rank).to(one.dtype);
        };
        for (size_t i = 0; i < parameters.size(); ++i) {
          if (one.used[step] >> i & 1U) engine.deliver(parameters[i], gradient(i, world.rank()));
        }
        if (one.used[step] == 0) {
          engine.backward({});
        } else {
          engine.end_pass();
        }
        engine.begin_step();
        std::map<const void*, Piece> pieces;
        size_t with_gradient = 0;
        for (const Piece& piece : engine.pieces()) {
          pieces[piece.parameter.unsafeGetTensorImpl()] = piece;
          with_gradient += piece.gradient.defined() ? 1 : 0;
        }
        const Stretches& stretches = impl.updater->lend_flat(impl.reducer->buckets());
        EXPECT_EQ(&stretches, &impl.updater->stretches());
        size_t members = 0;
        for (const Stretch& stretch : stretches.all) {
          ASSERT_EQ(stretch.weight.sizes(), stretch.gradient.sizes());
          ASSERT_EQ(stretch.weight.scalar_type(), at::promoteTypes(one.dtype, at::kFloat));
          ASSERT_EQ(stretch.gradient.scalar_type(), stretch.weight.scalar_type());
          at::Tensor padding = at::ones({stretch.weight.numel()}, at::kBool);
          int64_t end = 0;
          for (const Stretch::Member& member : stretch.members) {
            ++members;
            const auto found = pieces.find(member.parameter.unsafeGetTensorImpl());
            ASSERT_NE(found, pieces.end()) << "twice, or nobody's";
            const Piece piece = found->second;
            pieces.erase(found);
            ASSERT_TRUE(piece.gradient.defined());
            EXPECT_EQ(member.numel, piece.weight.numel());
            if (member.numel == 0) continue;
            EXPECT_EQ(member.begin, piece.begin);
            ASSERT_LE(end, member.offset);
            end = member.offset + member.numel;
            ASSERT_LE(end, stretch.weight.numel());
            EXPECT_EQ(stretch.weight.narrow(0, member.offset, 1).const_data_ptr(), piece.weight.const_data_ptr());
            EXPECT_TRUE(stretch.gradient.narrow(0, member.offset, member.numel).equal(piece.gradient));
            padding.narrow(0, member.offset, member.numel).zero_();
          }
          EXPECT_EQ(stretch.gradient.masked_select(padding).count_nonzero().item<int64_t>(), 0);
          EXPECT_EQ(stretch.weight.masked_select(padding).count_nonzero().item<int64_t>(), 0);
        }
        EXPECT_EQ(members, with_gradient);
        // As few as can be: a stretch ends only where a piece lies that has no gradient.
        size_t fewest = 0;
        for (const Bucket& bucket : impl.reducer->buckets()) {
          if (!bucket.has_gradient()) continue;
          size_t open = 0;
          bool joins = false;
          for (const Sink* sink : bucket.sinks) {
            if (overlap(sink->slot, sink->parameter.numel(), bucket.updated).size() == 0) continue;
            if (sink->grad().defined() && !joins) ++open;
            joins = sink->grad().defined();
          }
          fewest += std::max<size_t>(open, 1);
        }
        EXPECT_EQ(stretches.all.size(), fewest);
        // The number tells whether something is other than before.
        std::vector<const void*> now;
        for (const Stretch& stretch : stretches.all) {
          now.push_back(stretch.weight.const_data_ptr());
          now.push_back(reinterpret_cast<const void*>(stretch.weight.numel()));
          for (const Stretch::Member& member : stretch.members) now.push_back(member.parameter.unsafeGetTensorImpl());
        }
        if (step > 0) {
          EXPECT_EQ(stretches.number == number, now == before);
        }
        number = stretches.number;
        before = now;

        for (const Stretch& stretch : stretches.all) {
          at::Tensor(stretch.weight).sub_(stretch.gradient, 0.25);
        }
        engine.end_step();
        for (const Stretch& stretch : impl.updater->stretches().all) EXPECT_FALSE(stretch.gradient.defined());
        engine.zero_grad();
        for (size_t i = 0; i < parameters.size(); ++i) {
          for (int rank = 0; rank < one.ranks && (one.used[step] >> i & 1U); ++rank) {
            wanted[i] -= 0.25 * gradient(i, rank).to(at::kDouble) / one.ranks;
          }
          // Masters of half precision are as f32; a parameter is their rounding.
          const double ulp = one.dtype == at::kBFloat16 ? 5e-3 : one.dtype == at::kHalf ? 6e-4 : 1e-6;
          EXPECT_LT(distance(engine.full_parameter(parameters[i]), wanted[i]), ulp) << i;
        }
        if (HasFailure()) return;
      }
    });
  }
}

// What was lent is written back to every rank, though its gradient is gone by then; and what was not is not counted as updated.
TEST_P(StretchesIn, AndPiecesGoBackThoughGradientsAreClearedBeforeTheStepEnds) {
  for (const bool flat : {false, true}) {
    for (const bool clears : {false, true}) {
      run_local(2, [&](World world) {
        SCOPED_TRACE(c10::str(flat ? "flat" : "pieces", clears ? ", cleared" : ""));
        at::Tensor a = at::zeros({37}, at::kDouble).requires_grad_(), b = at::zeros({21}, at::kDouble).requires_grad_();
        Engine engine(world, NamedTensors{{"a", a}, {"b", b}}, {}, UserOptimizer{}, {.strategy = GetParam()});
        Engine::Impl& impl = engine.impl();
        for (int step = 1; step <= 3; ++step) {
          (step == 2 ? a.sum() : a.sum() + b.sum()).backward();
          engine.begin_step();
          if (flat) {
            for (const Stretch& one : impl.updater->lend_flat(impl.reducer->buckets()).all) {
              at::Tensor(one.weight).sub_(one.gradient);
            }
          } else {
            for (const Piece& one : engine.pieces()) {
              if (one.gradient.defined()) at::Tensor(one.weight).sub_(one.gradient);
            }
          }
          if (clears) engine.zero_grad();
          engine.end_step();
          engine.zero_grad();
          const int of_b = step == 1 ? 1 : step - 1;
          EXPECT_TRUE(engine.full_parameter(a).eq(-step).all().item<bool>()) << step;
          EXPECT_TRUE(engine.full_parameter(b).eq(-of_b).all().item<bool>()) << step;
          for (const Sink& sink : impl.reducer->sinks()) {
            EXPECT_EQ(impl.updater->memory_of(sink).updates, sink.name == "a" ? step : of_b) << sink.name;
          }
        }
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Strategies, StretchesIn, testing::Values("ddp", "zero1", "zero2"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace plumb
