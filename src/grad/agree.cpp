// What a rank says where all must agree: the facts of a pass or a step, a change inside of gathered(), a question about pieces.
#include <ATen/ATen.h>

#include <utility>
#include <vector>

#include "grad/reducer.h"
#include "layout/digest.h"

namespace plumb {

using Lock = std::lock_guard<std::recursive_mutex>;

Agreement Reducer::exchange_facts(Where::Kind kind, std::vector<bool> late, bool failed) {
  road_.pass(Point::agree, steps_, passes_);
  Facts mine;
  mine.kind = kind;
  mine.step = steps_;
  mine.pass = passes_;
  mine.failed = failed;
  mine.absent = absence_.now();
  mine.newcomers = members_.newcomers_digest();
  mine.rules = buckets_.rules_digest();
  const Settings& compared = kind == Where::Kind::step ? settings : settings_of_backwards;
  mine.settings = digest_of(compared);
  weights_.tell(mine);
  mine.late = std::move(late);
  for (const Bucket& bucket : buckets_) mine.idle.push_back(bucket.idle());
  for (const Sink& sink : sinks()) mine.used.push_back(sink.grad().defined() || sink.contributed);
  mine.changed = kind == Where::Kind::step ? changes_.changed_parameters(sinks()) : std::vector<bool>(sinks().size());
  mine.cleared = changes_.cleared();
  mine.touched = changes_.touched();
  mine.intact = changes_.intact();
  mine.extended = changes_.extended();
  mine.fit(buckets_.size(), sinks().size());  // of newcomers: nothing yet
  const auto units = gathering.lock();
  if (units) mine.gathers = units->settle();
  if (known_.sinks < sinks().size()) agree_on_newcomers(mine);
  Agreement all = agree(team_.control(), team_.rank(), members_.names(), mine, here(kind));
  weights_.hear(team_.control(), all, here(kind, "the weights of backwards"));
  if (units && all.any.gathers != all.every.gathers) units->explain(here(kind, "the gathers that differ"));
  check_settings(team_.control(), team_.rank(), compared, all, here(kind, "the settings that differ"));
  return all;
}

// Of parameters that were taken in before the ranks could agree on them: alike, and to the same places. Ranks that have none say
// as many words.
void Reducer::agree_on_newcomers(const Facts& mine) {
  Facts known = mine;
  known.fit(known_.buckets, known_.sinks);
  Digest digest;
  for (const Sink& sink : sinks()) {
    if (static_cast<size_t>(sink.index) < known_.sinks) continue;
    digest.add(sink.name);
    digest.add(static_cast<uint64_t>(sink.slot.bucket));
    digest.add(static_cast<uint64_t>(sink.slot.offset));
  }
  digest.add(static_cast<uint64_t>(mine.newcomers));
  known.newcomers = digest.value();
  agree(team_.control(), team_.rank(), members_.names(), known, here(mine.kind, "what has begun to train"));
  known_ = {sinks().size(), buckets_.size()};
}

Where Reducer::agree_to_write(const std::vector<at::Tensor>& parameters) {
  Lock lock(mutex_);
  check_alive();
  Facts mine;
  mine.kind = Where::Kind::setup;
  mine.writes = true;
  mine.rules = buckets_.rules_digest();
  mine.fit(buckets_.size(), sinks().size());
  for (const at::Tensor& parameter : parameters) {
    if (const Sink* sink = members_.find(parameter)) mine.changed[sink->index] = true;
  }
  const Where where{Where::Kind::setup, steps_, passes_, write_call(members_.names(), mine.changed)};
  serve_gathers(where);
  or_break([&] { agree(team_.control(), team_.rank(), members_.names(), mine, where); });
  return where;
}

// Ranks ask between backwards, when pieces are what they seem and the shard group carries nothing else.
Where Reducer::ask_about_pieces(const std::string& what) {
  Lock lock(mutex_);
  check_alive();
  if (pass_) {
    throw Error(team_.rank(), what +
                                  " is asked for inside a backward; with sharded gradients every rank must answer: ask "
                                  "after backward() has returned");
  }
  if (held_ && options_.deterministic) {
    throw Error(team_.rank(), what +
                                  " is asked for before step() has reduced it, in deterministic mode; with sharded "
                                  "gradients every rank must answer: use Options::clip_norm there");
  }
  const Where where = here(Where::Kind::step, what);
  serve_gathers(where);
  return where;
}

// Parameters that began to require a gradient, on all ranks alike. Their buckets are reduced, too.
void Reducer::admit_newcomers(Agreement& all, std::vector<bool>& late, bool failed) {
  if (all.any.newcomers == 0) return;
  admit(members_.newcomers());
  known_ = {sinks().size(), buckets_.size()};
  late.resize(buckets_.size(), true);
  all = exchange_facts(all.any.kind, late, failed);  // now with the newcomers' gradients
}

}  // namespace plumb
