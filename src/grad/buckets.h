// Buckets: where gradients lie. Owns the buckets, their order and the memory of the reduced gradients.
//
// Guarantees: a gradient keeps its values wherever it is moved to (contract 1); memory that somebody else keeps, or that
// another gradient lies in, is never written; a bucket's dtype is the widest that a member's rule asks for (contract 3).
#pragma once

#include <deque>
#include <functional>
#include <vector>

#include "grad/bucket.h"
#include "grad/piece.h"
#include "grad/team.h"
#include "plumb/engine.h"

namespace plumb {

class Buckets {
 public:
  Buckets(Team& team, const Options& options) : team_(team), options_(options) {}

  std::deque<Bucket>& all() { return buckets_; }
  const std::deque<Bucket>& all() const { return buckets_; }
  auto begin() { return buckets_.begin(); }
  auto end() { return buckets_.end(); }
  auto begin() const { return buckets_.begin(); }
  auto end() const { return buckets_.end(); }
  size_t size() const { return buckets_.size(); }
  Bucket& operator[](size_t index) { return buckets_[index]; }
  Bucket& of(const Sink& sink) { return buckets_[sink.slot.bucket]; }

  // Who answers questions about pieces of sharded gradients.
  void pieces_ask(std::function<Where(const std::string& what)> ask) {
    holders_ = std::make_shared<Holders>(team_.shard(), std::move(ask));
  }

  // All ranks are at the same point: questions are counted from here on.
  void ranks_met() { holders_->asked = 0; }

  // Lays these sinks out in this order, in buckets behind those that are there.
  void add(std::deque<Sink>& sinks, const std::vector<int>& indices);
  // Lays all of them out anew, in this order. Collective where gradients are sharded: pieces move to other ranks.
  void rebuild(std::deque<Sink>& sinks, const std::vector<int>& order, const Where& where);

  // A bucket whose memory was let go gets new one, and its sinks their views. What it must hold: zeros, zeros between
  // parameters, whose own places are about to be written, or nothing.
  enum class Blank { yes, padding, no };
  void make_gradient(Bucket& bucket, Blank blank = Blank::yes);
  // There are no gradients: forwards need the memory more.
  void let_go();
  int64_t small = 1 << 20;  // bytes of a bucket that keeps its memory

  // A gradient that somebody keeps although .grad was cleared or replaced is his: the bucket gets other memory.
  void renew_kept();
  // A .grad whose tensor was given other memory, or another shape (set_data, t_()), is the user's own from then on, and the sink's
  // place is its own again.
  void take_back(std::deque<Sink>& sinks);
  // A .grad that shares memory with somebody's place in a bucket (two gradients swapped by the user, say) gets memory of
  // its own before anything is copied.
  void untangle(std::deque<Sink>& sinks);
  // Contract 3: a leaf's rule may change between passes, and its bucket with it. True if any did.
  bool follow_rules();
  int64_t rules_digest() const { return rules_; }

  // For each device that holds parameters, but the CPU.
  void for_devices(const std::function<void(c10::Device)>& call) const;

 private:
  void place(std::deque<Sink>& sinks, const Layout& layout, const std::vector<int>& indices);
  void reshard(std::deque<Sink>& sinks, std::deque<Bucket>& old, const std::vector<int>& order, const Where& where);
  void renew(Bucket& bucket);
  std::shared_ptr<const PieceOf> piece_of(const Sink& sink, const Range& kept) const;

  Team& team_;
  const Options& options_;
  std::deque<Bucket> buckets_;  // stable addresses: units point here
  std::shared_ptr<Holders> holders_;
  int64_t rules_ = 0;  // digest of the rules that the buckets follow
};

}  // namespace plumb
