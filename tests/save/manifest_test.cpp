// Manifests, as properties: any that is legal is read as it was written, whoever's parts it was joined from, and every
// rule that one breaks is named.
#include "save/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <numeric>
#include <random>

#include "save/support/refused.h"
#include "save/xxh3.h"

namespace plumb::save {
namespace {

using test::refused;
using ::testing::HasSubstr;

// Some legal manifest. Parts of a tensor lie in different files.
Manifest some_manifest(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&](uint64_t bound) { return static_cast<int64_t>(random() % bound); };
  Manifest manifest;
  manifest.step = below(1000);
  manifest.samples = below(1000);
  manifest.ranks = 1 + below(9);
  manifest.engine = {{"rate", 0.1}, {"updates", Json::Array{1, 2}}};
  manifest.provenance = {{"version", "1"}};
  const int64_t files = 1 + below(4);
  for (int64_t i = 0; i < files; ++i) {
    manifest.files.push_back({"file-" + std::to_string(i) + "_x.safetensors", random() >> 1, random()});
  }
  const int64_t tensors = below(6);
  for (int64_t i = 0; i < tensors; ++i) {
    SavedTensor& tensor = manifest.tensors.emplace_back();
    tensor.kind = static_cast<Kind>(below(6));
    tensor.name = "layer." + std::to_string(i / 2) + "ü\"";
    tensor.key = "key " + std::to_string(i);
    tensor.dtype = below(2) ? "F32" : "BF16";
    for (int64_t d = below(4); d > 0; --d) tensor.shape.push_back(below(5));
    if (below(2)) {  // some order of memory; what has one element in a direction may say anything of it
      std::vector<size_t> order(tensor.shape.size());
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      tensor.strides.resize(order.size());
      int64_t stride = 1;
      for (const size_t d : order) {
        tensor.strides[d] = tensor.shape[d] == 1 ? below(100) : stride;
        stride *= tensor.shape[d];
      }
      if (tensor.numel() == 0) tensor.strides.clear();
    }
    tensor.sharded = below(2) == 1;
    int64_t at = 0;
    for (int64_t file = 0; file < files; ++file) {
      const int64_t end =
          file + 1 == files ? tensor.numel() : at + below(static_cast<uint64_t>(tensor.numel() - at + 1));
      tensor.parts.push_back({file, at, end, random()});
      at = end;
    }
  }
  return manifest;
}

void expect_same(const Manifest& a, const Manifest& b) {
  EXPECT_EQ(a.step, b.step);
  EXPECT_EQ(a.samples, b.samples);
  EXPECT_EQ(a.ranks, b.ranks);
  EXPECT_EQ(Json(a.engine).write(), Json(b.engine).write());
  EXPECT_EQ(Json(a.provenance).write(), Json(b.provenance).write());
  const auto files_of = [](const Manifest& manifest) {
    std::map<std::string, std::pair<uint64_t, uint64_t>> files;
    for (const SavedFile& file : manifest.files) files[file.name] = {file.bytes, file.header};
    return files;
  };
  EXPECT_EQ(files_of(a), files_of(b));
  ASSERT_EQ(a.tensors.size(), b.tensors.size());
  for (const SavedTensor& tensor : a.tensors) {
    const SavedTensor* other = b.find(tensor.kind, tensor.name, tensor.key);
    ASSERT_NE(other, nullptr) << tensor.title();
    EXPECT_EQ(tensor.kind, other->kind);
    EXPECT_EQ(tensor.dtype, other->dtype);
    EXPECT_EQ(tensor.shape, other->shape);
    EXPECT_EQ(tensor.strides, other->strides);
    EXPECT_EQ(tensor.sharded, other->sharded);
    ASSERT_EQ(tensor.parts.size(), other->parts.size()) << tensor.title();
    for (size_t i = 0; i < tensor.parts.size(); ++i) {
      const Part &one = tensor.parts[i], &two = other->parts[i];
      EXPECT_EQ(a.files[one.file].name, b.files[two.file].name);
      EXPECT_EQ(one.begin, two.begin);
      EXPECT_EQ(one.end, two.end);
      EXPECT_EQ(one.checksum, two.checksum);
    }
  }
}

TEST(ManifestProperty, IsReadAsItWasWritten) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    const Manifest manifest = some_manifest(seed);
    const std::string text = manifest.write();
    const Manifest found = Manifest::read(text, "it");
    expect_same(manifest, found);
    EXPECT_EQ(found.write(), text);
    for (const SavedTensor& tensor : manifest.tensors) {
      EXPECT_EQ(manifest.find(tensor.kind, tensor.name, tensor.key + "x"), nullptr);
      EXPECT_EQ(manifest.find(tensor.kind, tensor.name + "x", tensor.key), nullptr);
      const auto other = static_cast<Kind>((static_cast<int>(tensor.kind) + 1) % 6);
      EXPECT_EQ(manifest.find(other, tensor.name, tensor.key), nullptr);
    }
  }
}

