#include "grad/ledger.h"

#include "plumb/error.h"

namespace plumb {

void Ledger::arrange(const std::vector<std::string>& names, const std::vector<int>& bucket_of, int buckets) {
  names_ = names;
  accounts_.resize(names.size());
  reductions_.resize(buckets);
  members_.assign(buckets, {});
  for (size_t i = 0; i < names.size(); ++i) {
    accounts_[i].bucket = bucket_of[i];
    members_[bucket_of[i]].push_back(static_cast<int>(i));
  }
}

void Ledger::open_pass(int64_t step, int64_t pass) {
  if (off()) return;
  step_ = step;
  pass_ = pass;
  abandon_pass();
  for (Reductions& reductions : reductions_) reductions = {};
}

void Ledger::delivered(int sink) {
  if (off()) return;
  Account& account = accounts_[sink];
  const Reductions& reductions = reductions_[account.bucket];
  ++account.delivered;
  if (reductions.begun >= reductions.due) account.overtaken = true;
}

void Ledger::settled(int sink) {
  if (!off()) ++accounts_[sink].settled;
}

void Ledger::late(int bucket) {
  if (!off()) reductions_[bucket].due = 2;
}

void Ledger::reduced(int bucket) {
  if (off()) return;
  ++reductions_[bucket].begun;
  for (int member : members_[bucket]) {
    Account& account = accounts_[member];
    account.covered = account.settled;
    account.held = 0;
  }
}

void Ledger::close_pass(Sync sync) {
  if (off()) return;
  for (Account& account : accounts_) {
    if (sync == Sync::reduced) {
      const Reductions& reductions = reductions_[account.bucket];
      const auto bucket = [&] { return "bucket " + std::to_string(account.bucket); };
      // A frozen bucket that nobody has a gradient for is not reduced.
      if (reductions.begun == 0 && account.delivered > 0)
        fail(account, "the gradient was never reduced: no reduction of " + bucket() + " began");
      if (account.overtaken)
        fail(account, "the gradient was reduced early: " + bucket() + " was reduced before it came");
      if (reductions.begun > reductions.due) {
        fail(account, "the gradient was reduced twice: " + std::to_string(reductions.begun) + " reductions of " +
                          bucket() + " began, " + std::to_string(reductions.due) + " due");
      }
    }
    const int32_t arrived = sync == Sync::reduced ? account.covered : account.settled;
    if (arrived != account.delivered) {
      fail(account, std::string("a gradient was ") + (arrived < account.delivered ? "dropped: " : "doubled: ") +
                        std::to_string(account.delivered) + " delivered, " + std::to_string(arrived) +
                        " reached the bucket");
    }
    if (sync == Sync::held) account.held += account.settled;
    account.due += account.settled;
    account.delivered = account.settled = account.covered = 0;
  }
}

void Ledger::abandon_pass() {
  if (off()) return;
  for (Account& account : accounts_) {
    account.delivered = account.settled = account.covered = 0;
    account.overtaken = false;
  }
}

void Ledger::consumed(int sink) {
  if (!off()) ++accounts_[sink].consumed;
}

void Ledger::close_step(const std::vector<bool>& active) {
  if (off()) return;
  for (size_t i = 0; i < accounts_.size(); ++i) {
    Account& account = accounts_[i];
    if (active[i] && account.due > 0) {
      if (account.held > 0) {
        fail(account, "the gradient was consumed unreduced: " + std::to_string(account.held) +
                          " contributions are still this rank's alone");
      }
      if (account.consumed == 0) fail(account, "the gradient was never consumed by the optimizer");
    }
    if (account.consumed > 1) {
      fail(account, "the gradient was consumed " + std::to_string(account.consumed) + " times in one step");
    }
    account.held = account.due = account.consumed = 0;
  }
}

std::string Ledger::where() const { return "backward " + std::to_string(pass_) + " of step " + std::to_string(step_); }

void Ledger::fail(const Account& account, const std::string& what) const {
  const auto index = static_cast<size_t>(&account - accounts_.data());
  throw Error(rank_, "parameter '" + names_[index] + "', " + where() + ": " + what +
                         ". This is a defect of the engine, not of your program; please report it");
}

}  // namespace plumb
