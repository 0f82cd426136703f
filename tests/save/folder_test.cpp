// A folder of checkpoints: which names in it are checkpoints', in what order, which is the newest, and why one is not.
#include "save/folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <limits>
#include <memory>
#include <random>

#include "save/support/folder.h"
#include "save/support/refused.h"

namespace plumb::save {
namespace {

using test::refused;
using test::Scratch;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

std::string commit(Writer& writer, int64_t step, int64_t keep = 0) {
  writer.begin();
  Manifest manifest;
  manifest.step = step;
  return writer.commit(manifest, keep);
}

// As many as a sort must move far, each number under two names.
TEST(Folder, OrdersEqualNumbersByTheirNames) {
  for (const int64_t count : {1, 5, 40, 100}) {
    Scratch scratch;
    std::mt19937_64 random(static_cast<uint64_t>(count));
    for (int64_t i = 0; i < count; ++i) {
      const std::string number = std::to_string(random() % 7);
      make_folder(scratch.path("save-" + std::string(random() % 4, '0') + number + "-step-" + std::to_string(i)));
    }
    const auto found = checkpoints_in(scratch.path(""));
    ASSERT_EQ(found.size(), static_cast<size_t>(count));
    for (size_t i = 1; i < found.size(); ++i) {
      EXPECT_LT(std::pair(found[i - 1].number, found[i - 1].path), std::pair(found[i].number, found[i].path));
    }
  }
}

TEST(Folder, TakesNoNumberThatHasNoNext) {
  Scratch scratch;
  const int64_t most = std::numeric_limits<int64_t>::max();
  const std::vector<std::string> names = {"save-" + std::to_string(most) + "-step-1",
                                          "save-9223372036854775808-step-1",
                                          "save-step-1",
                                          "save--step-",
                                          "save-1-step-9223372036854775808",
                                          "save-1-step-1-step-2",
                                          "save-0x1-step-1",
                                          "save- 1-step-1"};
  for (const std::string& name : names) {
    make_folder(scratch.path(name));
  }
  EXPECT_TRUE(checkpoints_in(scratch.path("")).empty());
  make_folder(scratch.path("save-" + std::to_string(most - 1) + "-step-" + std::to_string(most)));
  const auto found = checkpoints_in(scratch.path(""));
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].number, most - 1);
  EXPECT_EQ(found[0].step, most);
}

TEST(Folder, KeepsAsManyAsItIsToldAndNeverTheOldestInstead) {
  for (int64_t keep = 0; keep <= 6; ++keep) {
    Scratch scratch;
    Writer writer(scratch.path("root"));
    for (int64_t step = 1; step <= 4; ++step) commit(writer, step);
    commit(writer, 5, keep);
    const auto left = checkpoints_in(scratch.path("root"));
    ASSERT_EQ(left.size(), static_cast<size_t>(keep == 0 ? 5 : std::min<int64_t>(keep, 5))) << keep;
    for (size_t i = 0; i < left.size(); ++i) EXPECT_EQ(left[left.size() - 1 - i].step, 5 - static_cast<int64_t>(i));
    EXPECT_EQ(names_in(scratch.path("root")).size(), left.size() + 1) << "but for the lock, nothing else remains";
  }
}

// Whichever of the earlier ones are whole: what was damaged counts as one of them, and goes as they do.
TEST(Folder, KeepsAsManyWhicheverAreDamaged) {
  for (const int damaged : {0b0001, 0b1000, 0b0110, 0b1111}) {
    for (const int64_t keep : {1, 3}) {
      Scratch scratch;
      Writer writer(scratch.path("root"));
      for (int64_t step = 1; step <= 4; ++step) {
        const std::string path = commit(writer, step);
        if ((damaged >> (step - 1) & 1) != 0) std::filesystem::remove(path + "/" + kManifest);
      }
      const std::string newest = commit(writer, 5, keep);
      const auto left = checkpoints_in(scratch.path("root"));
      ASSERT_EQ(left.size(), static_cast<size_t>(keep)) << damaged;
      for (size_t i = 0; i < left.size(); ++i) EXPECT_EQ(left[left.size() - 1 - i].step, 5 - static_cast<int64_t>(i));
      EXPECT_EQ(newest_of(scratch.path("root")), newest);
    }
  }
}

