// Checkpoints without an engine: any shares of any tensors, written in any parts, read in any ranges; files that are larger
// than one call or one look; and what a folder of checkpoints calls its own.
#include "save/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <random>

#include "save/new_checkpoint.h"
#include "save/support/folder.h"
#include "save/support/refused.h"
#include "save/xxh3.h"

namespace plumb::save {
namespace {

using test::refused;
using test::Scratch;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

std::string random_bytes(size_t count, std::mt19937_64& random) {
  std::string bytes(count, '\0');
  for (size_t at = 0; at < count; at += 8) {
    const uint64_t word = random();
    std::memcpy(bytes.data() + at, &word, std::min<size_t>(8, count - at));
  }
  return bytes;
}

struct Content {
  SavedTensor tensor;
  std::string bytes;
};

// A few small tensors, and one that is read in several looks.
std::vector<Content> some_tensors(std::mt19937_64& random) {
  std::vector<Content> all;
  const auto add = [&](Kind kind, const std::string& name, const std::string& dtype, std::vector<int64_t> shape,
                       std::vector<int64_t> strides = {}) {
    SavedTensor tensor;
    tensor.kind = kind;
    tensor.name = name;
    tensor.key = kind == Kind::weight ? "" : "mean";
    tensor.dtype = dtype;
    tensor.shape = std::move(shape);
    tensor.strides = std::move(strides);
    const auto count = static_cast<size_t>(tensor.numel()) * element_bytes(dtype);
    all.push_back({tensor, random_bytes(count, random)});
  };
  add(Kind::weight, "small", "F32", {3, 5});
  add(Kind::weight, "turned", "BF16", {3, 5}, {1, 3});
  add(Kind::optimizer, "small", "F64", {3, 5});
  add(Kind::extra, "single", "U8", {});
  add(Kind::weight, "none", "F32", {4, 0});
  add(Kind::weight, "large", "F16", {1201, 1300});  // almost 3 MiB
  return all;
}

std::string saved(const std::string& root, const std::vector<Content>& all, int files, std::mt19937_64& random) {
  NewCheckpoint made(root);
  const auto below = [&](int64_t bound) { return static_cast<int64_t>(random() % static_cast<uint64_t>(bound)); };
  std::map<const Content*, int64_t> done;
  for (int file = 0; file < files; ++file) {
    std::vector<Share> shares;
    std::vector<const Content*> whose;
    for (const Content& each : all) {
      const int64_t begin = done[&each], left = each.tensor.numel() - begin;
      const bool last = file + 1 == files;
      const int64_t end = last ? each.tensor.numel() : begin + (left > 0 && below(3) > 0 ? below(left + 1) : 0);
      // An empty tensor has one share, the last; no other share is empty.
      if (begin == end && !(last && each.tensor.numel() == 0)) continue;
      shares.push_back({each.tensor, begin, end});
      whose.push_back(&each);
      done[&each] = end;
    }
    made.add_file("part-" + std::to_string(file), shares, [&](size_t i, const NewCheckpoint::Write& write) {
      const size_t each = element_bytes(shares[i].tensor.dtype);
      size_t at = static_cast<size_t>(shares[i].begin) * each;
      const size_t end = static_cast<size_t>(shares[i].end) * each;
      while (at < end) {
        const size_t count = std::min<size_t>(end - at, 1 + random() % (2 << 20));
        write(whose[i]->bytes.data() + at, count);
        at += count;
      }
    });
  }
  made.manifest().step = 4;
  return made.commit();
}

TEST(CheckpointProperty, AnyRangeIsReadAsItWasWritten) {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    Scratch scratch;
    const std::vector<Content> all = some_tensors(random);
    const Checkpoint found(saved(scratch.path("root"), all, 1 + static_cast<int>(seed % 4), random));
    EXPECT_EQ(found.manifest().step, 4);
    ASSERT_EQ(found.manifest().tensors.size(), all.size());
    for (const Content& each : all) {
      const SavedTensor* tensor = found.manifest().find(each.tensor.kind, each.tensor.name, each.tensor.key);
      ASSERT_NE(tensor, nullptr);
      EXPECT_EQ(tensor->shape, each.tensor.shape);
      EXPECT_EQ(tensor->strides, each.tensor.strides);
      EXPECT_NO_THROW(found.verify(*tensor));
      const int64_t size = static_cast<int64_t>(element_bytes(tensor->dtype)), numel = tensor->numel();
      std::vector<std::pair<int64_t, int64_t>> ranges = {{0, numel}, {0, 0}};
      for (const Part& part : tensor->parts) ranges.emplace_back(part.begin, part.end);
      for (int i = 0; i < 8; ++i) {
        int64_t a = static_cast<int64_t>(random() % (numel + 1)), b = static_cast<int64_t>(random() % (numel + 1));
        ranges.emplace_back(std::min(a, b), std::max(a, b));
      }
      for (const auto& [begin, end] : ranges) {
        // Eight bytes before and behind are nobody's.
        std::string memory(static_cast<size_t>((end - begin) * size) + 16, '?');
        found.read(*tensor, begin, end, memory.data() + 8);
        EXPECT_TRUE(memory.substr(0, 8) == "????????" && memory.substr(memory.size() - 8) == "????????");
        EXPECT_TRUE(memory.substr(8, memory.size() - 16) ==
                    each.bytes.substr(static_cast<size_t>(begin * size), static_cast<size_t>((end - begin) * size)))
            << tensor->title() << " [" << begin << ", " << end << ")";
      }
    }
  }
}

TEST(CheckpointProperty, AChangedByteIsFoundByWhoeverReadsItsPartAndByNobodyElse) {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    Scratch scratch;
    const std::vector<Content> all = some_tensors(random);
    const std::string path = saved(scratch.path("root"), all, 3, random);
    const Manifest manifest = Checkpoint(path).manifest();
    // Some byte of some tensor of some file, its last one now and then.
    const auto file = static_cast<int64_t>(random() % 3);
    const std::string name = path + "/" + manifest.files[static_cast<size_t>(file)].name;
    const TensorFile tensors(name);
    std::vector<TensorInFile> filled;
    for (const TensorInFile& each : tensors.tensors()) {
      if (each.end > each.begin) filled.push_back(each);
    }
    if (filled.empty()) continue;
    const TensorInFile& hit = filled[random() % filled.size()];
    std::string bytes = Scratch::read_file(name);
    const size_t data = bytes.size() - tensors.tensors().back().end;
    const size_t offset = seed % 3 == 0 ? hit.end - hit.begin - 1 : random() % (hit.end - hit.begin);
    bytes[data + hit.begin + offset] = static_cast<char>(bytes[data + hit.begin + offset] ^ 1);
    Scratch::write_file(name, bytes);

    const Checkpoint found(path);
    for (const SavedTensor& tensor : found.manifest().tensors) {
      bool damaged = false;
      for (const Part& part : tensor.parts) {
        const bool here = part.file == file && tensor.in_file() == hit.name;
        damaged = damaged || here;
        if (part.begin == part.end) continue;
        std::string one(element_bytes(tensor.dtype), '\0');
        const std::string said = refused([&] { found.read(tensor, part.end - 1, part.end, one.data()); });
        if (here) {
          EXPECT_THAT(said, HasSubstr(tensor.title() + " of '" + name + "' was damaged: the checksum of elements [" +
                                      std::to_string(part.begin) + ", " + std::to_string(part.end) + ")"));
        } else {
          EXPECT_EQ(said, "");
        }
      }
      EXPECT_EQ(refused([&] { found.verify(tensor); }).empty(), !damaged) << tensor.title();
    }
  }
}

