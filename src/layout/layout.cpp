#include "layout/layout.h"

#include <map>

#include "world/round.h"

namespace plumb {

Layout plan(const std::vector<Item>& items, const std::vector<int>& order, const LayoutOptions& options) {
  Layout layout;
  layout.slots.resize(items.size());

  struct Open {
    BucketShape shape;
    int64_t bytes = 0;
  };
  std::map<int, Open> open;  // by kind
  bool first = true;

  auto close = [&](Open& bucket) {
    if (bucket.shape.items.empty()) return;
    bucket.shape.numel = round_up(bucket.shape.numel, kAlignment * options.shards);
    for (int item : bucket.shape.items) layout.slots[item].bucket = static_cast<int>(layout.buckets.size());
    layout.buckets.push_back(std::move(bucket.shape));
    bucket = Open{};
    first = false;
  };

  for (int index : order) {
    const Item& item = items[index];
    Open& bucket = open[item.kind];
    const int64_t length = round_up(item.numel, kAlignment);
    const int64_t bytes = length * item.element_bytes;
    const int64_t cap = first ? options.first_bucket_bytes : options.bucket_bytes;
    if (bucket.bytes > 0 && bucket.bytes + bytes > cap) close(bucket);
    bucket.shape.kind = item.kind;
    bucket.shape.items.push_back(index);
    layout.slots[index].offset = bucket.shape.numel;
    bucket.shape.numel += length;
    bucket.bytes += bytes;
  }
  for (auto& [kind, bucket] : open) close(bucket);
  return layout;
}

Range owned(int64_t numel, int rank, int shards) {
  const int64_t part = numel / shards;
  return {part * rank, part * (rank + 1)};
}

}  // namespace plumb
