// The real program as a child process: what it prints, how it ends, what it leaves behind.
#pragma once

#include <sys/types.h>

#include <nlohmann/json.hpp>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace plumb::test {

using Words = std::vector<std::string>;
using Environment = std::map<std::string, std::string>;

struct Result {
  int code = 0;  // exit code, or 128 + signal
  std::string out, err;

  std::vector<std::string> lines() const;  // of out
  nlohmann::json last() const;             // the last line of out
  std::vector<double> losses() const;      // of the step lines of --json
};

// Where the program under test is.
std::string program();

// In a session of its own, which ends with this object: no process survives a test.
class Program {
 public:
  explicit Program(const Words& words, const Environment& extra = {}, const std::string& file = program());
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  pid_t pid() const { return pid_; }
  // Reads until stdout has `count` lines or the program ends.
  void wait_for_lines(size_t count);
  void signal(int number) const;
  // Ends it when it takes longer than any of these programs may.
  Result wait();
  // Its child processes: the ranks, in the order they were started.
  std::vector<pid_t> children() const;
  // Whether anything of its session still runs.
  bool alive() const;

 private:
  bool pump(int milliseconds);  // false once both pipes are closed

  pid_t pid_ = -1;
  int out_ = -1, err_ = -1;
  bool reaped_ = false;
  Result result_;
};

Result run(const Words& words, const Environment& extra = {});
// A script of sh, in which "$PLUMB" is the program and "$@" the `words`.
Result shell(const std::string& script, const Words& words = {});

// A folder that goes away with the object.
class Scratch {
 public:
  Scratch();
  ~Scratch();
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string write(const std::string& name, const std::string& bytes) const;
  bool has(const std::string& name) const { return std::filesystem::exists(folder_ / name); }

 private:
  std::filesystem::path folder_;
};

// `plumb train` with a model small enough for a test, plus `more`.
Words tiny(const Words& more);

int free_port();

}  // namespace plumb::test
