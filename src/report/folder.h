// The run folder: log.jsonl grows with the run, report.html comes at its end.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <fstream>
#include <string>
#include <vector>

#include "report/run.h"

namespace plumb::report {

class Folder {
 public:
  // Makes nothing yet: a run that ends before its first step leaves no folder. Empty `path`: never makes any.
  explicit Folder(std::string path) : path_(std::move(path)) {}

  // A run that was started again goes on with its log: what it says of the first `steps` steps stays, and is returned. Before
  // any call of add(). Throws plumb::Error.
  std::vector<Step> go_on(int64_t steps);
  // Appends to log.jsonl (a first call replaces the log of an earlier run, but for go_on). Throws plumb::Error.
  void add(const nlohmann::ordered_json& record);
  // The last line, and report.html, which appears whole or not at all.
  void finish(const std::vector<Step>& steps, const nlohmann::ordered_json& summary);

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::ofstream log_;
  std::vector<std::string> before_;  // lines that stay
};

}  // namespace plumb::report
