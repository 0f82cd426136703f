// The channel of ranks that are threads of one process: a vector under a lock.
#include <mutex>
#include <utility>

#include "watch/report_channel.h"

namespace plumb {

struct LocalReports {
  std::mutex mutex;
  std::vector<Report> reports;
  std::vector<std::shared_ptr<Progress>> progress;
};

namespace {

class LocalChannel final : public ReportChannel {
 public:
  LocalChannel(std::shared_ptr<LocalReports> all, int rank, std::shared_ptr<Progress> progress)
      : all_(std::move(all)), rank_(rank) {
    std::lock_guard lock(all_->mutex);
    all_->progress[rank_] = std::move(progress);
  }

  void publish(const Report& report) override {
    std::lock_guard lock(all_->mutex);
    all_->reports[rank_] = report;
  }

  std::optional<std::vector<Heard>> read(std::chrono::milliseconds) override {
    const auto now = Clock::now();
    std::lock_guard lock(all_->mutex);
    std::vector<Heard> heard;
    for (size_t r = 0; r < all_->reports.size(); ++r) {
      heard.push_back({all_->reports[r], now});
      if (!all_->progress[r]) continue;
      heard.back().report.last = all_->progress[r]->road.last();
      for (size_t g = 0; g < heard.back().report.issued.size(); ++g) {
        heard.back().report.issued[g] = all_->progress[r]->issued[g].load();
      }
    }
    return heard;
  }

  std::string trouble() override { return {}; }
  bool beats() const override { return false; }

  void leave() override {
    std::lock_guard lock(all_->mutex);
    Report& mine = all_->reports[rank_];
    if (mine.state != Report::State::failed) mine.state = Report::State::left;
  }

 private:
  std::shared_ptr<LocalReports> all_;
  int rank_;
};

}  // namespace

std::shared_ptr<LocalReports> make_local_reports(int size) {
  auto all = std::make_shared<LocalReports>();
  all->reports.resize(size);
  all->progress.resize(size);
  return all;
}

std::unique_ptr<ReportChannel> make_local_channel(std::shared_ptr<LocalReports> all, int rank,
                                                  std::shared_ptr<Progress> progress) {
  return std::make_unique<LocalChannel>(std::move(all), rank, std::move(progress));
}

}  // namespace plumb
