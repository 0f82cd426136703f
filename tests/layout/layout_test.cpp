// The layout, as properties that hold for every list of parameters.
#include "layout/layout.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

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
      input.items.push_back({*rc::gen::inRange<int64_t>(0, 5000), *rc::gen::element<int64_t>(2, 4, 8), 0});
      input.items.back().kind = static_cast<int>(input.items.back().element_bytes);
    }
    input.order.resize(count);
    std::iota(input.order.begin(), input.order.end(), 0);
    for (int i = count - 1; i > 0; --i) std::swap(input.order[i], input.order[*rc::gen::inRange(0, i + 1)]);
    input.options.bucket_bytes = *rc::gen::inRange<int64_t>(1, 20000);
    input.options.first_bucket_bytes = *rc::gen::inRange<int64_t>(1, 5000);
    input.options.shards = *rc::gen::inRange(1, 9);
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
      found[bucket.kind].insert(found[bucket.kind].end(), bucket.items.begin(), bucket.items.end());
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
      for (int item : bucket.items) {
        bytes += (input.items[item].numel + kAlignment - 1) / kAlignment * kAlignment * input.items[item].element_bytes;
        filled += input.items[item].numel > 0;
      }
      RC_ASSERT(bytes <= cap || filled == 1);
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
