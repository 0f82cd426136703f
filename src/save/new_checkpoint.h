// Writes one checkpoint file by file, for programs without an engine: what is converted, what is cut for other ranks.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "save/folder.h"
#include "save/manifest.h"

namespace plumb::save {

// Elements [begin, end) of a tensor, whose own `parts` are not looked at.
struct Share {
  SavedTensor tensor;
  int64_t begin = 0, end = 0;
};

class NewCheckpoint {
 public:
  // In a folder of checkpoints, which nobody else writes meanwhile.
  explicit NewCheckpoint(const std::string& root) : writer_(root), folder_(writer_.begin()) {}
  // Nothing remains of one that was not committed.
  ~NewCheckpoint() { writer_.abandon(); }
  NewCheckpoint(const NewCheckpoint&) = delete;
  NewCheckpoint& operator=(const NewCheckpoint&) = delete;

  // One file of these shares, on the disk. `write_share(i, write)` hands the bytes of the i-th over, in order, to `write`;
  // it is an Error where they are more or fewer than its shape says.
  using Write = std::function<void(const void* data, size_t bytes)>;
  void add_file(const std::string& name, const std::vector<Share>& shares,
                const std::function<void(size_t, const Write&)>& write_share);

  // Step, samples, ranks, `engine` and `provenance` are to be set before the commit.
  Manifest& manifest() { return manifest_; }
  // Gives it its name, once it is whole; returns its path.
  std::string commit();

 private:
  Writer writer_;
  std::string folder_;
  Manifest manifest_;
};

}  // namespace plumb::save
