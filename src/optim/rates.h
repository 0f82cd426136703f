// Rates: which learning rate and weight decay each parameter has: the optimizer's, or those of the first group that
// matches its name.
#pragma once

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plumb/engine.h"

namespace plumb {

class Rates {
 public:
  struct Values {
    double lr = 0.0;
    double weight_decay = 0.0;
    bool operator==(const Values&) const = default;
  };

  // An Error if a group names no parameter, or a value makes no sense.
  Rates(int rank, const Optimizer& optimizer, const Options& options, const NamedTensors& parameters);

  Values of(const std::string& parameter) const;
  bool grouped() const { return !groups_.empty(); }

  // Before the schedule's factor. A group has the optimizer's rate until it has one of its own.
  double lr() const { return own_.lr; }
  double lr(int group) const;
  void set_lr(double lr);
  void set_lr(int group, double lr);
  std::vector<double> group_lrs() const;

  // Everything that may be set between steps, by the name a user knows.
  std::vector<std::pair<std::string, double>> settings() const;

 private:
  struct Group {
    std::optional<double> lr;
    std::optional<double> weight_decay;
  };
  const Group& group(int index) const;
  void check_lr(double lr) const;

  int rank_;
  bool trains_;  // there is an optimizer
  Values own_;
  std::vector<Group> groups_;
  std::unordered_map<std::string, int> group_of_;  // by parameter; one outside all groups is not in it
};

}  // namespace plumb
