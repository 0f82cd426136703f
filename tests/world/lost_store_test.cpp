// A store that goes, with the rank that serves it, while others still settle who takes part.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <stdexcept>
#include <string>

#include "world/rendezvous.h"

namespace plumb::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

// Answers `answers` calls, and none after them.
class EndingStore final : public c10d::PrefixStore {
 public:
  EndingStore(c10::intrusive_ptr<c10d::Store> store, int answers)
      : PrefixStore("", std::move(store)), answers_(answers) {}
  std::vector<uint8_t> get(const std::string& key) override { return call(), PrefixStore::get(key); }
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override {
    return call(), PrefixStore::compareSet(key, expected, desired);
  }
  int64_t add(const std::string& key, int64_t value) override { return call(), PrefixStore::add(key, value); }
  bool check(const std::vector<std::string>& keys) override { return call(), PrefixStore::check(keys); }
  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override {
    call();
    PrefixStore::wait(keys, timeout);
  }
  bool gone() const { return answers_ < 0; }

 private:
  void call() {
    if (--answers_ < 0) throw std::runtime_error("got 0 bytes");
  }
  int answers_;
};

Place place(int rank, int size) {
  Place place;
  place.rank = rank;
  place.size = size;
  return place;
}

// Rank 2 does not come, and rank 0 ends at every moment of rank 1's wait: rank 1 says that, or whom it misses.
TEST(LostStore, IsSaidAtEveryCallOfSettling) {
  bool whole = false;
  for (int answers = 0; !whole; ++answers) {
    ASSERT_LT(answers, 30);
    const auto store = c10::make_intrusive<c10d::HashStore>();
    const auto settle = [](int rank, const c10::intrusive_ptr<c10d::Store>& at) {
      Rendezvous(place(rank, 3), at, milliseconds(20)).settle();
    };
    EXPECT_THROW(settle(0, c10::make_intrusive<EndingStore>(store, 100)), Error);  // it leaves its claim
    const auto ending = c10::make_intrusive<EndingStore>(store, answers);
    try {
      settle(1, ending);
      ADD_FAILURE() << "rank 2 never came";
    } catch (const Error& e) {
      whole = !ending->gone();
      EXPECT_THAT(e.what(), HasSubstr(whole ? "did not hear of rank 2;" : "rank 0 (or the launcher")) << answers;
    }
  }
}

}  // namespace
}  // namespace plumb::testing
