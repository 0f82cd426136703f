// The program: reads its words, and turns every error into one message and an exit code.
#include <c10/util/Logging.h>
#include <torch/torch.h>

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cli/checkpoint.h"
#include "cli/checkpoints.h"
#include "cli/estimate.h"
#include "cli/info.h"
#include "cli/launch.h"
#include "cli/memory.h"
#include "cli/output.h"
#include "cli/process.h"
#include "cli/replay.h"
#include "cli/settings.h"
#include "cli/sim.h"
#include "cli/train.h"
#include "model/addition.h"
#include "model/text.h"
#include "plumb/error.h"
#include "plumb/world.h"
#include "save/folder.h"
#include "watch/report.h"
#include "watch/strike.h"
#include "world/environment.h"
#include "world/group.h"

namespace plumb::cli {

namespace {

constexpr const char* kHelp =
    "Plumb carries gradients through data-parallel training, and never loses one.\n"
    "\n"
    "Usage: plumb <command> [flags]\n"
    "\n"
    "  plumb train     train a small model on one or many ranks\n"
    "  plumb estimate  memory and messages of a run, before it runs\n"
    "  plumb sim       run the engine on a simulated accelerator and look for races\n"
    "  plumb info      versions, devices, backends (--json for machines)\n"
    "  plumb checkpoint  list, verify, compare and convert checkpoints\n"
    "  plumb replay    run a recorded failure again, in one process\n"
    "\n"
    "Try\n"
    "  plumb train --ranks 2 --out runs/first      2 ranks on this machine, then open the report\n"
    "  plumb train --data book.txt --context 128   learn the bytes of a text file\n"
    "  plumb train --config run.toml --steps 50    settings from a file; flags win\n"
    "  plumb train --ranks 2 --strategy zero3      shard parameters, gradients and optimizer state\n"
    "  plumb estimate --params 7B --ranks 8        what each strategy would hold and send\n"
    "  plumb train --checkpoint runs/saved --save-every 100    goes on from there when started again\n"
    "  torchrun --no-python --nproc-per-node 2 plumb train\n"
    "\n"
    "  plumb train --help                          every flag\n"
    "  plumb --version\n"
    "\n"
    "Exit codes: 0 done, 1 failed, 2 wrong flag or value, 130 stopped by Ctrl-C.\n";

// What fits on a screen (an Error may end with a table), whatever the library said: its stack traces help nobody here.
std::string for_people(const std::string& text) {
  constexpr int kMost = 20;
  const std::string whole = text.substr(0, text.find("\nException raised from "));
  size_t end = 0;
  for (int lines = 0; lines < kMost && end != std::string::npos; ++lines) end = whole.find('\n', end + 1);
  std::string shown = whole.substr(0, end);
  while (shown.ends_with('\n')) shown.pop_back();
  const auto more =
      end == std::string::npos ? 0 : std::count(whole.begin() + static_cast<int64_t>(end) + 1, whole.end(), '\n');
  if (more > 0) shown += "\n… and " + std::to_string(more) + " more";
  return shown.rfind("plumb: ", 0) == 0 ? shown : "plumb: " + shown;
}

enum class Cause { own, another };

void say_error(const std::string& text, Cause cause = Cause::own) {
  const std::string line = for_people(text);
  if (error_fd() >= 0) {
    const std::string word = (cause == Cause::another ? std::string(1, kConsequence) : "") + line;
    if (write(error_fd(), word.data(), word.size()) == static_cast<ssize_t>(word.size())) return;
  }
  std::fprintf(stderr, "%s\n", line.c_str());
}

// Runs `body`; any exception becomes its line and its exit code.
template <class Body>
int guarded(const Body& body) {
  try {
    return body();
  } catch (const UsageError& error) {
    say_error(printable(error.what()));  // it may hold a path, with any characters
    return 2;
  } catch (const Consequence& error) {
    say_error(error.what(), Cause::another);
    return 1;
  } catch (const c10::Error& error) {
    say_error(error.what_without_backtrace());
    return 1;
  } catch (const std::exception& error) {
    say_error(error.what());
    return 1;
  }
}

WorldOptions world_options(const Settings& s) {
  return {.backend = s.backend == "local" ? "" : s.backend,
          .device = s.device,
          .timeout = std::chrono::milliseconds(std::max<int64_t>(1, static_cast<int64_t>(s.timeout * 1e3)))};
}

std::unique_ptr<model::Task> make_task(const Settings& s) {
  const auto seed = static_cast<uint64_t>(s.seed);
  if (s.data.empty()) return std::make_unique<model::Addition>(s.digits, seed);
  try {
    return std::make_unique<model::Text>(s.data, s.context, seed);
  } catch (const Error& error) {
    throw UsageError(error.what());  // a file the user named
  }
}

// Kernels that share work between threads add in an order that depends on how many there are.
void use_threads(const Settings& s, int64_t local_ranks) {
  const int64_t cores = std::max<int64_t>(1, usable_cores() / local_ranks);
  at::set_num_threads(static_cast<int>(s.deterministic ? 1 : s.threads > 0 ? s.threads : cores));
}

bool fits(const Settings& s, int64_t ranks) {
  try {
    check_world(s, ranks);
    return true;
  } catch (const UsageError&) {
    return false;
  }
}

// How many ranks come after a life of `ranks` that lost some; 0: too few are left. A process of this machine can be started
// again: those that one restart does without are back at the next.
int64_t ranks_of_next(const Settings& s, int64_t asked, int64_t ranks, int64_t lost) {
  if (s.min_ranks == 0 || ranks < asked) return asked;
  int64_t left = asked - lost;
  while (left >= s.min_ranks && !fits(s, left)) --left;
  return left >= s.min_ranks ? left : 0;
}

// Starts the ranks, and again from the newest checkpoint as often as --restarts allows, until somebody asks for the end.
int launch_again_and_again(const Settings& s, int64_t asked, char** argv) {
  const Signals signals;
  int64_t ranks = asked;
  const auto older = s.checkpoint.empty() ? std::vector<save::Named>() : save::checkpoints_in(s.checkpoint);
  setenv(kOlderCheckpoints, std::to_string(older.empty() ? 0 : older.back().number).c_str(), /*overwrite=*/1);
  for (int64_t restart = 0;; ++restart) {
    const auto [code, lost] = launch(ranks, argv, world_options(s).timeout, signals);
    if (code != 1 || restart == s.restarts) return code;
    if (const int wish = signals.wish()) return 128 + wish;
    ranks = ranks_of_next(s, asked, ranks, lost);
    if (ranks == 0) {
      std::fprintf(stderr, "plumb: fewer than --min-ranks %lld ranks are left\n", static_cast<long long>(s.min_ranks));
      return code;
    }
    std::fprintf(stderr, "plumb: restart %lld of %lld, on %lld %s\n", static_cast<long long>(restart) + 1,
                 static_cast<long long>(s.restarts), static_cast<long long>(ranks), ranks == 1 ? "rank" : "ranks");
    if (const int wish = signals.wish()) return 128 + wish;
    setenv(kRestarted, std::to_string(restart + 1).c_str(), /*overwrite=*/1);
  }
}

int run_train(const std::vector<std::string>& words, char** argv) {
  bool help = false;
  const Settings s = read_settings(words, help);
  if (help) {
    std::fputs(train_help().c_str(), stdout);
    return 0;
  }
  if (s.device == "cuda" && !torch::cuda::is_available()) {
    throw UsageError("--device cuda: libtorch finds no CUDA device here; `plumb info` lists what it finds");
  }
  if (!s.shape.empty()) setenv("PLUMB_SHAPE", s.shape.c_str(), 1);  // the ranks that are started inherit it
  const bool is_rank = error_fd() >= 0;                             // started by our own launcher
  const bool joins = is_rank || (s.ranks == 0 && read_place().launcher != "none");
  if (joins && s.backend == "local") {
    throw UsageError(
        "--backend local makes its ranks threads of one process; it cannot take part in a launcher's world");
  }
  const int64_t ranks = std::max<int64_t>(1, s.ranks);
  if (!joins) check_world(s, ranks);
  const auto task = make_task(s);

  if (!joins && (ranks > 1 || s.restarts > 0) && s.backend != "local") {
    return launch_again_and_again(s, ranks, argv);
  }
  count_tensors();
  if (!joins) note_signals();  // who joins a world may wait for long, and is ended by a signal until then
  if (!joins && s.backend == "local") {
    int code = 0;
    run_local(
        static_cast<int>(ranks),
        [&](const World& world) {
          use_threads(s, ranks);
          const int mine = train(world, s, *task);
          if (world.rank() == 0) code = mine;
        },
        world_options(s));
    return code;
  }
  use_threads(s, joins ? ranks_here(environment) : 1);
  if (!joins) return train(World(), s, *task);

  // A failed rank leaves without unwinding: destroying communication that is under way may wait for the very ranks
  // that wait for us, and the operating system closes the sockets in any case.
  const int code = guarded([&] {
    World world = World::join(world_options(s));
    note_signals();
    const int result = guarded([&] {
      try {
        return train(world, s, *task);
      } catch (const std::exception& error) {
        report_failure(world, error.what(), {});  // the others need not wait for the time-out
        throw;
      }
    });
    if (result == 1 || result == 2) std::_Exit(result);
    return result;
  });
  if (code == 1 || code == 2) std::_Exit(code);
  return code;
}

int run(int argc, char** argv) {
  std::vector<std::string> words(argv + 1, argv + argc);
  if (words.empty()) {
    std::fputs(kHelp, stderr);
    return 2;
  }
  const std::string command = words.front();
  words.erase(words.begin());
  if (command == "train") return run_train(words, argv);
  if (command == "estimate") return estimate(words);
  if (command == "checkpoint") return checkpoint(words);
  if (command == "replay") return replay(words);
  if (command == "info") return info(words);
  if (command == "sim") return sim(words);
  if (command == "--help" || command == "-h" || command == "help") {
    std::fputs(kHelp, stdout);
    return 0;
  }
  if (command == "--version") {
    std::puts("plumb " PLUMB_VERSION);
    return 0;
  }
  throw UsageError("unknown command " + in_quotes(command) +
                   "; the commands are: train, estimate, sim, info, checkpoint, replay");
}

}  // namespace

}  // namespace plumb::cli

int main(int argc, char** argv) {
  plumb::cli::open_standard_descriptors();
  plumb::cli::heed_signals();
  // libtorch logs, with stack traces, what our errors say in one line. Who wants both sets the variable.
  setenv("TORCH_CPP_LOG_LEVEL", "FATAL", /*overwrite=*/0);
  c10::initLogging();
  return plumb::cli::guarded([&] {
    const int code = plumb::cli::run(argc, argv);
    if (code == 0) plumb::cli::check_output();
    return code;
  });
}
