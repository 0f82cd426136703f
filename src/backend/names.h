// What errors call the ranks of a group: a group of some ranks of a world counts them by itself, and nobody else does.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace plumb {

class Names {
 public:
  // Their numbers in the group.
  Names() = default;
  // By rank: the number in the world.
  explicit Names(std::vector<int> of) : of_(std::move(of)) {}

  int operator[](int rank) const { return of_.empty() ? rank : of_[static_cast<size_t>(rank)]; }
  std::string rank(int rank) const { return "rank " + std::to_string((*this)[rank]); }
  // Of `count` ranks from `first` on.
  Names part(int first, int count) const {
    std::vector<int> some;
    for (int i = 0; i < count; ++i) some.push_back((*this)[first + i]);
    return Names(std::move(some));
  }

 private:
  std::vector<int> of_;
};

}  // namespace plumb
