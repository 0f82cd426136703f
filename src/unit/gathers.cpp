#include "unit/gathers.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <utility>

#include "layout/at_a_time.h"
#include "plumb/error.h"
#include "watch/road.h"
#include "watch/timeline.h"

namespace plumb {

Gathers::Gathers(Reducer& reducer, std::deque<Home>& homes) : reducer_(reducer), homes_(homes) {
  for (Home& home : homes_) home_of_bucket_[home.bucket.index] = &home;
  set_window(reducer.options().gather_ahead_bytes);
}

void Gathers::set_window(int64_t bytes) {
  window_bytes_ = bytes;
  asks_ = std::ranges::any_of(homes_, [](const Home& home) { return home.peers.empty() && !home.named; });
}

void Gathers::fill(Home& home) {
  if (home.full && !home.ahead) return;
  // Memory of the engine's, whatever transform of torch.func asks for it.
  const c10::impl::ExcludeDispatchKeyGuard untransformed(c10::DispatchKeySet(
      {c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode}));
  home.peers.empty() ? gather_together(home) : read_in_place(home);
}

void Gathers::read_in_place(Home& home) {
  at::NoGradGuard no_grad;
  const Alone alone(home.lanes, home.whole.device());
  try {
    begin(home);
    home.lend();
    home.versions = home.versions_now();
    const int64_t part = home.bucket.held.size();
    for (size_t r = 0; r < home.peers.size(); ++r) {
      home.whole.narrow(0, static_cast<int64_t>(r) * part, part).copy_(home.peers[r]);
    }
  } catch (...) {
    home.release();  // nobody takes it for whole
    throw;
  }
}

void Gathers::gather_together(Home& home) {
  home.ahead = false;
  order_.use(home.bucket.index);
  look_ahead();
  std::vector<Home*> wanted = due(home);
  if (!home.named) {
    if (!home.full || !wanted.empty()) take_part(&home, wanted, place_of(home));
  } else {
    for (Home* ahead : wanted) ahead->ahead = true;
    if (!home.full) wanted.insert(wanted.begin(), &home);
    send_for(wanted);
  }
  receive(home);
  if (!home.lent) {
    home.lend();
    home.versions = home.versions_now();
  }
}

// The window: the units that are used next, as many as fit, and one that does not. Whatever is whole for nobody is released.
void Gathers::look_ahead() {
  for (Home* home : soon_) home->soon = false;
  soon_.clear();
  int64_t bytes = 0;
  for (const int index : order_.following()) {
    Home* home = home_of_bucket_.at(index);
    if (home->soon) continue;
    bytes += home->bytes();
    if (bytes > window_bytes_ && !soon_.empty()) break;
    home->soon = true;
    soon_.push_back(home);
  }
  for (Home& home : homes_) {
    if (home.ahead && !home.soon) release(home);
  }
}

// Of the window, what is to be gathered now: all that is not there, with `now` if that is not, or once less than half of it is there.
std::vector<Home*> Gathers::due(const Home& now) const {
  std::vector<Home*> missing;
  int64_t there = 0, all = 0;
  for (Home* home : soon_) {
    if (home->named != now.named) continue;  // of another device
    all += home->bytes();
    if (home->full) there += home->bytes();
    if (!home->full && home != &now) missing.push_back(home);
  }
  if (now.full && 2 * there > all) missing.clear();
  return missing;
}

// Small neighbours are one message.
void Gathers::send_for(const std::vector<Home*>& homes) {
  std::vector<Home*> message;
  int64_t bytes = 0;
  for (Home* home : homes) {
    if (!message.empty() && bytes + home->bytes() > kTogether) {
      send_message(std::exchange(message, {}));
      bytes = 0;
    }
    message.push_back(home);
    bytes += home->bytes();
  }
  if (!message.empty()) send_message(message);
}

void Gathers::send_message(const std::vector<Home*>& homes) {
  at::NoGradGuard no_grad;
  std::vector<Group::Part> parts;
  Digest what;
  const auto message = std::make_shared<Pending>();
  try {
    for (Home* home : homes) {
      const Alone alone(home->lanes, home->whole.device());
      home->arriving = message;
      begin(*home);
      parts.push_back({home->bucket.parameter, home->whole});
      what.add(static_cast<uint64_t>(home->bucket.index));
      sent_for_.add(static_cast<uint64_t>(home->bucket.index));
      sent_since_.push_back(home->bucket.index);
    }
    const int64_t said = reducer_.fault == Fault::gather_unnamed ? 0 : what.value();
    *message = reducer_.team().shard_control().gather(parts, said);
  } catch (...) {
    lose();
    throw;
  }
  on_their_way_.push_back(message);
}

// A gather failed: nobody uses what did not come, or may still be written.
void Gathers::lose() {
  on_their_way_.clear();
  for (Home& home : homes_) {
    if (!home.arriving) continue;
    home.arriving.reset();
    home.ahead = false;
    home.abandon();
  }
}

void Gathers::serve(const Where& where) {
  while (take_part(nullptr, {}, where)) {
  }
}

// Ranks say what they want, and all of them gather whatever somebody needs, in the order of who asked first: those who do not
// need it lend their shard. Where all want the same, and expect the same to follow, they gather that, too, and ask no more until
// most of it is used. False: nobody wanted anything.
bool Gathers::take_part(Home* wanted, const std::vector<Home*>& ahead, const Where& where) {
  const bool needs = wanted != nullptr && !wanted->full;
  const Reducer::Progress here = reducer_.progress();
  Digest following;
  for (const Home* home : ahead) following.add(static_cast<uint64_t>(home->bucket.index));
  const std::array<int64_t, 5> mine{wanted == nullptr ? -1 : wanted->bucket.index, needs, following.value(), here.pass,
                                    here.launched};
  const auto everybody = reducer_.gathers().shard_control.exchange(mine, where);
  bool anything = false, alike = true, together = true;
  int64_t launched = 0;
  for (const auto& theirs : everybody) {
    anything |= theirs[0] >= 0;
    // One that has begun more reductions went another way since the last question: a stream of its may wait for others' part in them.
    alike = alike && theirs[0] == mine[0] && theirs[3] == mine[3] && theirs[4] == mine[4];
    together = together && theirs[2] == mine[2];
    launched = std::max(launched, theirs[4]);
  }
  if (!alike && anything) {
    reducer_.part_ways(launched);
    release_ahead();  // on every rank: from here on they have the same again
  }
  std::vector<int64_t> gathered;
  for (const auto& theirs : everybody) {
    if (theirs[1] == 0 || std::ranges::count(gathered, theirs[0]) > 0) continue;
    gathered.push_back(theirs[0]);
    if (needs && theirs[0] == mine[0]) {
      gather(*wanted);
    } else {
      lend(*home_of_bucket_.at(static_cast<int>(theirs[0])), where);
    }
  }
  if (alike && together) {
    for (Home* home : ahead) {
      gather(*home);
      home->ahead = true;
    }
  }
  return anything;
}

// Begins it; receive() ends it.
void Gathers::gather(Home& home) {
  at::NoGradGuard no_grad;
  const Alone alone(home.lanes, home.whole.device());
  try {
    begin(home);
    home.arriving = std::make_shared<Pending>(reducer_.gathers().shard.all_gather(home.whole, home.bucket.parameter));
  } catch (...) {
    home.abandon();  // nobody takes it for whole
    throw;
  }
}

void Gathers::lend(Home& home, const Where& where) {
  at::NoGradGuard no_grad;
  const Alone alone(home.lanes, home.whole.device());
  reducer_.gathers()
      .shard.all_gather(at::empty({home.bucket.numel}, home.whole.options()), home.bucket.parameter)
      .wait(where);
}

void Gathers::begin(Home& home) {
  home.make_room();
  ++count_;
  home.complete = false;
  home.sent_for = std::chrono::steady_clock::now();
  const Where where = reducer_.here(Where::Kind::backward);
  road_of(reducer_.world()).pass(Point::gather, where.step, where.pass, home.bucket.index);
}

// Messages are waited for in the order in which all ranks sent for them: so two ranks that differ wait at the same one.
void Gathers::receive(Home& home) {
  const Alone alone(home.lanes, home.whole.device());
  const auto message = home.arriving;
  if (!message) return;
  try {
    const Where where = place_of(home);
    if (std::ranges::count(on_their_way_, message) > 0) {
      for (bool done = false; !done; on_their_way_.pop_front()) {
        done = on_their_way_.front() == message;
        on_their_way_.front()->wait(where);
      }
    }
    message->wait(where);
  } catch (...) {
    lose();
    throw;
  }
  home.arriving.reset();
  if (Timeline& timeline = timeline_of(reducer_.world()); timeline.on()) {
    timeline.span("gathers", home.name(), home.sent_for);
  }
}

int64_t Gathers::settle() {
  for (Home& home : homes_) {
    if (home.arriving) receive(home);
  }
  sent_since_.erase(sent_since_.begin(), sent_since_.begin() + static_cast<ptrdiff_t>(compared_));
  compared_ = sent_since_.size();
  return reducer_.team().mesh().replicate == 1 ? sent_for_.value() : 0;  // replicas are free to differ
}

void Gathers::explain(const Where& where) {
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
              "the same order: use the same units on every rank, or let ranks ask before they gather "
              "(Options::ask_before_gathers, PLUMB_ASK_BEFORE_GATHERS=1)");
    }
  }
  throw Error(
      reducer_.world().rank(),
      "the ranks gathered the same units in this pass, and different ones in an earlier one; use the same units "
      "on every rank");
}

void Gathers::release(Home& home) {
  if (!home.full) return;
  if (home.ahead) receive(home);
  home.ahead = false;
  home.release();
}

void Gathers::set_down(Home& home) {
  if (home.peers.empty() && home.soon) {
    home.withdraw();
    home.ahead = true;
  } else {
    release(home);
  }
}

void Gathers::backward_ended() {
  release_ahead();
  order_.restart();
  look_ahead();
}

// What nobody came to use after all.
void Gathers::release_ahead() {
  for (Home& home : homes_) {
    if (home.ahead) release(home);
  }
}

Where Gathers::place_of(const Home& home) const {
  return reducer_.here(Where::Kind::backward, "gathering the parameters beside '" + home.name() + "'");
}

}  // namespace plumb
