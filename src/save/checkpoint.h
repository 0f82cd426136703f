// Reads one checkpoint. Opening it checks all that can be checked without the tensors' bytes; reading compares checksums.
#pragma once

#include <string>
#include <vector>

#include "save/manifest.h"
#include "save/tensors.h"

namespace plumb::save {

class Checkpoint {
 public:
  // `path`: the checkpoint's own folder.
  explicit Checkpoint(const std::string& path);

  const std::string& path() const { return path_; }
  const Manifest& manifest() const { return manifest_; }

  // Elements [begin, end), in the order of memory. Every part that holds one is read and compared wholly; an Error names
  // the tensor and the file where its bytes are not those that were saved.
  void read(const SavedTensor& tensor, int64_t begin, int64_t end, void* to) const;
  // All parts, into nothing.
  void verify(const SavedTensor& tensor) const;

 private:
  void read_part(const SavedTensor& tensor, const Part& part, int64_t begin, int64_t end, char* to) const;

  std::string path_;
  Manifest manifest_;
  std::vector<TensorFile> files_;
};

}  // namespace plumb::save
