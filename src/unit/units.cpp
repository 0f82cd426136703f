#include "unit/units.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>
#include <utility>

#include "grad/node.h"
#include "plumb/error.h"
#include "unit/deferred.h"
#include "unit/saved.h"
#include "unit/storage.h"
#include "world/road.h"
#include "world/timeline.h"

namespace plumb {
namespace {

using Lock = std::lock_guard<std::recursive_mutex>;

// How many units a backward keeps that it may come back to.
constexpr size_t kRecent = 2;

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
    : owner_(std::move(reducer)), reducer_(*owner_), specs_(std::move(specs)),
      ahead_bytes_(reducer_.options().gather_ahead_bytes), handed_out_(std::make_shared<std::atomic<int64_t>>(0)) {
  for (Bucket& bucket : reducer_.buckets()) {
    if (bucket.unit < 0) continue;
    Home& home = homes_.emplace_back();
    home.bucket = &bucket;
    home_of_bucket_[bucket.index] = &home;
    settle_in(home);
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
      if (!home.full && !home.peers.empty()) gather(home);
    } catch (const std::exception&) {
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
  reducer_.settle_gathers = [weak = weak_from_this()] {
    const auto self = weak.lock();
    return self ? self->settle_gathers() : 0;
  };
  reducer_.explain_gathers = [weak = weak_from_this()](const Where& where) {
    if (const auto self = weak.lock()) self->explain_gathers(where);
  };
}

void Units::settle_in(Home& home) {
  at::NoGradGuard no_grad;
  Bucket& bucket = *home.bucket;
  const at::Tensor& like = bucket.sinks[0]->parameter;
  const auto options = at::TensorOptions().dtype(like.scalar_type()).device(like.device());
  home.whole = at::zeros({bucket.numel}, options);
  const Where where{Where::Kind::setup, 0, 0, "the shards of the parameters"};
  Group::Shared shards = reducer_.shard().share(bucket.held.size(), options, where);
  bucket.parameter = shards.mine;
  home.peers = std::move(shards.everybody);
  const at::Tensor rows = deferred::take_rows(bucket.sinks[0]->parameter);
  home.named = home.whole.is_cpu() && reducer_.team().shard_control().names_gathers();
  if (home.peers.empty() && !home.named) reducer_.gathers();
  for (Sink* sink : bucket.sinks) {
    const at::Tensor place = view_in(home.whole, sink->slot.offset, sink->parameter);
    if (rows.defined()) {
      if (bucket.numel != bucket.held.size() * reducer_.shard().size() || rows.numel() > bucket.held.size()) {
        throw Error(reducer_.world().rank(), "parameter '" + sink->name + "' was cut by rows, and its engine does not");
      }
    } else if (deferred::waits(sink->parameter)) {
      place.copy_(deferred::restore(sink->name, sink->parameter, reducer_.world(), reducer_.data()));
    } else {
      place.copy_(sink->parameter);
    }
    keep_for_current(sink->parameter);
    home.places.push_back(at::empty({0}, options));
    home_of_[sink->parameter.unsafeGetTensorImpl()] = &home;
    homes_of_[home.places.back().storage().unsafeGetStorageImpl()] = &home;
    home.shapes.push_back(sink->parameter.sizes().vec());
  }
  lend(home);
  for (size_t i = 0; i < home.places.size(); ++i) {
    at::Tensor parameter = bucket.sinks[i]->parameter;
    home.places[i].unsafeGetTensorImpl()->set_sizes_contiguous({parameter.numel()});
    parameter.set_data(view_in(home.places[i], 0, parameter));
  }
  bucket.parameter.copy_(home.whole.narrow(0, bucket.held.begin, bucket.held.size()));
  if (rows.defined()) {
    bucket.parameter.narrow(0, 0, rows.numel()).copy_(rows);
    if (reducer_.replicate().size() > 1) reducer_.replicate().broadcast(bucket.parameter, 0).wait(where);
  }
  reducer_.control().barrier().wait(where);  // nobody reads a shard that is not written yet
  home.lanes.end_all(home.whole.device());
  home.full = true;
  home.lent = true;
  release(home);
}

// The memory lives as long as somebody points into it.
void Units::lend(Home& home) {
  auto* memory = static_cast<char*>(home.whole.mutable_data_ptr());
  for (size_t i = 0; i < home.places.size(); ++i) {
    const Sink& sink = *home.bucket->sinks[i];
    const auto item = static_cast<int64_t>(home.whole.element_size());
    c10::DataPtr part(
        memory + sink.slot.offset * item, new c10::Storage(home.whole.storage()),
        [](void* whole) { delete static_cast<c10::Storage*>(whole); }, home.whole.device());
    fill_storage(*home.places[i].storage().unsafeGetStorageImpl(), std::move(part),
                 static_cast<size_t>(sink.parameter.numel() * item));
  }
  home.lent = true;
}

void Units::withdraw(Home& home) {
  if (!std::exchange(home.lent, false)) return;
  const std::string begin = "plumb: rank " + std::to_string(reducer_.world().rank()) + ": parameter '";
  for (size_t i = 0; i < home.places.size(); ++i) {
    empty_storage(*home.places[i].storage().unsafeGetStorageImpl(),
                  begin + home.bucket->sinks[i]->name +
                      "' was used while its unit is released; use it through its plumb::Unit, or inside "
                      "engine.gathered({...})");
  }
}

void Units::use(Home& home) {
  if (home.full && !home.ahead) return;
  if (home.peers.empty()) return use_together(home);
  gather(home);
}

int64_t Units::bytes_of(const Home& home) const { return home.bucket->numel * home.whole.element_size(); }

// By messages of all ranks, in program order and without asking: each says what it gathers, and what ranks gather is compared
// with the facts. What is to be used next, as after the last backward, is gathered ahead, or kept.
void Units::use_together(Home& home) {
  if (!home.named) return ask_to_gather(home);
  home.ahead = false;
  order_.after(home.bucket->index);
  look_ahead();
  send_ahead(home.full ? nullptr : &home);
  receive(home);
  if (!home.lent) {
    lend(home);
    home.versions = versions(home);
  }
}

// The window: the units that are used next, as many as fit, and one that does not. Whatever is whole for nobody is released.
void Units::look_ahead() {
  for (Home* home : soon_) home->soon = false;
  soon_.clear();
  int64_t bytes = 0;
  for (const int index : order_.following()) {
    Home* home = home_of_bucket_.at(index);
    if (home->soon) continue;
    bytes += bytes_of(*home);
    if (bytes > ahead_bytes_ && !soon_.empty()) break;
    home->soon = true;
    soon_.push_back(home);
  }
  for (Home& home : homes_) {
    if (home.ahead && !home.soon) release(home);
  }
}

// Sends for `first`, and for the window once less than half of it is there. Small neighbours are one message.
void Units::send_ahead(Home* first) {
  constexpr int64_t together = 512 << 10;  // bytes of a message of several
  std::vector<Home*> wanted;
  if (first != nullptr) wanted.push_back(first);
  int64_t there = 0, all = 0;
  for (const Home* home : soon_) {
    all += bytes_of(*home);
    if (home->full) there += bytes_of(*home);
  }
  if (first != nullptr || 2 * there <= all) {
    for (Home* home : soon_) {
      if (home->full || home == first) continue;
      home->ahead = true;
      wanted.push_back(home);
    }
  }
  std::vector<Home*> message;
  int64_t bytes = 0;
  for (Home* home : wanted) {
    if (!message.empty() && bytes + bytes_of(*home) > together) {
      send_for(std::exchange(message, {}));
      bytes = 0;
    }
    message.push_back(home);
    bytes += bytes_of(*home);
  }
  if (!message.empty()) send_for(message);
}

void Units::send_for(const std::vector<Home*>& homes) {
  at::NoGradGuard no_grad;
  std::vector<Group::Part> parts;
  Digest what;
  for (Home* home : homes) {
    const Alone alone(home->lanes, home->whole.device());
    make_room(*home);
    pass_gather(*home);
    parts.push_back({home->bucket->parameter, home->whole});
    what.add(static_cast<uint64_t>(home->bucket->index));
    sent_for_.add(static_cast<uint64_t>(home->bucket->index));
    sent_since_.push_back(home->bucket->index);
  }
  const int64_t said = reducer_.fault == Fault::gather_unnamed ? 0 : what.value();
  const auto message = std::make_shared<Pending>();
  for (Home* home : homes) home->arriving = message;
  try {
    *message = reducer_.team().shard_control().gather(parts, said);
  } catch (...) {
    lose_gathers();
    throw;
  }
  on_their_way_.push_back(message);
}

// A gather failed: nobody uses what did not come, or may still be written.
void Units::lose_gathers() {
  on_their_way_.clear();
  for (Home& home : homes_) {
    if (!home.arriving) continue;
    home.arriving.reset();
    home.ahead = false;
    withdraw(home);
    c10::StorageImpl& storage = *home.whole.storage().unsafeGetStorageImpl();
    (void)new c10::DataPtr(storage.set_data_ptr(storage.allocator()->allocate(0)));  // never freed
    empty_storage(storage, "plumb: released");
    home.full = false;
  }
}

// Asks before every gather, where a backend would mix up what ranks gather. What everybody expects to use next is gathered
// ahead.
void Units::ask_to_gather(Home& home) {
  const std::string& name = home.bucket->sinks[0]->name;
  const std::array<int64_t, 2> mine{home.bucket->index, order_.after(home.bucket->index)};
  bool agreed = mine[1] >= 0;
  for (const auto& other : reducer_.gathers().shard_control.exchange(mine, gathering(home))) {
    agreed = agreed && other[1] == mine[1];
    if (other[0] == mine[0]) continue;
    const Bucket& theirs = reducer_.buckets()[static_cast<size_t>(other[0])];
    throw Error(reducer_.world().rank(),
                "this rank gathers the parameters beside '" + name + "' while another gathers those beside '" +
                    theirs.sinks[0]->name +
                    "'; this backend can only gather what every rank uses, in the same order: use the same units on "
                    "every rank, or ranks of one machine, which read each other's memory (backend shm)");
  }
  if (!home.full) gather(home);
  home.ahead = false;
  release_ahead();
  const auto next =
      std::find_if(homes_.begin(), homes_.end(), [&](const Home& other) { return other.bucket->index == mine[1]; });
  if (agreed && next != homes_.end() && !next->full) {
    gather(*next);
    next->ahead = true;
  }
  receive(home);
}

void Units::pass_gather(const Home& home) const {
  const Where where = reducer_.here(Where::Kind::backward);
  road_of(reducer_.world()).pass(Point::gather, where.step, where.pass, home.bucket->index);
}

void Units::make_room(Home& home) {
  c10::StorageImpl& storage = *home.whole.storage().unsafeGetStorageImpl();
  const auto bytes = static_cast<size_t>(bytes_of(home));
  fill_storage(storage, storage.allocator()->allocate(bytes), bytes);
  ++gathers_;
  home.full = true;
  home.complete = false;
  home.sent_for = std::chrono::steady_clock::now();
}

// Begins it; a collective ends in receive().
void Units::gather(Home& home) {
  at::NoGradGuard no_grad;
  const Alone alone(home.lanes, home.whole.device());
  make_room(home);
  pass_gather(home);
  lend(home);
  home.versions = versions(home);
  if (home.peers.empty()) {
    home.arriving = std::make_shared<Pending>(reducer_.gathers().shard.all_gather(home.whole, home.bucket->parameter));
    return;
  }
  const int64_t part = home.bucket->held.size();
  for (size_t r = 0; r < home.peers.size(); ++r) {
    home.whole.narrow(0, static_cast<int64_t>(r) * part, part).copy_(home.peers[r]);
  }
}

// Messages are waited for in the order in which all ranks sent for them: so two ranks that differ wait at the same one.
void Units::receive(Home& home) {
  const Alone alone(home.lanes, home.whole.device());
  const auto message = home.arriving;
  if (!message) return;
  try {
    const Where where = gathering(home);
    if (std::ranges::count(on_their_way_, message) > 0) {
      for (bool done = false; !done; on_their_way_.pop_front()) {
        done = on_their_way_.front() == message;
        on_their_way_.front()->wait(where);
      }
    }
    message->wait(where);
  } catch (...) {
    lose_gathers();
    throw;
  }
  home.arriving.reset();
  if (Timeline& timeline = timeline_of(reducer_.world()); timeline.on()) {
    timeline.span("gathers", home.bucket->sinks[0]->name, home.sent_for);
  }
}

int64_t Units::settle_gathers() {
  Lock lock(mutex_);
  for (Home& home : homes_) {
    if (home.arriving) receive(home);
  }
  sent_since_.erase(sent_since_.begin(), sent_since_.begin() + static_cast<ptrdiff_t>(compared_));
  compared_ = sent_since_.size();
  return reducer_.team().mesh().replicate == 1 ? sent_for_.value() : 0;  // replicas are free to differ
}

void Units::explain_gathers(const Where& where) {
  Lock lock(mutex_);
  Group& control = reducer_.control();
  const auto count = static_cast<int64_t>(sent_since_.size());
  int64_t most = 0;
  for (const auto& theirs : control.exchange(std::span(&count, 1), where)) most = std::max(most, theirs[0]);
  std::vector<int64_t> mine = sent_since_;
  mine.resize(static_cast<size_t>(most), -1);
  const auto all = control.exchange(mine, where);
  const auto told = [&](int64_t index) {
    return index < 0 ? std::string("nothing more")
                     : "the parameters beside '" + reducer_.buckets()[static_cast<size_t>(index)].sinks[0]->name + "'";
  };
  for (size_t i = 0; i < mine.size(); ++i) {
    for (size_t rank = 1; rank < all.size(); ++rank) {
      if (all[rank][i] == all[0][i]) continue;
      throw Error(
          reducer_.world().rank(),
          "rank 0 gathered " + told(all[0][i]) + " where rank " + std::to_string(rank) + " gathered " +
              told(all[rank][i]) + ", as gather " + std::to_string(i + 1) +
              " of this pass; nothing of it was used "
              "to update a parameter. Ranks that cannot read each other's memory gather what every rank uses, in "
              "the same order: use the same units on every rank, or ranks of one machine (backend shm)");
    }
  }
  throw Error(
      reducer_.world().rank(),
      "the ranks gathered the same units in this pass, and different ones in an earlier one; use the same units "
      "on every rank");
}

Where Units::gathering(const Home& home) const {
  return reducer_.here(Where::Kind::backward, "gathering the parameters beside '" + home.bucket->sinks[0]->name + "'");
}

void Units::release(Home& home) {
  if (!home.full) return;
  if (home.ahead) receive(home);
  home.ahead = false;
  home.lanes.keep(home.whole.storage().data_ptr());  // the readers' kernels may still run
  withdraw(home);
  empty_storage(*home.whole.storage().unsafeGetStorageImpl(), "plumb: released");
  home.full = false;
}

// A whole home's memory, as somebody else's from now on. A copy of it where others read it, too, or where kernels may.
c10::DataPtr Units::take_memory(Home& home) {
  c10::StorageImpl& storage = *home.whole.storage().unsafeGetStorageImpl();
  if (home.holds == 0 && home.readers.empty() && home.whole.is_cpu()) {
    withdraw(home);
    c10::DataPtr memory = storage.set_data_ptr(storage.allocator()->allocate(0));
    empty_storage(storage, "plumb: released");
    home.full = home.ahead = false;
    return memory;
  }
  home.lanes.begin_part(home.whole.device());
  at::Tensor copy = home.whole.clone();
  home.lanes.end_part(home.whole.device());
  c10::StorageImpl& other = *copy.storage().unsafeGetStorageImpl();
  return other.set_data_ptr(other.allocator()->allocate(0));
}

void Units::release_if_idle(Home& home) {
  if (!home.full || home.ahead || home.holds > 0 || !home.readers.empty()) return;
  const bool recent = std::find(recent_.begin(), recent_.end(), home.bucket->unit) != recent_.end();
  if (!home.complete && recent) return;
  if (home.peers.empty() && home.named && home.soon) {
    withdraw(home);  // used soon
    home.ahead = true;
  } else {
    release(home);
  }
}

// What nobody came to use after all.
void Units::release_ahead() {
  for (Home& home : homes_) {
    if (home.ahead) release(home);
  }
}

// ---- scopes

// All of them, or none.
void Units::hold(const std::vector<Home*>& homes) {
  Lock lock(mutex_);
  std::vector<Home*> held;
  try {
    for (Home* home : homes) {
      ++home->holds;
      held.push_back(home);
      use(*home);
      home->lanes.begin_part(home->whole.device());
    }
  } catch (...) {
    for (Home* home : held) --home->holds;
    throw;
  }
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
  saved::pop();
  Lock lock(mutex_);
  note_changes(unit);
  // A forward that runs again inside a backward is followed by its own backward.
  if (torch::autograd::get_current_graph_task_id() >= 0 && at::GradMode::is_enabled()) {
    if (backward::listen(shared_from_this())) ++tasks_;
    touch(unit);
  }
  let_go(homes_of_unit_[unit]);
}

void Units::hold(const std::vector<at::Tensor>& parameters) {
  hold(homes_of(parameters));
  saved::push({weak_from_this(), -1, parameters});
}

void Units::let_go(const std::vector<at::Tensor>& parameters) {
  saved::pop();
  let_go(homes_of(parameters));
}

void Units::begin_update() {
  Lock lock(mutex_);
  check_nothing_lost();
  for (Home& home : homes_) {
    if (home.holds > 0) {
      throw Error(reducer_.world().rank(), "step() while the parameters beside '" + home.bucket->sinks[0]->name +
                                               "' are in use; end the scope that gathered them first");
    }
    release(home);
    home.lanes.begin_all(home.whole.device());
    bring_home(home);
  }
}

// Nobody reads a shard that another rank has not finished.
void Units::end_update() {
  Lock lock(mutex_);
  for (Home& home : homes_) home.lanes.end_all(home.whole.device());
  const bool reads_in_place =
      std::any_of(homes_.begin(), homes_.end(), [](const Home& h) { return h.peers.size() > 1; });
  if (reads_in_place) reducer_.control().barrier().wait(reducer_.here(Where::Kind::step, "the updated shards"));
}

NamedTensors Units::shards() const {
  NamedTensors all;
  for (const Home& home : homes_) {
    for (const Sink* sink : home.bucket->sinks) {
      const Range mine = overlap(sink->slot, sink->parameter.numel(), home.bucket->held);
      const int64_t begin = std::clamp<int64_t>(mine.begin - home.bucket->held.begin, 0, home.bucket->held.size());
      all.emplace_back(sink->name, home.bucket->parameter.narrow(0, begin, mine.size()));
    }
  }
  return all;
}

void Units::shards_written() {
  Lock lock(mutex_);
  for (Home& home : homes_) {
    if (home.holds == 0 && home.readers.empty()) release(home);  // also what was gathered ahead: it is of before
  }
  reducer_.control().barrier().wait(reducer_.here(Where::Kind::step, "the shards that were written"));
}

void Units::gather_together(int64_t ahead) {
  reducer_.gathers();
  ahead_bytes_ = ahead;
  for (Home& home : homes_) home.peers.clear();
}

int64_t Units::gathered_bytes() const {
  Lock lock(mutex_);
  int64_t bytes = *handed_out_;
  for (const Home& home : homes_) bytes += home.full ? home.bucket->numel * home.whole.element_size() : 0;
  return bytes;
}

// ---- backwards

void Units::need(int unit) {
  Lock lock(mutex_);
  for (Home* home : homes_of_unit_[unit]) need(*home);
}

void Units::need_storage(const c10::StorageImpl* storage) {
  Lock lock(mutex_);
  need(*homes_of_.at(storage));
}

void Units::need(Home& home) {
  use(home);
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
  touch(home.bucket->unit);
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
    if (home.bucket != &bucket) continue;
    home.complete = true;
    release_if_idle(home);
  }
}

void Units::backward_ended(std::exception_ptr) {
  Lock lock(mutex_);
  if (--tasks_ > 0) return;
  tasks_ = 0;
  recent_.clear();
  release_ahead();
  order_.restart();
  look_ahead();
  for (Home& home : homes_) {
    home.readers.clear();  // a node that threw never said that it was done
    home.complete = false;
    release_if_idle(home);
  }
}

}  // namespace plumb
