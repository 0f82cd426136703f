// The table itself, and how a word becomes a value.
#include "cli/flags.h"

#include <CLI/CLI.hpp>

#include <charconv>
#include <cmath>
#include <map>
#include <sstream>

namespace plumb::cli {

std::vector<Flag> flags(Settings& s) {
  return {
      {"ranks", "World", "N", "start N ranks on this machine", &s.ranks},
      {"strategy", "World", "NAME", "where things live: ddp, zero1, zero2, zero3, hsdp", &s.strategy},
      {"mesh", "World", "AXES", "replicate=R,shard=S: shards inside groups of S ranks", &s.mesh},
      {"backend", "World", "NAME", "shm, tcp, gloo, nccl, or local (ranks are threads)", &s.backend},
      {"device", "World", "NAME", "cpu or cuda", &s.device},
      {"timeout", "World", "SECONDS", "how long a rank may keep the others waiting", &s.timeout},
      {"bucket-mb", "World", "MB", "cap of a gradient bucket", &s.bucket_mb},
      {"shape", "World", "LINK", "latency=1ms,gbps=10: as if a link like that lay between the ranks", &s.shape},
      {"threads", "World", "N", "threads per rank (0: the cores, divided; --deterministic: 1)", &s.threads},
      {"hold-unsharded", "World", "", "sharded gradients of micro-batches travel once a step, not each time",
       &s.hold_unsharded},
      {"deterministic", "World", "", "the same bits on any number of ranks, in every strategy", &s.deterministic},
      {"virtual-ranks", "World", "V", "shares the batch is cut into for that, one backward each", &s.virtual_ranks},
      {"graph", "World", "", "forward and backward as a CUDA graph, replayed from the fifth step on (one rank, cuda)",
       &s.graph},
      {"model", "Model", "NAME", "gpt, or moe: a gpt with a mixture of experts in each block", &s.model},
      {"layers", "Model", "N", "blocks", &s.layers},
      {"heads", "Model", "N", "attention heads per block", &s.heads},
      {"width", "Model", "N", "size of the residual stream", &s.width},
      {"context", "Model", "N", "longest sequence", &s.context},
      {"experts", "Model", "N", "experts per block (moe)", &s.experts},
      {"top-k", "Model", "N", "experts that each token goes to (moe)", &s.top_k},
      {"dtype", "Model", "NAME", "f32; bf16 or f16 (f32 sums and master weights; f16 scales its loss)", &s.dtype},
      {"recompute", "Model", "", "blocks run again in the backward instead of keeping activations", &s.recompute},
      {"data", "Task", "FILE", "learn the bytes of this text file (otherwise: addition)", &s.data},
      {"digits", "Task", "N", "digits of each number to add", &s.digits},
      {"steps", "Training", "N", "optimizer steps", &s.steps},
      {"batch", "Training", "N", "samples per step, all ranks together", &s.batch},
      {"accumulate", "Training", "N", "micro-batches per step and rank", &s.accumulate},
      {"lr", "Training", "X", "peak learning rate (AdamW, cosine to a tenth)", &s.lr},
      {"warmup", "Training", "N", "steps of linear warm-up", &s.warmup},
      {"weight-decay", "Training", "X", "for matrices and embeddings", &s.weight_decay},
      {"clip", "Training", "X", "largest global gradient norm (0: never clips)", &s.clip},
      {"seed", "Training", "N", "of the initial values and the samples", &s.seed},
      {"eval-every", "Training", "N", "steps between measures of accuracy (0: at the end; -1: ten in all)",
       &s.eval_every},
      {"questions", "Training", "N", "held-out questions asked at the end", &s.questions},
      {"nonfinite", "Training", "WHAT", "on a NaN or inf: error, skip (the update) or continue", &s.nonfinite},
      {"trace-nonfinite", "Training", "", "then run the step again, and name the operation that made the first one",
       &s.trace_nonfinite},
      {"verify", "Training", "K", "every K steps look for ranks that compute wrong numbers (0: never)", &s.verify},
      {"checkpoint", "Checkpoints", "DIR", "save into this folder: at the end, on Ctrl-C, and as --save-every says",
       &s.checkpoint},
      {"save-every", "Checkpoints", "N", "steps between checkpoints, written while training goes on (0: at the end)",
       &s.save_every},
      {"resume", "Checkpoints", "WHERE", "auto (the newest complete one of --checkpoint, if any), never, or a path",
       &s.resume},
      {"keep", "Checkpoints", "K", "checkpoints that stay (0: all)", &s.keep},
      {"restarts", "Checkpoints", "K", "times a failed run goes on from the newest checkpoint (with --ranks)",
       &s.restarts},
      {"min-ranks", "Checkpoints", "N",
       "go on without the ranks that were lost, on at least N; the next restart has all again (0: always)",
       &s.min_ranks},
      {"record", "Output", "DIR", "where a failing step goes, for `plumb replay DIR`", &s.record},
      {"out", "Output", "DIR", "run folder: log.jsonl and report.html", &s.out},
      {"trace", "Output", "FILE", "what every rank did when, for Perfetto or chrome://tracing", &s.trace},
      {"json", "Output", "", "machine-readable lines on stdout", &s.json},
      {"quiet", "Output", "", "the summary alone", &s.quiet},
  };
}

namespace {

template <class Number>
bool read_number(const std::string& text, Number& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

}  // namespace

Parsed parse(const std::string& command, const std::vector<std::string>& words, const std::vector<Flag>& table) {
  CLI::App app;
  app.set_help_flag();
  std::map<std::string, std::string> text;
  std::map<std::string, CLI::Option*> options;
  Parsed parsed;
  app.add_flag("-h,--help", parsed.help);
  std::vector<std::string> configs;
  CLI::Option* const has_config =
      command == "train" ? app.add_option("--config", configs)->allow_extra_args(false) : nullptr;
  for (const Flag& flag : table) {
    if (auto* const* on = std::get_if<bool*>(&flag.target)) {
      options[flag.name] = app.add_flag("--" + flag.name, **on);
    } else {
      options[flag.name] =
          app.add_option("--" + flag.name, text[flag.name])->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    }
  }
  // "--out=", the library would read as "--out" and take the next word.
  for (const std::string& word : words) {
    if (word.starts_with("--") && word.find('=') + 1 == word.size()) {
      throw UsageError(word.substr(0, word.size() - 1) + " needs a value");
    }
  }
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));
  } catch (const CLI::ExtrasError&) {
    throw UsageError("unknown argument " + in_quotes(app.remaining().at(0)) + "; see `plumb " + command + " --help`");
  } catch (const CLI::ArgumentMismatch& error) {
    const std::string what = error.what();  // "--steps: 1 required …"
    throw UsageError(what.substr(0, what.find(':')) + " needs a value");
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  if (parsed.help) return parsed;
  if (has_config != nullptr && has_config->count() > 0) {
    if (configs.size() > 1)
      throw UsageError("--config is there twice; one file holds the settings, and flags win over it");
    parsed.config = configs.front();
  }
  for (const Flag& flag : table) {
    if (options[flag.name]->count() == 0) continue;
    parsed.given.push_back(flag.name);
    if (!std::holds_alternative<bool*>(flag.target)) assign(flag, text[flag.name], "--" + flag.name);
  }
  return parsed;
}