TEST(ManifestProperty, OfEachRankJoinedIsTheWholeOne) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    const Manifest manifest = some_manifest(seed);
    // One for each file, with what lies there; a rank reads the others' from their text.
    std::vector<Manifest> ranks;
    for (size_t file = 0; file < manifest.files.size(); ++file) {
      Manifest mine = manifest;
      mine.files = {manifest.files[file]};
      for (SavedTensor& tensor : mine.tensors) {
        const Part part = tensor.parts[file];
        tensor.parts = {{0, part.begin, part.end, part.checksum}};
      }
      ranks.push_back(Manifest::read(mine.write(), "a rank's", Manifest::Coverage::some));
    }
    std::mt19937_64 random(seed);
    std::shuffle(ranks.begin(), ranks.end(), random);
    while (ranks.size() > 1) {  // of one rank each, or of several that were joined before
      const auto at = static_cast<std::ptrdiff_t>(random() % (ranks.size() - 1));
      ranks[static_cast<size_t>(at)].join(ranks[static_cast<size_t>(at) + 1]);
      ranks.erase(ranks.begin() + at + 1);
    }
    const Manifest& whole = ranks[0];
    const bool has_empty = std::ranges::any_of(manifest.tensors, [](const SavedTensor& tensor) {
      return std::ranges::any_of(tensor.parts, [](const Part& part) { return part.begin == part.end; });
    });
    if (has_empty) continue;  // such a part may lie before or behind its neighbour; ranks write none
    expect_same(manifest, Manifest::read(whole.write(), "the whole"));
  }
}

TEST(ManifestProperty, TellsTensorsApart) {
  const auto tensor = [](Kind kind, const std::string& name, const std::string& key) {
    SavedTensor tensor;
    tensor.kind = kind;
    tensor.name = name;
    tensor.key = key;
    return tensor;
  };
  EXPECT_EQ(tensor(Kind::weight, "a.b", "").in_file(), "a.b");
  EXPECT_EQ(tensor(Kind::buffer, "a.b", "").in_file(), "a.b");
  EXPECT_EQ(tensor(Kind::optimizer, "a.b", "mean").in_file(), "optimizer:a.b/mean");
  EXPECT_EQ(tensor(Kind::optimizer_value, "a.b", "step").in_file(), "optimizer value:a.b/step");
  EXPECT_EQ(tensor(Kind::generator, "cpu", "rank 3").in_file(), "generator:cpu/rank 3");
  EXPECT_EQ(tensor(Kind::extra, "mine", "x").in_file(), "extra:mine/x");
  EXPECT_EQ(tensor(Kind::weight, "a.b", "").title(), "weight 'a.b'");
  EXPECT_EQ(tensor(Kind::optimizer, "a.b", "mean").title(), "optimizer 'a.b' (mean)");
  Manifest manifest;
  manifest.engine = {{"a", 1}, {"b", 2}};
  EXPECT_EQ(manifest.engine_field("b").integer("b"), 2);
  EXPECT_THAT(refused([&] { (void)manifest.engine_field("c"); }), HasSubstr("says nothing of 'c'"));
}

// Two files and a tensor of 2 × 3, half in each.
Manifest good() {
  Manifest manifest;
  manifest.files = {{"a", 1, 2}, {"b", 3, 4}};
  SavedTensor tensor;
  tensor.name = "w";
  tensor.dtype = "F32";
  tensor.shape = {2, 3};
  tensor.parts = {{0, 0, 2, 5}, {1, 2, 6, 6}};
  manifest.tensors = {tensor};
  return manifest;
}

