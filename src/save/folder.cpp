#include "save/folder.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <limits>

#include "plumb/error.h"

namespace plumb::save {
namespace {

constexpr const char* kUnfinished = ".unfinished-";

std::optional<int64_t> number_in(std::string_view text) {
  int64_t value = 0;
  const auto read = std::from_chars(text.begin(), text.end(), value);
  if (text.empty() || text[0] == '-' || read.ec != std::errc() || read.ptr != text.end()) return std::nullopt;
  return value;
}

// save-00000007-step-1200
std::optional<Named> read_name(const std::string& root, const std::string& name) {
  constexpr std::string_view begin = "save-", middle = "-step-";
  const size_t cut = name.find(middle);
  if (!name.starts_with(begin) || cut == std::string::npos) return std::nullopt;
  const std::string_view text = name;
  const auto number = number_in(text.substr(begin.size(), cut - begin.size()));
  const auto step = number_in(text.substr(cut + middle.size()));
  if (!number || !step || *number == std::numeric_limits<int64_t>::max())
    return std::nullopt;  // the next has a number, too
  return Named{*number, *step, root + "/" + name};
}

std::string padded(int64_t number) {
  std::string text = std::to_string(number);
  return std::string(text.size() < 8 ? 8 - text.size() : 0, '0') + text;
}

std::string prepared(const std::string& root) {
  if (root.empty()) throw Error("the folder for checkpoints has no name");
  make_folder(root);
  if (is_checkpoint(root)) throw Error("'" + root + "' is a checkpoint itself; name the folder that it lies in");
  std::error_code ignored;
  for (auto path = std::filesystem::canonical(root, ignored); path.has_relative_path(); path = path.parent_path()) {
    const std::string above = path.parent_path().string();
    if (read_name("", path.parent_path().filename().string()) && is_checkpoint(above)) {
      throw Error("'" + root + "' lies in the checkpoint '" + above + "', which is nobody's to write to");
    }
  }
  return root;
}

}  // namespace

bool is_checkpoint(const std::string& path) {
  const auto names = names_in(path);
  return std::find(names.begin(), names.end(), kManifest) != names.end();
}

std::vector<Named> checkpoints_in(const std::string& root) {
  std::vector<Named> all;
  for (const std::string& name : names_in(root)) {
    if (auto named = read_name(root, name); named && is_folder(named->path)) all.push_back(std::move(*named));
  }
  std::sort(all.begin(), all.end(), [](const Named& a, const Named& b) {
    return a.number != b.number ? a.number < b.number : a.path < b.path;
  });
  return all;
}

std::optional<std::string> newest_in(const std::string& path, std::vector<std::string>* skipped) {
  if (is_folder(path) && is_checkpoint(path)) return path;
  std::vector<Named> all = checkpoints_in(path);
  for (; !all.empty(); all.pop_back()) {
    const std::string& candidate = all.back().path;
    try {
      const Manifest manifest = Manifest::read(read_text(candidate + "/" + kManifest, kLongestManifest),
                                               "the manifest of '" + candidate + "'");
      for (const SavedFile& file : manifest.files) {
        const OldFile found(candidate + "/" + file.name);
        if (found.bytes() == file.bytes) continue;
        throw Error("'" + found.path() + "' has " + std::to_string(found.bytes()) + " bytes; expected " +
                    std::to_string(file.bytes));
      }
      return candidate;
    } catch (const Error& error) {
      const std::string_view what = error.what(), ours = "plumb: ";  // it will stand inside of another one's
      if (skipped != nullptr) skipped->emplace_back(what.substr(what.starts_with(ours) ? ours.size() : 0));
    }
  }
  return std::nullopt;
}

std::string newest_of(const std::string& path, std::vector<std::string>* skipped) {
  std::vector<std::string> ours;
  std::vector<std::string>& why_not = skipped != nullptr ? *skipped : ours;
  if (const auto found = newest_in(path, &why_not)) return *found;
  std::string why = "there is no complete checkpoint in '" + path + "'";
  if (!is_folder(path)) why += ": there is no such folder";
  for (const std::string& one : why_not) why += "; " + one;
  throw Error(why);
}

Writer::Writer(const std::string& root) : root_(prepared(root)), lock_(root) {
  for (const std::string& name : names_in(root_)) {
    if (name.starts_with(kUnfinished)) remove_folder(root_ + "/" + name);
  }
}

std::string Writer::begin() {
  if (!unfinished_.empty()) throw Error("a checkpoint is being written into '" + root_ + "' already");
  make_folder(root_);  // it may have vanished, and its lock with it
  lock_.hold();
  std::erase_if(left_, [](const std::string& path) { return remove_folder(path).empty(); });
  int64_t number = 0;
  std::string path;
  do {
    path = root_ + "/" + kUnfinished + std::to_string(getpid()) + "-" + std::to_string(number++);
  } while (is_folder(path));
  unfinished_ = path;
  make_plain_folder(path);  // commit() sees to its name
  return path;
}

std::string Writer::commit(const Manifest& manifest, int64_t keep) {
  const std::string text = manifest.write();
  NewFile file(unfinished_ + "/" + kManifest);
  file.write(text.data(), text.size());
  file.finish();
  sync_folder(unfinished_);
  const auto before = checkpoints_in(root_);
  const int64_t number = before.empty() ? 1 : before.back().number + 1;
  const std::string path = root_ + "/save-" + padded(number) + "-step-" + std::to_string(manifest.step);
  rename_folder(unfinished_, path);
  unfinished_.clear();
  sync_folder(root_);
  // What cannot be removed now goes later; what is removed in part has no checkpoint's name any more.
  for (size_t i = 0; keep > 0 && i + static_cast<size_t>(keep) <= before.size(); ++i) {
    const std::string old = root_ + "/" + kUnfinished + "removed-" + std::to_string(before[i].number);
    if (rename(before[i].path.c_str(), old.c_str()) == 0) remove(old);
  }
  return path;
}

void Writer::abandon() noexcept {
  if (!unfinished_.empty()) remove(unfinished_);
  unfinished_.clear();
}

void Writer::remove(const std::string& path) noexcept {
  if (!remove_folder(path).empty()) left_.push_back(path);
}

}  // namespace plumb::save
