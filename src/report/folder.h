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

  // Appends to log.jsonl (a first call replaces the log of an earlier run). Throws plumb::Error.
  void add(const nlohmann::ordered_json& record);
  // The last line, and report.html, which appears whole or not at all.
  void finish(const std::vector<Step>& steps, const nlohmann::ordered_json& summary);

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::ofstream log_;
};

}  // namespace plumb::report
