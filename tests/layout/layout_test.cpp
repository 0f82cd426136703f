// The layout, as properties that hold for every list of parameters.
#include "layout/layout.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

namespace plumb {
namespace {

struct Input {
  std::vector<Item> items;
  std::vector<int> order;
  LayoutOptions options;
};

rc::Gen<Input> inputs() {
  return rc::gen::exec([] {
    Input input;
    const auto count = *rc::gen::inRange(0, 40);
    for (int i = 0; i < count; ++i) {
      // One of many is larger than 32 bits count: nothing is laid out here but numbers.
      const int64_t more = *rc::gen::weightedElement<int64_t>({{15, 0}, {1, (int64_t{1} << 31) - 2500}});
      input.items.push_back({more + *rc::gen::inRange<int64_t>(0, 5000), *rc::gen::element<int64_t>(2, 4, 8), 0});
      input.items.back().kind = static_cast<int>(input.items.back().element_bytes);
    }
    input.order.resize(count);
    std::iota(input.order.begin(), input.order.end(), 0);
    for (int i = count - 1; i > 0; --i) std::swap(input.order[i], input.order[*rc::gen::inRange(0, i + 1)]);
    input.options.bucket_bytes = *rc::gen::inRange<int64_t>(1, 20000);
    input.options.first_bucket_bytes = *rc::gen::inRange<int64_t>(1, 5000);
    input.options.shards = *rc::gen::inRange(1, 9);
    if (*rc::gen::arbitrary<bool>()) {
      input.options.owners = *rc::gen::inRange(1, 5);
      input.options.shards = input.options.owners * *rc::gen::inRange(1, 3);
    }
    return input;
  });
}

void holds(const std::string& what, const std::function<void(const Input&, const Layout&)>& property) {
  EXPECT_TRUE(rc::check(what, [&] {
    const Input input = *inputs();
    property(input, plan(input.items, input.order, input.options));
  }));
}

TEST(Layout, PutsEveryItemIntoExactlyOneBucket) {
  holds("each once", [](const Input& input, const Layout& layout) {
    std::multiset<int> found;
    for (const auto& bucket : layout.buckets) found.insert(bucket.items.begin(), bucket.items.end());
    RC_ASSERT(found == std::multiset<int>(input.order.begin(), input.order.end()));
  });
}

TEST(Layout, NeverLetsTwoItemsOverlapAndKeepsThemInsideTheBucket) {
  holds("no overlap", [](const Input& input, const Layout& layout) {
    for (size_t b = 0; b < layout.buckets.size(); ++b) {
      int64_t free = 0;
      for (int item : layout.buckets[b].items) {
        RC_ASSERT(layout.slots[item].bucket == static_cast<int>(b));
        RC_ASSERT(layout.slots[item].offset >= free);
        RC_ASSERT(layout.slots[item].offset % kAlignment == 0);
        free = layout.slots[item].offset + input.items[item].numel;
      }
      RC_ASSERT(free <= layout.buckets[b].numel);
    }
  });
}

TEST(Layout, NeverMixesKinds) {
  holds("one kind", [](const Input& input, const Layout& layout) {
    for (const auto& bucket : layout.buckets) {
      for (int item : bucket.items) RC_ASSERT(input.items[item].kind == bucket.kind);
    }
  });
}

TEST(Layout, KeepsTheGivenOrderInsideAKind) {
  holds("order", [](const Input& input, const Layout& layout) {
    std::map<int, std::vector<int>> expected, found;
    for (int item : input.order) expected[input.items[item].kind].push_back(item);
    for (const auto& bucket : layout.buckets) {
      std::vector<int> items = bucket.items;
      if (input.options.owners > 0) {  // by owner, inside a bucket
        std::ranges::sort(items, {}, [&](int item) { return std::ranges::find(input.order, item); });
      }
      found[bucket.kind].insert(found[bucket.kind].end(), items.begin(), items.end());
    }
    RC_ASSERT(found == expected);
  });
}

TEST(Layout, ExceedsTheCapOnlyForASingleItem) {
  holds("cap", [](const Input& input, const Layout& layout) {
    const int64_t cap = std::max(input.options.bucket_bytes, input.options.first_bucket_bytes);
    for (const auto& bucket : layout.buckets) {
      int64_t bytes = 0;
      int64_t filled = 0;
      int64_t largest = 0;
      for (int item : bucket.items) {
        const int64_t padded = (input.items[item].numel + kAlignment - 1) / kAlignment * kAlignment;
        bytes += padded * input.items[item].element_bytes;
        largest = std::max(largest, padded * input.items[item].element_bytes);
        filled += input.items[item].numel > 0;
      }
      RC_ASSERT(bytes <= cap || filled == 1 || bytes <= input.options.owners * largest);
    }
  });
}

TEST(Layout, OwnedRangesTileTheBucketInRankOrder) {
  holds("tiles", [](const Input& input, const Layout& layout) {
    for (const auto& bucket : layout.buckets) {
      int64_t at = 0;
      for (int rank = 0; rank < input.options.shards; ++rank) {
        const Range range = owned(bucket.numel, rank, input.options.shards);
        RC_ASSERT(range.begin == at);
        RC_ASSERT(range.begin % kAlignment == 0);
        RC_ASSERT(range.size() == bucket.numel / input.options.shards);
        at = range.end;
      }
      RC_ASSERT(at == bucket.numel);
    }
  });
}

// Which items of a run lie with which owner, and where: the largest first, each with whoever has least.
void place_by_owner(const Input& input, BucketShape& shape, std::vector<Slot>& slots) {
  const auto padded = [&](int item) { return (input.items[item].numel + kAlignment - 1) / kAlignment * kAlignment; };
  const int owners = input.options.owners;
  std::vector<std::vector<int>> lists(owners);
  const auto length = [&](const std::vector<int>& list) {
    return std::accumulate(list.begin(), list.end(), int64_t{0},
                           [&](int64_t sum, int item) { return sum + padded(item); });
  };
  std::vector<int> left = shape.items;
  while (!left.empty()) {
    size_t largest = 0;
    for (size_t i = 1; i < left.size(); ++i) largest = padded(left[i]) > padded(left[largest]) ? i : largest;
    int least = 0;
    for (int owner = 1; owner < owners; ++owner) least = length(lists[owner]) < length(lists[least]) ? owner : least;
    lists[least].push_back(left[largest]);
    left.erase(left.begin() + static_cast<int64_t>(largest));
  }
  int64_t part = 0;
  for (const auto& list : lists) part = std::max(part, length(list));
  while (part % (kAlignment * (input.options.shards / owners)) != 0) part += kAlignment;
  for (int owner = 0; owner < owners; ++owner) {
    int64_t at = part * owner;
    for (const int item : lists[owner]) {
      slots[item].offset = at;
      at += padded(item);
    }
  }
  shape.numel = part * owners;
  // In the order of memory; an empty one before what begins where it does, several of them as they came.
  std::multimap<std::pair<int64_t, int64_t>, int> in_memory;
  for (const int item : shape.items) in_memory.insert({{slots[item].offset, input.items[item].numel}, item});
  shape.items.clear();
  for (const auto& [place, item] : in_memory) shape.items.push_back(item);
}

// The whole layout once more, one kind at a time: a bucket is the longest run that fits under its cap. What the first
// bucket is, all kinds decide together: the one that is complete first.
Layout recomputed(const Input& input) {
  const auto padded = [&](int item) { return (input.items[item].numel + kAlignment - 1) / kAlignment * kAlignment; };
  const auto bytes = [&](int item) { return padded(item) * input.items[item].element_bytes; };
  std::set<int> kinds;
  for (int item : input.order) kinds.insert(input.items[item].kind);
  struct Run {
    size_t completed;  // by which position of the order; past the end: by nobody
    int kind;
    std::vector<int> items;
  };
  std::vector<Run> runs;
  // The first completed bucket has the smaller cap. Until then that is the cap of all; afterwards the other is.
  size_t first_completed = input.order.size();
  for (const bool decided : {false, true}) {
    runs.clear();
    for (const int kind : kinds) {
      std::vector<int> open;
      int64_t filled = 0, largest = 0;
      for (size_t at = 0; at < input.order.size(); ++at) {
        const int item = input.order[at];
        if (input.items[item].kind != kind || input.items[item].alone > 0) continue;
        const bool first = !decided || at <= first_completed;
        const int64_t cap = first ? input.options.first_bucket_bytes : input.options.bucket_bytes;
        const int64_t room =
            input.options.owners * std::max(largest, bytes(item));  // each owner could take the largest
        if (filled > 0 && filled + bytes(item) > std::max(cap, room)) {
          runs.push_back({at, kind, open});
          open.clear();
          filled = largest = 0;
        }
        open.push_back(item);
        filled += bytes(item);
        largest = std::max(largest, bytes(item));
      }
      if (!open.empty()) runs.push_back({input.order.size() + static_cast<size_t>(kind), kind, open});
    }
    if (!decided) {
      for (const Run& run : runs) first_completed = std::min(first_completed, run.completed);
    }
  }
  for (size_t at = 0; at < input.order.size(); ++at) {
    const int item = input.order[at];
    if (input.items[item].alone > 0) runs.push_back({at, input.items[item].kind, {item}});
  }
  std::stable_sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.completed < b.completed; });
  Layout layout;
  layout.slots.resize(input.items.size());
  for (const Run& run : runs) {
    BucketShape shape{run.kind, run.items, 0};
    for (int item : run.items) {
      layout.slots[item] = {static_cast<int>(layout.buckets.size()), shape.numel};
      shape.numel += padded(item);
    }
    const int64_t unit = kAlignment * input.options.shards;
    while (shape.numel % unit != 0) shape.numel += kAlignment;
    const Item& only = input.items[run.items[0]];
    if (only.alone > 0) {
      shape.numel = only.alone;
    } else if (input.options.owners > 0) {
      place_by_owner(input, shape, layout.slots);
    }
    layout.buckets.push_back(shape);
  }
  return layout;
}

