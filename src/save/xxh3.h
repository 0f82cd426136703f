// XXH3, 64 bits, seed 0: the checksum of checkpoints. Byte for byte what xxHash's XXH3_64bits gives.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace plumb::save {

uint64_t xxh3(const void* data, size_t bytes);

// The same of data that comes in parts.
class Xxh3 {
 public:
  void add(const void* data, size_t bytes);
  uint64_t value() const;

 private:
  void stripes(const unsigned char* data, size_t count);

  static constexpr size_t kRoom = 256;
  std::array<uint64_t, 8> sums_ = start();
  std::array<unsigned char, kRoom> room_{};  // what is not summed yet: at least one byte once anything came
  std::array<unsigned char, 64> before_{};   // the last that was summed
  size_t filled_ = 0;
  size_t stripe_ = 0;  // of the current block
  uint64_t total_ = 0;

  static std::array<uint64_t, 8> start();
};

// 16 hexadecimal digits, and back; an Error where it is something else.
std::string hex(uint64_t value);
uint64_t from_hex(const std::string& text, const std::string& what);

}  // namespace plumb::save
