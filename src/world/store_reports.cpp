// The channel over a store: one thread per process beats, publishes and reads, so that nobody else ever waits for it.
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "watch/process.h"
#include "world/rendezvous.h"

namespace plumb {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds beat{500};
constexpr milliseconds farewell{1'000};  // for the last word to be sent
constexpr milliseconds linger{2'000};    // of the store's host, for the others to read the last words
constexpr milliseconds deaf{2'500};      // a rank that has not beaten this long is not waited for

std::string key_of(int rank) { return "report/" + std::to_string(rank); }

// Shared with the thread, which outlives the channel when the store hangs.
struct Shared {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  std::shared_ptr<Progress> progress;
  std::vector<std::string> keys;
  Clock::time_point contestable;

  std::mutex mutex;
  std::condition_variable wake;      // for the thread
  std::condition_variable answered;  // for the others
  Report mine;
  std::vector<ReportChannel::Heard> heard;
  int64_t published = 0;  // reports handed in
  int64_t sent = 0;       // of these, known to be in the store
  int64_t reads_wanted = 0;
  int64_t reads_done = 0;
  bool stop = false;
  bool ended = false;
  std::string trouble;
  std::string objection;  // written once, before `contested`
  std::atomic<bool> contested{false};
  std::atomic<int64_t> messages{0};  // to the store
};

std::string encode(Shared& shared) {
  ++shared.mine.beat;
  for (size_t g = 0; g < shared.mine.issued.size(); ++g) shared.mine.issued[g] = shared.progress->issued[g].load();
  shared.mine.last = shared.progress->road.last();
  return shared.mine.encode();
}

// One exchange with the store, with `lock` open meanwhile.
void visit(Shared& shared, std::unique_lock<std::mutex>& lock) {
  const std::string report = encode(shared);
  const int64_t publishing = shared.published;
  const int64_t reading = shared.reads_wanted;
  const bool read = reading > shared.reads_done;
  lock.unlock();
  std::vector<std::vector<uint8_t>> values;
  std::string trouble;
  try {
    shared.store->set(key_of(shared.rank), report);
    shared.messages += read ? 2 : 1;
    // The set is not answered, a read is: it proves that the store has taken the report.
    if (read) values = shared.store->multiGet(shared.keys);
    if (Clock::now() < shared.contestable && !shared.contested.load()) {
      ++shared.messages;
      shared.objection = late_objection(*shared.store);
      if (!shared.objection.empty()) shared.contested.store(true);
    }
  } catch (const std::exception& e) {
    trouble = first_line(e.what());
  }
  lock.lock();
  shared.trouble = trouble;
  if (trouble.empty()) {
    shared.sent = publishing;
    const auto now = Clock::now();
    for (size_t r = 0; r < values.size(); ++r) {
      Report report_of = Report::decode(std::string(values[r].begin(), values[r].end()));
      const bool moved = report_of.beat != shared.heard[r].report.beat;
      shared.heard[r].report = std::move(report_of);
      if (moved || shared.heard[r].changed == Clock::time_point{}) shared.heard[r].changed = now;
    }
    if (read) shared.reads_done = reading;
  }
  shared.answered.notify_all();
}

void beat_on(const std::shared_ptr<Shared>& shared) {
  std::unique_lock lock(shared->mutex);
  while (!shared->stop && shared->trouble.empty()) {
    visit(*shared, lock);
    shared->wake.wait_for(lock, beat, [&] {
      return shared->stop || shared->published > shared->sent || shared->reads_wanted > shared->reads_done;
    });
  }
  shared->ended = true;
  shared->answered.notify_all();
}

class StoreChannel final : public ReportChannel {
 public:
  StoreChannel(std::shared_ptr<Shared> shared, StoreHost host)
      : shared_(std::move(shared)), hosts_(host == StoreHost::here) {
    thread_ = std::thread([shared = shared_] { beat_on(shared); });
  }

  ~StoreChannel() override {
    if (process_.left()) {
      thread_.detach();
      return;
    }
    leave();
    bool ended = false;
    {
      std::unique_lock lock(shared_->mutex);
      shared_->stop = true;
      shared_->wake.notify_all();
      ended = shared_->answered.wait_for(lock, farewell, [&] { return shared_->ended; });
    }
    // A store that hangs keeps its thread, which touches nothing but what it shares.
    ended ? thread_.join() : thread_.detach();
  }

  void publish(const Report& report) override {
    std::lock_guard lock(shared_->mutex);
    if (shared_->mine.state == Report::State::failed) return;  // the last word
    const int64_t beats = shared_->mine.beat;
    shared_->mine = report;
    shared_->mine.beat = beats;
    ++shared_->published;
    // That this rank waits no more is no news: the next beat tells it.
    if (report.state != Report::State::running) shared_->wake.notify_all();
  }

  std::optional<std::vector<Heard>> read(milliseconds patience) override {
    std::unique_lock lock(shared_->mutex);
    const int64_t wanted = ++shared_->reads_wanted;
    shared_->wake.notify_all();
    const bool done = shared_->answered.wait_for(
        lock, patience, [&] { return shared_->reads_done >= wanted || !shared_->trouble.empty() || shared_->ended; });
    if (!done && shared_->trouble.empty()) shared_->trouble = "the store does not answer";
    if (shared_->reads_done < wanted) return std::nullopt;
    return shared_->heard;
  }

  std::string trouble() override {
    std::lock_guard lock(shared_->mutex);
    return shared_->trouble;
  }

  bool beats() const override { return true; }
  int64_t messages() const override { return shared_->messages.load(); }

  const std::string* objection() const override { return shared_->contested.load() ? &shared_->objection : nullptr; }

  void leave() override {
    if (process_.left() || std::exchange(left_, true)) return;
    {
      std::unique_lock lock(shared_->mutex);
      if (shared_->mine.state != Report::State::failed) {
        shared_->mine.state = Report::State::left;
        ++shared_->published;
      }
      shared_->wake.notify_all();
    }
    const auto end = Clock::now() + (hosts_ ? linger : farewell);
    // A read carries the last word along and proves that it arrived; the host reads until the others have left too.
    for (bool waiting = true; waiting && Clock::now() < end;) {
      const auto heard = read(farewell);
      waiting = false;
      if (!heard || !hosts_) continue;
      for (size_t r = 0; r < heard->size(); ++r) {
        const auto& [report, changed] = (*heard)[r];
        const bool there = report.state == Report::State::running || report.state == Report::State::waiting;
        if (static_cast<int>(r) != shared_->rank && there && Clock::now() - changed < deaf) waiting = true;
      }
      if (waiting) std::this_thread::sleep_for(milliseconds(5));
    }
  }

 private:
  std::shared_ptr<Shared> shared_;
  const bool hosts_;
  const OwnProcess process_;
  bool left_ = false;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<ReportChannel> make_store_channel(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                                  std::shared_ptr<Progress> progress, milliseconds timeout,
                                                  StoreHost host, Clock::time_point contestable) {
  auto shared = std::make_shared<Shared>();
  shared->rank = rank;
  shared->progress = std::move(progress);
  shared->contestable = contestable;
  for (int r = 0; r < size; ++r) shared->keys.push_back(key_of(r));
  shared->heard.resize(size);
  store->set(key_of(rank), encode(*shared));
  const auto end = Clock::now() + timeout;
  // The last one says so: a few messages per rank, however many there are.
  if (store->add("reported", 1) == size) store->set("all reported", "yes");
  if (!await_key(*store, "all reported", rank, end)) {
    std::vector<int> missing;
    for (int r = 0; r < size; ++r) {
      if (!store->check({key_of(r)})) missing.push_back(r);
    }
    throw not_heard_of(rank, size, timeout, missing);
  }
  // A connection of its own: a wait of somebody else's on the store must not hold up a heartbeat.
  try {
    shared->store = store->clone();
  } catch (const std::exception&) {
    shared->store = std::move(store);
  }
  return std::make_unique<StoreChannel>(std::move(shared), host);
}

}  // namespace plumb
