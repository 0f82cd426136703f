// Ledger: the account of every contribution. Each is delivered, settled in its bucket, reduced and consumed exactly
// once, or an Error names the parameter, the rank, the backward and what happened. Counts only: no tensors, no waiting.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace plumb {

class Ledger {
 public:
  enum class Mode { off, on };
  Ledger(int rank, Mode mode) : rank_(rank), mode_(mode) {}

  // Parameters and the bucket each lies in. What is on the account stays.
  void arrange(const std::vector<std::string>& names, const std::vector<int>& bucket_of, int buckets);

  void open_pass(int64_t step, int64_t pass);
  void delivered(int sink);  // autograd, or another entrance, handed over a gradient
  void settled(int sink);    // it lies in its bucket
  void late(int bucket);     // a gradient comes after the reduction began: one more reduction is due
  void reduced(int bucket);  // a reduction began: it covers everything settled so far
  enum class Sync { reduced, held };
  void close_pass(Sync sync);
  // The pass failed: what it delivered is the user's to drop or keep, as in one process.
  void abandon_pass();

  void consumed(int sink);
  // `active`: the parameters whose gradient the user kept. Everything delivered to them must be reduced, consumed once.
  void close_step(const std::vector<bool>& active);

 private:
  struct Account {
    int bucket = 0;
    int32_t delivered = 0;   // in this pass
    int32_t settled = 0;     // in this pass
    int32_t covered = 0;     // of those, by a reduction
    bool overtaken = false;  // one came after the last reduction that was due had begun
    int32_t held = 0;        // from earlier passes of this step, not reduced yet
    int32_t due = 0;         // in this step, to be consumed
    int32_t consumed = 0;    // in this step
  };
  struct Reductions {
    int32_t begun = 0;
    int32_t due = 1;
  };

  [[noreturn]] void fail(const Account& account, const std::string& what) const;
  std::string where() const;
  bool off() const { return mode_ == Mode::off; }

  int rank_;
  Mode mode_;
  int64_t step_ = 0;
  int64_t pass_ = 0;
  std::vector<std::string> names_;
  std::vector<Account> accounts_;
  std::vector<Reductions> reductions_;
  std::vector<std::vector<int>> members_;  // by bucket
};

}  // namespace plumb