void expect_recomputed(const Input& input, const Layout& layout) {
  const Layout expected = recomputed(input);
  RC_ASSERT(layout.buckets.size() == expected.buckets.size());
  for (size_t b = 0; b < expected.buckets.size(); ++b) {
    RC_ASSERT(layout.buckets[b].kind == expected.buckets[b].kind);
    RC_ASSERT(layout.buckets[b].items == expected.buckets[b].items);
    RC_ASSERT(layout.buckets[b].numel == expected.buckets[b].numel);
  }
  RC_ASSERT(layout.slots.size() == input.items.size());
  for (size_t i = 0; i < expected.slots.size(); ++i) {
    RC_ASSERT(layout.slots[i].bucket == expected.slots[i].bucket);
    RC_ASSERT(layout.slots[i].offset == expected.slots[i].offset);
  }
}

TEST(Layout, IsThatOfAPlainRecomputation) {
  holds("recomputed", [](const Input& input, const Layout& layout) { expect_recomputed(input, layout); });
}

// Sizes around the alignment, and caps around what they fill: exactly, one byte less, one more. Some items are left out,
// some ask for a bucket of their own, and sometimes each has one owner.
TEST(Layout, IsRightAtEveryBoundary) {
  EXPECT_TRUE(rc::check("boundaries", [] {
    Input input;
    const auto count = *rc::gen::inRange(0, 24);
    for (int i = 0; i < count; ++i) {
      const auto numel = *rc::gen::element<int64_t>(0, 0, 1, 3, 15, 16, 17, 31, 32, 33, 48);
      const auto alone = *rc::gen::element<int64_t>(0, 0, 0, 0, 0, 1, 50);
      input.items.push_back({numel, *rc::gen::element<int64_t>(1, 2, 4, 8), *rc::gen::inRange(0, 3), alone});
      if (*rc::gen::inRange(0, 8) > 0) input.order.push_back(i);
    }
    for (size_t i = input.order.size(); i > 1; --i) {
      std::swap(input.order[i - 1], input.order[*rc::gen::inRange<size_t>(0, i)]);
    }
    const auto cap = [] { return 16 * *rc::gen::inRange<int64_t>(1, 20) + *rc::gen::element<int64_t>(-1, 0, 0, 1); };
    input.options = {cap(), cap(), *rc::gen::inRange(1, 9)};
    input.options.owners = *rc::gen::element(0, 0, input.options.shards);
    input.options.shards *= *rc::gen::element(1, 1, 2);
    const Layout layout = plan(input.items, input.order, input.options);
    expect_recomputed(input, layout);
    for (int i = 0; i < count; ++i) {
      const bool there = std::count(input.order.begin(), input.order.end(), i) > 0;
      RC_ASSERT((layout.slots[i].bucket >= 0) == there);
    }
  }));
}

