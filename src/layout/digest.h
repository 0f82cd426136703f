// A digest by which ranks compare what they hold: FNV-1a, the same everywhere.
#pragma once

#include <cstdint>
#include <span>

namespace plumb {

class Digest {
 public:
  void add(uint64_t word) { value_ = (value_ ^ word) * 0x100000001b3u; }
  void add(std::span<const char> bytes) {
    for (const char byte : bytes) add(static_cast<uint64_t>(static_cast<unsigned char>(byte)));
  }
  int64_t value() const { return static_cast<int64_t>(value_); }

 private:
  uint64_t value_ = 0xcbf29ce484222325u;
};

}  // namespace plumb
