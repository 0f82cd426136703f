// A folder of checkpoints. Each is a folder named save-<number>-step-<step>, complete the moment it has that name: it was
// written under another one, brought to the disk, and renamed. No file says which one is the newest; the names do.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "save/file.h"
#include "save/manifest.h"

namespace plumb::save {

struct Named {
  int64_t number = 0;  // later ones are larger
  int64_t step = 0;
  std::string path;
};

// Those in `root`, oldest first; none where there is no such folder.
std::vector<Named> checkpoints_in(const std::string& root);

// The checkpoint that `path` means: itself, or the newest in it whose manifest can be read and whose files have their
// length. `skipped`: those newer ones that cannot, and why. Empty where there is none.
std::optional<std::string> newest_in(const std::string& path, std::vector<std::string>* skipped = nullptr);
// The same, and an Error that says why where there is none.
std::string newest_of(const std::string& path, std::vector<std::string>* skipped = nullptr);
bool is_checkpoint(const std::string& path);  // it has a manifest

// The one writer of a folder of checkpoints.
class Writer {
 public:
  // Makes the folder, takes its lock, and clears away what a writer that died left behind.
  explicit Writer(const std::string& root);

  const std::string& root() const { return root_; }
  // Where the files of the next checkpoint go; one at a time. What could not be removed when it was to go is tried again.
  std::string begin();
  // The files are on the disk. Adds the manifest and gives it its name; afterwards the older ones may go, but the newest
  // `keep` (0: all stay). Returns the checkpoint's path.
  std::string commit(const Manifest& manifest, int64_t keep);
  // Nothing of it remains.
  void abandon() noexcept;

 private:
  void remove(const std::string& path) noexcept;

  std::string root_;
  FolderLock lock_;
  std::string unfinished_;
  std::vector<std::string> left_;  // what was to be removed, and is still there
};

}  // namespace plumb::save
