// A save that ends, or fails, at each of its system calls leaves the old checkpoint or the new one, whole.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <memory>

#include "save/checkpoint.h"
#include "save/file.h"
#include "save/folder.h"
#include "save/support/calls.h"
#include "save/support/folder.h"
#include "save/support/trained.h"

namespace plumb {
namespace {

using namespace test;
using calls::Fault;

// A run with one checkpoint in its folder, about to make the next.
struct SavedRun {
  SavedRun() : engine(World(), model, AdamW{}) {
    train(engine, model, 1);
    engine.save(root);
    old.add(engine);
    train(engine, model, 1);
    now.add(engine);
  }
  // The newest checkpoint is the old or the new one, whole, and another one can be made.
  void check(bool must_be_new) {
    Model other(7);
    Engine reader(World(), other, AdamW{});
    reader.load(root);
    Everything found;
    found.add(reader);
    const bool is_new = now.difference(found).empty();
    EXPECT_TRUE(is_new || (!must_be_new && old.difference(found).empty()));
  }
  Scratch scratch;
  std::string root = scratch.path("root");
  Model model{3};
  Engine engine;
  Everything old, now;
};

enum class Save { at_once, in_background };

// A run of its own process, which ends at the `number`th call of its second save, or after it: whether it came to its end.
bool ends_well(const std::string& root, int ranks, Save how, int number) {
  // Everything happens in a child: it holds the folder's lock until it dies.
  const pid_t child = fork();
  if (child == 0) {
    at::set_num_threads(1);  // libtorch makes its pool again after a fork, and not in two threads at once
    const auto texts = errors(ranks, [&](World world) {
      Model model(3);
      Engine engine(world, model, AdamW{}, {.strategy = ranks > 1 ? "zero2" : "ddp"});
      train(engine, model, 1);
      engine.save(root);
      train(engine, model, 1);
      if (world.rank() == 0) calls::watch(root, Fault::kill, number);
      world.barrier();
      if (how == Save::at_once) {
        engine.save(root, {.keep = 1});
      } else {
        engine.save_in_background(root, {.keep = 1});
        engine.finish_save();
      }
      world.barrier();
      if (world.rank() == 0) _exit(0);
      for (;;) pause();
    });
    for (const std::string& text : texts) std::fprintf(stderr, "a rank ended: %s\n", text.c_str());
    _exit(3);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
  return WIFEXITED(status);
}

void kill_at_every_call(int ranks, Save how) {
  // What it should be.
  Everything old, now;
  Model model(3);
  Engine engine(World(), model, AdamW{});
  train(engine, model, 1);
  old.add(engine);
  train(engine, model, 1);
  now.add(engine);
  int calls_of_a_save = 0;
  bool completed = false;
  for (int number = 1; !completed; ++number) {
    ASSERT_LT(number, 500);
    SCOPED_TRACE(c10::str("killed at call ", number));
    const Scratch scratch;
    const std::string root = scratch.path("root");
    completed = ends_well(root, ranks, how, number);
    calls_of_a_save = number;
    Model other(7);
    Engine reader(World(), other, AdamW{});
    reader.load(root);
    Everything found;
    found.add(reader);
    // What has a checkpoint's name is complete.
    for (const save::Named& named : save::checkpoints_in(root)) {
      EXPECT_NO_THROW(save::Checkpoint(named.path)) << named.path;
    }
    const bool is_new = now.difference(found).empty(), is_old = old.difference(found).empty();
    EXPECT_TRUE(completed ? is_new : is_new || is_old);
    // The next run goes on where this one ended.
    EXPECT_NO_THROW(reader.save(root, {.keep = 1}));
    EXPECT_EQ(save::names_in(root).size(), 2u) << "only the lock and one checkpoint stay";
  }
  EXPECT_GT(calls_of_a_save, 15);
}

TEST(Faults, KillAtEverySystemCallLeavesOneWhole) { kill_at_every_call(1, Save::at_once); }

TEST(Faults, KillAtEverySystemCallOfABackgroundSaveLeavesOneWhole) { kill_at_every_call(1, Save::in_background); }

// Both ranks die, wherever each of them is.
TEST(Faults, KillAtEverySystemCallOfTwoRanksLeavesOneWhole) { kill_at_every_call(2, Save::in_background); }

TEST(Faults, AnyFailingCallLeavesOneWholeAndTrainingGoesOn) {
  SavedRun run;
  calls::watch(run.root);
  run.engine.save(run.root);
  const int count = calls::stop();
  ASSERT_GT(count, 15);
  for (const int error : {EIO, ENOSPC, EACCES, 0}) {
    const Fault fault = error == 0 ? Fault::short_write : Fault::error;
    for (int number = 1; number <= count + 6; ++number) {
      SCOPED_TRACE(c10::str("call ", number, " fails with ", error));
      SavedRun one;
      calls::watch(one.root, fault, number, error);
      bool saved = false;
      try {
        one.engine.save(one.root, {.keep = 1});
        saved = true;
      } catch (const Error& thrown) {
        EXPECT_THAT(thrown.what(), testing::HasSubstr("save() failed: "));
      }
      calls::stop();
      EXPECT_TRUE(saved || fault == Fault::error);
      one.check(saved);
      Everything after;
      after.add(one.engine);
      EXPECT_EQ(one.now.difference(after), "");
      if (number % 5 != 0) continue;  // the rest is the same for each
      one.engine.save(one.root, {.keep = 1});
      one.check(true);
      train(one.engine, one.model, 1);
    }
  }
}

// One engine saves again and again, and each time the next call of the `struck` rank fails, until it has none left.
void fail_at_every_call(int ranks, int struck, Save how) {
  const Scratch scratch;
  const std::string root = scratch.path("root");
  const auto whose = [struck](const std::string& path) {
    return (path.find("-00001-of-") != path.npos) == (struck == 1);
  };
  std::shared_ptr<Everything> now, disk = std::make_shared<Everything>();
  std::vector<std::string> told(ranks);
  bool came = false;
  int calls_of_a_save = 0, failures = 0;
  const auto ends = errors(ranks, [&](World world) {
    const bool first = world.rank() == 0;
    Model model(3);
    Engine engine(world, model, AdamW{}, {.strategy = ranks > 1 ? "zero2" : "ddp"});
    train(engine, model, 1);
    engine.save(root);
    disk->add(engine);
    for (const int error : {EIO, ENOSPC, EACCES, 0}) {
      const Fault fault = error == 0 ? Fault::short_write : Fault::error;
      for (int number = 1;; ++number) {
        SCOPED_TRACE(c10::str("call ", number, " of rank ", struck, " fails with ", error));
        train(engine, model, 1);
        if (first) now = std::make_shared<Everything>();
        world.barrier();
        now->add(engine);
        Everything before, after;
        before.add(engine);
        if (first) calls::watch(root, fault, number, error, whose);
        world.barrier();
        std::string& mine = told[world.rank()] = "";
        const auto hear = [&](const std::function<void()>& call) {
          try {
            call();
          } catch (const SaveError& failure) {
            mine = failure.what();
          }
        };
        bool stepped = false;
        if (how == Save::at_once) {
          hear([&] { engine.save(root, {.keep = 1}); });
        } else {
          hear([&] { engine.save_in_background(root, {.keep = 1}); });
          if (stepped = mine.empty() && number % 2 == 0; stepped) {
            const int64_t steps = engine.steps();
            hear([&] { train(engine, model, 1); });
            EXPECT_EQ(engine.steps(), mine.empty() ? steps + 1 : steps);
            if (!mine.empty()) engine.step();  // it has done nothing, and can be taken
            engine.zero_grad();
          }
          if (mine.empty()) hear([&] { engine.finish_save(); });
        }
        after.add(engine);
        if (!stepped) {
          EXPECT_EQ(before.difference(after), "");
        }
        world.barrier();
        if (first) {
          came = calls::struck();
          calls::stop();
          for (const std::string& text : told) {
            EXPECT_EQ(text.empty(), mine.empty()) << text;
            if (text.empty()) continue;
            EXPECT_THAT(text, testing::HasSubstr(ranks > 1 ? c10::str("save() failed on rank ", struck, ": cannot ")
                                                           : "save() failed: cannot "));
          }
          EXPECT_TRUE(mine.empty() || (came && fault == Fault::error));
          failures += !mine.empty();
          calls_of_a_save = number;
          for (const save::Named& named : save::checkpoints_in(root)) {
            EXPECT_NO_THROW(save::Checkpoint(named.path)) << named.path;
          }
          Model other(7);
          Engine reader(World(), other, AdamW{});
          reader.load(root);
          const auto found = std::make_shared<Everything>();
          found->add(reader);
          EXPECT_TRUE(now->difference(*found).empty() || (!mine.empty() && disk->difference(*found).empty()));
          disk = found;
        }
        world.barrier();
        if (!came || number > 500) break;
      }
    }
    EXPECT_NO_THROW(engine.save(root, {.keep = 1}));
  });
  for (const std::string& text : ends) EXPECT_EQ(text, "none");
  EXPECT_GT(calls_of_a_save, 15);
  EXPECT_GT(failures, calls_of_a_save * 2) << "most of them cannot be done without, whatever the error";
  EXPECT_EQ(save::names_in(root).size(), 2u) << "only the lock and one checkpoint stay";
}

TEST(Faults, AnyFailingCallOfABackgroundSaveIsToldAndTrainingGoesOn) { fail_at_every_call(1, 0, Save::in_background); }

TEST(Faults, AnyFailingCallOfOneOfTwoRanksIsToldToBoth) {
  for (const int struck : {0, 1}) {
    for (const Save how : {Save::at_once, Save::in_background}) {
      SCOPED_TRACE(how == Save::at_once ? "at once" : "in the background");
      fail_at_every_call(2, struck, how);
    }
  }
}

// Whoever reads fails, and nobody has changed anything.
TEST(Faults, AnyFailingCallOfALoadIsAnErrorOnEveryRankAndChangesNothing) {
  const Scratch scratch;
  const std::string root = scratch.path("root");
  std::string path;
  Everything saved, loaded;
  bool came = true;
  int calls_of_a_load = 0, failures = 0;
  const auto ends = errors(2, [&](World world) {
    const bool first = world.rank() == 0;
    Model model(3), other(7);
    Engine writer(world, model, AdamW{}, {.strategy = "zero3"});
    train(writer, model, 2);
    const std::string written = writer.save(root);
    saved.add(writer);
    if (first) path = written;
    Engine engine(world, other, AdamW{}, {.strategy = "zero2"});
    for (int number = 1; came; ++number) {
      ASSERT_LT(number, 500);
      SCOPED_TRACE(c10::str("call ", number, " fails"));
      train(engine, other, 1);
      Everything before, after;
      before.add(engine);
      if (first) calls::watch(root, Fault::error, number, number % 2 == 0 ? EIO : EACCES);
      world.barrier();
      std::string told;
      try {
        engine.load(path);
      } catch (const Error& failure) {
        told = failure.what();
      }
      after.add(engine);
      EXPECT_THAT(told, testing::AnyOf("", testing::HasSubstr("load() failed on rank ")));
      EXPECT_EQ(before.difference(after).empty(), !told.empty());
      world.barrier();
      if (first) {
        came = calls::struck();
        calls_of_a_load = calls::stop();
        failures += !told.empty();
      }
      world.barrier();
    }
    loaded.add(engine);
  });
  for (const std::string& text : ends) EXPECT_EQ(text, "none");
  EXPECT_EQ(saved.difference(loaded), "");
  EXPECT_GT(failures, 15);
  EXPECT_GT(calls_of_a_load, 30);
}

// A disk tells of an error once: whoever hears of it must not go on.
TEST(Faults, AnErrorOfTheDiskIsHeardWhereverItIsTold) {
  SavedRun run;
  calls::watch(run.root);
  run.engine.save(run.root);
  calls::stop();
  const int number = calls::first_flush();
  ASSERT_GT(number, 0);
  for (const auto& [error, fails] : {std::pair(EIO, true), std::pair(ENOSPC, true), std::pair(EINVAL, false)}) {
    SavedRun one;
    calls::watch(one.root, Fault::error, number, error);
    const std::string said = errors(1, [&](World) { one.engine.save(one.root); })[0];
    calls::stop();
    EXPECT_THAT(said, fails ? testing::HasSubstr("cannot bring to the disk") : testing::HasSubstr("none"));
    one.check(!fails);
  }
}

// Some file systems have nothing to sync in a folder; whatever else a disk says there is an error.
TEST(Faults, AFolderThatHasNothingToSyncIsOnTheDisk) {
  const Scratch scratch;
  const std::string folder = scratch.path("folder");
  save::make_folder(folder);
  const auto synced = [&](int error) -> std::string {
    std::string said = "well";
    calls::watch(folder, calls::Fault::error, error != 0 ? 2 : 0, error);  // the one behind the opening
    try {
      save::sync_folder(folder);
    } catch (const Error& failure) {
      said = failure.what();
    }
    calls::stop();
    return said;
  };
  EXPECT_EQ(synced(EINVAL), "well");
  EXPECT_THAT(synced(EIO), testing::HasSubstr("cannot bring to the disk the folder '" + folder));
  // A program that closed its standard input opens its next file under that number.
  const int before = dup(0);
  close(0);
  EXPECT_EQ(synced(0), "well");
  std::string said = "well";
  try {
    save::NewFile file(folder + "/file");
    file.write("bytes", 5);
    errno = ENOSPC;  // of before: it says nothing of this file
    file.flush();
    file.finish();
    const save::OldFile again(folder + "/file");
    char bytes[5];
    again.read(0, bytes, 5);
    EXPECT_EQ(std::string(bytes, 5), "bytes");
  } catch (const Error& failure) {
    said = failure.what();
  }
  dup2(before, 0);
  close(before);
  EXPECT_EQ(said, "well");
}

TEST(Faults, NothingIsNamedOrRemovedBeforeItIsSafe) {
  SavedRun run;
  calls::watch(run.root);
  run.engine.save(run.root, {.keep = 1});
  calls::stop();
  EXPECT_EQ(calls::unsafe(), "");
  EXPECT_EQ(calls::not_synced(), "");
}

// The first checkpoint lies in folders that nobody made before: their own names must outlast the machine, too.
TEST(Faults, ANewFoldersNameIsOnTheDiskBeforeItsCheckpointGetsOne) {
  Model model(3);
  Engine engine(World(), model, AdamW{});
  train(engine, model, 1);
  bool completed = false;
  for (int number = 0; !completed || number == 1; ++number) {  // 0: none fails
    SCOPED_TRACE(c10::str("call ", number, " fails"));
    const Scratch scratch;
    const std::string above = std::filesystem::path(scratch.path("below")).parent_path().string();
    const std::string root = scratch.path("new/newer/newest");
    calls::watch(above, Fault::error, number, EIO);
    completed = errors(1, [&](World) { engine.save(root); })[0] == "none";
    calls::stop();
    EXPECT_EQ(calls::unsafe(), "");
    EXPECT_TRUE(number != 0 || completed);
    if (completed) {
      EXPECT_EQ(calls::not_synced(), "");
    }
    for (std::string made = root; made != above; made = std::filesystem::path(made).parent_path().string()) {
      const std::string holder = std::filesystem::path(made).parent_path().string();
      EXPECT_TRUE(!save::is_folder(made) ||
                  ("\n" + calls::not_synced()).find("\n" + holder + "\n") == std::string::npos)
          << made << " stays though its name is not on the disk";
    }
    EXPECT_NO_THROW(engine.save(root));
    EXPECT_NO_THROW(save::Checkpoint(save::newest_of(root)));
  }
}

TEST(Faults, AFolderIsMadeHoweverItsPathIsSpelled) {
  const Scratch scratch;
  for (const char* path : {"a/b/", "./c", "d/../e", "f//g/./h", "a/b/i"}) {
    save::make_folder(scratch.path(path));
    EXPECT_TRUE(save::is_folder(scratch.path(path))) << path;
  }
  const std::string before = std::filesystem::current_path().string();
  std::filesystem::current_path(scratch.path("a"));
  // By one name, or by several: each new one is on the disk.
  for (const char* path : {"here", "below/here", "./there", "below/../other/"}) {
    const std::string first = *std::filesystem::path(path).begin();
    calls::watch(first);
    save::make_folder(path);
    calls::stop();
    EXPECT_EQ(calls::not_synced(), "") << path;
  }
  std::filesystem::current_path(before);
  EXPECT_TRUE(save::is_folder(scratch.path("a/here")) && save::is_folder(scratch.path("a/below/here")));
  EXPECT_THROW(save::make_folder(""), Error);
}

TEST(Faults, AVanishedFolderIsAnErrorAndTheNextSaveMakesItAgain) {
  SavedRun run;
  std::filesystem::remove_all(run.root);
  EXPECT_NO_THROW(run.engine.save(run.root));
  Scratch::write_file(run.scratch.path("file"), "x");
  EXPECT_THROW(run.engine.save(run.scratch.path("file")), Error);
  EXPECT_THROW(run.engine.save(run.scratch.path("file/below")), Error);
  EXPECT_NO_THROW(run.engine.save(run.root));
  run.check(true);
}

TEST(Faults, TwoRunsCannotWriteOneFolder) {
  SavedRun run;
  Model other(5);
  Engine second(World(), other, AdamW{});
  EXPECT_THAT(errors(1, [&](World) { second.save(run.root); })[0],
              testing::HasSubstr("another run writes checkpoints"));
  run.check(false);
}

}  // namespace
}  // namespace plumb
