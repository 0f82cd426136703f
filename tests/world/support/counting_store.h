// A store that counts what the thread that made it asks, and how many bytes come back; but for looks whether something is
// there yet, which a slow machine has more of.
#pragma once

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <thread>

namespace plumb::testing {

class CountingStore final : public c10d::PrefixStore {
 public:
  explicit CountingStore(c10::intrusive_ptr<c10d::Store> store) : PrefixStore("", std::move(store)) {}
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    count(0);
    PrefixStore::set(key, value);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    auto value = PrefixStore::get(key);
    count(value.size());
    return value;
  }
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override {
    count(0);
    return PrefixStore::compareSet(key, expected, desired);
  }
  int64_t add(const std::string& key, int64_t value) override {
    count(0);
    return PrefixStore::add(key, value);
  }
  void wait(const std::vector<std::string>& keys) override {
    count(0);
    PrefixStore::wait(keys);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    auto values = PrefixStore::multiGet(keys);
    size_t heard = 0;
    for (const auto& value : values) heard += value.size();
    count(heard);
    return values;
  }
  int64_t messages = 0, bytes = 0;

 private:
  void count(size_t heard) {
    if (std::this_thread::get_id() != owner_) return;  // a heartbeat
    ++messages;
    bytes += static_cast<int64_t>(heard);
  }
  const std::thread::id owner_ = std::this_thread::get_id();
};

}  // namespace plumb::testing
