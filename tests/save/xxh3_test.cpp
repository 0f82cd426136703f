// The checksum of checkpoints beside xxHash's own, where that is installed.
#define XXH_INLINE_ALL
#include "save/xxh3.h"

#include <gtest/gtest.h>
#include <xxhash.h>

#include <algorithm>
#include <random>
#include <vector>

namespace plumb::save {
namespace {

TEST(Xxh3, IsXxHashsOwnForEveryLengthAndInParts) {
  std::mt19937_64 random(7);
  std::vector<unsigned char> bytes(5000);
  for (auto& byte : bytes) byte = static_cast<unsigned char>(random());
  for (size_t n = 0; n <= 2600; ++n) {
    const uint64_t expected = XXH3_64bits(bytes.data(), n);
    ASSERT_EQ(xxh3(bytes.data(), n), expected) << n;
    Xxh3 parts;
    for (size_t at = 0; at < n;) {
      const size_t count = std::min<size_t>(n - at, random() % 700);
      parts.add(bytes.data() + at, count);
      at += count;
    }
    ASSERT_EQ(parts.value(), expected) << n;
  }
  EXPECT_EQ(hex(xxh3("", 0)), "2d06800538d394c2");
}

}  // namespace
}  // namespace plumb::save
