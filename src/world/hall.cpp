// The board of ranks that are threads of one process: a vector under a lock.
#include <mutex>
#include <utility>

#include "world/board.h"

namespace plumb {

struct Hall {
  std::mutex mutex;
  std::vector<Report> reports;
  std::vector<std::shared_ptr<Counters>> counters;
};

namespace {

class HallBoard final : public Board {
 public:
  HallBoard(std::shared_ptr<Hall> hall, int rank, std::shared_ptr<Counters> counters)
      : hall_(std::move(hall)), rank_(rank) {
    std::lock_guard lock(hall_->mutex);
    hall_->counters[rank_] = std::move(counters);
  }

  void publish(const Report& report) override {
    std::lock_guard lock(hall_->mutex);
    hall_->reports[rank_] = report;
  }

  std::optional<std::vector<Heard>> read(std::chrono::milliseconds) override {
    const auto now = Clock::now();
    std::lock_guard lock(hall_->mutex);
    std::vector<Heard> heard;
    for (size_t r = 0; r < hall_->reports.size(); ++r) {
      heard.push_back({hall_->reports[r], now});
      if (!hall_->counters[r]) continue;
      for (size_t g = 0; g < heard.back().report.issued.size(); ++g) {
        heard.back().report.issued[g] = (*hall_->counters[r])[g].load();
      }
    }
    return heard;
  }

  std::string trouble() override { return {}; }
  bool beats() const override { return false; }

  void leave() override {
    std::lock_guard lock(hall_->mutex);
    Report& mine = hall_->reports[rank_];
    if (mine.state != Report::State::failed) mine.state = Report::State::left;
  }

 private:
  std::shared_ptr<Hall> hall_;
  int rank_;
};

}  // namespace

std::shared_ptr<Hall> make_hall(int size) {
  auto hall = std::make_shared<Hall>();
  hall->reports.resize(size);
  hall->counters.resize(size);
  return hall;
}

std::unique_ptr<Board> make_hall_board(std::shared_ptr<Hall> hall, int rank, std::shared_ptr<Counters> counters) {
  return std::make_unique<HallBoard>(std::move(hall), rank, std::move(counters));
}

}  // namespace plumb
