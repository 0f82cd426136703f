#include "save/checkpoint.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "plumb/error.h"
#include "save/file.h"
#include "save/xxh3.h"

namespace plumb::save {
namespace {

constexpr size_t kChunk = 1 << 20;  // bytes, which are in the processor's cache when their checksum is taken

std::string text_of(const std::string& path) {
  if (!is_folder(path)) throw Error("'" + path + "' is no folder of a checkpoint");
  return read_text(path + "/" + kManifest, kLongestManifest);
}

}  // namespace

Checkpoint::Checkpoint(const std::string& path)
    : path_(path), manifest_(Manifest::read(text_of(path), "the manifest of '" + path + "'")) {
  for (const SavedFile& file : manifest_.files) {
    const TensorFile& found = files_.emplace_back(path + "/" + file.name);
    if (found.bytes() != file.bytes || found.header_checksum() != file.header) {
      throw Error("'" + found.path() +
                  "' is not the file that was saved: its length or its header differ from the manifest");
    }
  }
  std::vector<std::set<std::string>> claimed(files_.size());
  for (const SavedTensor& tensor : manifest_.tensors) {
    for (const Part& part : tensor.parts) {
      const TensorFile& file = files_[static_cast<size_t>(part.file)];
      const TensorInFile* found = file.find(tensor.in_file());
      const std::string what = tensor.title() + " of '" + file.path() + "'";
      if (found == nullptr) throw Error(what + " is in the manifest and not in the file");
      const std::vector<int64_t> flat = {part.end - part.begin};
      if (found->dtype != tensor.dtype ||
          !(found->shape == flat || (tensor.parts.size() == 1 && found->shape == tensor.shape))) {
        throw Error(what + " has another dtype or length than in the manifest");
      }
      if (!claimed[static_cast<size_t>(part.file)].insert(found->name).second) {
        throw Error(what + " is claimed twice by the manifest");
      }
    }
  }
  for (size_t i = 0; i < files_.size(); ++i) {
    if (claimed[i].size() == files_[i].tensors().size()) continue;
    for (const TensorInFile& tensor : files_[i].tensors()) {
      if (claimed[i].contains(tensor.name)) continue;
      throw Error("tensor '" + tensor.name + "' of '" + files_[i].path() + "' is not in the manifest");
    }
  }
}

void Checkpoint::read(const SavedTensor& tensor, int64_t begin, int64_t end, void* to) const {
  for (const Part& part : tensor.parts) {
    if (std::max(begin, part.begin) < std::min(end, part.end)) {
      read_part(tensor, part, begin, end, static_cast<char*>(to));
    }
  }
}

void Checkpoint::verify(const SavedTensor& tensor) const {
  for (const Part& part : tensor.parts) read_part(tensor, part, 0, 0, nullptr);
}

void Checkpoint::read_part(const SavedTensor& tensor, const Part& part, int64_t begin, int64_t end, char* to) const {
  const TensorFile& file = files_[static_cast<size_t>(part.file)];
  const TensorInFile& place = *file.find(tensor.in_file());
  const auto each = static_cast<int64_t>(element_bytes(tensor.dtype));
  const uint64_t bytes = place.end - place.begin;
  // Wanted, in bytes of this part.
  const auto first = static_cast<uint64_t>((std::max(begin, part.begin) - part.begin) * each);
  const auto last = static_cast<uint64_t>((std::min(end, part.end) - part.begin) * each);
  const bool all = to != nullptr && first == 0 && last == bytes;
  char* whole = all ? to + (part.begin - begin) * each : nullptr;
  std::vector<char> chunk(all ? 0 : std::min<uint64_t>(kChunk, bytes));
  Xxh3 hash;
  for (uint64_t at = 0; at < bytes; at += kChunk) {
    const size_t count = std::min<uint64_t>(kChunk, bytes - at);
    char* memory = all ? whole + at : chunk.data();
    file.read(place, at, memory, count);
    hash.add(memory, count);
    if (all || to == nullptr) continue;
    const uint64_t from = std::max(first, at), until = std::min(last, at + count);
    if (from >= until) continue;
    const int64_t offset = (part.begin - begin) * each + static_cast<int64_t>(from);
    std::memcpy(to + offset, chunk.data() + (from - at), until - from);
  }
  if (hash.value() == part.checksum) return;
  throw Error(tensor.title() + " of '" + file.path() + "' was damaged: the checksum of elements [" +
              std::to_string(part.begin) + ", " + std::to_string(part.end) + ") is " + hex(hash.value()) +
              "; it was saved with " + hex(part.checksum));
}

}  // namespace plumb::save
