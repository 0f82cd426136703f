#include "cli/checkpoint.h"

#include <torch/torch.h>

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>

#include "cli/settings.h"
#include "engine/slots.h"
#include "plumb/error.h"
#include "report/run.h"
#include "save/checkpoint.h"
#include "save/folder.h"
#include "save/new_checkpoint.h"

namespace plumb::cli {

namespace {

using save::Checkpoint;
using save::Kind;
using save::SavedTensor;

constexpr const char* kHelp =
    "Usage: plumb checkpoint <what> ...\n"
    "\n"
    "  list DIR                  the checkpoints in a folder, oldest first\n"
    "  inspect PATH              every tensor of one: kind, name, dtype, shape, where its parts lie\n"
    "  verify PATH...            read every byte and compare every checksum\n"
    "  diff A B                  the first tensor that differs, and by how much; exit code 1 where one does\n"
    "  consolidate PATH FILE     the model as one plain safetensors file\n"
    "  reshard PATH DIR --ranks N   the same checkpoint, as N ranks would have written it\n"
    "\n"
    "From and to DeepSpeed's folders, torch.distributed.checkpoint and safetensors: `python -m plumb checkpoint "
    "convert`.\n"
    "\n"
    "PATH is a checkpoint, or a folder of them: then its newest complete one.\n";

// On a terminal, how far it is.
class Progress {
 public:
  Progress(std::string verb, int64_t total) : verb_(std::move(verb)), total_(total), shown_(isatty(2) != 0) {}
  ~Progress() {
    if (shown_) std::fprintf(stderr, "\r\x1b[K");
  }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void add(int64_t bytes) {
    done_ += bytes;
    if (shown_)
      std::fprintf(stderr, "\r%s %3lld %%", verb_.c_str(),
                   static_cast<long long>(total_ > 0 ? 100 * done_ / total_ : 100));
  }

