// Neighbours of any kind: whatever parameters there are, whoever else knows their memory and whatever the user did to their
// gradients, the stretches are those that a plain list of these facts gives, and an update of a stretch is one of its members.
#include <gtest/gtest.h>

#include "engine/impl.h"
#include "engine/support/plain.h"
#include "optim/neighbours.h"

namespace plumb {
namespace {

using namespace test;

enum class Shape { rows, turned, gapped, scalar, empty };
enum class Known { to_nobody, to_another_tensor, as_a_part, borrowed };
enum class Gradient { reduced, twin, none, replaced, with_graph };

struct House {
  at::Tensor parameter;
  c10::StorageImpl* storage = nullptr;
  Shape shape = Shape::rows;
  bool movable = true;
  bool home = false;  // its memory is the street's
  Gradient gradient = Gradient::reduced;

  // Its gradient lies as it does, and an update of many elements may be an update of its own.
  bool fits() const {
    return (shape == Shape::rows || shape == Shape::turned) &&
           (gradient == Gradient::reduced || gradient == Gradient::twin);
  }
};

class Town {
 public:
  Town(uint64_t seed, World world)
      : draw_(seed), world_(std::move(world)), dtype_(draw_.of<at::ScalarType>({at::kFloat, at::kDouble})),
        single_(draw_.one_in(2)) {
    const int64_t count = draw_.whole(1, 9);
    NamedTensors named;
    for (int64_t i = 0; i < count; ++i) {
      build();
      named.emplace_back("p" + std::to_string(i), houses_.back().parameter);
    }
    const auto cap = draw_.of<int64_t>({1, 400, 1 << 20});
    engine_ = std::make_unique<Engine>(world_, named, NamedTensors{}, NoOptimizer{},
                                       Options{.bucket_bytes = cap, .first_bucket_bytes = cap});
  }

  void step() {
    engine_->zero_grad();
    at::Tensor loss = at::zeros({}, at::kDouble).requires_grad_();
    for (House& house : houses_) {
      const bool used = !draw_.one_in(6);
      house.gradient = used ? draw_.of<Gradient>({Gradient::reduced, Gradient::reduced, Gradient::reduced,
                                                  Gradient::twin, Gradient::replaced, Gradient::with_graph})
                            : Gradient::none;
      if (used) loss = loss + (house.parameter.to(at::kDouble).square().sum() * (world_.rank() + 1));
    }
    engine_->backward(loss);
    engine_->step();
    for (House& house : houses_) {
      at::Tensor& gradient = house.parameter.mutable_grad();
      if (house.gradient == Gradient::twin) gradient = gradient.detach();
      if (house.gradient == Gradient::replaced) gradient = gradient.clone();
      if (house.gradient == Gradient::with_graph) gradient = gradient.detach().requires_grad_();
    }
    if (draw_.one_in(3)) meet(houses_[static_cast<size_t>(draw_.whole(0, static_cast<int64_t>(houses_.size()) - 1))]);
    check();
  }

 private:
  void build() {
    House& house = houses_.emplace_back();
    house.shape = draw_.of<Shape>({Shape::rows, Shape::rows, Shape::rows, Shape::rows, Shape::turned, Shape::gapped,
                                   Shape::scalar, Shape::empty});
    const at::ScalarType dtype = !single_ && draw_.one_in(4) ? at::kBFloat16 : dtype_;
    const auto fresh = [&](at::IntArrayRef shape) { return noise(shape, houses_.size()).to(dtype); };
    const int64_t numel = draw_.of<int64_t>({16, 32, 32, 64, 5, 33});
    switch (house.shape) {
      case Shape::rows:
        house.parameter = fresh({numel});
        break;
      case Shape::turned:
        house.parameter = at::empty_strided({4, 8}, {1, 4}, dtype).copy_(fresh({4, 8}));
        break;
      case Shape::gapped:
        house.parameter = at::empty_strided({4, 4}, {9, 1}, dtype).copy_(fresh({4, 4}));
        break;
      case Shape::scalar:
        house.parameter = fresh({});
        break;
      case Shape::empty:
        house.parameter = fresh({0});
        break;
    }
    if (house.shape == Shape::rows) {
      const auto known = draw_.of<Known>({Known::to_nobody, Known::to_nobody, Known::to_nobody, Known::to_nobody,
                                          Known::to_another_tensor, Known::as_a_part, Known::borrowed});
      if (known == Known::to_another_tensor) meet(house);
      if (known == Known::as_a_part) {
        house.parameter = at::empty({0}, dtype).set_(fresh({2 * numel}).storage(), numel, {numel}, {1});
      }
      if (known == Known::borrowed) {
        others_.push_back(house.parameter);
        house.parameter = at::from_blob(others_.back().mutable_data_ptr(), {numel}, others_.back().options());
      }
      house.movable = known == Known::to_nobody;
    }
    house.parameter.requires_grad_();
    house.storage = house.parameter.storage().unsafeGetStorageImpl();
  }

  // Another tensor over its memory: it moves no more, and stays a neighbour where it is home already.
  void meet(House& house) {
    others_.push_back(house.parameter.detach());
    house.movable = false;
  }