TEST(Folder, IsNoCheckpointAndLiesInNone) {
  Scratch scratch;
  std::string path;
  {
    Writer writer(scratch.path("root"));
    path = commit(writer, 3);
  }
  const auto before = names_in(path);
  EXPECT_EQ(refused([&] { Writer writer(path); }),
            "'" + path + "' is a checkpoint itself; name the folder that it lies in");
  EXPECT_EQ(names_in(path), before);
  const std::string above = std::filesystem::canonical(path).string();
  for (const char* name : {"/deeper", "/deeper/down", "/deeper/down/save-00000001-step-1"}) {
    EXPECT_EQ(refused([&] { Writer writer(path + name); }),
              "'" + path + name + "' lies in the checkpoint '" + above + "', which is nobody's to write to");
  }
  // By its own name or by a link's.
  std::filesystem::create_symlink(path, scratch.path("link"));
  EXPECT_THAT(refused([&] { Writer writer(scratch.path("link/other")); }), HasSubstr("lies in the checkpoint"));
  // A folder that merely has such a name, or such a file, is nobody's checkpoint.
  make_folder(scratch.path("save-00000001-step-1"));
  EXPECT_EQ(refused([&] { Writer writer(scratch.path("save-00000001-step-1/runs")); }), "");
  make_folder(scratch.path("archive"));
  scratch.write(std::string("archive/") + kManifest, "{}");
  EXPECT_EQ(refused([&] { Writer writer(scratch.path("archive/runs")); }), "");
}

TEST(Folder, WithoutACompleteCheckpointSaysOfEachWhyNot) {
  Scratch scratch;
  EXPECT_EQ(refused([&] { newest_of(scratch.path("absent")); }),
            "there is no complete checkpoint in '" + scratch.path("absent") + "': there is no such folder");
  Writer writer(scratch.path("root"));
  EXPECT_EQ(refused([&] { newest_of(scratch.path("root")); }),
            "there is no complete checkpoint in '" + scratch.path("root") + "'");
  const std::string first = commit(writer, 1), second = commit(writer, 2), third = commit(writer, 3);
  EXPECT_EQ(newest_of(scratch.path("root")), third);
  EXPECT_EQ(newest_of(first), first);
  std::filesystem::remove(third + "/" + kManifest);
  std::vector<std::string> skipped;
  EXPECT_EQ(newest_of(scratch.path("root"), &skipped), second);
  EXPECT_THAT(skipped, ElementsAre(StartsWith("cannot open '" + third)));
  std::filesystem::resize_file(second + "/" + kManifest, 20);
  scratch.write("root/save-00000001-step-1/" + std::string(kManifest), "{}");
  skipped.clear();
  const std::string said = refused([&] { newest_of(scratch.path("root"), &skipped); });
  ASSERT_EQ(skipped.size(), 3u) << "the newest first";
  EXPECT_EQ(said, "there is no complete checkpoint in '" + scratch.path("root") + "'; " + skipped[0] + "; " +
                      skipped[1] + "; " + skipped[2]);
  EXPECT_THAT(skipped[1], AllOf(HasSubstr("the manifest of '" + second + "'"), Not(HasSubstr("plumb: "))));
  EXPECT_THAT(skipped[2], HasSubstr("the manifest of '" + first + "'"));
}

TEST(Folder, ThatVanishedIsMadeAgainByTheNextCheckpoint) {
  Scratch scratch;
  const std::string root = scratch.path("root");
  Writer writer(root);
  std::filesystem::remove_all(root);
  EXPECT_EQ(commit(writer, 1), root + "/save-00000001-step-1");
  writer.abandon();  // nothing is being written: nothing goes
  EXPECT_EQ(commit(writer, 2), root + "/save-00000002-step-2");
  EXPECT_EQ(checkpoints_in(root).size(), 2u);
}

// Its lock has gone with it: whoever makes it again has it alone, the first one or another.
TEST(Folder, ThatVanishedBelongsToWhoeverWritesToItNext) {
  Scratch scratch;
  const std::string root = scratch.path("root");
  const auto another = testing::HasSubstr("another run writes checkpoints into '" + root);
  Writer writer(root);
  std::filesystem::remove_all(root);
  commit(writer, 1);
  EXPECT_THAT(refused([&] { const Writer other(root); }), another);
  std::filesystem::rename(root, scratch.path("elsewhere"));
  {
    Writer other(root);
    EXPECT_THAT(refused([&] { writer.begin(); }), another);
    commit(other, 2);
  }
  EXPECT_EQ(commit(writer, 3), root + "/save-00000002-step-3");
}

// A process that was forked (a worker of a data loader) has the lock's file open: the lock is its parent's all the same.
TEST(Folder, IsItsWritersWhateverAForkedProcessDoes) {
  Scratch scratch;
  const std::string root = scratch.path("root");
  auto writer = std::make_unique<Writer>(root);
  const pid_t leaving = ::fork();
  if (leaving == 0) {
    ::alarm(60);
    writer.reset();
    ::_exit(7);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(leaving, &status, 0), leaving);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
  EXPECT_THAT(refused([&] { const Writer other(root); }), HasSubstr("another run writes checkpoints into '" + root));
  const pid_t staying = ::fork();
  if (staying == 0) {
    ::alarm(60);
    for (;;) ::pause();
  }
  writer.reset();
  EXPECT_EQ(refused([&] { const Writer other(root); }), "");
  ::kill(staying, SIGKILL);
  ::waitpid(staying, nullptr, 0);
}

}  // namespace
}  // namespace plumb::save
