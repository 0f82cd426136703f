// What a group does by messages between two ranks, where its backend has them: host messages in log₂ N rounds, and gathers
// that say what they gather.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "world/collective.h"

namespace plumb {
namespace {

uint64_t mixed(uint64_t digest, uint64_t word) {
  digest = (digest ^ word) * 0x9e3779b97f4a7c15u;
  return digest ^ (digest >> 29);
}

// `what` every rank must be about to do; `send` begins it.
template <class Send>
Pending begin(Group::Impl& group, Cargo cargo, uint64_t what, std::vector<at::Tensor> keep,
              std::function<void()> finish, const Send& send) {
  group.watch->check();
  Ticket ticket{.group = cargo == Cargo::gather ? gather_index : group.index,
                .circle = group.circle,
                .what = static_cast<int64_t>(what),
                .members = group.members};
  c10::intrusive_ptr<c10d::Work> work;
  try {
    work = send();
  } catch (const Error&) {
    throw;
  } catch (...) {
    group.watch->explain(std::current_exception(), Where{.detail = "sending a message"}, ticket);
  }
  ticket.number = group.watch->count(ticket.group);
  // Links end what is under way themselves.
  return Pending(std::move(work), group.watch, std::move(keep), std::make_shared<Ticket>(std::move(ticket)), {},
                 std::move(finish));
}

Pending start(Group::Impl& group, Cargo cargo, const Links::Script& script, uint64_t what,
              std::vector<at::Tensor> keep) {
  return begin(group, cargo, what, std::move(keep), {}, [&] { return group.links(cargo)->start(script, what); });
}

// Everybody's `sent` into its part of `received`.
Pending start_gather(Group::Impl& group, uint64_t what, at::Tensor received, at::Tensor sent,
                     std::function<void()> finish = {}) {
  return begin(group, Cargo::gather, what, {received, sent}, std::move(finish), [&] {
    if (group.gathers) return group.gathers->gather(received, sent, what);
    return group.links(Cargo::gather)->start(direct_gather(group.rank, group.size, received, sent), what);
  });
}

// What a combination has so far, as it travels: any, every, and the sums' bits.
struct Combination {
  size_t bits, sums;
  at::Tensor message;

  Combination(std::span<const int64_t> mine, std::span<const double> numbers)
      : bits(mine.size()), sums(numbers.size()),
        message(at::empty({static_cast<int64_t>(2 * bits + sums)}, at::kLong)) {
    std::ranges::copy(mine, words());
    std::ranges::copy(mine, words() + bits);
    for (size_t i = 0; i < sums; ++i) words()[2 * bits + i] = std::bit_cast<int64_t>(numbers[i]);
  }
  int64_t* words() const { return message.data_ptr<int64_t>(); }