TEST(NewCheckpoint, TakesNoMoreAndNoLessThanAShapeSays) {
  Scratch scratch;
  SavedTensor tensor;
  tensor.name = "w";
  tensor.dtype = "F32";
  tensor.shape = {4};
  for (const size_t bytes : {size_t{12}, size_t{17}, size_t{20}}) {
    NewCheckpoint made(scratch.path("root"));
    const std::string said = refused([&] {
      made.add_file("a", {{tensor, 0, 4}}, [&](size_t, const NewCheckpoint::Write& write) {
        for (size_t i = 0; i < bytes; ++i) write("x", 1);
      });
    });
    EXPECT_EQ(said, bytes < 16 ? "weight 'w' has 12 bytes; its shape says 16"
                               : "weight 'w' has more bytes than its shape says");
  }
  {
    NewCheckpoint made(scratch.path("root"));
    made.add_file("a", {{tensor, 0, 3}}, [](size_t, const NewCheckpoint::Write& write) { write("123456789012", 12); });
    EXPECT_THAT(refused([&] { made.commit(); }), HasSubstr("has 3 of its 4 elements"));
  }
  EXPECT_THAT(names_in(scratch.path("root")), ElementsAre(".lock")) << "nothing remains of one that was not committed";
}

// Whoever reads the file by its header alone takes the bytes to lie in the order of the shape.
TEST(NewCheckpoint, SaysAShapeOnlyWhereItsBytesLieInItsOrder) {
  Scratch scratch;
  std::mt19937_64 random(5);
  const std::string path = saved(scratch.path("root"), some_tensors(random), 1, random);
  const Manifest manifest = Checkpoint(path).manifest();
  const TensorFile file(path + "/part-0");
  int turned = 0;
  for (const SavedTensor& tensor : manifest.tensors) {
    turned += tensor.strides.empty() ? 0 : 1;
    EXPECT_EQ(file.find(tensor.in_file())->shape,
              tensor.strides.empty() ? tensor.shape : std::vector<int64_t>{tensor.numel()})
        << tensor.title();
  }
  EXPECT_GT(turned, 0);
}

