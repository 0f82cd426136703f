// Stretches of flat memory that an optimizer of the user's own updates, where it treats every element alike.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace plumb {

struct Stretch {
  // A parameter, or this rank's piece of it. One without elements here is a member all the same.
  struct Member {
    at::Tensor parameter;
    int64_t begin = 0;   // of the piece in the parameter
    int64_t offset = 0;  // of the piece in the stretch
    int64_t numel = 0;
    bool operator==(const Member& other) const {
      return parameter.is_same(other.parameter) && begin == other.begin && offset == other.offset &&
             numel == other.numel;
    }
  };

  at::Tensor weight, gradient;
  std::vector<Member> members;

  // The same memory for the same members.
  bool same(const Stretch& other) const {
    return weight.const_data_ptr() == other.weight.const_data_ptr() && weight.sizes() == other.weight.sizes() &&
           members == other.members;
  }
};

struct Stretches {
  int64_t number = 0;  // another one whenever weights or members are others than before
  std::vector<Stretch> all;

  const Stretches& renew(std::vector<Stretch> now) {
    if (!std::ranges::equal(now, all, &Stretch::same)) ++number;
    all = std::move(now);
    return *this;
  }
  // They are the buckets' alone again; or somebody seemed to keep them.
  void drop_gradients() {
    for (Stretch& stretch : all) stretch.gradient.reset();
  }
};

}  // namespace plumb
