// Pipes, fork and patience with an end.
#include "cli/support/program.h"

#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "paths.h"
#include "slowness.h"
#include "world/support/port.h"

namespace plumb::test {

namespace fs = std::filesystem;

std::vector<std::string> Result::lines() const {
  std::vector<std::string> all;
  std::istringstream text(out);
  for (std::string line; std::getline(text, line);) all.push_back(line);
  return all;
}

nlohmann::json Result::last() const {
  const auto all = lines();
  if (all.empty()) {
    ADD_FAILURE() << "nothing on stdout; stderr: " << err;
    return {};
  }
  return nlohmann::json::parse(all.back());
}

std::vector<double> Result::losses() const {
  std::vector<double> all;
  for (const auto& line : lines()) {
    const auto json = nlohmann::json::parse(line);
    if (json.contains("step")) all.push_back(json["loss"]);
  }
  return all;
}

std::string program() {
  const char* named = std::getenv("PLUMB_PROGRAM");
  return named ? named : PLUMB_PROGRAM;
}

Program::Program(const Words& words, const Environment& extra, const std::string& file) {
  std::vector<std::string> all = {file};
  all.insert(all.end(), words.begin(), words.end());
  std::vector<char*> argv;
  for (auto& word : all) argv.push_back(word.data());
  argv.push_back(nullptr);

  // Whatever launcher runs the tests, the program shall not take part in its world.
  Environment environment;
  for (char** entry = environ; *entry; ++entry) {
    const std::string text = *entry;
    environment[text.substr(0, text.find('='))] = text.substr(text.find('=') + 1);
  }
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
                           "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "SLURM_PROCID",
                           "SLURM_NTASKS", "PLUMB_ERROR_FD", "PLUMB_STORE_FD"}) {
    environment.erase(name);
  }
  for (const auto& [name, value] : extra) environment[name] = value;
  std::vector<std::string> entries;
  for (const auto& [name, value] : environment) entries.push_back(name + "=" + value);
  std::vector<char*> envp;
  for (auto& entry : entries) envp.push_back(entry.data());
  envp.push_back(nullptr);

  int out[2], err[2];
  if (pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
  pid_ = fork();
  if (pid_ == 0) {
    setsid();
    dup2(out[1], 1);
    dup2(err[1], 2);
    execve(argv[0], argv.data(), envp.data());
    _exit(127);
  }
  close(out[1]);
  close(err[1]);
  out_ = out[0];
  err_ = err[0];
}

Program::~Program() {
  if (!reaped_) {
    kill(-pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  if (out_ >= 0) close(out_);
  if (err_ >= 0) close(err_);
}

bool Program::pump(int milliseconds) {
  pollfd watched[] = {{out_, POLLIN, 0}, {err_, POLLIN, 0}};
  if (poll(watched, 2, milliseconds) <= 0) return true;
  for (auto [pipe, into, ready] :
       {std::tuple{&out_, &result_.out, watched[0].revents}, std::tuple{&err_, &result_.err, watched[1].revents}}) {
    if (*pipe < 0 || ready == 0) continue;
    char buffer[65536];
    const ssize_t n = read(*pipe, buffer, sizeof(buffer));
    if (n > 0) {
      into->append(buffer, static_cast<size_t>(n));
    } else {
      close(*pipe);
      *pipe = -1;
    }
  }
  return out_ >= 0 || err_ >= 0;
}

void Program::wait_for_lines(size_t count) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(120 * patience);
  while (static_cast<size_t>(std::count(result_.out.begin(), result_.out.end(), '\n')) < count) {
    if (!pump(1000)) return;
    if (std::chrono::steady_clock::now() > deadline) {
      ADD_FAILURE() << "still waiting for line " << count << "; stdout:\n"
                    << result_.out << "\nstderr:\n"
                    << result_.err;
      return;
    }
  }
}

void Program::signal(int number) const { kill(pid_, number); }

Result Program::wait() {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(120 * patience);
  while (pump(1000)) {
    if (std::chrono::steady_clock::now() > deadline) {
      ADD_FAILURE() << "the program did not end; stdout:\n" << result_.out << "\nstderr:\n" << result_.err;
      kill(-pid_, SIGKILL);
      break;
    }
  }
  int status = 0;
  waitpid(pid_, &status, 0);
  reaped_ = true;
  result_.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result_;
}

std::vector<pid_t> Program::children() const {
  std::ifstream file("/proc/" + std::to_string(pid_) + "/task/" + std::to_string(pid_) + "/children");
  std::vector<pid_t> all;
  for (pid_t child = 0; file >> child;) all.push_back(child);
  return all;
}

bool Program::alive() const { return kill(-pid_, 0) == 0; }

Result run(const Words& words, const Environment& extra) { return Program(words, extra).wait(); }

Result shell(const std::string& script, const Words& words) {
  Words all = {"-c", script, "sh"};
  all.insert(all.end(), words.begin(), words.end());
  return Program(all, {{"PLUMB", program()}}, "/bin/sh").wait();
}

Scratch::Scratch() {
  std::string pattern = (fs::temp_directory_path() / "plumb-test-XXXXXX").string();
  if (!mkdtemp(pattern.data())) throw std::runtime_error("no scratch folder");
  folder_ = pattern;
}

Scratch::~Scratch() {
  std::error_code ignored;
  fs::remove_all(folder_, ignored);
}

std::string Scratch::write(const std::string& name, const std::string& bytes) const {
  std::ofstream(folder_ / name, std::ios::binary) << bytes;
  return path(name);
}

Words tiny(const Words& more) {
  Words words = {"train",   "--layers", "1",       "--heads", "2",        "--width", "16",        "--context", "16",
                 "--batch", "8",        "--steps", "6",       "--warmup", "2",       "--threads", "1"};
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

int free_port() { return plumb::testing::free_port(); }

}  // namespace plumb::test