TEST(CheckpointProperty, MustBeTheFilesOfItsManifest) {
  Scratch scratch;
  std::mt19937_64 random(5);
  const std::string path = saved(scratch.path("root"), some_tensors(random), 1, random);
  const std::string good = Scratch::read_file(path + "/part-0");
  const Manifest manifest = Checkpoint(path).manifest();
  const auto said = [&](const std::function<void(Manifest&, std::string&)>& edit) {
    Manifest changed = manifest;
    std::string bytes = good;
    edit(changed, bytes);
    Scratch::write_file(path + "/part-0", bytes);
    Scratch::write_file(path + "/" + kManifest, changed.write());
    return refused([&] { Checkpoint{path}; });
  };
  EXPECT_EQ(said([](Manifest&, std::string&) {}), "");
  EXPECT_THAT(said([](Manifest& m, std::string&) { m.files[0].bytes += 1; }),
              HasSubstr("its length or its header differ"));
  EXPECT_THAT(said([](Manifest& m, std::string&) { m.files[0].header += 1; }),
              HasSubstr("its length or its header differ"));
  EXPECT_THAT(said([](Manifest& m, std::string&) { m.tensors[0].name = "other"; }),
              HasSubstr("is in the manifest and not in the file"));
  EXPECT_THAT(said([](Manifest& m, std::string&) { m.tensors[0].dtype = "I32"; }),
              HasSubstr("another dtype or length"));
  EXPECT_THAT(said([](Manifest& m, std::string&) { m.tensors[0].shape = {5, 3}; }),
              HasSubstr("another dtype or length"));
  EXPECT_THAT(said([](Manifest& m, std::string&) {  // the whole of it in the place of a part
                const Part whole = m.tensors[0].parts[0];
                m.tensors[0].parts = {{whole.file, 0, 1, whole.checksum}, {whole.file, 1, whole.end, whole.checksum}};
              }),
              HasSubstr("another dtype or length"));
  EXPECT_THAT(said([](Manifest& m, std::string&) {
                m.tensors[1] = m.tensors[0];
                m.tensors[1].kind = Kind::buffer;  // of the same name in the file
              }),
              HasSubstr("is claimed twice by the manifest"));
  EXPECT_THAT(said([](Manifest& m, std::string&) { m.tensors.erase(m.tensors.begin() + 1); }),
              HasSubstr("tensor 'turned' of '" + path + "/part-0' is not in the manifest"));
  EXPECT_THAT(said([](Manifest& m, std::string&) { m.tensors.clear(); }), HasSubstr("is not in the manifest"));
  EXPECT_THAT(refused([&] { Checkpoint{scratch.path("absent")}; }), HasSubstr("is no folder of a checkpoint"));
}

// --- files

