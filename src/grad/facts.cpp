#include "grad/facts.h"

#include <bit>

namespace plumb {
namespace {

void pack_bits(const std::vector<bool>& bits, std::vector<int64_t>& words) {
  const size_t first = words.size();
  words.resize(first + (bits.size() + 63) / 64, 0);
  for (size_t i = 0; i < bits.size(); ++i) {
    if (bits[i]) words[first + i / 64] |= static_cast<int64_t>(uint64_t{1} << (i % 64));
  }
}

std::vector<bool> unpack_bits(std::span<const int64_t> words, size_t count) {
  std::vector<bool> bits(count);
  for (size_t i = 0; i < count; ++i) bits[i] = (static_cast<uint64_t>(words[i / 64]) >> (i % 64)) & 1;
  return bits;
}

constexpr size_t kHead = 7;

}  // namespace

std::vector<int64_t> Facts::pack() const {
  std::vector<int64_t> words = {static_cast<int64_t>(kind),    step, pass, failed, newcomers, rules,
                                std::bit_cast<int64_t>(factor)};
  pack_bits(late, words);
  pack_bits(used, words);
  pack_bits(changed, words);
  return words;
}

Facts Facts::unpack(std::span<const int64_t> words, size_t buckets, size_t parameters) {
  Facts facts;
  facts.kind = static_cast<Where::Kind>(words[0]);
  facts.step = words[1];
  facts.pass = words[2];
  facts.failed = words[3] != 0;
  facts.newcomers = words[4];
  facts.rules = words[5];
  facts.factor = std::bit_cast<double>(words[6]);
  facts.late = unpack_bits(words.subspan(kHead), buckets);
  words = words.subspan(kHead + (buckets + 63) / 64);
  facts.used = unpack_bits(words, parameters);
  facts.changed = unpack_bits(words.subspan((parameters + 63) / 64), parameters);
  return facts;
}

void join_late(const std::vector<Facts>& all, std::vector<bool>& late) {
  for (const Facts& facts : all) {
    for (size_t i = 0; i < late.size(); ++i) late[i] = late[i] || facts.late[i];
  }
}

}  // namespace plumb
