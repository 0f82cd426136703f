// Every step that the system refuses is an Error that says what could not be done, to what, and why; what it merely
// interrupts goes on; and no descriptor is worse than another.
#include <errno.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <future>

#include "save/file.h"
#include "save/support/calls.h"
#include "save/support/folder.h"
#include "save/support/refused.h"

namespace plumb::save {
namespace {

namespace calls = test::calls;
using calls::Fault;
using test::refused;
using test::Scratch;
using ::testing::ElementsAre;

constexpr int kErrors[] = {EIO, ENOSPC, EDQUOT, EACCES, ENOTDIR, ELOOP};

// What is said when the `number`-th call under the scratch folder fails with `error`.
std::string said(const Scratch& scratch, int number, int error, const std::function<void()>& body) {
  calls::watch(scratch.path(""), Fault::error, number, error);
  const std::string text = refused(body);
  calls::stop();
  return text;
}

std::string cannot(const std::string& what, const std::string& path, int error) {
  return "cannot " + what + " '" + path + "': " + std::strerror(error);
}

// A file that is written, flushed and finished: its calls are open, write, sync_file_range, fsync and close.
void write_file(const std::string& path) {
  NewFile file(path);
  file.write("123", 3);
  file.flush();
  file.finish();
}

TEST(Refusals, OfANewFileSayWhatAndWhy) {
  for (const int error : kErrors) {
    SCOPED_TRACE(std::strerror(error));
    Scratch scratch;
    const std::string path = scratch.path("x");
    EXPECT_EQ(said(scratch, 1, error, [&] { write_file(path); }), cannot("create", path, error));
    const std::pair<int, std::string> steps[] = {{2, "write"}, {4, "bring to the disk"}, {5, "close"}};
    for (const auto& [number, what] : steps) {
      EXPECT_EQ(said(scratch, number, error, [&] { write_file(path); }), cannot(what, path, error));
      std::filesystem::remove(path);
    }
    // A file system that does not know how to flush is no broken disk.
    const bool of_the_disk = error == EIO || error == ENOSPC || error == EDQUOT;
    EXPECT_EQ(said(scratch, 3, error, [&] { write_file(path); }),
              of_the_disk ? cannot("bring to the disk", path, error) : "");
  }
}

TEST(Refusals, OfTheDiskAreNotThoseOfSomebodyElseBefore) {
  Scratch scratch;
  NewFile file(scratch.path("x"));
  file.write("123", 3);
  for (const int stale : kErrors) {
    errno = stale;
    EXPECT_EQ(refused([&] { file.flush(); }), "");
  }
  errno = EIO;
  EXPECT_EQ(refused([&] { file.finish(); }), "");
  errno = EIO;
  EXPECT_EQ(refused([&] { sync_folder(scratch.path("")); }), "");
}

TEST(Refusals, OfAnOldFileSayWhatAndWhy) {
  Scratch scratch;
  scratch.write("x", "12345");
  const std::string path = scratch.path("x");
  for (const int error : kErrors) {
    SCOPED_TRACE(std::strerror(error));
    char bytes[5];
    EXPECT_EQ(said(scratch, 1, error, [&] { OldFile file(path); }), cannot("open", path, error));
    EXPECT_EQ(said(scratch, 2, error, [&] { OldFile(path).read(0, bytes, 5); }), cannot("read", path, error));
  }
  std::filesystem::create_symlink(path, scratch.path("link"));
  EXPECT_EQ(refused([&] { OldFile file(scratch.path("link")); }), cannot("open", scratch.path("link"), ELOOP));
  EXPECT_EQ(refused([&] { OldFile file(scratch.path("absent")); }), cannot("open", scratch.path("absent"), ENOENT));
  char bytes[8];
  EXPECT_EQ(refused([&] { OldFile(path).read(2, bytes, 4); }), "'" + path + "' ends before byte 6");
  EXPECT_EQ(refused([&] { OldFile(path).read(9, bytes, 4); }), "'" + path + "' ends before byte 13");
}

// Whoever opens a pipe that nobody writes to would wait for ever.
TEST(Refusals, OfWhatIsNoPlainFileAreToldAtOnce) {
  Scratch scratch;
  const std::string pipe = scratch.path("pipe");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0666), 0);
  auto told = std::async(std::launch::async, [&] { return refused([&] { OldFile file(pipe); }); });
  const bool at_once = told.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
  if (!at_once) {  // past the calls that are counted here, one of which still goes on
    close(static_cast<int>(syscall(SYS_openat, AT_FDCWD, pipe.c_str(), O_WRONLY | O_NONBLOCK)));
  }
  EXPECT_TRUE(at_once);
  EXPECT_EQ(told.get(), "'" + pipe + "' is not a plain file");
  EXPECT_EQ(refused([&] { read_text(scratch.path(""), 10); }), "'" + scratch.path("") + "' is not a plain file");
}

