// The manifest of a checkpoint: every tensor it holds, which file holds which of its elements, and with which checksum.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "save/json.h"

namespace plumb::save {

// Elements [begin, end) of a tensor, in the order of its memory, in one file.
struct Part {
  int64_t file = 0;  // of Manifest::files
  int64_t begin = 0, end = 0;
  uint64_t checksum = 0;
};

// What a tensor is of: a weight or a buffer of the model; an optimizer's value for every element of a parameter, or for the
// parameter as a whole; a generator of one rank; something of the user's.
enum class Kind { weight, optimizer, optimizer_value, buffer, generator, extra };

struct SavedTensor {
  Kind kind = Kind::weight;
  std::string name;  // of the parameter, the buffer, the device of a generator, the extra
  std::string key;   // which of several under one name: "mean", "rank 3"; empty for weights and buffers
  std::string dtype;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // of its memory, where it is not in the order of its shape; otherwise empty
  bool sharded = false;          // it was cut over the ranks when it was saved
  std::vector<Part> parts;       // in order, without a hole

  std::string in_file() const;  // its name there
  std::string title() const;    // for people
  int64_t numel() const;
};

struct SavedFile {
  std::string name;
  uint64_t bytes = 0;
  uint64_t header = 0;  // checksum of its length and header
};

struct Manifest {
  int64_t step = 0;
  int64_t samples = 0;  // the global cursor: how many samples of the data the run has used
  int64_t ranks = 1;
  Json::Object engine;      // what else the engine needs: rates, loss scale, updates by parameter, order of buckets
  Json::Object provenance;  // for people: versions, strategy, mesh, when
  std::vector<SavedFile> files;
  std::vector<SavedTensor> tensors;

  const Json& engine_field(const std::string& key) const;  // an Error where there is none
  const SavedTensor* find(Kind kind, const std::string& name, const std::string& key = "") const;

  // The text ends with its own checksum.
  std::string write() const;
  // Refuses what it does not understand wholly: another version, unknown fields, names that leave the folder, parts that
  // overlap or leave a hole, a checksum that does not agree. `where` is for the message. One rank's own manifest has
  // some parts only.
  enum class Coverage { whole, some };
  static Manifest read(const std::string& text, const std::string& where, Coverage coverage = Coverage::whole);
  // Takes another rank's files and parts in.
  void join(Manifest other);
};

inline constexpr const char* kManifest = "manifest.json";
inline constexpr uint64_t kLongestManifest = uint64_t{1} << 30;
std::string to_string(Kind kind);

}  // namespace plumb::save
