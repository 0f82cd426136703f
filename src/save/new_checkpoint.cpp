#include "save/new_checkpoint.h"

#include "plumb/error.h"
#include "save/tensors.h"
#include "save/xxh3.h"

namespace plumb::save {

void NewCheckpoint::add_file(const std::string& name, const std::vector<Share>& shares,
                             const std::function<void(size_t, const Write&)>& write_share) {
  std::vector<TensorInFile> places;
  for (const Share& share : shares) {
    const bool whole = share.begin == 0 && share.end == share.tensor.numel() && share.tensor.strides.empty();
    places.push_back({share.tensor.in_file(), share.tensor.dtype,
                      whole ? share.tensor.shape : std::vector<int64_t>{share.end - share.begin}});
  }
  const std::string head = header_of(places, {{"format", "pt"}});
  NewFile file(folder_ + "/" + name);
  file.write(head.data(), head.size());
  Manifest added;
  uint64_t bytes = head.size();
  for (size_t i = 0; i < shares.size(); ++i) {
    const auto expected =
        static_cast<uint64_t>(shares[i].end - shares[i].begin) * element_bytes(shares[i].tensor.dtype);
    uint64_t written = 0;
    Xxh3 hash;
    write_share(i, [&](const void* data, size_t count) {
      written += count;
      if (written > expected) throw Error(shares[i].tensor.title() + " has more bytes than its shape says");
      file.write(data, count, hash);
    });
    if (written != expected) {
      throw Error(shares[i].tensor.title() + " has " + std::to_string(written) + " bytes; its shape says " +
                  std::to_string(expected));
    }
    bytes += written;
    SavedTensor& tensor = added.tensors.emplace_back(shares[i].tensor);
    tensor.parts = {{0, shares[i].begin, shares[i].end, hash.value()}};
  }
  file.finish();
  added.files.push_back({name, bytes, xxh3(head.data(), head.size())});
  manifest_.join(std::move(added));
}

std::string NewCheckpoint::commit() {
  Manifest::read(manifest_.write(), "the new manifest");  // what nobody wrote is noticed now
  return writer_.commit(manifest_, 0);
}

}  // namespace plumb::save
