#include "optim/rates.h"

#include <c10/util/StringUtil.h>

#include <cmath>

#include "optim/rules.h"

namespace plumb {

Rates::Rates(int rank, const Optimizer& optimizer, const Options& options, const NamedTensors& parameters)
    : rank_(rank),
      trains_(!std::holds_alternative<NoOptimizer>(optimizer) && !std::holds_alternative<UserOptimizer>(optimizer)),
      own_{lr_of(optimizer), weight_decay_of(optimizer)} {
  check_values(rank, optimizer);
  for (size_t i = 0; i < options.groups.size(); ++i) {
    const ParameterGroup& group = options.groups[i];
    const auto complain = [&](const std::string& what) {
      throw Error(rank, "parameter group " + std::to_string(i) + " " + what);
    };
    if (group.match == nullptr) complain("has no `match` function");
    if (group.lr && !(*group.lr >= 0)) complain(c10::str("has lr ", *group.lr, "; it must not be negative"));
    if (group.weight_decay && !(*group.weight_decay >= 0)) {
      complain(c10::str("has weight_decay ", *group.weight_decay, "; it must not be negative"));
    }
    bool any = false;
    for (const auto& [name, parameter] : parameters) {
      if (!group.match(name)) continue;
      any = true;
      group_of_.emplace(name, static_cast<int>(i));  // the first one that matches stays
    }
    if (!any) complain("matches no parameter of this model");
    groups_.push_back({group.lr, group.weight_decay});
  }
}

Rates::Values Rates::of(const std::string& parameter) const {
  const auto it = group_of_.find(parameter);
  if (it == group_of_.end()) return own_;
  const Group& group = groups_[it->second];
  return {group.lr.value_or(own_.lr), group.weight_decay.value_or(own_.weight_decay)};
}

double Rates::lr(int index) const { return group(index).lr.value_or(own_.lr); }

void Rates::set_lr(double lr) {
  check_lr(lr);
  own_.lr = lr;
}

void Rates::set_lr(int index, double lr) {
  check_lr(lr);
  group(index);
  groups_[index].lr = lr;
}

std::vector<double> Rates::group_lrs() const {
  std::vector<double> all;
  for (const Group& group : groups_) all.push_back(group.lr.value_or(own_.lr));
  return all;
}

std::vector<std::pair<std::string, double>> Rates::settings() const {
  std::vector<std::pair<std::string, double>> all = {{"lr", own_.lr}};
  for (size_t i = 0; i < groups_.size(); ++i) {
    all.emplace_back("the lr of group " + std::to_string(i), groups_[i].lr.value_or(own_.lr));
  }
  return all;
}

const Rates::Group& Rates::group(int index) const {
  if (index < 0 || static_cast<size_t>(index) >= groups_.size()) {
    throw Error(rank_, c10::str("there is no parameter group ", index, "; Options::groups has ", groups_.size(),
                                ", counted from 0"));
  }
  return groups_[index];
}

void Rates::check_lr(double lr) const {
  if (!trains_) throw Error(rank_, "set_lr() on an engine without an optimizer; set it in your own");
  if (!(lr >= 0) || std::isinf(lr)) {
    throw Error(rank_, c10::str("set_lr(", lr, "); a learning rate must be finite and not negative"));
  }
}

}  // namespace plumb
