// Each rank knows what every other one sends, and computes the result by itself.
#include "world/support/rehearsal.h"

#include <ATen/ops/cat.h>

#include <algorithm>
#include <array>
#include <random>
#include <sstream>
#include <stdexcept>

#include "world/group.h"
#include "world/support/plain.h"

namespace plumb::testing {
namespace {

// Known at compile time: a role is played before other constants are made.
constexpr std::array<at::ScalarType, 9> numbers{at::kFloat, at::kDouble, at::kHalf, at::kBFloat16,    at::kLong,
                                                at::kInt,   at::kChar,   at::kByte, at::kComplexFloat};

class Rehearsal {
 public:
  Rehearsal(const World& world, uint32_t seed)
      : world_(world), group_(data_group(world)), plan_(seed), seed_(seed), n_(world.size()), me_(world.rank()) {}

  void round() {
    switch (plan_() % 8) {
      case 0:
        return all_reduce();
      case 1:
        return reduce_scatter();
      case 2:
        return reduce_several();
      case 3:
        return all_gather();
      case 4:
        return broadcast();
      case 5:
        return all_to_all();
      case 6:
        return messages();
      default:
        return several_under_way();
    }
  }

 private:
  // Sizes from nothing to more than any backend sends in one go; odd ones, and those next to powers of two.
  int64_t size() {
    const int64_t power = int64_t{1} << plan_() % 15;
    return std::max<int64_t>(power + static_cast<int64_t>(plan_() % 3) - 1, 0);
  }
  at::ScalarType dtype() { return numbers[plan_() % numbers.size()]; }
  // What rank `r` sends in this round.
  at::Tensor of(int r, int64_t numel, at::ScalarType dtype, uint32_t salt) {
    return varied(numel, dtype, salt * 64 + static_cast<uint32_t>(r));
  }
  std::vector<at::Tensor> everybodys(int64_t numel, at::ScalarType dtype, uint32_t salt) {
    std::vector<at::Tensor> all;
    for (int r = 0; r < n_; ++r) all.push_back(of(r, numel, dtype, salt));
    return all;
  }
  std::vector<at::Tensor> parts(const std::vector<at::Tensor>& all, int64_t shard, int owner) const {
    std::vector<at::Tensor> result;
    for (const auto& one : all) result.push_back(one.narrow(0, owner * shard, shard));
    return result;
  }
  // Memory of the group's own, or any.
  at::Tensor copy_of(const at::Tensor& source) {
    at::Tensor made = plan_() % 2 == 0 ? group_.allocate(source.numel(), source.options()) : at::empty_like(source);
    return made.copy_(source);
  }
  void must(const at::Tensor& found, const at::Tensor& right, const std::string& what) const {
    if (same_bits(found, right)) return;
    std::ostringstream text;
    text << "rank " << me_ << " of " << n_ << ", seed " << seed_ << ": wrong " << what << " of " << right.numel() << " "
         << right.scalar_type();
    throw std::runtime_error(text.str());
  }
  // gloo's own all-reduce rounds narrow dtypes at every addition, and adds in an order of its own.
  void must_be_near(const at::Tensor& found, const std::vector<at::Tensor>& all, const std::string& what) const {
    if (world_.backend() != "gloo" || c10::isIntegralType(found.scalar_type(), true)) {
      return must(found, plain_reduction(all, Reduction::sum), what);
    }
    const bool narrow = found.element_size() == 2;
    if (relative_error(found, all, Reduction::sum) > (narrow ? 0.03 : 1e-5)) throw std::runtime_error("wrong " + what);
  }

  void all_reduce() {
    const int64_t numel = size();
    const auto type = dtype();
    const auto all = everybodys(numel, type, plan_());
    at::Tensor mine = copy_of(all[me_]);
    group_.all_reduce(mine).wait(where_);
    must_be_near(mine, all, "all_reduce");
  }

  void reduce_scatter() {
    const int64_t shard = size();
    const auto type = dtype();
    const auto all = everybodys(shard * n_, type, plan_());
    at::Tensor full = copy_of(all[me_]);
    const bool in_place = plan_() % 2 == 0;
    at::Tensor mine = in_place ? full.narrow(0, me_ * shard, shard) : copy_of(of(me_, shard, type, 7));
    group_.reduce_scatter(mine, full).wait(where_);
    must(mine, plain_reduction(parts(all, shard, me_), Reduction::sum), "reduce_scatter");
    if (!in_place) must(full, all[me_], "input after a reduce_scatter");
  }

