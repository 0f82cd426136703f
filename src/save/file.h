// Files and folders whose every step is checked: an Error says what could not be done, to what, and why.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "save/xxh3.h"
#include "watch/process.h"

namespace plumb::save {

// A new file, written from its begin to its end. The disk begins with the first bytes while the later ones are written.
// What was not finished is not there after a crash.
class NewFile {
 public:
  explicit NewFile(const std::string& path);  // an Error where it exists
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void write(const void* data, size_t bytes);
  // The same, with their checksum, taken while they are at hand.
  void write(const void* data, size_t bytes, Xxh3& checksum);
  // Waits for the disk to have the bytes. finish() alone would do; but where several files are flushed first, the file
  // system writes its own facts about all of them at once.
  void flush();
  // Its bytes are on the disk, and it is closed.
  void finish();

 private:
  std::string path_;
  int fd_ = -1;
  uint64_t written_ = 0, begun_ = 0;  // bytes; of them, those that the disk was told to begin with
};

class OldFile {
 public:
  explicit OldFile(const std::string& path);  // an Error where it is no plain file
  ~OldFile();
  OldFile(OldFile&& other) noexcept;
  OldFile& operator=(OldFile&&) = delete;
  OldFile(const OldFile&) = delete;

  uint64_t bytes() const { return bytes_; }
  const std::string& path() const { return path_; }
  // All of them, or an Error.
  void read(uint64_t offset, void* data, size_t bytes) const;

 private:
  std::string path_;
  int fd_ = -1;
  uint64_t bytes_ = 0;
};

// And those above it, with the names of all that were made on the disk; an existing one is fine.
void make_folder(const std::string& path);
// This one alone, and its name may be lost with the machine; false where it exists.
bool make_plain_folder(const std::string& path);
void sync_folder(const std::string& path);  // the names in it are on the disk
// An Error where `to` exists.
void rename_folder(const std::string& from, const std::string& to);
// With all that is in it; where that fails, what is left stays, and the answer is why.
std::string remove_folder(const std::string& path) noexcept;
bool is_folder(const std::string& path);
// Names in a folder, sorted; none where it does not exist.
std::vector<std::string> names_in(const std::string& path);
std::string read_text(const std::string& path, uint64_t longest);

// While it lives, nobody else has the lock of this folder; an Error where somebody has.
class FolderLock {
 public:
  explicit FolderLock(const std::string& folder);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

  // Takes the lock of the folder that is there now, where the one that was taken went with its folder; an Error where
  // somebody has it.
  void hold();

 private:
  bool is_there() const;
  void take();
  void let_go();

  std::string folder_;
  const OwnProcess process_;
  int fd_ = -1;
};

}  // namespace plumb::save