// Every element of every parameter is some one rank's, whatever its size.
TEST(Layout, GivesEveryElementToOneRank) {
  holds("elements", [](const Input& input, const Layout& layout) {
    for (int item : input.order) {
      const Slot& slot = layout.slots[item];
      const int64_t numel = layout.buckets[slot.bucket].numel;
      int64_t found = 0;
      for (int rank = 0; rank < input.options.shards; ++rank) {
        const Range range = owned(numel, rank, input.options.shards);
        RC_ASSERT(range.size() >= 0);
        found += std::max<int64_t>(
            0, std::min(range.end, slot.offset + input.items[item].numel) - std::max(range.begin, slot.offset));
      }
      RC_ASSERT(found == input.items[item].numel);
    }
  });
}

TEST(Layout, CutsBetweenParametersWhereEachHasOneOwner) {
  holds("owners", [](const Input& input, const Layout& layout) {
    const int owners = input.options.owners;
    if (owners == 0) return;
    for (const int item : input.order) {
      const Slot& slot = layout.slots[item];
      int found = 0;
      for (int rank = 0; rank < owners; ++rank) {
        const Range range = owned(layout.buckets[slot.bucket].numel, rank, owners);
        found += slot.offset >= range.begin && slot.offset + input.items[item].numel <= range.end ? 1 : 0;
      }
      RC_ASSERT(found >= 1);  // an empty one may lie on a border
      RC_ASSERT(found == 1 || input.items[item].numel == 0);
    }
  });
}