  // The members of each stretch: of a bucket's parameters in their order, those at home, up to the end of one whose elements
  // are no whole number of vectors.
  std::vector<std::vector<size_t>> wanted() {
    std::vector<std::vector<size_t>> all;
    for (const Bucket& bucket : engine_->impl().reducer->buckets()) {
      std::vector<size_t> street;
      for (const Sink* sink : bucket.sinks) {
        street.push_back(static_cast<size_t>(
            std::ranges::find_if(houses_,
                                 [&](const House& house) { return house.parameter.is_same(sink->parameter); }) -
            houses_.begin()));
      }
      if (std::ranges::count_if(street, [&](size_t i) { return houses_[i].fits(); }) < 2) continue;
      bool joins = false;
      for (const size_t i : street) {
        House& house = houses_[i];
        house.home = house.home || (house.fits() && house.movable);
        const bool member = house.fits() && house.home;
        if (member && !joins) all.emplace_back();
        if (member) all.back().push_back(i);
        joins = member && house.parameter.nbytes() % 64 == 0;
      }
    }
    std::erase_if(all, [](const auto& members) { return members.size() < 2; });
    return all;
  }

  void check() {
    std::vector<at::Tensor> values, gradients, places;
    for (const House& house : houses_) {
      values.push_back(house.parameter.detach().clone());
      gradients.push_back(house.parameter.grad().defined() ? house.parameter.grad().detach().clone() : at::Tensor());
      places.push_back(house.parameter.grad());
    }
    const std::vector<std::vector<size_t>> expected = wanted();
    const auto& stretches = neighbours_.lend(engine_->impl().reducer->buckets());
    for (size_t i = 0; i < houses_.size(); ++i) {
      const at::Tensor& parameter = houses_[i].parameter;
      ASSERT_TRUE(parameter.equal(values[i])) << i;
      ASSERT_EQ(parameter.storage().unsafeGetStorageImpl(), houses_[i].storage) << i;
      ASSERT_TRUE(places[i].defined() ? parameter.grad().is_same(places[i]) : !parameter.grad().defined()) << i;
    }
    std::vector<std::vector<size_t>> found;
    std::vector<const void*> begins;
    for (const auto& stretch : stretches.all) {
      begins.push_back(stretch.weight.const_data_ptr());
      ASSERT_EQ(stretch.weight.sizes(), stretch.gradient.sizes());
      found.emplace_back();
      for (const auto& member : stretch.members) {
        size_t i = 0;
        while (!houses_[i].parameter.is_same(member.parameter)) ++i;
        found.back().push_back(i);
        ASSERT_EQ(member.begin, 0);
        ASSERT_EQ(member.numel, member.parameter.numel());
        const auto at = [&](const at::Tensor& flat) {
          return flat.narrow(0, member.offset, member.numel).const_data_ptr();
        };
        ASSERT_EQ(at(stretch.weight), member.parameter.const_data_ptr());
        ASSERT_EQ(at(stretch.gradient), member.parameter.grad().const_data_ptr());
        ASSERT_EQ(stretch.weight.scalar_type(), member.parameter.scalar_type());
      }
      const auto& last = stretch.members.back();
      ASSERT_EQ(stretch.weight.numel(), last.offset + last.numel);
    }
    ASSERT_EQ(found, expected);
    ASSERT_EQ(stretches.number != number_, found != found_ || begins != begins_);
    number_ = stretches.number;
    found_ = found;
    begins_ = begins;
    update(values, gradients);
    neighbours_.take_back();
    for (const auto& stretch : neighbours_.stretches().all) ASSERT_FALSE(stretch.gradient.defined());
  }

  // As an optimizer over long tensors would, and one over each of the others.
  void update(const std::vector<at::Tensor>& values, const std::vector<at::Tensor>& gradients) {
    at::NoGradGuard no_grad;
    std::vector<bool> done(houses_.size());
    for (size_t s = 0; s < found_.size(); ++s) {
      const auto& stretch = neighbours_.stretches().all[s];
      stretch.weight.sub_(stretch.gradient, 0.25);
      for (const size_t i : found_[s]) done[i] = true;
    }
    for (size_t i = 0; i < houses_.size(); ++i) {
      if (gradients[i].defined() && !done[i]) houses_[i].parameter.sub_(gradients[i], 0.25);
      const at::Tensor now = gradients[i].defined() ? values[i].sub(gradients[i], 0.25) : values[i];
      ASSERT_TRUE(houses_[i].parameter.equal(now)) << i << (done[i] ? ", in a stretch" : "");
    }
  }

  Draw draw_;
  World world_;
  const at::ScalarType dtype_;
  const bool single_;
  std::vector<House> houses_;
  std::vector<at::Tensor> others_;
  std::unique_ptr<Engine> engine_;
  Neighbours neighbours_;
  int64_t number_ = 0;
  std::vector<std::vector<size_t>> found_;
  std::vector<const void*> begins_;
};

TEST(NeighboursOfAnyKind, AreThoseThatAPlainListGives) {
  for (uint64_t seed = 1; seed <= 150 && !testing::Test::HasFailure(); ++seed) {
    run_local(seed % 3 == 0 ? 2 : 1, [&](World world) {
      SCOPED_TRACE(c10::str("seed ", seed, ", rank ", world.rank()));
      Town town(seed, world);
      for (int step = 0; step < 4 && !testing::Test::HasFailure(); ++step) town.step();
    });
  }
}

}  // namespace
}  // namespace plumb