TEST(Files, LargerThanOneCallAreWrittenAndReadWhole) {
  Scratch scratch;
  std::mt19937_64 random(3);
  const std::string bytes = random_bytes((20 << 20) + 13, random);
  Xxh3 checksum;
  {
    NewFile file(scratch.path("x"));
    file.write(bytes.data(), 5);
    file.write(bytes.data() + 5, (18 << 20) - 5, checksum);
    file.write(bytes.data() + (18 << 20), bytes.size() - (18 << 20));
    file.flush();
    file.finish();
  }
  EXPECT_EQ(checksum.value(), xxh3(bytes.data() + 5, (18 << 20) - 5));
  EXPECT_TRUE(Scratch::read_file(scratch.path("x")) == bytes);
  const OldFile file(scratch.path("x"));
  EXPECT_EQ(file.bytes(), bytes.size());
  EXPECT_EQ(file.path(), scratch.path("x"));
  for (const auto& [begin, count] :
       {std::pair<size_t, size_t>(0, bytes.size()), {3, 17 << 20}, {bytes.size() - 9, 9}, {7, 0}}) {
    std::string memory(count + 2, '?');
    file.read(begin, memory.data() + 1, count);
    EXPECT_TRUE(memory == "?" + bytes.substr(begin, count) + "?") << begin;
  }
  std::string memory(10, '\0');
  EXPECT_THAT(refused([&] { file.read(bytes.size() - 9, memory.data(), 10); }),
              HasSubstr("ends before byte " + std::to_string(bytes.size() + 1)));
  EXPECT_THAT(refused([&] { NewFile again(scratch.path("x")); }), HasSubstr("cannot create"));
}

TEST(Files, AreAllClosedInTheEnd) {
  const auto open = [] {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return std::distance(std::filesystem::begin(all), std::filesystem::end(all));
  };
  Scratch scratch;
  std::mt19937_64 random(11);
  const auto use = [&] {
    const std::string path = saved(scratch.path("root"), some_tensors(random), 2, random);
    const Checkpoint found(path);
    for (const SavedTensor& tensor : found.manifest().tensors) found.verify(tensor);
    sync_folder(path);
    EXPECT_NE(refused([&] { Checkpoint{scratch.path("")}; }), "");
    EXPECT_NE(refused([&] { OldFile folder(path); }), "");
    const FolderLock lock(scratch.path(""));
    EXPECT_NE(refused([&] { FolderLock again(scratch.path("")); }), "");
    OldFile moved(path + "/part-0");
    const OldFile here(std::move(moved));
    NewFile dropped(path + "/unfinished");
    std::filesystem::remove(path + "/unfinished");
  };
  use();
  const auto before = open();
  for (int i = 0; i < 3; ++i) use();
  EXPECT_EQ(open(), before);
}

// A program that a rank starts may outlive it: a lock that it inherited would keep the next run out of the folder.
TEST(Files, AreNotThoseOfAProgramThatIsStartedMeanwhile) {
  Scratch scratch;
  scratch.write("old", "12345");
  const NewFile written(scratch.path("new"));
  const OldFile read(scratch.path("old"));
  const FolderLock lock(scratch.path(""));
  FILE* program = popen("readlink /proc/self/fd/* 2>/dev/null; true", "r");
  ASSERT_NE(program, nullptr);
  std::string inherited;
  for (char piece[256]; fgets(piece, sizeof piece, program) != nullptr;) inherited += piece;
  pclose(program);
  EXPECT_NE(inherited, "");
  EXPECT_THAT(inherited, Not(HasSubstr(std::filesystem::path(scratch.path("old")).parent_path().filename().string())));
}

// A published vector of each of the ways that a length is summed, and all lengths in one number.
TEST(Checksums, AreThoseOfXxh3) {
  std::string bytes;
  for (int i = 0; i < 3000; ++i) bytes += static_cast<char>((i * 131 + (i >> 3)) & 255);
  uint64_t all = 0;
  for (size_t n = 0; n <= bytes.size(); ++n) {
    const uint64_t one = xxh3(bytes.data(), n);
    all = (all ^ one) * 0x100000001b3u;
    Xxh3 parts;
    const size_t cut = n * 7 % (n + 1);
    parts.add(bytes.data(), cut);
    parts.add(bytes.data() + cut, n - cut);
    ASSERT_EQ(parts.value(), one) << n;
  }
  EXPECT_EQ(hex(xxh3("", 0)), "2d06800538d394c2");
  EXPECT_EQ(hex(all), "4faea7f9ee6856f1");
  EXPECT_EQ(from_hex("00ff00ff12345678", "it"), 0x00ff00ff12345678u);
  for (const char* text :
       {"", "00ff", "00FF00ff12345678", "00ff00ff123456789", " 0ff00ff12345678", "00ff00ff1234567g"}) {
    EXPECT_THAT(refused([&] { from_hex(text, "it"); }), HasSubstr("it is no checksum")) << text;
  }
}