TEST(ManifestProperty, NamesTheRuleThatIsBroken) {
  using Edit = std::function<void(Manifest&)>;
  const auto of = [](const auto& edit) { return Edit([edit](Manifest& m) { edit(m, m.tensors[0]); }); };
  const std::vector<std::pair<Edit, std::string>> cases = {
      {of([](Manifest&, SavedTensor&) {}), ""},
      {of([](Manifest& m, SavedTensor&) { m.step = -1; }), "the step of it is negative"},
      {of([](Manifest& m, SavedTensor&) { m.samples = -1; }), "the samples of it is negative"},
      {of([](Manifest& m, SavedTensor&) { m.ranks = -1; }), "the ranks of it is negative"},
      {of([](Manifest& m, SavedTensor&) { m.files[1].name = "a"; }), "file 'a' of it stands twice"},
      {of([](Manifest& m, SavedTensor&) { m.files[1].bytes = ~uint64_t{0}; }), "the length of 'b' is negative"},
      {of([](Manifest& m, SavedTensor& t) { m.tensors.push_back(t); }), "weight 'w' of it stands twice"},
      {of([](Manifest&, SavedTensor& t) { t.dtype = "F31"; }), "the unknown dtype 'F31'"},
      {of([](Manifest&, SavedTensor& t) { t.shape = {-2, -3}; }), "the impossible shape [-2, -3]"},
      {of([](Manifest&, SavedTensor& t) { t.parts.clear(); }), "has 0 of its 6 elements"},
      {of([](Manifest&, SavedTensor& t) { t.shape = {0}, t.parts.clear(); }), "has 0 of its 0 elements"},
      {of([](Manifest&, SavedTensor& t) { t.shape = {0}, t.parts = {{0, 0, 0, 1}}; }), ""},
      {of([](Manifest&, SavedTensor& t) { t.parts.pop_back(); }), "has 2 of its 6 elements"},
      {of([](Manifest&, SavedTensor& t) { t.parts[1].end = 7; }), "has 7 of its 6 elements"},
      {of([](Manifest&, SavedTensor& t) { t.parts[1].begin = 1; }), "[1, 6) behind element 2: parts overlap"},
      {of([](Manifest&, SavedTensor& t) { t.parts[1].begin = 3; }), "[3, 6) behind element 2: parts overlap"},
      {of([](Manifest&, SavedTensor& t) { t.parts[1].end = 1; }), "[2, 1) behind element 2"},
      {of([](Manifest&, SavedTensor& t) { t.parts[0].begin = -1; }), "a begin of tensor 'w' of it is negative"},
      {of([](Manifest&, SavedTensor& t) { t.parts[0].end = -1; }), "an end of tensor 'w' of it is negative"},
      {of([](Manifest&, SavedTensor& t) { t.parts[1].file = 2; }), "names a file that is not listed"},
      {of([](Manifest&, SavedTensor& t) { t.parts[1].file = -1; }), "the file of tensor 'w' of it is negative"},
      {of([](Manifest&, SavedTensor& t) { t.strides = {3, 1}; }), ""},
      {of([](Manifest&, SavedTensor& t) { t.strides = {1, 2}; }), ""},
      {of([](Manifest&, SavedTensor& t) { t.strides = {1, 3}; }), "strides that do not cover its memory once"},
      {of([](Manifest&, SavedTensor& t) { t.strides = {1, 1}; }), "strides that do not cover its memory once"},
      {of([](Manifest&, SavedTensor& t) { t.strides = {6, 2}; }), "strides that do not cover its memory once"},
      {of([](Manifest&, SavedTensor& t) { t.strides = {3}; }), "strides that do not cover its memory once"},
      {of([](Manifest&, SavedTensor& t) { t.strides = {3, 1, 1}; }), "strides that do not cover its memory once"},
      {of([](Manifest&, SavedTensor& t) { t.shape = {2, 1, 3}, t.strides = {3, 77, 1}; }), ""},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    Manifest manifest = good();
    cases[i].first(manifest);
    const std::string said = refused([&] { Manifest::read(manifest.write(), "it"); });
    if (cases[i].second.empty()) {
      EXPECT_EQ(said, "") << i;
    } else {
      EXPECT_THAT(said, HasSubstr(cases[i].second)) << i;
    }
  }
}

