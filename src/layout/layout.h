// Layout: which parameter lies where in which bucket, and which rank owns which range. Pure arithmetic, no tensors.
#pragma once

#include <cstdint>
#include <vector>

namespace plumb {

// One parameter as the layout sees it. Items of different `kind` (dtype, device, placement) never share a bucket.
struct Item {
  int64_t numel = 0;
  int64_t element_bytes = 4;
  int kind = 0;
  int64_t alone = 0;  // elements of a bucket of its own, with padding; 0: it shares one
};

struct Slot {
  int bucket = -1;
  int64_t offset = 0;  // in elements
};

struct BucketShape {
  int kind = 0;
  std::vector<int> items;  // in the order they lie in memory
  int64_t numel = 0;       // with padding; a multiple of shards × alignment, unless an item asked to be alone
};

struct Layout {
  std::vector<Slot> slots;  // by item; bucket -1 for an item that `order` left out
  std::vector<BucketShape> buckets;
};

struct LayoutOptions {
  int64_t bucket_bytes = 25 << 20;
  int64_t first_bucket_bytes = 1 << 20;
  int shards = 1;
  // 0: ranges may end anywhere. Otherwise no item crosses the border of one of as many equal ranges (see owned()), which
  // are filled as evenly as they can be; `shards` is a multiple of it. An item that alone fills its range leaves the others
  // of its bucket room as large as itself: whatever fits there joins it, over the cap.
  int owners = 0;
};

// Every slot begins at a multiple of this many elements, so that vector kernels see the same alignment for a parameter
// wherever it lies.
inline constexpr int64_t kAlignment = 16;

struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

// Fills buckets with the items in the given order. A bucket closes when the next item would lift it over its cap; an
// item larger than the cap gets a bucket of its own. Buckets are in the order in which they are completed.
Layout plan(const std::vector<Item>& items, const std::vector<int>& order, const LayoutOptions& options);

// The part of a bucket of `numel` elements that `rank` of `shards` owns: equal, contiguous, in rank order.
Range owned(int64_t numel, int rank, int shards);

}  // namespace plumb