TEST(Files, AreTextUpToALength) {
  Scratch scratch;
  scratch.write("text", "12345");
  EXPECT_EQ(read_text(scratch.path("text"), 5), "12345");
  EXPECT_THAT(refused([&] { read_text(scratch.path("text"), 4); }), HasSubstr("has 5 bytes; expected at most 4"));
}

TEST(Folders, AreMadeListedRenamedAndRemoved) {
  Scratch scratch;
  EXPECT_THAT(names_in(scratch.path("absent")), ElementsAre());
  make_folder(scratch.path("a/b/c"));
  make_folder(scratch.path("a/b"));
  EXPECT_TRUE(is_folder(scratch.path("a/b/c")));
  for (const char* name : {"a/z", "a/m", "a/c"}) scratch.write(name, "x");
  EXPECT_FALSE(is_folder(scratch.path("a/z")));
  EXPECT_THAT(names_in(scratch.path("a")), ElementsAre("b", "c", "m", "z"));
  EXPECT_THAT(refused([&] { names_in(scratch.path("a/z")); }), HasSubstr("cannot read the folder"));
  EXPECT_THAT(refused([&] { make_folder(scratch.path("a/z")); }), HasSubstr("a/z'"));
  EXPECT_THAT(refused([&] { make_folder(scratch.path("a/z/below")); }), HasSubstr("Not a directory"));
  EXPECT_THAT(refused([&] { sync_folder(scratch.path("a/z")); }), HasSubstr("cannot open the folder"));
  EXPECT_NO_THROW(sync_folder(scratch.path("a")));
  make_folder(scratch.path("d"));  // empty: the system alone would replace it
  EXPECT_THAT(refused([&] { rename_folder(scratch.path("a"), scratch.path("d")); }), HasSubstr("exists already"));
  EXPECT_THAT(refused([&] { rename_folder(scratch.path("absent"), scratch.path("e")); }), HasSubstr("cannot rename"));
  rename_folder(scratch.path("a"), scratch.path("e"));
  EXPECT_THAT(names_in(scratch.path("e")), ElementsAre("b", "c", "m", "z"));
  EXPECT_EQ(remove_folder(scratch.path("e")), "");
  EXPECT_EQ(remove_folder(scratch.path("e")), "") << "what is not there needs no removing";
  EXPECT_THAT(names_in(scratch.path("")), ElementsAre("d"));
}

// --- folders of checkpoints

TEST(Names, AreThoseOfCheckpointsInTheOrderOfTheirNumbers) {
  Scratch scratch;
  for (const char* name : {"save-00000010-step-7", "save-9-step-12", "save-123456789-step-0", "save-00000002-step-5"}) {
    make_folder(scratch.path(name));
  }
  for (const char* name :
       {"save--1-step-2", "save-1-step--2", "save-1-step-", "save--step-1", "save-1x-step-2", "save-1-step-2x",
        "save-1", "asave-1-step-2", "other", "save-99999999999999999999-step-1", "save-+1-step-2"}) {
    make_folder(scratch.path(name));
  }
  scratch.write("save-00000003-step-1", "a file");
  std::vector<std::pair<int64_t, int64_t>> found;
  for (const Named& named : checkpoints_in(scratch.path(""))) {
    found.emplace_back(named.number, named.step);
    EXPECT_TRUE(is_folder(named.path));
    EXPECT_THAT(named.path, HasSubstr("-step-" + std::to_string(named.step)));
  }
  EXPECT_EQ(found, (std::vector<std::pair<int64_t, int64_t>>{{2, 5}, {9, 12}, {10, 7}, {123456789, 0}}));
}

