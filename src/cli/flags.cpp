// The table itself, and how a word becomes a value.
#include "cli/flags.h"

#include <charconv>
#include <cmath>

namespace plumb::cli {

std::vector<Flag> flags(Settings& s) {
  return {
      {"ranks", "World", "N", "start N ranks on this machine", &s.ranks},
      {"strategy", "World", "NAME", "where parameters, gradients and state live: ddp", &s.strategy},
      {"backend", "World", "NAME", "shm, gloo, nccl, or local (ranks are threads)", &s.backend},
      {"device", "World", "NAME", "cpu or cuda", &s.device},
      {"timeout", "World", "SECONDS", "how long a rank may keep the others waiting", &s.timeout},
      {"bucket-mb", "World", "MB", "cap of a gradient bucket", &s.bucket_mb},
      {"threads", "World", "N", "threads per rank (0: the cores, divided)", &s.threads},
      {"model", "Model", "NAME", "gpt, or moe: a gpt with a mixture of experts in each block", &s.model},
      {"layers", "Model", "N", "blocks", &s.layers},
      {"heads", "Model", "N", "attention heads per block", &s.heads},
      {"width", "Model", "N", "size of the residual stream", &s.width},
      {"context", "Model", "N", "longest sequence", &s.context},
      {"experts", "Model", "N", "experts per block (moe)", &s.experts},
      {"top-k", "Model", "N", "experts that each token goes to (moe)", &s.top_k},
      {"dtype", "Model", "NAME", "f32, or bf16 (with f32 gradients and master weights)", &s.dtype},
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
      {"out", "Output", "DIR", "run folder: log.jsonl and report.html", &s.out},
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

void assign(const Flag& flag, const std::string& text, const std::string& where) {
  if (auto* const* whole = std::get_if<int64_t*>(&flag.target)) {
    if (!read_number(text, **whole)) throw UsageError(where + " takes a whole number, not '" + text + "'");
  } else if (auto* const* real = std::get_if<double*>(&flag.target)) {
    if (!read_number(text, **real) || !std::isfinite(**real)) {
      throw UsageError(where + " takes a number, not '" + text + "'");
    }
  } else if (auto* const* word = std::get_if<std::string*>(&flag.target)) {
    if (text.empty()) throw UsageError(where + " takes a value, not an empty one");
    **word = text;
  } else if (text != "true" && text != "false") {
    throw UsageError(where + " takes true or false, not '" + text + "'");
  } else {
    *std::get<bool*>(flag.target) = text == "true";
  }
}

}  // namespace plumb::cli
