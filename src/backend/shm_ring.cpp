// How the pieces of a group's collectives move on: arrive, work, retire, release.
#include "backend/shm_ring.h"

#include <c10/util/irange.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <cstring>
#include <utility>

#include "backend/machines.h"
#include "backend/shm_work.h"
#include "plumb/error.h"

namespace plumb {

ShmRing::ShmRing(std::shared_ptr<ShmHeap> heap, int64_t serial, Names names, int first)
    : heap_(std::move(heap)), serial_(serial), rank_(heap_->rank()), size_(heap_->size()), names_(std::move(names)),
      first_(first), arrived_seen_(size_), retired_seen_(size_) {}

std::shared_ptr<ShmRing> ShmRing::make(std::shared_ptr<ShmHeap> heap, c10d::Store& store, int64_t serial, Names names,
                                       int first) {
  std::shared_ptr<ShmRing> ring(new ShmRing(std::move(heap), serial, std::move(names), first));
  ring->own_ = ring->heap_->allocate(sizeof(Mailbox));
  const std::string key = "mailbox/" + std::to_string(serial) + "/";
  store.set(key + std::to_string(ring->rank_), std::to_string(ring->own_.offset));
  const std::vector<std::string> offsets = read_all(store, key, ring->size_);
  for (int r = 0; r < ring->size_; ++r) {
    const int64_t offset = std::stoll(offsets[static_cast<size_t>(r)]);
    if (!ring->heap_->within(r, offset, sizeof(Mailbox))) {
      throw Error(ring->me(), ring->names_.rank(r) + " has no shared memory left for a group of " +
                                  std::to_string(sizeof(Mailbox)) + " bytes; free memory on this machine");
    }
    ring->mailboxes_.push_back(reinterpret_cast<Mailbox*>(ring->heap_->at(r, offset)));  // zeroed pages
  }
  ring->heap_->enlist(ring);
  return ring;
}

c10::intrusive_ptr<c10d::Work> ShmRing::issue(ShmCall call, std::chrono::milliseconds timeout) {
  const auto active = std::make_shared<Active>();
  active->call = std::move(call);
  const ShmCall& what = active->call;
  const bool in_one = what.verb == Verb::barrier || what.verb == Verb::all_to_all;
  if (what.input.defined()) active->item = what.input.element_size();
  active->parts = what.verb == Verb::reduce_scatter || what.verb == Verb::scatter ? size_ : 1;
  const int64_t bytes = what.numel * active->item * active->parts;
  active->small = bytes <= small_bytes;
  const int64_t step =
      in_one ? std::max<int64_t>(what.numel, 1) : std::max<int64_t>(piece_bytes / (active->item * active->parts), 1);
  const int64_t unit = unit_bytes / active->item;
  const bool claimed = what.verb == Verb::all_reduce && what.reader < 0 && !active->small;

  std::lock_guard lock(mutex_);
  int64_t begin = 0;
  do {  // a collective of nothing is one piece, too
    Piece piece{.active = active, .begin = begin, .count = std::min(step, what.numel - begin)};
    if (claimed) piece.units = static_cast<uint32_t>((piece.count + unit - 1) / unit);
    begin += piece.count;
    ++active->left;
    if (!failure_) pieces_.push_back(std::move(piece));
    ++issued_;
  } while (begin < what.numel);
  active->work = c10::make_intrusive<ShmWork>(shared_from_this(), rank_, what.verb, issued_ - 1, timeout);
  const auto work = active->work;
  if (failure_) {
    work->end(failure_);
  } else {
    advance_locked();
  }
  return work;
}

void ShmRing::advance() {
  std::lock_guard lock(mutex_);
  advance_locked();
}

void ShmRing::advance_locked() {
  try {
    while (!failure_ && (publish() | work() | retire() | release())) {
    }
  } catch (...) {
    fail(std::current_exception());
  }
}

bool ShmRing::all_arrived(uint64_t number) {
  for (int r = 0; r < size_; ++r) {
    if (arrived_seen_[r] > number) continue;
    arrived_seen_[r] = mailboxes_[r]->arrived.load();
    if (arrived_seen_[r] <= number) return false;
  }
  return true;
}

bool ShmRing::all_retired(uint64_t number) {
  for (int r = 0; r < size_; ++r) {
    if (retired_seen_[r] > number) continue;
    retired_seen_[r] = mailboxes_[r]->retired.load();
    if (retired_seen_[r] <= number) return false;
  }
  return true;
}

// Whether an earlier call that has not ended uses the same memory: collectives take effect in the order of issue.
bool ShmRing::in_the_way(const Piece& piece) const {
  const auto overlap = [](const at::Tensor& a, const at::Tensor& b) {
    if (!a.defined() || !b.defined() || a.nbytes() == 0 || b.nbytes() == 0) return false;
    const char* at = static_cast<const char*>(a.const_data_ptr());
    const char* bt = static_cast<const char*>(b.const_data_ptr());
    return at < bt + b.nbytes() && bt < at + a.nbytes();
  };
  const ShmCall& mine = piece.active->call;
  for (uint64_t n = released_; n < published_; ++n) {
    const Active& other = *pieces_[n - released_].active;
    if (other.left == 0 || &other == piece.active.get()) continue;
    for (const at::Tensor* a : {&mine.input, &mine.output}) {
      if (overlap(*a, other.call.input) || overlap(*a, other.call.output)) return true;
    }
  }
  return false;
}

// Arrives at the next pieces.
bool ShmRing::publish() {
  bool moved = false;
  bool complete = false;
  while (published_ < issued_) {
    Piece& piece = pieces_[published_ - released_];
    if (published_ >= slots && !all_retired(published_ - slots)) break;
    if (staged_ > staged_limit || (piece.begin == 0 && in_the_way(piece))) break;
    fill(piece, slot(rank_, published_));
    mailboxes_[rank_]->arrived.store(published_ + 1);
    complete = all_arrived(published_) || complete;
    ++published_;
    moved = true;
  }
  if (complete) heap_->ring();
  return moved;
}

// Writes into the slot what this piece is and where its input lies.
void ShmRing::fill(Piece& piece, Slot& slot) {
  const Active& active = *piece.active;
  const ShmCall& call = active.call;
  slot.verb = call.verb;
  slot.reduction = call.reduction;
  slot.dtype = call.input.defined() ? static_cast<int32_t>(call.input.scalar_type()) : -1;
  slot.root = call.root;
  slot.reader = call.reader;
  slot.what = call.what;
  slot.numel = call.numel;
  slot.begin = piece.begin;
  slot.count = piece.count;
  slot.parts = active.parts;
  slot.stride = 0;
  slot.place = Slot::Place::nowhere;
  slot.offset = 0;
  slot.claimed.store(0, std::memory_order_relaxed);
  slot.done.store(0, std::memory_order_relaxed);
  const bool from_one = call.verb == Verb::broadcast || call.verb == Verb::scatter;
  if (call.verb == Verb::barrier || (from_one && rank_ != call.root)) return;

  const char* source = static_cast<const char*>(call.input.const_data_ptr());
  const int64_t whole = call.numel * active.item;   // one part of the call
  const int64_t bytes = piece.count * active.item;  // one part of the piece
  const int64_t splits = call.verb == Verb::all_to_all ? int64_t{2} * size_ * static_cast<int64_t>(sizeof(int64_t)) : 0;
  const int64_t offset = heap_->offset_of(source);
  if (!active.small && splits == 0 && offset >= 0 && heap_->within(rank_, offset, whole * active.parts)) {
    slot.place = Slot::Place::heap;
    slot.offset = offset + piece.begin * active.item;
    slot.stride = whole;
    piece.exposed = true;
    return;
  }
  const int64_t copied = splits + bytes * active.parts;
  char* copy = slot.bytes;
  slot.place = Slot::Place::slot;
  if (copied > payload) {
    piece.staged = heap_->borrow(copied);
    if (piece.staged.offset < 0) {
      throw Error(me(), "no shared memory is left for a copy of " + std::to_string(copied) + " bytes in " +
                            name_of(call.verb) + "; free memory on this machine, or join by backend 'gloo'");
    }
    staged_ += piece.staged.bytes;
    copy = heap_->at(rank_, piece.staged.offset);
    slot.place = Slot::Place::heap;
    slot.offset = piece.staged.offset;
  }
  slot.stride = bytes;
  if (splits > 0) {
    std::memcpy(copy, call.input_splits.data(), splits / 2);
    std::memcpy(copy + splits / 2, call.output_splits.data(), splits / 2);
    copy += splits;
  }
  for (int64_t part = 0; part < active.parts && bytes > 0; ++part) {
    std::memcpy(copy + part * bytes, source + part * whole + piece.begin * active.item, bytes);
  }
}

// Does this rank's part of the pieces that everybody has arrived at.
bool ShmRing::work() {
  bool moved = false;
  while (worked_ < published_ && all_arrived(worked_)) {
    Piece& piece = pieces_[worked_ - released_];
    if (!of_one_mind(worked_)) break;  // nobody goes on; the watch tells who is where
    if (const std::string text = mismatch(worked_); !text.empty()) throw Error(me(), text);
    if (piece.units > 0) {
      do_units(piece, worked_);
    } else {
      do_piece(piece, worked_);
      if (!piece.exposed) part_done(piece);
    }
    ++worked_;
    moved = true;
  }
  return moved;
}

// Lets go of the slots of pieces whose work is done.
bool ShmRing::retire() {
  const uint64_t before = retired_;
  for (; retired_ < worked_; ++retired_) {
    Piece& piece = pieces_[retired_ - released_];
    if (piece.units == 0) continue;
    if (slot(0, retired_).done.load() < piece.units) break;
    if (!piece.exposed) {
      char* result = static_cast<char*>(piece.active->call.output.data_ptr()) + piece.begin * piece.active->item;
      std::memcpy(result, input(rank_, retired_, 0), piece.count * piece.active->item);
    }
    part_done(piece);
  }
  if (retired_ == before) return false;
  mailboxes_[rank_]->retired.store(retired_);
  heap_->ring();
  return true;
}

// Takes back what the others no longer read.
bool ShmRing::release() {
  const uint64_t before = released_;
  while (released_ < retired_ && all_retired(released_)) {
    Piece& piece = pieces_.front();
    part_done(piece);
    if (piece.staged.offset >= 0) {
      staged_ -= piece.staged.bytes;
      heap_->give_back(piece.staged);
    }
    pieces_.pop_front();
    ++released_;
  }
  return released_ != before;
}

void ShmRing::part_done(Piece& piece) {
  if (std::exchange(piece.complete, true)) return;
  if (--piece.active->left == 0) piece.active->work->end(nullptr);
}

// The pieces stay: others may still write to their memory.
void ShmRing::fail(std::exception_ptr failure) {
  failure_ = std::move(failure);
  for (const Piece& piece : pieces_) {
    if (piece.active->left == 0) continue;
    piece.active->left = 0;
    piece.active->work->end(failure_);
  }
  heap_->ring();
}

void ShmRing::close() {
  if (heap_->inherited()) return;
  std::lock_guard lock(mutex_);
  advance_locked();
  if (!failure_) fail(std::make_exception_ptr(Error(me(), "the group was closed before this collective ended")));
  std::vector<ShmHeap::Block> blocks{own_};
  for (const Piece& piece : pieces_) {
    if (piece.staged.offset >= 0) blocks.push_back(piece.staged);
    if (piece.exposed && !piece.complete) heap_->condemn(heap_->offset_of(piece.active->call.input.const_data_ptr()));
  }
  pieces_.clear();
  released_ = retired_ = worked_ = published_ = issued_;
  heap_->close(serial_, std::move(blocks));
}

void ShmRing::look_for_the_dead(uint64_t number) {
  const std::vector<int> dead = heap_->gone();
  if (dead.empty()) return;
  std::lock_guard lock(mutex_);
  advance_locked();  // what they did before they died still counts
  if (failure_ || number < released_ || pieces_[number - released_].active->left == 0) return;
  std::vector<int> needed;
  for (const int r : dead) {
    if (mailboxes_[r]->arrived.load() <= number || mailboxes_[r]->retired.load() <= number) {
      needed.push_back(first_ + r);
    }
  }
  if (!needed.empty()) fail(std::make_exception_ptr(RanksGone(needed)));
}

std::string ShmRing::missing(uint64_t number) {
  std::string late;
  std::string working;
  for (int r = 0; r < size_; ++r) {
    std::string& list = mailboxes_[r]->arrived.load() <= number ? late : working;
    if (r != rank_ && mailboxes_[r]->retired.load() <= number) {
      list += (list.empty() ? "" : ", ") + names_.rank(r);
    }
  }
  return !late.empty() ? late + ", which did not come" : working + ", which came, but did not do its part";
}

}  // namespace plumb
