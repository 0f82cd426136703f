#include "layout/layout.h"

#include <algorithm>
#include <map>

#include "backend/round.h"

namespace plumb {
namespace {

// Gives each item of a bucket to one of `owners` equal ranges, the largest first, each to the range that holds least.
void share_out(BucketShape& shape, std::vector<Slot>& slots, const std::vector<Item>& items, int owners,
               int64_t multiple) {
  const auto length = [&](int item) { return round_up(items[item].numel, kAlignment); };
  std::vector<int> by_size = shape.items;
  std::ranges::stable_sort(by_size, [&](int a, int b) { return length(a) > length(b); });
  std::vector<int64_t> fill(owners, 0);
  std::map<int, int> owner_of;
  for (const int item : by_size) {
    const auto least = std::ranges::min_element(fill);
    owner_of[item] = static_cast<int>(least - fill.begin());
    slots[item].offset = *least;
    *least += length(item);
  }
  const int64_t part = round_up(*std::ranges::max_element(fill), multiple);
  for (const int item : shape.items) slots[item].offset += owner_of[item] * part;
  // Empty items lie before what begins where they do.
  const auto place = [&](int item) { return std::pair(slots[item].offset, items[item].numel); };
  std::ranges::stable_sort(shape.items, [&](int a, int b) { return place(a) < place(b); });
  shape.numel = part * owners;
}

}  // namespace

Layout plan(const std::vector<Item>& items, const std::vector<int>& order, const LayoutOptions& options) {
  Layout layout;
  layout.slots.resize(items.size());

  struct Open {
    BucketShape shape;
    int64_t bytes = 0;
    int64_t largest = 0;  // item, in bytes
  };
  std::map<int, Open> open;  // by kind
  bool first = true;

  auto close = [&](Open& bucket) {
    if (options.owners > 0) {
      share_out(bucket.shape, layout.slots, items, options.owners, kAlignment * options.shards / options.owners);
    } else {
      bucket.shape.numel = round_up(bucket.shape.numel, kAlignment * options.shards);
    }
    for (int item : bucket.shape.items) layout.slots[item].bucket = static_cast<int>(layout.buckets.size());
    layout.buckets.push_back(std::move(bucket.shape));
    bucket = Open{};
    first = false;
  };

  for (int index : order) {
    const Item& item = items[index];
    if (item.alone > 0) {
      layout.slots[index] = {static_cast<int>(layout.buckets.size()), 0};
      layout.buckets.push_back({item.kind, {index}, item.alone});
      continue;
    }
    Open& bucket = open[item.kind];
    const int64_t length = round_up(item.numel, kAlignment);
    const int64_t bytes = length * item.element_bytes;
    int64_t cap = first ? options.first_bucket_bytes : options.bucket_bytes;
    cap = std::max(cap, options.owners * std::max(bucket.largest, bytes));
    if (bucket.bytes > 0 && bucket.bytes + bytes > cap) close(bucket);
    bucket.shape.kind = item.kind;
    bucket.shape.items.push_back(index);
    layout.slots[index].offset = bucket.shape.numel;
    bucket.shape.numel += length;
    bucket.bytes += bytes;
    bucket.largest = std::max(bucket.largest, bytes);
  }
  for (auto& [kind, bucket] : open) close(bucket);
  return layout;
}

Range owned(int64_t numel, int rank, int shards) {
  const int64_t part = numel / shards;
  return {part * rank, part * (rank + 1)};
}

}  // namespace plumb