// Of one number, as somebody's copy may have it: by their names, however many there are.
TEST(Names, OfOneNumberAreInTheirOwnOrder) {
  Scratch scratch;
  std::vector<std::string> wanted;
  for (int step = 0; step < 60; ++step) {
    wanted.push_back(scratch.path("save-7-step-" + std::to_string(step)));
    make_folder(wanted.back());
  }
  std::sort(wanted.begin(), wanted.end());
  wanted.insert(wanted.begin(), scratch.path("save-6-step-99"));
  make_folder(wanted.front());
  std::vector<std::string> found;
  for (const Named& named : checkpoints_in(scratch.path(""))) {
    found.push_back(scratch.path(std::filesystem::path(named.path).filename().string()));
  }
  EXPECT_EQ(found, wanted);
}

TEST(Names, GoOnFromTheLargestNumber) {
  Scratch scratch;
  const std::string root = scratch.path("root");
  Writer writer(root);
  EXPECT_EQ(writer.root(), root);
  const auto commit = [&](int64_t step, int64_t keep) {
    const std::string folder = writer.begin();
    EXPECT_THAT(folder, HasSubstr(root + "/.unfinished-"));
    Manifest manifest;
    manifest.step = step;
    return writer.commit(manifest, keep);
  };
  EXPECT_EQ(commit(5, 0), root + "/save-00000001-step-5");
  EXPECT_EQ(commit(3, 0), root + "/save-00000002-step-3");
  make_folder(root + "/save-99999998-step-1");
  EXPECT_EQ(commit(6, 0), root + "/save-99999999-step-6");
  EXPECT_EQ(commit(7, 0), root + "/save-100000000-step-7");
  EXPECT_EQ(commit(8, 5), root + "/save-100000001-step-8");
  EXPECT_EQ(checkpoints_in(root).size(), 5u);
  EXPECT_EQ(commit(9, 9), root + "/save-100000002-step-9");
  EXPECT_EQ(checkpoints_in(root).size(), 6u);
  EXPECT_EQ(commit(10, 1), root + "/save-100000003-step-10");
  EXPECT_THAT(names_in(root), ElementsAre(".lock", "save-100000003-step-10"));
}

TEST(Names, AreGivenToOneCheckpointAtATime) {
  Scratch scratch;
  EXPECT_THAT(refused([] { Writer writer(""); }), HasSubstr("has no name"));
  const std::string root = scratch.path("root");
  Writer writer(root);
  const std::string first = writer.begin();
  EXPECT_THAT(refused([&] { writer.begin(); }), HasSubstr("is being written into '" + root + "' already"));
  Scratch::write_file(first + "/half", "x");
  writer.abandon();
  EXPECT_FALSE(is_folder(first));
  EXPECT_THAT(names_in(root), ElementsAre(".lock"));
  make_folder(first);  // somebody's of the same process
  const std::string second = writer.begin();
  EXPECT_NE(second, first);
  EXPECT_TRUE(is_folder(second));
}

TEST(Names, OfTheNewestAreThoseOfWholeFiles) {
  Scratch scratch;
  std::mt19937_64 random(9);
  const std::string root = scratch.path("root");
  const std::string first = saved(root, some_tensors(random), 2, random);
  const std::string second = saved(root, some_tensors(random), 2, random);
  EXPECT_TRUE(is_checkpoint(first));
  EXPECT_FALSE(is_checkpoint(root));
  EXPECT_EQ(newest_in(root), second);
  const auto length = std::filesystem::file_size(second + "/part-1");
  for (const int more : {-1, 1}) {
    std::filesystem::resize_file(second + "/part-1", length + static_cast<uintmax_t>(more));
    std::vector<std::string> skipped;
    EXPECT_EQ(newest_in(root, &skipped), first) << more;
    EXPECT_THAT(skipped, ElementsAre(HasSubstr("part-1' has")));
    EXPECT_EQ(newest_in(root), first);
  }
  std::filesystem::remove(first + "/part-0");
  EXPECT_EQ(newest_in(root), std::nullopt);
  EXPECT_EQ(newest_in(second), second) << "what is named itself is not judged by its length";
}

}  // namespace
}  // namespace plumb::save