TEST(Layout, SharesOwnersOutEvenly) {
  // The largest first, each to whoever has least: 5 | 4 | 3 + 2.
  std::vector<Item> items;
  for (const int64_t numel : {16 * 2, 16 * 3, 16 * 4, 16 * 5}) items.push_back({numel, 4, 0});
  const Layout layout = plan(items, {0, 1, 2, 3}, {.bucket_bytes = 1 << 20, .shards = 3, .owners = 3});
  ASSERT_EQ(layout.buckets.size(), 1u);
  EXPECT_EQ(layout.buckets[0].numel, 3 * 16 * 5);
  EXPECT_EQ(layout.buckets[0].items, (std::vector<int>{3, 2, 1, 0}));
  EXPECT_EQ(layout.slots[1].offset, 2 * 16 * 5);
  EXPECT_EQ(layout.slots[0].offset, 2 * 16 * 5 + 16 * 3);
}

TEST(Layout, CountsMoreThan32BitsHold) {
  constexpr int64_t large = (int64_t{1} << 33) + 16;
  for (const int owners : {0, 2}) {
    const int64_t cap = 8 * large + 128;
    const Layout layout = plan({{large, 4, 0}, {large, 4, 0}, {16, 4, 0}, {16, 4, 0}}, {0, 1, 2, 3},
                               {.bucket_bytes = cap, .first_bucket_bytes = cap, .shards = 2, .owners = owners});
    ASSERT_EQ(layout.buckets.size(), 1u);
    EXPECT_EQ(layout.buckets[0].numel, 2 * large + 32);
    EXPECT_EQ(layout.slots[1].offset, owners == 0 ? large : large + 16);
    EXPECT_EQ(layout.slots[3].offset, 2 * large + 16);
    const Range second = owned(layout.buckets[0].numel, 1, 2);
    EXPECT_EQ(second.begin, large + 16);
    EXPECT_EQ(second.end, 2 * large + 32);
  }
}

TEST(Layout, LargeParametersComeAsManyAtATimeAsThereAreOwners) {
  // Each is over the cap; alone in their buckets they would leave three ranks of four without anything to own.
  const std::vector<Item> items(8, Item{1600, 4, 0});
  const Layout layout =
      plan(items, {0, 1, 2, 3, 4, 5, 6, 7}, {.bucket_bytes = 64, .first_bucket_bytes = 64, .shards = 4, .owners = 4});
  ASSERT_EQ(layout.buckets.size(), 2u);
  for (const BucketShape& bucket : layout.buckets) EXPECT_EQ(bucket.numel, 4 * 1600);
}

TEST(Layout, AnEmptyParameterLiesBeforeTheOneThatBeginsThere) {
  const std::vector<Item> items = {{32, 4, 0}, {0, 4, 0}, {32, 4, 0}};
  const Layout layout = plan(items, {0, 2, 1}, {.shards = 2, .owners = 2});
  int64_t last = 0;
  bool empty_after = false;
  for (const int item : layout.buckets[0].items) {
    empty_after = empty_after || (items[item].numel == 0 && layout.slots[item].offset < last);
    last = layout.slots[item].offset + items[item].numel;
  }
  EXPECT_FALSE(empty_after);
}

TEST(Layout, GivesAnItemThatAsksForItABucketOfItsOwn) {
  std::vector<Item> items(5, Item{16, 4, 0});
  items[1].alone = items[3].alone = 21;
  const Layout layout = plan(items, {0, 1, 2, 3, 4}, {.bucket_bytes = 4096, .first_bucket_bytes = 4096, .shards = 3});
  ASSERT_EQ(layout.buckets.size(), 3u);
  for (const int item : {1, 3}) {
    const BucketShape& bucket = layout.buckets[layout.slots[item].bucket];
    EXPECT_EQ(bucket.items, (std::vector<int>{item}));
    EXPECT_EQ(bucket.numel, 21);  // as asked, whatever the alignment
    EXPECT_EQ(layout.slots[item].offset, 0);
  }
  EXPECT_EQ(layout.buckets[layout.slots[0].bucket].items, (std::vector<int>{0, 2, 4}));
}

TEST(Layout, GivesTheFirstBucketTheSmallerCap) {
  const std::vector<Item> items(10, Item{16, 4, 0});
  std::vector<int> order(10);
  std::iota(order.begin(), order.end(), 0);
  const Layout layout = plan(items, order, {.bucket_bytes = 256, .first_bucket_bytes = 64});
  ASSERT_EQ(layout.buckets.size(), 4u);
  EXPECT_EQ(layout.buckets[0].items, (std::vector<int>{0}));
  EXPECT_EQ(layout.buckets[1].items, (std::vector<int>{1, 2, 3, 4}));
}

}  // namespace
}  // namespace plumb
