// Files of the safetensors format: 8 bytes of length, a JSON header, and the tensors' bytes without a hole.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "save/file.h"

namespace plumb::save {

inline constexpr const char* kMetadata = "__metadata__";  // a header's word for what is no tensor

struct TensorInFile {
  std::string name;
  std::string dtype;  // as the format spells it: F32, BF16, …
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;  // of its bytes, counted from the end of the header
};

// Of one element; 0 for a dtype that the format does not know.
uint64_t element_bytes(const std::string& dtype);
// Elements of a tensor of this shape; an Error that names `what` where a length is negative or the product too large.
uint64_t elements(const std::vector<int64_t>& shape, const std::string& what);

// A strict reader: a header within bounds, every tensor of the length its shape says, one behind the other from the first
// byte to the last, and nothing after it. Anything else is an Error that names the file and what was found.
class TensorFile {
 public:
  explicit TensorFile(const std::string& path);

  const std::vector<TensorInFile>& tensors() const { return tensors_; }  // in the order of their bytes
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const TensorInFile* find(const std::string& name) const;
  uint64_t bytes() const { return file_.bytes(); }
  uint64_t header_checksum() const { return header_checksum_; }
  const std::string& path() const { return file_.path(); }
  // `bytes` of the tensor's data from `offset` on.
  void read(const TensorInFile& tensor, uint64_t offset, void* data, size_t bytes) const;

 private:
  OldFile file_;
  std::vector<TensorInFile> tensors_;
  std::map<std::string, size_t> by_name_;
  std::map<std::string, std::string> metadata_;
  uint64_t data_ = 0;  // where the tensors begin
  uint64_t header_checksum_ = 0;
};

// The length and the header of a file of these tensors, one behind the other in this order; sets their places.
std::string header_of(std::vector<TensorInFile>& tensors, const std::map<std::string, std::string>& metadata);

}  // namespace plumb::save