TEST(Refusals, OfFoldersSayWhatAndWhy) {
  for (const int error : kErrors) {
    SCOPED_TRACE(std::strerror(error));
    Scratch scratch;
    make_folder(scratch.path("a/b"));
    const std::string a = scratch.path("a"), c = scratch.path("c");
    EXPECT_EQ(said(scratch, 1, error, [&] { make_folder(c); }), cannot("make the folder", c, error));
    EXPECT_EQ(said(scratch, 2, error, [&] { make_folder(c + "/d"); }), cannot("make the folder", c + "/d", error));
    EXPECT_EQ(said(scratch, 1, error, [&] { sync_folder(a); }), cannot("open the folder", a, error));
    EXPECT_EQ(said(scratch, 2, error, [&] { sync_folder(a); }), cannot("bring to the disk the folder", a, error));
    EXPECT_EQ(said(scratch, 1, error, [&] { rename_folder(a, scratch.path("e")); }),
              cannot("rename '" + a + "' to", scratch.path("e"), error));
    calls::watch(scratch.path(""), Fault::error, 1, error);
    const std::string why = remove_folder(a);
    calls::stop();
    EXPECT_EQ(why, cannot("remove", a, error));
    EXPECT_TRUE(is_folder(a));
    const std::string lock = scratch.path("a/.lock");
    EXPECT_EQ(said(scratch, 1, error, [&] { FolderLock one(a); }), cannot("open", lock, error));
    EXPECT_EQ(said(scratch, 2, error, [&] { FolderLock one(a); }), cannot("lock", lock, error));
    EXPECT_EQ(refused([&] { FolderLock one(a); }), "") << "nobody holds it";
  }
}

// What is in the way, by whichever name it is asked for.
TEST(Refusals, OfFoldersWhereSomethingElseHasTheName) {
  Scratch scratch;
  scratch.write("file", "x");
  const std::string file = scratch.path("file");
  for (const std::string& path : {file, file + "/below", file + "/below/it"}) {
    EXPECT_EQ(refused([&] { make_folder(path); }), cannot("make the folder", path, ENOTDIR));
  }
  EXPECT_NE(refused([&] { make_folder(file + "/"); }), "");
  EXPECT_EQ(refused([&] { names_in(file); }), cannot("read the folder", file, ENOTDIR));
  EXPECT_EQ(refused([&] { sync_folder(file); }), cannot("open the folder", file, ENOTDIR));
  EXPECT_EQ(refused([&] { FolderLock one(file); }), cannot("open", file + "/.lock", ENOTDIR));
  make_folder(scratch.path("a"));
  std::filesystem::create_symlink("nowhere", scratch.path("dangling"));
  for (const char* name : {"file", "dangling"}) {
    EXPECT_EQ(refused([&] { rename_folder(scratch.path("a"), scratch.path(name)); }),
              "'" + scratch.path(name) + "' exists already");
  }
  std::filesystem::create_symlink("a", scratch.path("there"));
  make_folder(scratch.path("there"));  // a link to a folder is one
  EXPECT_TRUE(is_folder(scratch.path("there")));
  {
    const FolderLock one(scratch.path("a"));
    EXPECT_EQ(refused([&] { FolderLock other(scratch.path("a")); }),
              "another run writes checkpoints into '" + scratch.path("a") +
                  "', or another engine of this one; give each a folder of its own");
  }
  EXPECT_EQ(refused([&] { FolderLock other(scratch.path("a")); }), "") << "it was let go";
}

// Some file systems have nothing to sync in a folder; and a signal is no reason to stop.
TEST(Refusals, ThatAreNoneAreNotTold) {
  Scratch scratch;
  make_folder(scratch.path("a"));
  EXPECT_EQ(said(scratch, 2, EINVAL, [&] { sync_folder(scratch.path("a")); }), "");
  EXPECT_EQ(said(scratch, 2, EINTR, [&] { write_file(scratch.path("x")); }), "");
  EXPECT_EQ(Scratch::read_file(scratch.path("x")), "123");
  char bytes[4] = "";
  EXPECT_EQ(said(scratch, 2, EINTR, [&] { OldFile(scratch.path("x")).read(0, bytes, 3); }), "");
  EXPECT_STREQ(bytes, "123");
  EXPECT_EQ(said(scratch, 2, EINTR, [&] { FolderLock one(scratch.path("a")); }), "");
  calls::watch(scratch.path(""), Fault::short_write, 2);
  write_file(scratch.path("y"));
  calls::stop();
  EXPECT_EQ(Scratch::read_file(scratch.path("y")), "123");
}

// A program whose standard input is closed: the next descriptor is 0, and means no failure.
TEST(Refusals, AreNotReadOutOfDescriptorZero) {
  Scratch scratch;
  const int kept = dup(STDIN_FILENO);
  close(STDIN_FILENO);
  std::string failed;
  std::vector<std::string> left_open;
  const auto used = [&](const char* what, const std::function<void()>& body) {
    failed += refused(body);
    if (fcntl(STDIN_FILENO, F_GETFD) < 0) return;
    left_open.emplace_back(what);
    close(STDIN_FILENO);
  };
  used("a new file", [&] { write_file(scratch.path("x")); });
  used("one that was dropped", [&] { NewFile dropped(scratch.path("z")); });
  used("an old file", [&] { EXPECT_EQ(read_text(scratch.path("x"), 3), "123"); });
  used("one that was moved", [&] {
    OldFile moved(scratch.path("x"));
    const OldFile here(std::move(moved));
    char bytes[4] = "";
    here.read(0, bytes, 3);
    EXPECT_STREQ(bytes, "123");
  });
  used("no plain file", [&] { EXPECT_NE(refused([&] { OldFile file(scratch.path("")); }), ""); });
  used("a folder", [&] { sync_folder(scratch.path("")); });
  used("a lock", [&] {
    const FolderLock one(scratch.path(""));
    EXPECT_NE(refused([&] { FolderLock other(scratch.path("")); }), "");
  });
  if (kept >= 0) {
    dup2(kept, STDIN_FILENO);
    close(kept);
  }
  EXPECT_EQ(failed, "");
  EXPECT_THAT(left_open, ElementsAre());
}

}  // namespace
}  // namespace plumb::save
