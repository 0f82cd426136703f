#include "save/xxh3.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>

#include "plumb/error.h"

namespace plumb::save {
namespace {

static_assert(std::endian::native == std::endian::little, "checksums and tensors are little-endian");

constexpr uint32_t kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F, kPrime64_3 = 0x165667B19E3779F9,
                   kPrime64_4 = 0x85EBCA77C2B2AE63, kPrime64_5 = 0x27D4EB2F165667C5;

// The specification's constant of 192 bytes, as little-endian words.
constexpr uint64_t kWords[24] = {0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
                                 0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
                                 0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
                                 0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
                                 0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
                                 0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af};
constexpr size_t kSecretBytes = sizeof(kWords), kStripe = 64, kStripesOfBlock = (kSecretBytes - kStripe) / 8;

const unsigned char* secret() { return reinterpret_cast<const unsigned char*>(kWords); }

uint64_t read64(const unsigned char* p) {
  uint64_t value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}
uint32_t read32(const unsigned char* p) {
  uint32_t value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

// Both halves of the 128-bit product, folded.
uint64_t fold(uint64_t a, uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t avalanche(uint64_t h) {
  h ^= h >> 37;
  h *= 0x165667919E3779F9;
  return h ^ (h >> 32);
}
uint64_t avalanche64(uint64_t h) {
  h ^= h >> 33;
  h *= kPrime64_2;
  h ^= h >> 29;
  h *= kPrime64_3;
  return h ^ (h >> 32);
}

uint64_t mix16(const unsigned char* p, const unsigned char* key) {
  return fold(read64(p) ^ read64(key), read64(p + 8) ^ read64(key + 8));
}

uint64_t up_to_16(const unsigned char* p, size_t n) {
  const unsigned char* key = secret();
  if (n > 8) {
    const uint64_t low = read64(p) ^ (read64(key + 24) ^ read64(key + 32));
    const uint64_t high = read64(p + n - 8) ^ (read64(key + 40) ^ read64(key + 48));
    return avalanche(n + __builtin_bswap64(low) + high + fold(low, high));
  }
  if (n >= 4) {
    const uint64_t joined = read32(p + n - 4) + (static_cast<uint64_t>(read32(p)) << 32);
    uint64_t h = joined ^ (read64(key + 8) ^ read64(key + 16));
    h ^= std::rotl(h, 49) ^ std::rotl(h, 24);
    h *= 0x9FB21C651E98DF25;
    h ^= (h >> 35) + n;
    h *= 0x9FB21C651E98DF25;
    return h ^ (h >> 28);
  }
  if (n > 0) {
    const uint32_t joined = static_cast<uint32_t>(p[0]) << 16 | static_cast<uint32_t>(p[n / 2]) << 24 |
                            static_cast<uint32_t>(p[n - 1]) | static_cast<uint32_t>(n) << 8;
    return avalanche64(joined ^ static_cast<uint64_t>(read32(key) ^ read32(key + 4)));
  }
  return avalanche64(read64(key + 56) ^ read64(key + 64));
}

uint64_t up_to_240(const unsigned char* p, size_t n) {
  const unsigned char* key = secret();
  uint64_t sum = n * kPrime64_1;
  if (n <= 128) {
    for (size_t i = (n - 1) / 32 + 1; i-- > 0;) {
      sum += mix16(p + 16 * i, key + 32 * i);
      sum += mix16(p + n - 16 * (i + 1), key + 32 * i + 16);
    }
    return avalanche(sum);
  }
  for (size_t i = 0; i < 8; ++i) sum += mix16(p + 16 * i, key + 16 * i);
  sum = avalanche(sum);
  for (size_t i = 8; i < n / 16; ++i) sum += mix16(p + 16 * i, key + 16 * (i - 8) + 3);
  return avalanche(sum + mix16(p + n - 16, key + 136 - 17));
}

using Sums = std::array<uint64_t, 8>;

void add_stripe(Sums& sums, const unsigned char* p, const unsigned char* key) {
  for (size_t i = 0; i < 8; ++i) {
    const uint64_t value = read64(p + 8 * i), keyed = value ^ read64(key + 8 * i);
    sums[i ^ 1] += value;
    sums[i] += (keyed & 0xffffffff) * (keyed >> 32);
  }
}

void scramble(Sums& sums) {
  const unsigned char* key = secret() + kSecretBytes - kStripe;
  for (size_t i = 0; i < 8; ++i) {
    sums[i] = (sums[i] ^ (sums[i] >> 47) ^ read64(key + 8 * i)) * kPrime32_1;
  }
}

uint64_t merge(const Sums& sums, uint64_t bytes) {
  const unsigned char* key = secret() + 11;
  uint64_t result = bytes * kPrime64_1;
  for (size_t i = 0; i < 4; ++i) {
    result += fold(sums[2 * i] ^ read64(key + 16 * i), sums[2 * i + 1] ^ read64(key + 16 * i + 8));
  }
  return avalanche(result);
}

}  // namespace

std::array<uint64_t, 8> Xxh3::start() {
  return {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3, kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
}

void Xxh3::stripes(const unsigned char* data, size_t count) {
  Sums sums = sums_;
  for (; count > 0; --count, data += kStripe) {
    add_stripe(sums, data, secret() + 8 * stripe_);
    if (++stripe_ < kStripesOfBlock) continue;
    scramble(sums);
    stripe_ = 0;
  }
  sums_ = sums;
}

// The last stripe is summed otherwise than the others, so that at least one byte is kept back.
void Xxh3::add(const void* data, size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  total_ += bytes;
  if (bytes == 0) return;
  if (filled_ + bytes <= kRoom) {
    std::memcpy(room_.data() + filled_, p, bytes);
    filled_ += bytes;
    return;
  }
  if (filled_ > 0) {
    const size_t first = kRoom - filled_;
    std::memcpy(room_.data() + filled_, p, first);
    p += first;
    bytes -= first;
    stripes(room_.data(), kRoom / kStripe);
    std::memcpy(before_.data(), room_.data() + kRoom - kStripe, kStripe);
  }
  if (const size_t whole = (bytes - 1) / kStripe; whole > 0) {
    stripes(p, whole);
    p += whole * kStripe;
    bytes -= whole * kStripe;
    std::memcpy(before_.data(), p - kStripe, kStripe);
  }
  std::memcpy(room_.data(), p, bytes);
  filled_ = bytes;
}

uint64_t Xxh3::value() const {
  if (total_ <= 16) return up_to_16(room_.data(), filled_);
  if (total_ <= 240) return up_to_240(room_.data(), filled_);
  Xxh3 rest = *this;
  const size_t whole = (filled_ - 1) / kStripe;
  rest.stripes(room_.data(), whole);
  std::array<unsigned char, kStripe> last;
  if (filled_ >= kStripe) {
    std::memcpy(last.data(), room_.data() + filled_ - kStripe, kStripe);
  } else {
    std::memcpy(last.data(), before_.data() + filled_, kStripe - filled_);
    std::memcpy(last.data() + kStripe - filled_, room_.data(), filled_);
  }
  add_stripe(rest.sums_, last.data(), secret() + kSecretBytes - kStripe - 7);
  return merge(rest.sums_, total_);
}

uint64_t xxh3(const void* data, size_t bytes) {
  Xxh3 hash;
  hash.add(data, bytes);
  return hash.value();
}

std::string hex(uint64_t value) {
  std::string text(16, '0');
  for (size_t i = 16; i-- > 0; value >>= 4) text[i] = "0123456789abcdef"[value & 15];
  return text;
}

uint64_t from_hex(const std::string& text, const std::string& what) {
  uint64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value, 16);
  // Whatever it could not read, or read otherwise, is not what would be written.
  if (hex(value) != text) throw Error(what + " is no checksum of 16 hexadecimal digits");
  return value;
}

}  // namespace plumb::save
