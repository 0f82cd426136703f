#include "save/file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <utility>

#include "plumb/error.h"

namespace plumb::save {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const std::string& verb, const std::string& path, int error) {
  throw Error("cannot " + verb + " '" + path + "': " + std::strerror(error));
}

constexpr size_t kAtOnce = 8 << 20;  // bytes of one call
constexpr size_t kAtHand = 1 << 20;  // bytes that a processor's cache holds

}  // namespace

NewFile::NewFile(const std::string& path) : path_(path) {
  fd_ = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd_ < 0) fail("create", path, errno);
}

NewFile::~NewFile() {
  if (fd_ >= 0) close(fd_);
}

void NewFile::write(const void* data, size_t bytes) {
  const auto* p = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::write(fd_, p, std::min(bytes, kAtOnce));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail("write", path_, n < 0 ? errno : ENOSPC);
    p += n;
    bytes -= static_cast<size_t>(n);
    written_ += static_cast<uint64_t>(n);
  }
  if (written_ - begun_ < kAtOnce) return;
  // Only a hint: what fails here fails again when it is waited for.
  sync_file_range(fd_, static_cast<off_t>(begun_), static_cast<off_t>(written_ - begun_), SYNC_FILE_RANGE_WRITE);
  begun_ = written_;
}

void NewFile::write(const void* data, size_t bytes, Xxh3& checksum) {
  const auto* p = static_cast<const char*>(data);
  for (size_t at = 0; at < bytes; at += kAtHand) {
    const size_t count = std::min(kAtHand, bytes - at);
    write(p + at, count);
    checksum.add(p + at, count);
  }
}

void NewFile::flush() {
  constexpr unsigned kAll = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
  if (sync_file_range(fd_, 0, 0, kAll) == 0) return;
  // An error of the disk is told once, here or to finish(); some file systems do not know this call.
  if (errno == EIO || errno == ENOSPC || errno == EDQUOT) fail("bring to the disk", path_, errno);
}

void NewFile::finish() {
  if (fsync(fd_) != 0) fail("bring to the disk", path_, errno);
  if (close(std::exchange(fd_, -1)) != 0) fail("close", path_, errno);
}

OldFile::OldFile(const std::string& path) : path_(path) {
  fd_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
  if (fd_ < 0) fail("open", path, errno);
  struct stat facts{};
  if (fstat(fd_, &facts) != 0 || !S_ISREG(facts.st_mode)) {
    close(std::exchange(fd_, -1));
    throw Error("'" + path + "' is not a plain file");
  }
  bytes_ = static_cast<uint64_t>(facts.st_size);
  // A hint. Asking for each range before it is read (WILLNEED) is slower: the system then fills its cache page by page.
  posix_fadvise(fd_, 0, 0, POSIX_FADV_SEQUENTIAL);
}

OldFile::~OldFile() {
  if (fd_ >= 0) close(fd_);
}

OldFile::OldFile(OldFile&& other) noexcept
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)), bytes_(other.bytes_) {}

void OldFile::read(uint64_t offset, void* data, size_t bytes) const {
  auto* p = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t n = pread(fd_, p, std::min(bytes, kAtOnce), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("read", path_, errno);
    if (n == 0) throw Error("'" + path_ + "' ends before byte " + std::to_string(offset + bytes));
    p += n;
    offset += static_cast<uint64_t>(n);
    bytes -= static_cast<size_t>(n);
  }
}

namespace {

// Whether it was made, and not there before. An Error names `wanted`.
bool make_one(const std::string& path, const std::string& wanted) {
  std::error_code error;
  const bool made = fs::create_directory(path, error);
  // "It exists" means here that something else has its name.
  if (error) fail("make the folder", wanted, error == std::errc::file_exists ? ENOTDIR : error.value());
  return made;
}

}  // namespace

void make_folder(const std::string& path) {
  fs::path whole;
  for (const fs::path& part : fs::path(path)) {
    whole /= part;
    if (part.empty() || is_folder(whole.string())) continue;
    if (!make_one(whole.string(), path)) continue;
    try {
      sync_folder(whole.has_parent_path() ? whole.parent_path().string() : ".");
    } catch (...) {
      rmdir(whole.c_str());  // who finds it later takes it for safe
      throw;
    }
  }
  if (!is_folder(path)) fail("make the folder", path, ENOTDIR);
}

bool make_plain_folder(const std::string& path) { return make_one(path, path); }

void sync_folder(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail("open the folder", path, errno);
  const int error = fsync(fd) == 0 ? 0 : errno;
  close(fd);
  // Some file systems have nothing to sync there.
  if (error != 0 && error != EINVAL) fail("bring to the disk the folder", path, error);
}

void rename_folder(const std::string& from, const std::string& to) {
  // A folder replaces an empty one without a word.
  std::error_code ignored;
  if (fs::exists(fs::symlink_status(to, ignored))) throw Error("'" + to + "' exists already");
  if (rename(from.c_str(), to.c_str()) != 0) fail("rename '" + from + "' to", to, errno);
}

std::string remove_folder(const std::string& path) noexcept {
  std::error_code error;
  fs::remove_all(path, error);
  return error ? "cannot remove '" + path + "': " + error.message() : "";
}

bool is_folder(const std::string& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored);
}

std::vector<std::string> names_in(const std::string& path) {
  std::error_code error;
  std::vector<std::string> names;
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
    names.push_back(it->path().filename().string());
  }
  if (error && error != std::errc::no_such_file_or_directory) fail("read the folder", path, error.value());
  std::sort(names.begin(), names.end());
  return names;
}

std::string read_text(const std::string& path, uint64_t longest) {
  const OldFile file(path);
  if (file.bytes() > longest) {
    throw Error("'" + path + "' has " + std::to_string(file.bytes()) + " bytes; expected at most " +
                std::to_string(longest));
  }
  std::string text(file.bytes(), '\0');
  file.read(0, text.data(), text.size());
  return text;
}

FolderLock::FolderLock(const std::string& folder) : folder_(folder) { hold(); }

// It may be removed between the two calls that take it. Some file systems never give one file one number.
void FolderLock::hold() {
  for (int tries = 3; tries > 0 && !is_there(); --tries) take();
}

void FolderLock::take() {
  const std::string path = folder_ + "/.lock";
  let_go();
  fd_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
  if (fd_ < 0) fail("open", path, errno);
  while (flock(fd_, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    const int error = errno;
    close(std::exchange(fd_, -1));
    if (error == EWOULDBLOCK) {
      throw Error("another run writes checkpoints into '" + folder_ +
                  "', or another engine of this one; give each a folder of its own");
    }
    fail("lock", path, error);
  }
}

bool FolderLock::is_there() const {
  struct stat mine{}, there{};
  return fd_ >= 0 && fstat(fd_, &mine) == 0 && stat((folder_ + "/.lock").c_str(), &there) == 0 &&
         mine.st_dev == there.st_dev && mine.st_ino == there.st_ino;
}

// A process that was forked has the lock as long as it lives, unless its maker gives it back.
void FolderLock::let_go() {
  if (fd_ < 0) return;
  if (!process_.left()) flock(fd_, LOCK_UN);
  close(std::exchange(fd_, -1));
}

FolderLock::~FolderLock() { let_go(); }

}  // namespace plumb::save
