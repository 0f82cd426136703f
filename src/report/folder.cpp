// Files of a run folder, each write checked.
#include "report/folder.h"

#include <nlohmann/json.hpp>

#include <filesystem>

#include "plumb/error.h"
#include "report/page.h"

namespace plumb::report {

namespace fs = std::filesystem;

void Folder::add(const nlohmann::ordered_json& record) {
  if (path_.empty()) return;
  if (!log_.is_open()) {
    std::error_code error;
    fs::create_directories(path_, error);
    if (error) throw Error("cannot make the run folder '" + path_ + "': " + error.message());
    fs::remove(fs::path(path_) / "report.html", error);
    log_.open(fs::path(path_) / "log.jsonl", std::ios::trunc);
  }
  log_ << one_line(record) << '\n' << std::flush;
  if (!log_) throw Error("cannot write '" + (fs::path(path_) / "log.jsonl").string() + "'; is there space?");
}

void Folder::finish(const std::vector<Step>& steps, const nlohmann::ordered_json& summary) {
  if (path_.empty()) return;
  add(summary);
  const fs::path whole = fs::path(path_) / "report.html", part = fs::path(path_) / "report.html.part";
  std::ofstream file(part, std::ios::trunc | std::ios::binary);
  file << page(steps, summary);
  file.close();
  std::error_code error;
  if (file) fs::rename(part, whole, error);
  if (!file || error) {
    fs::remove(part, error);
    throw Error("cannot write '" + whole.string() + "'; is there space?");
  }
}

}  // namespace plumb::report