 private:
  std::string verb_;
  int64_t total_, done_ = 0;
  bool shown_;
};

int64_t bytes_of(const SavedTensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(save::element_bytes(tensor.dtype));
}

int64_t bytes_of(const save::Manifest& manifest) {
  int64_t bytes = 0;
  for (const SavedTensor& tensor : manifest.tensors) bytes += bytes_of(tensor);
  return bytes;
}

std::string shown(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

std::string said(const save::Json::Object& from, const std::string& key) {
  for (const auto& [name, value] : from) {
    if (name == key) return value.write();
  }
  return "?";
}

// In the order of its shape, checked.
at::Tensor read_whole(const Checkpoint& checkpoint, const SavedTensor& tensor) {
  const at::Tensor flat = at::empty({tensor.numel()}, dtype_of(tensor.dtype));
  checkpoint.read(tensor, 0, tensor.numel(), flat.mutable_data_ptr());
  return tensor.strides.empty() ? flat.view(tensor.shape) : flat.as_strided(tensor.shape, tensor.strides).contiguous();
}

// PATH is one, or a folder of them: then its newest complete one, and whatever newer ones are damaged is told.
std::string chosen(const std::string& path, int64_t* damaged = nullptr) {
  std::vector<std::string> skipped;
  const std::string found = save::newest_of(path, &skipped);
  for (const std::string& why : skipped) {
    std::fprintf(stderr, "plumb: a newer checkpoint than '%s' is passed over: %s\n", printable(found).c_str(),
                 printable(why).c_str());
  }
  if (damaged != nullptr) *damaged += static_cast<int64_t>(skipped.size());
  return found;
}

int list(const std::string& root) {
  if (!save::is_folder(root)) throw Error("'" + root + "' is no folder");
  const std::vector<save::Named> all = save::checkpoints_in(root);
  if (all.empty() && save::is_checkpoint(root)) {
    throw Error("'" + root + "' is a checkpoint itself, which `inspect` shows; name the folder that it lies in");
  }
  if (all.empty()) std::fprintf(stderr, "plumb: there are no checkpoints in '%s'\n", printable(root).c_str());
  for (const save::Named& named : all) {
    try {
      const Checkpoint one(named.path);
      const save::Manifest& manifest = one.manifest();
      std::printf("%s  step %lld, %lld samples, %s, by %lld %s (%s), %s\n", named.path.c_str(),
                  static_cast<long long>(manifest.step), static_cast<long long>(manifest.samples),
                  report::human_bytes(bytes_of(manifest)).c_str(), static_cast<long long>(manifest.ranks),
                  manifest.ranks == 1 ? "rank" : "ranks", said(manifest.provenance, "strategy").c_str(),
                  said(manifest.provenance, "written").c_str());
    } catch (const Error& error) {
      std::printf("%s  damaged: %s\n", named.path.c_str(), printable(error.what()).c_str());
    }
  }
  return 0;
}

int inspect(const std::string& path) {
  const Checkpoint one(chosen(path));
  const save::Manifest& manifest = one.manifest();
  std::printf("%s: step %lld, %lld samples\n", one.path().c_str(), static_cast<long long>(manifest.step),
              static_cast<long long>(manifest.samples));
  for (const auto& [key, value] : manifest.provenance) std::printf("  %s %s\n", key.c_str(), value.write().c_str());
  for (const SavedTensor& tensor : manifest.tensors) {
    std::string places;
    for (const save::Part& part : tensor.parts) {
      places += (places.empty() ? "" : ", ") + manifest.files[static_cast<size_t>(part.file)].name;
      if (tensor.parts.size() > 1) places += "[" + std::to_string(part.begin) + ", " + std::to_string(part.end) + ")";
    }
    std::printf("%s  %s %s  %s\n", printable(tensor.title()).c_str(), tensor.dtype.c_str(), shown(tensor.shape).c_str(),
                places.c_str());
  }
  return 0;
}

int verify(const std::vector<std::string>& paths) {
  int64_t damaged = 0;
  for (const std::string& path : paths) {
    const Checkpoint one(chosen(path, &damaged));
    Progress progress("verifying", bytes_of(one.manifest()));
    for (const SavedTensor& tensor : one.manifest().tensors) {
      one.verify(tensor);
      progress.add(bytes_of(tensor));
    }
    std::printf("%s: %zu tensors, %s, all as they were saved\n", one.path().c_str(), one.manifest().tensors.size(),
                report::human_bytes(bytes_of(one.manifest())).c_str());
  }
  return damaged > 0 ? 1 : 0;
}

// Empty: the same bits.
std::string difference(const Checkpoint& a, const SavedTensor& mine, const Checkpoint& b, const SavedTensor& theirs) {
  if (mine.dtype != theirs.dtype || mine.shape != theirs.shape) {
    return mine.dtype + " " + shown(mine.shape) + " and " + theirs.dtype + " " + shown(theirs.shape);
  }
  const at::Tensor one = read_whole(a, mine).flatten(), other = read_whole(b, theirs).flatten();
  if (one.nbytes() == 0 || std::memcmp(one.const_data_ptr(), other.const_data_ptr(), one.nbytes()) == 0) return "";
  const at::Tensor unequal = one.view(at::kByte).ne(other.view(at::kByte)).view({one.numel(), -1}).any(1);
  const int64_t count = unequal.sum().item<int64_t>(), first = unequal.to(at::kByte).argmax().item<int64_t>();
  const at::ScalarType wide = one.is_complex() ? at::kComplexDouble : at::kDouble;
  const at::Tensor x = one.to(wide), y = other.to(wide);
  return c10::str(count, " of ", one.numel(), " elements differ, by at most ", (x - y).abs().max().item<double>(),
                  "; the first is element ", first, ": ", x[first].item(), " and ", y[first].item());
}

// Of two texts of JSON: the members where they begin to differ.
std::string first_difference(const std::string& mine, const std::string& theirs) {
  constexpr size_t kMost = 60;
  const auto at =
      static_cast<size_t>(std::mismatch(mine.begin(), mine.end(), theirs.begin(), theirs.end()).first - mine.begin());
  const size_t before = at == 0 ? std::string::npos : mine.find_last_of(",{[", at - 1);
  const size_t begin = before == std::string::npos ? 0 : before + 1;
  const auto member = [&](const std::string& text) {
    const size_t end = text.find_first_of(",}]", std::min(text.size(), std::max(begin, at)));
    return text.substr(begin, std::min(kMost, end == std::string::npos ? end : end - begin));
  };
  return member(mine) + " and " + member(theirs);
}

int diff(const std::string& left, const std::string& right) {
  const Checkpoint a(chosen(left)), b(chosen(right));
  std::map<std::string, const SavedTensor*> others;
  for (const SavedTensor& tensor : b.manifest().tensors) others[tensor.title()] = &tensor;
  int differ = 0;
  std::string first;
  const auto note = [&](const std::string& what, const std::string& how) {
    if (differ++ == 0) first = what + ": " + how;
  };
  if (a.manifest().step != b.manifest().step) {
    note("the step", c10::str(a.manifest().step, " and ", b.manifest().step));
  }
  if (a.manifest().samples != b.manifest().samples) {
    note("the sample cursor", c10::str(a.manifest().samples, " and ", b.manifest().samples));
  }
  // The order of the buckets is no difference of what was learned.
  for (const char* key : {"optimizer", "lr", "group_lrs", "loss_scale", "updates", "outer", "extras"}) {
    const std::string mine = said(a.manifest().engine, key), theirs = said(b.manifest().engine, key);
    if (mine != theirs) note(c10::str("setting '", key, "'"), first_difference(mine, theirs));
  }
  Progress progress("comparing", bytes_of(a.manifest()));
  for (const SavedTensor& tensor : a.manifest().tensors) {
    const auto found = others.find(tensor.title());
    if (found == others.end()) {
      note(tensor.title(), "only in " + a.path());
    } else {
      if (const std::string how = difference(a, tensor, b, *found->second); !how.empty()) note(tensor.title(), how);
      others.erase(found);
    }
    progress.add(bytes_of(tensor));
  }
  for (const auto& [title, tensor] : others) note(title, "only in " + b.path());
  if (differ == 0) {
    std::printf("the same: %zu tensors\n", a.manifest().tensors.size());
    return 0;
  }
  std::printf("%s\n%d %s in all\n", printable(first).c_str(), differ, differ == 1 ? "difference" : "differences");
  return 1;
}

// Where a file of this name is, or will be: what a link means, never a device or a folder that it would take the place of.
std::string plain_file(const std::string& name) {
  std::error_code ignored;
  const auto there = std::filesystem::status(name, ignored);
  if (name.empty() || (std::filesystem::exists(there) && !std::filesystem::is_regular_file(there))) {
    throw Error("'" + name + "' is no plain file; name one that is to be written, or written anew");
  }
  const std::filesystem::path meant = std::filesystem::canonical(name, ignored);
  return meant.empty() ? name : meant.string();
}

int consolidate(const std::string& path, const std::string& named) {
  const std::string target = plain_file(named);
  const std::filesystem::path folder_of_target = std::filesystem::absolute(target).parent_path();
  if (std::filesystem::exists(folder_of_target / save::kManifest)) {
    throw Error("'" + named + "' would lie inside of a checkpoint, which it would damage; name a file outside of it");
  }
  const Checkpoint one(chosen(path));
  std::vector<const SavedTensor*> tensors;
  std::vector<save::TensorInFile> places;
  int64_t total = 0;
  for (const SavedTensor& tensor : one.manifest().tensors) {
    if (tensor.kind != Kind::weight && tensor.kind != Kind::buffer) continue;
    tensors.push_back(&tensor);
    places.push_back({tensor.name, tensor.dtype, tensor.shape});
    total += bytes_of(tensor);
  }
  const std::string unfinished = target + ".unfinished";
  std::error_code ignored;
  std::filesystem::remove(unfinished, ignored);
  try {
    save::NewFile file(unfinished);
    const std::string head = save::header_of(places, {{"format", "pt"}});
    file.write(head.data(), head.size());
    Progress progress("writing", total);
    for (const SavedTensor* tensor : tensors) {
      const at::Tensor value = read_whole(one, *tensor);
      file.write(value.const_data_ptr(), value.nbytes());
      progress.add(bytes_of(*tensor));
    }
    file.finish();
    if (std::rename(unfinished.c_str(), target.c_str()) != 0) {
      throw Error("cannot rename '" + unfinished + "' to '" + target + "': " + std::strerror(errno));
    }
  } catch (...) {
    std::filesystem::remove(unfinished, ignored);
    throw;
  }
  save::sync_folder(folder_of_target.string());
  std::printf("%s: %zu tensors, %s\n", named.c_str(), tensors.size(), report::human_bytes(total).c_str());
  return 0;
}

int reshard(const std::string& path, const std::string& target, int64_t ranks) {
  const Checkpoint one(chosen(path));
  save::NewCheckpoint made(target);
  save::Manifest& manifest = made.manifest();
  manifest = one.manifest();
  manifest.files.clear();
  manifest.tensors.clear();
  Progress progress("writing", bytes_of(one.manifest()));
  for (int64_t rank = 0; rank < ranks; ++rank) {
    char name[64];
    std::snprintf(name, sizeof(name), "all-%05lld-of-%05lld.safetensors", static_cast<long long>(rank),
                  static_cast<long long>(ranks));
    std::vector<save::Share> shares;
    for (const SavedTensor& tensor : one.manifest().tensors) {
      const int64_t numel = tensor.numel();
      const int64_t begin = numel / ranks * rank + std::min(rank, numel % ranks);
      const int64_t end = begin + numel / ranks + (rank < numel % ranks ? 1 : 0);
      if (begin == end && !(numel == 0 && rank == 0)) continue;
      shares.push_back({tensor, begin, end});
    }
    made.add_file(name, shares, [&](size_t i, const save::NewCheckpoint::Write& write) {
      const auto& [tensor, begin, end] = shares[i];
      std::string data(static_cast<size_t>(end - begin) * save::element_bytes(tensor.dtype), '\0');
      one.read(tensor, begin, end, data.data());
      write(data.data(), data.size());
      progress.add(static_cast<int64_t>(data.size()));
    });
  }
  std::printf("%s\n", made.commit().c_str());
  return 0;
}

// The value of a flag, which is no path any more, wherever it stands: "--ranks 3" or "--ranks=3"; empty where it is not.
std::string taken_out(std::vector<std::string>& words, const std::string& flag) {
  for (auto word = words.begin(); word != words.end(); ++word) {
    if (word->starts_with(flag + "=")) {
      const std::string value = word->substr(flag.size() + 1);
      words.erase(word);
      return value;
    }
    if (*word != flag || word + 1 == words.end()) continue;
    std::string value = std::move(word[1]);
    words.erase(word, word + 2);
    return value;
  }
  return "";
}

}  // namespace

int checkpoint(const std::vector<std::string>& words) {
  if (words.empty()) {
    std::fputs(kHelp, stderr);
    return 2;
  }
  for (const std::string& word : words) {
    if (word != "--help" && word != "-h") continue;
    std::fputs(kHelp, stdout);
    return 0;
  }
  const std::string& what = words[0];
  std::vector<std::string> paths(words.begin() + 1, words.end());
  const auto want = [&](size_t count, const std::string& names) {
    if (paths.size() == count) return;
    throw UsageError("`plumb checkpoint " + what + "` takes " + names + "; `plumb checkpoint --help` says more");
  };
  if (what == "list") return want(1, "a folder"), list(paths[0]);
  if (what == "inspect") return want(1, "a checkpoint"), inspect(paths[0]);
  if (what == "verify") {
    if (paths.empty()) want(1, "checkpoints");
    return verify(paths);
  }
  if (what == "diff") return want(2, "two checkpoints"), diff(paths[0], paths[1]);
  if (what == "consolidate") return want(2, "a checkpoint and a file"), consolidate(paths[0], paths[1]);
  if (what == "reshard") {
    const std::string text = taken_out(paths, "--ranks");
    if (text.empty()) paths.clear();  // nothing is complete without it
    want(2, "a checkpoint, a folder and --ranks N");
    int64_t ranks = 0;
    const auto read = std::from_chars(text.data(), text.data() + text.size(), ranks);
    if (read.ptr != text.data() + text.size() || ranks < 1 || ranks > 65536) {
      throw UsageError("--ranks " + in_quotes(text) + ": expected a number from 1 to 65536");
    }
    return reshard(paths[0], paths[1], ranks);
  }
  if (what == "convert") {
    throw UsageError(
        "other formats are pickles, which Python reads: `python -m plumb checkpoint convert --help` says more");
  }
  throw UsageError("unknown word " + in_quotes(what) +
                   "; `plumb checkpoint` knows list, inspect, verify, diff, consolidate and reshard");
}

}  // namespace plumb::cli