  void add(const int64_t* any, const int64_t* every, const int64_t* more) const {
    int64_t* mine = words();
    for (size_t i = 0; i < bits; ++i) mine[i] |= any[i];
    for (size_t i = 0; i < bits; ++i) mine[bits + i] &= every[i];
    for (size_t i = 2 * bits; i < 2 * bits + sums; ++i) {
      mine[i] = std::bit_cast<int64_t>(std::bit_cast<double>(mine[i]) + std::bit_cast<double>(*more++));
    }
  }
  Group::Combined result() const {
    Group::Combined combined{{words(), words() + bits}, {words() + bits, words() + 2 * bits}, {}};
    for (size_t i = 0; i < sums; ++i) combined.sums.push_back(std::bit_cast<double>(words()[2 * bits + i]));
    return combined;
  }
};

}  // namespace

std::shared_ptr<Group::Impl> make_group(c10::intrusive_ptr<c10d::Backend> backend, std::shared_ptr<Watch> watch,
                                        int index, const std::string& name, const std::vector<int>& members) {
  auto group = make_group(std::move(backend), std::move(watch), index);
  uint64_t circle = 1;
  for (const char letter : name) circle = mixed(circle, static_cast<unsigned char>(letter));
  for (const int member : members) circle = mixed(circle, static_cast<uint64_t>(member));
  group->circle = static_cast<int64_t>(circle);
  group->members = std::make_shared<std::vector<int>>(members);
  group->watch->belong(group->circle);
  return group;
}

Links* Group::Impl::links(Cargo cargo) {
  std::lock_guard lock(issuing);
  auto& links = cargo == Cargo::gather ? gather_links : control_links;
  if (!links) links = std::make_unique<Links>(backend, issuing, watch->wire(), cargo);
  return links.get();
}

bool Group::names_gathers() const { return size() > 1 && impl_->has_links; }

Pending Group::gather(const std::vector<Part>& parts, int64_t what) {
  int64_t row = 0;  // bytes of one rank
  for (const Part& part : parts) {
    check_parts(*impl_, "gather", part.full, part.shard);
    row += padded(part.shard);
  }
  if (row == 0) return {};
  const uint64_t said = mixed(static_cast<uint64_t>(what), static_cast<uint64_t>(row));
  if (parts.size() == 1) {
    const at::Tensor full = as_real(parts[0].full).view(at::kByte);
    const at::Tensor shard = as_real(parts[0].shard).view(at::kByte);
    return start_gather(*impl_, said, full, shard);
  }
  const at::Tensor sent = at::empty({row}, at::kByte);
  const at::Tensor received = at::empty({size() * row}, at::kByte);
  std::vector<std::pair<at::Tensor, int64_t>> places;  // everybody's part of every whole, and where it comes
  int64_t offset = 0;
  for (const Part& part : parts) {
    const int64_t bytes = static_cast<int64_t>(part.shard.nbytes());
    sent.narrow(0, offset, bytes).copy_(as_real(part.shard).view(at::kByte));
    places.emplace_back(as_real(part.full).view(at::kByte).view({size(), bytes}), offset);
    offset += padded(part.shard);
  }
  auto deal_out = [received, places, row, size = size()] {
    const at::Tensor rows = received.view({size, row});
    for (const auto& [place, from] : places) place.copy_(rows.narrow(1, from, place.size(1)));
  };
  return start_gather(*impl_, said, received, sent, deal_out);
}

std::vector<std::vector<int64_t>> Group::exchange(std::span<const int64_t> mine, const Where& where) {
  const int size = this->size();
  if (size == 1) return {{mine.begin(), mine.end()}};
  const int64_t length = static_cast<int64_t>(mine.size());
  if (length == 0) return std::vector<std::vector<int64_t>>(size);
  at::Tensor shard = at::empty({length}, at::kLong);
  std::copy(mine.begin(), mine.end(), shard.data_ptr<int64_t>());
  at::Tensor full = at::empty({length * size}, at::kLong);
  if (impl_->has_links) {
    start(*impl_, Cargo::control, spread(rank(), size, shard, full), mixed(1, static_cast<uint64_t>(length)), {full})
        .wait(where);
  } else {
    all_gather(full, shard).wait(where);
  }
  std::vector<std::vector<int64_t>> all;
  const int64_t* values = full.data_ptr<int64_t>();
  for (int r = 0; r < size; ++r) all.emplace_back(values + r * length, values + (r + 1) * length);
  return all;
}

Group::Combined Group::combine(std::span<const int64_t> bits, std::span<const double> sums, const Where& where) {
  const Combination mine(bits, sums);
  if (size() == 1 || mine.message.numel() == 0) return mine.result();
  if (impl_->has_links) {
    const auto join = [mine](const at::Tensor& other) {
      const int64_t* theirs = other.data_ptr<int64_t>();
      mine.add(theirs, theirs + mine.bits, theirs + 2 * mine.bits);
    };
    start(*impl_, Cargo::control, combination(rank(), size(), mine.message, join),
          mixed(2, static_cast<uint64_t>(mine.message.numel())), {mine.message})
        .wait(where);
    return mine.result();
  }
  std::vector<int64_t> words(bits.begin(), bits.end());
  for (const double sum : sums) words.push_back(std::bit_cast<int64_t>(sum));
  const Combination all(bits, std::vector<double>(sums.size()));
  for (const auto& theirs : exchange(words, where)) all.add(theirs.data(), theirs.data(), theirs.data() + bits.size());
  return all.result();
}

}  // namespace plumb