std::string describe(const std::vector<Flag>& table) {
  std::ostringstream text;
  std::string group;
  for (const Flag& flag : table) {
    if (flag.group != group) text << "\n" << (group = flag.group) << "\n";
    std::string left = "  --" + flag.name + " " + flag.value;
    left.resize(std::max<size_t>(24, left.size() + 1), ' ');
    text << left << flag.help;
    std::visit(
        [&](auto* value) {
          if constexpr (std::is_same_v<decltype(value), std::string*>) {
            if (!value->empty()) text << " [" << *value << "]";
          } else if constexpr (!std::is_same_v<decltype(value), bool*>) {
            if (flag.name != "ranks" && flag.name != "threads" && flag.name != "eval-every") {
              text << " [" << *value << "]";
            }
          }
        },
        flag.target);
    text << "\n";
  }
  return text.str();
}

void assign(const Flag& flag, const std::string& text, const std::string& where) {
  if (auto* const* whole = std::get_if<int64_t*>(&flag.target)) {
    if (!read_number(text, **whole)) throw UsageError(where + " takes a whole number, not " + in_quotes(text));
  } else if (auto* const* real = std::get_if<double*>(&flag.target)) {
    if (!read_number(text, **real) || !std::isfinite(**real)) {
      throw UsageError(where + " takes a number, not " + in_quotes(text));
    }
  } else if (auto* const* word = std::get_if<std::string*>(&flag.target)) {
    if (text.empty()) throw UsageError(where + " takes a value, not an empty one");
    **word = text;
  } else if (text != "true" && text != "false") {
    throw UsageError(where + " takes true or false, not " + in_quotes(text));
  } else {
    *std::get<bool*>(flag.target) = text == "true";
  }
}

}  // namespace plumb::cli
