// What the ranks tell each other at the end of a pass and at a step, and what they make of it.
#include "grad/reducer.h"

namespace plumb {

std::vector<Facts> Reducer::agree(Where::Kind kind, std::vector<bool> late) {
  Facts mine;
  mine.kind = kind;
  mine.step = steps_;
  mine.pass = passes_;
  mine.failed = failure_ != nullptr;
  mine.newcomers = newcomers_digest();
  mine.rules = rules_;
  mine.late = std::move(late);
  for (const Sink& sink : sinks_) mine.used.push_back(sink.grad().defined() || sink.given);
  if (kind == Where::Kind::step) mine.factor = factor_of_pieces();
  mine.changed = kind == Where::Kind::step ? changed_parameters() : std::vector<bool>(sinks_.size());
  if (control_.size() == 1) return {mine};
  std::vector<Facts> all;
  for (const auto& words : control_.exchange(mine.pack(), here(kind))) {
    all.push_back(Facts::unpack(words, mine.late.size(), mine.used.size()));
  }
  check_in_step(all);
  return all;
}

void Reducer::check_in_step(const std::vector<Facts>& all) const {
  auto told = [](const Facts& facts) {
    const std::string backwards = std::to_string(facts.pass) + (facts.pass == 1 ? " backward" : " backwards");
    return facts.kind == Where::Kind::step
               ? "called step() number " + std::to_string(facts.step) + " after " + backwards
               : "is in backward " + std::to_string(facts.pass) + " of step " + std::to_string(facts.step);
  };
  for (size_t rank = 1; rank < all.size(); ++rank) {
    const Facts& first = all[0];
    const Facts& other = all[rank];
    if (other.kind != first.kind || other.step != first.step || other.pass != first.pass) {
      throw Error(
          world_.rank(),
          "rank 0 " + told(first) + ", but rank " + std::to_string(rank) + " " + told(other) +
              ". Every rank must run the same number of backwards before step(), and the same ones under no_sync; a "
              "rank with nothing to contribute calls engine.backward() all the same");
    }
    if (other.rules != first.rules) {
      throw Error(world_.rank(), "the grad_dtype of some parameter differs between rank 0 and rank " +
                                     std::to_string(rank) + "; set it alike on every rank");
    }
    if (other.newcomers != first.newcomers) {
      throw Error(world_.rank(), "parameters were frozen or unfrozen differently on rank 0 and rank " +
                                     std::to_string(rank) + "; change requires_grad alike on every rank");
    }
  }
}

void Reducer::throw_if_failed_elsewhere(const std::vector<Facts>& all) {
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].failed) continue;
    ledger_.abandon_pass();
    throw Error(world_.rank(), "backward " + std::to_string(all[rank].pass) + " of step " +
                                   std::to_string(all[rank].step) + " failed on rank " + std::to_string(rank) +
                                   ", so its gradients are incomplete on every rank; call zero_grad() and run it again "
                                   "on every rank");
  }
}

}  // namespace plumb
