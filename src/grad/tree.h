// Tree: deterministic mode, for every placement. A step is a fixed number of shares of the global batch, one backward each;
// their gradients are summed as one binary tree, whose lower part is a rank's own shares and whose upper part the ranks, so
// that the bits are the same on every number of ranks. A pass only joins this rank's sums; step() reduces them.
#pragma once

#include "grad/collected.h"

namespace plumb {

class Tree final : public Collected {
 public:
  Tree(Team& team, Buckets& buckets, Ledger& ledger, int virtual_ranks)
      : Collected(team, buckets, ledger), virtual_ranks_(virtual_ranks) {}

  OpenPass::Sync sync(Wish) const override { return OpenPass::Sync::held; }
  void open_pass(const OpenPass& pass, int64_t number, std::deque<Sink>& sinks) override;
  void close_held_pass(int64_t pass) override;
  bool drop_held_pass() override;
  void begin(Bucket& bucket, const Where& where) override;
  bool holds_in_buckets() const override { return true; }
  void check_passes(int64_t passes) const override;
  void check_step(int64_t passes, const std::deque<Sink>& sinks) const override;
  void forget() override;

 private:
  bool collects(const OpenPass&) const override { return true; }
  double scale() const override { return 1.0; }  // the sum of all of them is scaled
  bool stays_in_bucket() const override { return true; }
  at::Tensor memory_for(const Bucket& bucket) override;
  void arrived(Bucket& bucket, const Where& where) override;
  void take_in(Sink& sink) override;
  void check_unchanged(const Sink& sink) const;
  void forget_shares(const Sink& sink);
  void follow_rules();
  void show(Bucket& bucket);
  void reduce(Bucket& bucket, const Where& where);
  int64_t shares_per_step() const { return virtual_ranks_ / team_.size(); }  // of this rank

  const int virtual_ranks_;
};

}  // namespace plumb
