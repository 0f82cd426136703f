// Scattered: gradients that are sharded. What a pass collected is reduce-scattered over the ranks of the replica; the piece
// then crosses to the other replicas, to be summed with theirs, beside what follows; `.grad` is this rank's piece. At most two
// whole gradients are alive at a time.
#pragma once

#include <deque>
#include <vector>

#include "grad/collected.h"

namespace plumb {

class Scattered final : public Collected {
 public:
  // What no_sync does: each backward is reduced all the same, or .grad is this rank's whole sum until the next that is.
  enum class Holding { never, whole };
  Scattered(Team& team, Buckets& buckets, Ledger& ledger, Holding holding)
      : Collected(team, buckets, ledger), holding_(holding) {}

  OpenPass::Sync sync(Wish wish) const override {
    return wish == Wish::reduce || holding_ == Holding::never ? OpenPass::Sync::reduced : OpenPass::Sync::held;
  }
  void open_pass(const OpenPass& pass, int64_t number, std::deque<Sink>& sinks) override;
  void begin(Bucket& bucket, const Where& where) override;
  void send() override;
  int64_t together(c10::Device device, int64_t bucket_bytes) const override;
  void begin_rest(const Where& where) override;
  void never_wait(bool on) override { never_waits_ = on; }
  bool may_wait() const override { return !never_waits_; }
  bool holds_in_buckets() const override { return false; }
  void finish_step() override;

 private:
  bool collects(const OpenPass& pass) const override { return pass.sync == OpenPass::Sync::reduced; }
  double scale() const override { return 1.0 / team_.size(); }
  at::Tensor memory_for(const Bucket& bucket) override;
  void finish_before(Bucket& bucket, const Where& where) override;
  void arrived(Bucket& bucket, const Where& where) override;
  void send(const std::vector<Bucket*>& buckets);
  void keep_few_in_flight();
  bool crosses() const { return team_.replicate().size() > 1; }
  bool stays_in_bucket() const override { return crosses(); }
  void cross(Where where);  // the oldest in flight
  void give_back(Incoming& incoming);

  const Holding holding_;
  std::vector<Bucket*> outgoing_;   // wait for the rest of their convoy
  std::deque<Bucket*> in_flight_;   // in the order in which they were sent
  std::deque<Bucket*> crossing_;    // in the same order
  Where sent_at_;                   // by the last of them
  bool never_waits_ = false;        // then more are alive
  std::vector<at::Tensor> spares_;  // memory of `incoming` that ended, until the step ends
};

}  // namespace plumb