  void reduce_several() {
    std::vector<Group::Part> sums;
    std::vector<std::vector<at::Tensor>> inputs;
    const int count = 1 + static_cast<int>(plan_() % 4);
    for (int i = 0; i < count; ++i) {
      const int64_t shard = plan_() % 5 == 0 ? 0 : size();
      const auto type = dtype();
      inputs.push_back(everybodys(shard * n_, type, plan_()));
      sums.push_back({at::empty({shard}, type), copy_of(inputs.back()[me_])});
    }
    group_.reduce_scatter(sums).wait(where_);
    for (int i = 0; i < count; ++i) {
      must(sums[i].shard, plain_reduction(parts(inputs[i], sums[i].shard.numel(), me_), Reduction::sum),
           "one of several reduce_scatters");
    }
  }

  void all_gather() {
    const int64_t shard = size();
    const auto type = plan_() % 5 == 0 ? at::kBool : dtype();
    const auto all = everybodys(shard, type, plan_());
    at::Tensor full = copy_of(of(me_, shard * n_, type, 7));
    const bool in_place = plan_() % 2 == 0;
    at::Tensor mine = in_place ? full.narrow(0, me_ * shard, shard) : copy_of(all[me_]);
    mine.copy_(all[me_]);
    group_.all_gather(full, mine).wait(where_);
    must(full, at::cat(all), "all_gather");
    must(mine, all[me_], "input after an all_gather");
  }

  void broadcast() {
    const int64_t numel = size();
    const auto type = plan_() % 5 == 0 ? at::kBool : dtype();
    const auto all = everybodys(numel, type, plan_());
    const int root = static_cast<int>(plan_() % n_);
    at::Tensor mine = copy_of(all[me_]);
    group_.broadcast(mine, root).wait(where_);
    must(mine, all[root], "broadcast");
  }

  void all_to_all() {
    const int64_t shard = size();
    const auto type = dtype();
    const auto all = everybodys(shard * n_, type, plan_());
    must(group_.all_to_all(copy_of(all[me_]), where_), at::cat(parts(all, shard, me_)), "all_to_all");
  }

  void messages() {
    const int64_t length = plan_() % 40;
    const uint32_t salt = plan_();
    const auto numbers_of = [&](int r) {
      const at::Tensor values = of(r, length, at::kLong, salt);
      return std::vector<int64_t>(values.data_ptr<int64_t>(), values.data_ptr<int64_t>() + length);
    };
    const auto text_of = [&](int r) {
      const uint32_t mixed = (salt + static_cast<uint32_t>(r)) * 2654435761u;
      std::string text(mixed % 3 == 0 ? 0 : (mixed >> 8) % 70, static_cast<char>('a' + r));
      if (text.size() > 2) text[text.size() / 2] = '\0';
      return text;
    };
    const auto said = exchange(world_, numbers_of(me_), where_);
    const auto texts = exchange_text(world_, text_of(me_), where_);
    for (int r = 0; r < n_; ++r) {
      if (said.at(r) != numbers_of(r)) throw std::runtime_error("wrong exchange");
      if (texts.at(r) != text_of(r)) throw std::runtime_error("wrong exchange_text");
    }
    world_.barrier();
  }

  // Issued in one order by all, and waited for in another.
  void several_under_way() {
    struct Open {
      at::Tensor tensor;
      std::vector<at::Tensor> all;
      Pending pending;
    };
    std::vector<Open> open;
    const int count = 2 + static_cast<int>(plan_() % 20);
    for (int i = 0; i < count; ++i) {
      Open one{{}, everybodys(size(), dtype(), plan_()), {}};
      one.tensor = copy_of(one.all[me_]);
      one.pending = group_.all_reduce(one.tensor);
      open.push_back(std::move(one));
    }
    std::mt19937 whim(plan_() + static_cast<uint32_t>(me_));
    std::shuffle(open.begin(), open.end(), whim);
    for (auto& one : open) {
      one.pending.wait(where_);
      must_be_near(one.tensor, one.all, "one of several all_reduces");
    }
  }

  const World& world_;
  Group group_;
  std::mt19937 plan_;  // the same on every rank
  const uint32_t seed_;
  const int n_;
  const int me_;
  const Where where_{.detail = "a rehearsal"};
};

}  // namespace

void rehearse(const World& world, uint32_t seed, int rounds) {
  Rehearsal rehearsal(world, seed);
  for (int i = 0; i < rounds; ++i) rehearsal.round();
}

}  // namespace plumb::testing
