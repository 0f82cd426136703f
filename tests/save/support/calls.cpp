#include "save/support/calls.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace plumb::test::calls {
namespace {

struct State {
  std::mutex mutex;
  std::string root;
  Fault fault = Fault::none;
  int number = 0, error = 0, count = 0;
  Whose whose;
  std::map<int, std::string> files;  // open ones, by descriptor
  std::set<std::string> dirty;       // written, or with new names, since they were last synced
  int flush = 0;                     // the number of the first call that waits for a file's bytes
  std::string unsafe;
};
State& state() {
  static auto* instance = new State;
  return *instance;
}

std::string parent(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

// Whether this call is to fail.
bool strike(State& s, const std::string& path) {
  if ((s.whose && !s.whose(path)) || ++s.count != s.number) return false;
  if (s.fault == Fault::kill) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
  }
  errno = s.error;
  return s.fault == Fault::error;
}

bool ours(const State& s, const char* path) {
  if (s.root.empty() || path == nullptr) return false;
  const std::string name = path;
  return name.starts_with(s.root) || (name == "." && s.root[0] != '/');  // where a relative root lies
}

}  // namespace

void watch(const std::string& root, Fault fault, int number, int error, Whose whose) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  s.root = root;
  s.fault = fault;
  s.number = number;
  s.error = error;
  s.count = 0;
  s.whose = std::move(whose);
  s.files.clear();
  s.dirty.clear();
  s.unsafe.clear();
  s.flush = 0;
}

int stop() {
  State& s = state();
  std::lock_guard lock(s.mutex);
  s.root.clear();
  return s.count;
}

bool struck() {
  State& s = state();
  std::lock_guard lock(s.mutex);
  return s.number > 0 && s.count >= s.number;
}

std::string unsafe() { return state().unsafe; }
int first_flush() { return state().flush; }

std::string not_synced() {
  std::string all;
  for (const std::string& path : state().dirty) all += path + "\n";
  return all;
}

int open_call(const char* path, int flags, unsigned mode) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  const bool watched = ours(s, path);
  if (watched && strike(s, path)) return -1;
  const int fd = static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, flags, mode));
  if (watched && fd >= 0) {
    s.files[fd] = path;
    if ((flags & O_CREAT) != 0 && !std::string(path).ends_with("/.lock")) {
      s.dirty.insert(path);
      s.dirty.insert(parent(path));
    }
  }
  return fd;
}

ssize_t write_call(int fd, const void* data, size_t bytes) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  const auto found = s.files.find(fd);
  const bool watched = !s.root.empty() && found != s.files.end();
  if (watched) {
    const int before = s.count;
    if (strike(s, found->second)) return -1;
    if (s.fault == Fault::short_write && s.count > before && s.count == s.number && bytes > 1) --bytes;
    s.dirty.insert(found->second);
  }
  lock.unlock();
  return syscall(SYS_write, fd, data, bytes);
}

ssize_t pread_call(int fd, void* data, size_t bytes, off_t offset) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  const auto found = s.files.find(fd);
  if (!s.root.empty() && found != s.files.end() && strike(s, found->second)) return -1;
  lock.unlock();
  return syscall(SYS_pread64, fd, data, bytes, offset);
}

int flock_call(int fd, int operation) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  const auto found = s.files.find(fd);
  if (!s.root.empty() && found != s.files.end() && strike(s, found->second)) return -1;
  return static_cast<int>(syscall(SYS_flock, fd, operation));
}

int fsync_call(int fd) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  const auto found = s.files.find(fd);
  if (s.root.empty() || found == s.files.end()) return static_cast<int>(syscall(SYS_fsync, fd));
  if (strike(s, found->second)) return -1;
  s.dirty.erase(found->second);
  return 0;  // no test waits for a disk
}

// The data alone: what was written stays dirty, for its length and its name are not on the disk.
int flush_call(int fd, off64_t begin, off64_t bytes, unsigned flags) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  const auto found = s.files.find(fd);
  if (s.root.empty() || found == s.files.end()) {
    return static_cast<int>(syscall(SYS_sync_file_range, fd, begin, bytes, flags));
  }
  const bool fails = strike(s, found->second);
  if (s.flush == 0 && (flags & SYNC_FILE_RANGE_WAIT_AFTER) != 0) s.flush = s.count;
  return fails ? -1 : 0;
}

int close_call(int fd) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  const auto found = s.files.find(fd);
  const bool fails = !s.root.empty() && found != s.files.end() && strike(s, found->second);
  if (!s.root.empty() && found != s.files.end()) s.files.erase(found);
  const int error = errno;
  const int result = static_cast<int>(syscall(SYS_close, fd));
  if (fails) errno = error;
  return fails ? -1 : result;
}

int rename_call(const char* from, const char* to) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  if (ours(s, from)) {
    if (strike(s, from)) return -1;
    const std::string old = from, name = to;
    const bool commits = name.find("/save-") != std::string::npos;
    for (const std::string& path : s.dirty) {
      if (commits && path.starts_with(old)) s.unsafe += path + " is not on the disk when its folder gets its name\n";
      if (commits && parent(name).starts_with(path + "/")) {
        s.unsafe += path + " does not name the folder below on the disk when a checkpoint in it gets its name\n";
      }
      if (!commits && path == parent(old)) s.unsafe += old + " goes before the new checkpoint's name is on the disk\n";
    }
    if (commits) s.dirty.insert(parent(name));
  }
  return static_cast<int>(syscall(SYS_rename, from, to));
}

int mkdir_call(const char* path, mode_t mode) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  const bool watched = ours(s, path);
  if (watched && strike(s, path)) return -1;
  const int result = static_cast<int>(syscall(SYS_mkdir, path, mode));
  if (watched && result == 0) s.dirty.insert(parent(path));
  return result;
}

int unlinkat_call(int folder, const char* path, int flags) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  if (!s.root.empty() && strike(s, s.root)) return -1;
  return static_cast<int>(syscall(SYS_unlinkat, folder, path, flags));
}

}  // namespace plumb::test::calls

// What libplumb and the C++ library call. The attribute keeps them in sight of shared libraries.
#define PLUMB_SEEN __attribute__((visibility("default"), used))
namespace calls = plumb::test::calls;
extern "C" {
PLUMB_SEEN int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const unsigned mode = (flags & O_CREAT) != 0 ? va_arg(more, unsigned) : 0;
  va_end(more);
  return calls::open_call(path, flags, mode);
}
PLUMB_SEEN ssize_t write(int fd, const void* data, size_t bytes) { return calls::write_call(fd, data, bytes); }
PLUMB_SEEN ssize_t pread(int fd, void* data, size_t bytes, off_t offset) {
  return calls::pread_call(fd, data, bytes, offset);
}
PLUMB_SEEN int flock(int fd, int operation) noexcept { return calls::flock_call(fd, operation); }
PLUMB_SEEN int fsync(int fd) { return calls::fsync_call(fd); }
PLUMB_SEEN int sync_file_range(int fd, off64_t begin, off64_t bytes, unsigned flags) {
  return calls::flush_call(fd, begin, bytes, flags);
}
PLUMB_SEEN int close(int fd) { return calls::close_call(fd); }
PLUMB_SEEN int rename(const char* from, const char* to) noexcept { return calls::rename_call(from, to); }
PLUMB_SEEN int mkdir(const char* path, mode_t mode) noexcept { return calls::mkdir_call(path, mode); }
PLUMB_SEEN int unlinkat(int folder, const char* path, int flags) noexcept {
  return calls::unlinkat_call(folder, path, flags);
}
}
