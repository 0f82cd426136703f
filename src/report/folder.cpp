// Files of a run folder, each write checked.
#include "report/folder.h"

#include <nlohmann/json.hpp>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "plumb/error.h"
#include "report/page.h"

namespace plumb::report {

namespace fs = std::filesystem;

namespace {

// Streams do not keep the system's reason; it stands in errno, where the caller has put 0 before.
[[noreturn]] void cannot_write(const fs::path& file, int reason) {
  const std::string why = reason != 0 ? std::generic_category().message(reason) : "the system gives no reason";
  throw Error("cannot write '" + file.string() + "': " + why);
}

}  // namespace

std::vector<Step> Folder::go_on(int64_t steps) {
  std::vector<Step> kept;
  if (path_.empty()) return kept;
  std::ifstream log(fs::path(path_) / "log.jsonl");
  for (std::string line; std::getline(log, line);) {
    const auto step = step_of(line);
    if (!step || step->step > steps || (!kept.empty() && step->step <= kept.back().step)) continue;
    kept.push_back(*step);
    before_.push_back(line);
  }
  return kept;
}

void Folder::add(const nlohmann::ordered_json& record) {
  if (path_.empty()) return;
  if (!log_.is_open()) {
    std::error_code error;
    fs::create_directories(path_, error);
    if (error) throw Error("cannot make the run folder '" + path_ + "': " + error.message());
    fs::remove(fs::path(path_) / "report.html", error);
    errno = 0;
    log_.open(fs::path(path_) / "log.jsonl", std::ios::trunc);
    for (const std::string& line : std::exchange(before_, {})) log_ << line << '\n';
    if (!log_) cannot_write(fs::path(path_) / "log.jsonl", errno);
  }
  errno = 0;
  log_ << one_line(record) << '\n' << std::flush;
  if (!log_) cannot_write(fs::path(path_) / "log.jsonl", errno);
}

void Folder::finish(const std::vector<Step>& steps, const nlohmann::ordered_json& summary) {
  if (path_.empty()) return;
  add(summary);
  const fs::path whole = fs::path(path_) / "report.html", part = fs::path(path_) / "report.html.part";
  errno = 0;
  std::ofstream file(part, std::ios::trunc | std::ios::binary);
  file << page(steps, summary);
  file.close();
  int reason = errno;
  std::error_code error, ignored;
  if (file) {
    fs::rename(part, whole, error);
    reason = error.value();
  }
  if (!file || error) {
    fs::remove(part, ignored);
    cannot_write(whole, reason);
  }
}

}  // namespace plumb::report
