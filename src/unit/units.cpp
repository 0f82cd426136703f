#include "unit/units.h"

#include <ATen/ATen.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/functorch/DynamicLayer.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "grad/node.h"
#include "plumb/error.h"
#include "unit/saved.h"

namespace plumb {
namespace {

using Lock = std::lock_guard<std::recursive_mutex>;

// How many units a backward keeps that it may come back to.
constexpr size_t kRecent = 2;

std::deque<Home> settled(Reducer& reducer) {
  std::deque<Home> homes;
  for (Bucket& bucket : reducer.buckets()) {
    if (bucket.unit >= 0) homes.emplace_back(bucket, reducer);
  }
  return homes;
}

}  // namespace

// After a node that unpacked something of a unit has run.
struct Units::ReaderHook final : torch::autograd::FunctionPostHook {
  ReaderHook(std::weak_ptr<Units> units, Home* home, const void* node)
      : units(std::move(units)), home(home), node(node) {}
  ~ReaderHook() override {
    auto alive = units.lock();
    if (!alive) return;
    Lock lock(alive->mutex_);
    if (auto it = alive->hooked_.find(node); it != alive->hooked_.end()) {
      std::erase(it->second, home);
      if (it->second.empty()) alive->hooked_.erase(it);
    }
  }
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    if (auto alive = units.lock()) alive->left(*home, node);
    return outputs;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { refuse_compiled_autograd(); }
  std::weak_ptr<Units> units;
  Home* home;
  const void* node;
};

Units::Units(std::vector<UnitSpec> specs, std::shared_ptr<Reducer> reducer)
    : owner_(std::move(reducer)), reducer_(*owner_), specs_(std::move(specs)), homes_(settled(reducer_)),
      gathers_(reducer_, homes_), handed_out_(std::make_shared<std::atomic<int64_t>>(0)) {
  for (Home& home : homes_) {
    for (size_t i = 0; i < home.places.size(); ++i) {
      home_of_[home.bucket.sinks[i]->parameter.unsafeGetTensorImpl()] = &home;
      homes_of_[home.places[i].storage().unsafeGetStorageImpl()] = &home;
    }
  }
  for (const UnitSpec& spec : specs_) homes_of_unit_.push_back(homes_of(spec.parameters));
  reducer_.remember_parameters();
}

Units::~Units() {
  for (const UnitSpec& spec : specs_) {
    std::lock_guard lock(spec.door->mutex);
    spec.door->number = -1;
  }
  // Whoever keeps the parameters keeps whole ones where that needs nobody else.
  for (Home& home : homes_) {
    try {
      if (!home.full && !home.peers.empty()) gathers_.fill(home);
    } catch (const std::exception&) {  // then they keep their rows
    }
  }
}

void Units::open_doors() {
  saved::install(weak_from_this());
  for (size_t i = 0; i < specs_.size(); ++i) {
    std::lock_guard lock(specs_[i].door->mutex);
    specs_[i].door->units = weak_from_this();
    specs_[i].door->number = static_cast<int>(i);
  }
  reducer_.on_complete = [weak = weak_from_this()](Bucket& bucket) {
    if (auto self = weak.lock()) self->completed(bucket);
  };
  reducer_.gathering = weak_from_this();
}

// ---- for the reducer

void Units::serve(const Where& where) {
  const Entrance entrance(*this);
  gathers_.serve(where);
}

int64_t Units::settle() {
  Lock lock(mutex_);
  return gathers_.settle();
}

void Units::explain(const Where& where) {
  Lock lock(mutex_);
  gathers_.explain(where);
}

void Units::release_if_idle(Home& home) {
  if (!home.full || home.ahead || home.in_use()) return;
  const bool recent = std::find(recent_.begin(), recent_.end(), home.bucket.unit) != recent_.end();
  if (home.complete || !recent) gathers_.set_down(home);
}

// ---- scopes

// All of them, or none.
void Units::hold(const std::vector<Home*>& homes) {
  const Entrance entrance(*this);
  std::vector<Home*> held;
  try {
    for (Home* home : homes) {
      ++home->holds;
      held.push_back(home);
      gathers_.fill(*home);
      home->lanes.begin_part(home->whole.device());
    }
  } catch (...) {
    for (Home* home : held) {
      --home->holds;
      release_if_idle(*home);
    }
    throw;
  }
}

// Every rank is in this call: where they ask, none goes by what it has left of a window that another may have used otherwise.
void Units::hold_together(const std::vector<Home*>& homes) {
  const Entrance entrance(*this);
  for (Home* home : homes) {
    if (asks() && home->ahead) gathers_.release(*home);
  }
  hold(homes);
}

void Units::let_go(const std::vector<Home*>& homes) {
  Lock lock(mutex_);
  for (Home* home : homes) {
    --home->holds;
    home->lanes.end_part(home->whole.device());
    release_if_idle(*home);
  }
}

void Units::enter(int unit) {
  {
    Lock lock(mutex_);
    check_nothing_lost();
  }
  hold(homes_of_unit_[unit]);
  saved::push({weak_from_this(), unit});
}

void Units::leave(int unit) {
  const bool aside = saved::pop();
  Lock lock(mutex_);
  note_changes(unit);
  // A forward that runs again inside a backward is followed by its own backward.
  if (torch::autograd::get_current_graph_task_id() >= 0 && at::GradMode::is_enabled()) {
    if (backward::listen(shared_from_this())) ++tasks_;
    touch(unit);
  }
  // What transforms save goes through no hooks.
  if (aside || at::functorch::maybeCurrentDynamicLayer() || !at::SavedTensorDefaultHooks::is_enabled()) {
    for (Home* home : homes_of_unit_[unit]) home->lingers = true;
  }
  let_go(homes_of_unit_[unit]);
}

void Units::keep(const std::vector<at::Tensor>& parameters) { hold_together(homes_of(parameters)); }

void Units::hold(const std::vector<at::Tensor>& parameters) {
  hold_together(homes_of(parameters));
  saved::push({weak_from_this(), -1, parameters});
}

void Units::let_go(const std::vector<at::Tensor>& parameters) {
  const bool aside = saved::pop();
  const std::vector<Home*> homes = homes_of(parameters);
  if (aside) {
    Lock lock(mutex_);
    for (Home* home : homes) home->lingers = true;
  }
  let_go(homes);
}

void Units::begin_update() {
  Lock lock(mutex_);
  check_nothing_lost();
  for (Home& home : homes_) {
    if (home.holds > 0) {
      throw Error(reducer_.world().rank(), "step() while the parameters beside '" + home.name() +
                                               "' are in use; end the scope that gathered them first");
    }
    home.lingers = false;
    gathers_.release(home);
    home.lanes.begin_all(home.whole.device());
    home.bring_home();
  }
}

// Nobody reads a shard that another rank has not finished.
void Units::end_update() {
  Lock lock(mutex_);
  for (Home& home : homes_) home.lanes.end_all(home.whole.device());
  const bool reads_in_place =
      std::any_of(homes_.begin(), homes_.end(), [](const Home& h) { return h.peers.size() > 1; });
  if (!reads_in_place) return;  // those of this axis; another's may travel
  reducer_.team().shard_control().barrier().wait(reducer_.here(Where::Kind::step, "the updated shards"));
}

NamedTensors Units::shards() const {
  NamedTensors all;
  for (const Home& home : homes_) {
    for (const Sink* sink : home.bucket.sinks) {
      const Range mine = overlap(sink->slot, sink->parameter.numel(), home.bucket.held);
      const int64_t begin = std::clamp<int64_t>(mine.begin - home.bucket.held.begin, 0, home.bucket.held.size());
      all.emplace_back(sink->name, home.bucket.parameter.narrow(0, begin, mine.size()));
    }
  }
  return all;
}

void Units::shards_written() {
  Lock lock(mutex_);
  for (Home& home : homes_) {
    home.lingers = false;
    if (!home.in_use()) gathers_.release(home);  // also what was gathered ahead: it is of before
  }
  reducer_.control().barrier().wait(reducer_.here(Where::Kind::step, "the shards that were written"));
}

void Units::gather_together(int64_t ahead) {
  reducer_.gathers();
  for (Home& home : homes_) home.peers.clear();
  gathers_.set_window(ahead);
}

int64_t Units::gathered_bytes() const {
  Lock lock(mutex_);
  int64_t bytes = *handed_out_;
  for (const Home& home : homes_) bytes += home.full ? home.bytes() : 0;
  return bytes;
}

// ---- backwards

void Units::need(int unit) {
  const Entrance entrance(*this);
  for (Home* home : homes_of_unit_[unit]) need(*home);
}

void Units::need_storage(const c10::StorageImpl* storage) {
  const Entrance entrance(*this);
  need(*homes_of_.at(storage));
}

void Units::need(Home& home) {
  gathers_.fill(home);
  home.lanes.begin_part(home.whole.device());
  home.lanes.end_part(home.whole.device());  // also where nobody tells when it is done
  if (torch::autograd::get_current_graph_task_id() < 0)
    return;  // somebody looks at a graph; the next backward releases
  if (backward::listen(shared_from_this())) ++tasks_;
  if (const auto node = torch::autograd::get_current_node()) {
    home.readers.insert(node.get());
    auto& known = hooked_[node.get()];
    if (std::find(known.begin(), known.end(), &home) == known.end()) {
      known.push_back(&home);
      node->add_post_hook(std::make_unique<ReaderHook>(weak_from_this(), &home, node.get()));
    }
  }
  touch(home.bucket.unit);
}

void Units::touch(int unit) {
  if (std::find(recent_.begin(), recent_.end(), unit) != recent_.end()) return;
  recent_.push_front(unit);
  if (recent_.size() <= kRecent) return;
  recent_.pop_back();
  for (Home& home : homes_) release_if_idle(home);
}

void Units::left(Home& home, const void* node) {
  Lock lock(mutex_);
  home.readers.erase(node);
  home.lanes.end_part(home.whole.device());
  release_if_idle(home);
}

void Units::completed(Bucket& bucket) {
  Lock lock(mutex_);
  for (Home& home : homes_) {
    if (&home.bucket != &bucket) continue;
    home.complete = true;
    release_if_idle(home);
  }
}

void Units::backward_ended(std::exception_ptr) {
  Lock lock(mutex_);
  if (--tasks_ > 0) return;
  tasks_ = 0;
  recent_.clear();
  gathers_.backward_ended();
  for (Home& home : homes_) {
    home.readers.clear();  // a node that threw never said that it was done
    home.complete = home.lingers = false;
    release_if_idle(home);
  }
}

}  // namespace plumb
