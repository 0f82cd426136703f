#include "grad/facts.h"

#include <algorithm>
#include <array>
#include <bit>

#include "grad/manifest.h"
#include "layout/digest.h"
#include "plumb/error.h"
#include "watch/report.h"

namespace plumb {
namespace {

void pack_bits(const std::vector<bool>& bits, std::vector<int64_t>& words) {
  const size_t first = words.size();
  words.resize(first + (bits.size() + 63) / 64, 0);
  for (size_t i = 0; i < bits.size(); ++i) {
    if (bits[i]) words[first + i / 64] |= static_cast<int64_t>(uint64_t{1} << (i % 64));
  }
}

// Takes them off the front.
std::vector<bool> unpack_bits(std::span<const int64_t>& words, size_t count) {
  std::vector<bool> bits(count);
  for (size_t begin = 0; begin < count; begin += 64) {
    const auto word = static_cast<uint64_t>(words[begin / 64]);
    if (word == 0) continue;  // mostly all are alike
    const size_t end = std::min(begin + 64, count);
    if (word == ~uint64_t{0}) {
      std::fill(bits.begin() + static_cast<ptrdiff_t>(begin), bits.begin() + static_cast<ptrdiff_t>(end), true);
      continue;
    }
    for (size_t i = begin; i < end; ++i) bits[i] = (word >> (i % 64)) & 1;
  }
  words = words.subspan((count + 63) / 64);
  return bits;
}

// The words before the bits: those in which all ranks must agree first.
constexpr size_t kAlike = 6, kHead = 12;
constexpr std::array kByParameter = {&Facts::used,    &Facts::changed, &Facts::cleared,
                                     &Facts::touched, &Facts::intact,  &Facts::extended};

std::string told(const std::vector<std::string>& names, const Facts& facts) {
  if (facts.writes) return "is in " + write_call(names, facts.changed);
  const std::string backwards = std::to_string(facts.pass) + (facts.pass == 1 ? " backward" : " backwards");
  return facts.kind == Where::Kind::step
             ? "called step() number " + std::to_string(facts.step) + " after " + backwards
             : "is in backward " + std::to_string(facts.pass) + " of step " + std::to_string(facts.step);
}

void check_in_step(int rank, const std::vector<std::string>& names, const std::vector<Facts>& all) {
  const Facts& first = all[0];
  for (size_t other = 1; other < all.size(); ++other) {
    const Facts& facts = all[other];
    const std::string other_rank = "rank " + std::to_string(other);
    if (facts.writes != first.writes || (facts.writes && facts.changed != first.changed)) {
      throw Error(rank, "rank 0 " + told(names, first) + ", but " + other_rank + " " + told(names, facts) +
                            ". What rank 0 writes becomes everybody's: every rank must make that call, at the same "
                            "point, for the same parameters");
    }
    if (facts.kind != first.kind || facts.step != first.step || facts.pass != first.pass) {
      throw Error(rank, "rank 0 " + told(names, first) + ", but " + other_rank + " " + told(names, facts) +
                            ". Every rank must run the same number of backwards before step(), and the same ones under "
                            "no_sync; a rank with nothing to contribute calls engine.backward() all the same");
    }
    if (facts.newcomers != first.newcomers) {
      throw Error(rank, "parameters were frozen or unfrozen differently on rank 0 and " + other_rank +
                            "; change requires_grad alike on every rank");
    }
    if (facts.rules != first.rules) {
      throw Error(rank, "the grad_dtype of some parameter differs between rank 0 and " + other_rank +
                            "; set it alike on every rank");
    }
  }
}

}  // namespace

void Facts::fit(size_t buckets, size_t parameters) {
  late.resize(buckets);
  idle.resize(buckets);
  for (const auto bits : kByParameter) (this->*bits).resize(parameters);
}

std::vector<int64_t> Facts::pack() const {
  std::vector<int64_t> words = {static_cast<int64_t>(kind),
                                step,
                                pass,
                                newcomers,
                                rules,
                                writes,
                                failed,
                                settings,
                                gathers,
                                weighted,
                                absent,
                                since};
  pack_bits(late, words);
  pack_bits(idle, words);
  for (const auto bits : kByParameter) pack_bits(this->*bits, words);
  return words;
}

Facts Facts::unpack(std::span<const int64_t> words, size_t buckets, size_t parameters) {
  Facts facts;
  facts.kind = static_cast<Where::Kind>(words[0]);
  facts.step = words[1];
  facts.pass = words[2];
  facts.newcomers = words[3];
  facts.rules = words[4];
  facts.writes = words[5] != 0;
  facts.failed = words[6] != 0;
  facts.settings = words[7];
  facts.gathers = words[8];
  facts.weighted = words[9];
  facts.absent = words[10] != 0;
  facts.since = words[11];
  words = words.subspan(kHead);
  facts.late = unpack_bits(words, buckets);
  facts.idle = unpack_bits(words, buckets);
  for (const auto bits : kByParameter) facts.*bits = unpack_bits(words, parameters);
  return facts;
}

std::string write_call(const std::vector<std::string>& names, const std::vector<bool>& which) {
  std::string list;
  for (size_t i = 0; i < which.size(); ++i) {
    if (which[i]) list += (list.empty() ? "'" : ", '") + names[i] + "'";
  }
  return "engine.gathered({" + (list.empty() ? "frozen parameters" : list) + "}, Access::write)";
}

namespace {

// Whether an error will have to name a rank. Every rank finds the same.
bool must_tell(const Agreement& all, bool in_step) {
  const Facts &any = all.any, &every = all.every;
  if (!in_step || any.failed || any.weighted != every.weighted) return true;
  if (any.kind == Where::Kind::step && any.used != every.used) return true;
  for (size_t i = 0; i < any.used.size(); ++i) {
    if (any.cleared[i] + any.touched[i] + any.intact[i] > 1) return true;
  }
  return false;
}

}  // namespace

Agreement agree(Group& control, int rank, const std::vector<std::string>& names, const Facts& mine,
                const Where& where) {
  if (control.size() == 1) {
    Agreement alone{mine, mine, mine.weight};
    if (must_tell(alone, true)) alone.everybody = {mine};
    return alone;
  }
  const std::vector<int64_t> words = mine.pack();
  const Group::Combined combined = control.combine(words, std::span(&mine.weight, 1), where);
  const size_t buckets = mine.late.size(), parameters = mine.used.size();
  Agreement all{Facts::unpack(combined.any, buckets, parameters), Facts::unpack(combined.every, buckets, parameters),
                combined.sums[0], control.size()};
  const bool alike = std::equal(combined.any.begin(), combined.any.begin() + kAlike, combined.every.begin());
  const bool same_call = !all.any.writes || all.any.changed == all.every.changed;
  if (must_tell(all, alike && same_call)) {
    for (const auto& said : control.exchange(words, where)) {
      all.everybody.push_back(Facts::unpack(said, buckets, parameters));
    }
    check_in_step(rank, names, all.everybody);
  }
  return all;
}

int64_t digest_of(const Settings& settings) {
  Digest digest;
  for (const auto& [name, value] : settings) digest.add(std::bit_cast<uint64_t>(value));
  return digest.value();
}

void check_settings(Group& control, int rank, const Settings& mine, const Agreement& all, const Where& where) {
  if (all.any.settings == all.every.settings) return;
  const auto count = static_cast<int64_t>(mine.size());
  int64_t least = count;
  int64_t another = count;
  for (const auto& others : control.exchange(std::span(&count, 1), where)) {
    least = std::min(least, others[0]);
    if (others[0] != count) another = others[0];
  }
  const std::string at = where.kind == Where::Kind::step ? ", at step " + std::to_string(where.step) : "";
  std::vector<int64_t> bits;  // of what all have: it may tell why one has more
  for (const auto& [name, value] : std::span(mine).first(least)) bits.push_back(std::bit_cast<int64_t>(value));
  const auto everybodys = control.exchange(bits, where);
  for (size_t i = 0; i < bits.size(); ++i) {
    for (size_t other = 1; other < everybodys.size(); ++other) {
      if (everybodys[other][i] == everybodys[0][i]) continue;
      const auto told = [](int64_t value) { return shortest(std::bit_cast<double>(value)); };
      throw Error(rank, mine[i].first + " is " + told(everybodys[other][i]) + " on rank " + std::to_string(other) +
                            ", where it is " + told(everybodys[0][i]) + " on rank 0" + at +
                            "; it must be alike on every rank");
    }
  }
  if (another == count) return;
  throw Error(rank, "the optimizers of the ranks have different numbers of settings, " + std::to_string(count) +
                        " here and " + std::to_string(another) + " elsewhere" + at +
                        "; build the same optimizer on every rank");
}

void check_nobody_failed(int rank, const Agreement& all) {
  for (size_t other = 0; other < all.everybody.size(); ++other) {
    const Facts& facts = all.everybody[other];
    if (!facts.failed) continue;
    if (facts.kind == Where::Kind::step) {
      throw Consequence(rank, "step() number " + std::to_string(facts.step) + " was refused on rank " +
                                  std::to_string(other) +
                                  ", which says why, and nothing was updated; call it again on every rank when that is "
                                  "mended");
    }
    throw Consequence(
        rank, "backward " + std::to_string(facts.pass) + " of step " + std::to_string(facts.step) + " failed on rank " +
                  std::to_string(other) +
                  ", so its gradients are incomplete on every rank; call zero_grad() and run it again on every "
                  "rank");
  }
}

void join_late(const Agreement& all, std::vector<bool>& late) {
  for (size_t i = 0; i < late.size(); ++i) late[i] = late[i] || all.any.late[i];
}

}  // namespace plumb
