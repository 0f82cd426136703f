// Summing: how gradients become the mean over the ranks. One interface, three policies:
//
//   in place    ddp, zero1           autograd sums into .grad, which is the bucket; the bucket is all-reduced
//   scattered   zero2, zero3, hsdp   contributions are collected; their sum is reduce-scattered; .grad is this rank's piece
//   tree        deterministic mode   each pass is one share of the batch; step() adds all ranks' shares as a binary tree
//
// Every policy guarantees: a contribution obeys the leaf's rule (contract 3) and is in the sum once; a reduction reads what
// every producer wrote (contract 2); gradients that lie elsewhere (the user's, held ones) are in it, and where a parameter
// has none, zeros. After finish(), the bucket's gradient is the mean.
#pragma once

#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "grad/buckets.h"
#include "grad/ledger.h"
#include "grad/pass.h"
#include "grad/team.h"
#include "plumb/fused.h"

namespace c10d {
class CommHookInterface;
}

namespace plumb {

class Summing {
 public:
  Summing(Team& team, Buckets& buckets, Ledger& ledger) : team_(team), buckets_(buckets), ledger_(ledger) {}
  virtual ~Summing() = default;
  Summing(const Summing&) = delete;
  Summing& operator=(const Summing&) = delete;

  enum class Wish { reduce, hold };  // the user's: outside and inside of no_sync
  virtual OpenPass::Sync sync(Wish wish) const = 0;
  // `number` of it in this step, from 1.
  virtual void open_pass(const OpenPass& /*pass*/, int64_t /*number*/, std::deque<Sink>& /*sinks*/) {}
  virtual void close_held_pass(int64_t /*pass*/) {}
  // One that failed. True: nothing of it is in any sum, as if it had not been.
  virtual bool drop_held_pass() { return false; }

  // A gradient comes from autograd. What is returned is accumulated into .grad; undefined where it was collected.
  virtual at::Tensor accept(const OpenPass& pass, Sink& sink, const at::Tensor& gradient) = 0;
  // The first gradient of a .grad lies in memory of somebody else's: copies it to where it is reduced. False: there is no such
  // place, or it must keep its dtype.
  virtual bool place(Sink& /*sink*/, const at::Tensor& /*gradient*/) { return false; }
  // It was accumulated, and would lose by the next one that is added to it.
  virtual void accumulated(Sink& sink) = 0;
  // An operation writes a gradient itself. Between two passes there is none, and it stays here until the next reduction.
  virtual GradTarget open_fused(const OpenPass* pass, Sink& sink) = 0;
  virtual void wrote_fused(const OpenPass* pass, Sink& sink) = 0;

  // Begins the reduction of a bucket; the caller has all of it for itself. What may travel together does with send().
  virtual void begin(Bucket& bucket, const Where& where) = 0;
  virtual void send() {}
  // Bytes of neighbouring buckets of that device, or the CPU, that begin together; 0: each begins alone. `bucket_bytes`: the
  // user's cap of a bucket.
  virtual int64_t together(c10::Device /*device*/, int64_t /*bucket_bytes*/) const { return 0; }
  // Begins what reductions on their way still need of others, who would wait for it while this rank waits for them.
  virtual void begin_rest(const Where& /*where*/) {}
  // Whether nothing waits for others before the backward has ended: they may be waiting for this rank elsewhere. A gradient of a
  // bucket on its way is kept apart then, until that has come.
  virtual void never_wait(bool /*on*/) {}
  virtual bool may_wait() const { return true; }
  // Waits for it.
  void finish(Bucket& bucket, const Where& where);

  // At step(): whether gradients held on this rank wait in buckets for a reduction, and that they are complete. As many passes as
  // every rank has had: an Error on all of them, or on none.
  virtual bool holds_in_buckets() const = 0;
  virtual void check_passes(int64_t /*passes*/) const {}
  // And that this rank's can be summed as they are, before anything is: what it throws is told to the others.
  virtual void check_step(int64_t passes, const std::deque<Sink>& sinks) const = 0;
  virtual void finish_step() {}
  // No gradient of this step is there any more: nothing that is kept of its passes counts.
  virtual void forget() { sent_.clear(); }

  // The user's own way from a bucket's gradients to their mean (torch's interface), instead of the collective of the policy.
  // It runs once per reduction, in bucket order. Only where gradients are whole on every rank.
  virtual void use_hook(std::unique_ptr<c10d::CommHookInterface> hook);
  // Sums are divided by `ranks` from the next reduction on, instead of by all: ranks that ran out of inputs contribute none.
  virtual void divide_by(int ranks);

  // From now on each message is looked at as it leaves: one read more of it.
  void look_for_nonfinite() { looks_ = true; }
  // The first pass in which this rank's own part of a message was not finite; none: there was no such pass, or nobody looked.
  std::optional<int64_t> first_not_finite() const;
  void forget_looks() { sent_.clear(); }
  // Where all gradients were cleared: they are in no sum any more.
  void forget_cleared(const std::deque<Sink>& sinks);

  // What went wrong with a gradient while a reduction began; the others wait for that reduction all the same.
  std::exception_ptr take_failure() { return std::exchange(failure_, nullptr); }

 protected:
  // Reductions that must end before this one does.
  virtual void finish_before(Bucket& /*bucket*/, const Where& /*where*/) {}
  // The collective has ended.
  virtual void arrived(Bucket& /*bucket*/, const Where& /*where*/) {}
  void note_failure() {
    if (!failure_) failure_ = std::current_exception();
  }
  // This rank's part of a message, as it is about to leave.
  void look_at(const at::Tensor& own, int64_t pass);
  void settled_all(Sink& sink) {
    for (; sink.unsettled > 0; --sink.unsettled) ledger_.settled(sink.index);
  }

  Team& team_;
  Buckets& buckets_;
  Ledger& ledger_;

 private:
  struct Sent {
    int64_t pass;
    at::Tensor sum;  // finite where all of it is; its device is not waited for
  };

  std::exception_ptr failure_;
  bool looks_ = false;
  std::vector<Sent> sent_;
};

// The policy of these options.
std::unique_ptr<Summing> make_summing(Team& team, Buckets& buckets, Ledger& ledger, const Options& options);

}  // namespace plumb
