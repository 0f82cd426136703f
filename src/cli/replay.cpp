#include "cli/replay.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "cli/job.h"
#include "cli/nonfinite.h"
#include "cli/origin.h"
#include "cli/record.h"
#include "engine/not_finite.h"
#include "watch/report.h"

namespace plumb::cli {

namespace {

constexpr const char* kHelp =
    "Usage: plumb replay DIR\n\n"
    "Runs the step again at which a run with --record DIR failed, in one process: every rank's micro-batches one after "
    "the\n"
    "other, with their inputs and random numbers, from the parameters of that moment. Says whether it fails in the "
    "same way,\n"
    "and which operation made the first NaN or inf. Exit codes: 0 it fails in the same way, 1 it does not, 2 wrong "
    "words.\n";

// Without who says it: "plumb: rank 1: rank 0 failed: x" and "x" are one failure.
std::string cause_in(const std::string& error) {
  std::string text = without_prefix(error);
  while (text.starts_with("rank ")) {
    const size_t colon = text.find(": ");
    if (colon == std::string::npos) break;
    text = text.substr(colon + 2);
  }
  return text.substr(0, text.find("; it began on rank "));
}

struct Replayed {
  std::string error;   // empty: the step goes well
  double loss = 0.0;   // of all micro-batches, then
  std::string origin;  // the first operation that made a NaN or inf, if one did
};

// Every rank's micro-batches of the failing step, one after the other, and the step.
void run_again(Engine& engine, model::Gpt& model, const std::vector<Record>& records, Replayed& outcome) {
  const int64_t micros = records[0].micros, all = records[0].ranks * micros;
  for (const Record& record : records) {
    set_generators(record.generators);
    for (int64_t i = 0; i < micros; ++i) {
      const OriginWatch watch;
      const at::Tensor loss = model::loss_of(model, record.batches[static_cast<size_t>(i)]);
      const at::Tensor share = engine.scale(loss / static_cast<double>(all));
      if (record.rank * micros + i + 1 < all) {
        const auto quiet = engine.no_sync();
        share.backward();
      } else {
        share.backward();
      }
      if (outcome.origin.empty() && !watch.found().empty()) {
        outcome.origin =
            "rank " + std::to_string(record.rank) + ", micro-batch " + std::to_string(i) + ": " + watch.found();
      }
      const double value = loss.item<double>();
      if (record.settings.nonfinite == "error" && !std::isfinite(value)) {
        throw NotFinite(record.rank, loss_not_finite(record.step, i, record.rank));
      }
      outcome.loss += value / static_cast<double>(all);
    }
  }
  engine.step();
}

// In one process, from the state in `folder`.
Replayed replayed(const std::vector<Record>& records, const std::string& folder) {
  Settings s = records[0].settings;
  s.strategy = "ddp";
  s.mesh.clear();
  model::Gpt model = build_model(s, records[0].vocabulary, at::Device(at::kCPU));
  Engine engine(World(), *model, optimizer_of(s), engine_options(s));
  engine.load(folder);
  Replayed outcome;
  try {
    run_again(engine, model, records, outcome);
  } catch (const c10::Error& error) {
    outcome.error = first_line(error.what_without_backtrace());
  } catch (const std::exception& error) {
    outcome.error = first_line(error.what());
  }
  return outcome;
}

}  // namespace

int replay(const std::vector<std::string>& words) {
  if (words.size() == 1 && (words[0] == "--help" || words[0] == "-h")) {
    std::fputs(kHelp, stdout);
    return 0;
  }
  if (words.size() != 1 || words[0].empty() || words[0][0] == '-') {
    throw UsageError("plumb replay takes one folder; see `plumb replay --help`");
  }
  const std::string folder = failure_in(words[0]);
  const std::vector<Record> records = read_records(folder);
  for (const Record& record : records) {
    if (record.stateless.empty()) continue;
    throw Error("rank " + std::to_string(record.rank) + " recorded no state: " + record.stateless +
                "; go on from the last checkpoint instead (plumb train --resume PATH)");
  }
  const Record& first = records[0];
  std::printf("replay of step %lld of '%s' (%d ranks, %s)\nrecorded: %s\n", static_cast<long long>(first.step),
              folder.c_str(), first.ranks, first.settings.strategy.c_str(), first.error.c_str());
  at::set_num_threads(1);
  join_state(folder, first.ranks);
  const Replayed here = replayed(records, folder);
  if (here.error.empty()) {
    std::printf("here:     the step goes well, with a loss of %.17g\n", here.loss);
  } else {
    std::printf("here:     %s\n", here.error.c_str());
  }
  if (!here.origin.empty()) std::printf("first:    %s\n", here.origin.c_str());
  const bool same = !here.error.empty() && std::ranges::any_of(records, [&](const Record& record) {
    return cause_in(here.error) == cause_in(record.error);
  });
  std::printf("%s\n", same ? "the same failure" : "not the same failure");
  return same ? 0 : 1;
}

}  // namespace plumb::cli
