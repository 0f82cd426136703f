// In place: gradients that are whole on every rank. Autograd sums into .grad, which is a view of the bucket wherever that
// loses nothing; the bucket is scaled by 1/N and all-reduced, or handed to the user's communication hook as it is.
#pragma once

#include <ATen/core/ivalue.h>

#include <unordered_map>

#include "grad/summing.h"

namespace plumb {

class InPlace final : public Summing {
 public:
  InPlace(Team& team, Buckets& buckets, Ledger& ledger);
  ~InPlace() override;

  OpenPass::Sync sync(Wish wish) const override {
    return wish == Wish::reduce ? OpenPass::Sync::reduced : OpenPass::Sync::held;
  }
  at::Tensor accept(const OpenPass&, Sink&, const at::Tensor& gradient) override { return gradient; }
  bool place(Sink& sink, const at::Tensor& gradient) override;
  void accumulated(Sink& sink) override;
  GradTarget open_fused(const OpenPass* pass, Sink& sink) override;
  void wrote_fused(const OpenPass* pass, Sink& sink) override;
  void begin(Bucket& bucket, const Where& where) override;
  void send() override;
  int64_t together(c10::Device device, int64_t bucket_bytes) const override;
  bool holds_in_buckets() const override { return true; }
  void check_step(int64_t passes, const std::deque<Sink>& sinks) const override;
  void use_hook(std::unique_ptr<c10d::CommHookInterface> hook) override;
  void divide_by(int ranks) override { divisor_ = ranks; }

 private:
  void settle(Sink& sink, double scale);
  void reduce(const std::vector<Bucket*>& buckets);
  static void copy_together(const std::vector<Bucket*>& buckets);
  void arrived(Bucket& bucket, const Where& where) override;

  int divisor_;
  int64_t pass_ = 0;               // that the last reduction began in
  std::vector<Bucket*> outgoing_;  // wait for the rest of their convoy
  std::unique_ptr<c10d::CommHookInterface> hook_;
  std::unordered_map<int, c10::intrusive_ptr<c10::ivalue::Future>> answers_;  // of the hook, by bucket
};

}  // namespace plumb