TEST(ManifestProperty, HasFilesOfItsOwnFolderOnly) {
  const auto said = [](const std::string& name) {
    Manifest manifest = good();
    manifest.files[0].name = name;
    return refused([&] { Manifest::read(manifest.write(), "it"); });
  };
  for (const std::string& name : {std::string("A-z_0.9"), std::string("x"), std::string(199, 'x')}) {
    EXPECT_EQ(said(name), "") << name;
  }
  for (const std::string& name : {std::string(), std::string("."), std::string(".."), std::string(".x"),
                                  std::string("a/b"), std::string("/a"), std::string("a b"), std::string("a\\b"),
                                  std::string("a\0b", 3), std::string("\xc3\xbc"), std::string(200, 'x')}) {
    EXPECT_THAT(said(name), HasSubstr("a file of it is called '")) << name;
  }
}

// The text with one thing replaced, and a checksum that agrees.
std::string edited(const Manifest& manifest, const std::string& from, const std::string& to) {
  std::string text = manifest.write();
  const size_t tail = text.rfind(",\n \"xxh3\": \"");
  std::string body = text.substr(0, tail);
  const size_t at = body.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  if (at != std::string::npos) body.replace(at, from.size(), to);
  return body + text.substr(tail, 12) + hex(xxh3(body.data(), body.size())) + "\"\n}\n";
}

TEST(ManifestProperty, RefusesWhatItDoesNotUnderstandWholly) {
  const std::vector<std::array<std::string, 3>> cases = {
      {"{", "{\"more\": 1,", "it has the unknown field 'more'"},
      {"\"name\": \"a\"", "\"name\": \"a\", \"more\": 1", "a file of it has the unknown field 'more'"},
      {"\"kind\"", "\"more\": 1, \"kind\"", "a tensor of it has the unknown field 'more'"},
      {"\"file\": 0", "\"file\": 0, \"more\": 1", "a part of tensor 'w' of it has the unknown field 'more'"},
      {"\"format\": \"plumb checkpoint\"", "\"format\": \"plumb\"", "it is of no checkpoint"},
      {"\"version\": 1", "\"version\": 2", "it is of format version 2; this program reads version 1"},
      {"\"version\": 1", "\"version\": 0", "it is of format version 0"},
      {"\"version\": 1", "\"version\": \"1\"", "the version of it is not an integer"},
      {"\"kind\": \"weight\"", "\"kind\": \"weights\"", "of the unknown kind 'weights'"},
      {"\"sharded\": false", "\"sharded\": 0", "'sharded' of tensor 'w' of it is not true or false"},
      {"0000000000000005", "000000000000005", "no checksum of 16"},
      {"0000000000000005", "000000000000000A", "no checksum of 16"},
      {"0000000000000005", "00000000000000 5", "no checksum of 16"},
      {"0000000000000002", "+000000000000002", "no checksum of 16"},
      {"\"key\": \"\", ", "", "has no 'key'"},
      {"\"samples\": 0,", "", "it has no 'samples'"},
  };
  for (const auto& [from, to, why] : cases) {
    EXPECT_THAT(refused([&, from = from, to = to] { Manifest::read(edited(good(), from, to), "it"); }), HasSubstr(why))
        << from << " → " << to;
  }
  const std::string text = good().write();
  for (size_t length = 0; length < text.size(); ++length) {
    EXPECT_THAT(refused([&] { Manifest::read(text.substr(0, length), "it"); }),
                HasSubstr("it does not end with its checksum"));
  }
  EXPECT_THAT(refused([&] { Manifest::read(text + "\n", "it"); }), HasSubstr("does not end with its checksum"));
  for (size_t at = 0; at < text.size() - 33; at += 7) {
    std::string changed = text;
    changed[at] = changed[at] == 'x' ? 'y' : 'x';
    EXPECT_THAT(refused([&] { Manifest::read(changed, "it"); }), HasSubstr("it was changed: its checksum is")) << at;
  }
}

TEST(ManifestProperty, OfOneRankMayHaveSomePartsOnly) {
  Manifest manifest = good();
  manifest.tensors[0].parts.erase(manifest.tensors[0].parts.begin());
  EXPECT_THAT(refused([&] { Manifest::read(manifest.write(), "it"); }), HasSubstr("behind element 0"));
  EXPECT_EQ(Manifest::read(manifest.write(), "it", Manifest::Coverage::some).tensors[0].parts[0].begin, 2);
  manifest.tensors[0].strides = {9, 9};
  EXPECT_THAT(refused([&] { Manifest::read(manifest.write(), "it", Manifest::Coverage::some); }), HasSubstr("strides"));
}

}  // namespace
}  // namespace plumb::save
