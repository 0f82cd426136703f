// The parts of a checkpoint's format, each alone: JSON, safetensors files, folders.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "engine/slots.h"
#include "plumb/error.h"
#include "save/folder.h"
#include "save/json.h"
#include "save/support/folder.h"
#include "save/tensors.h"
#include "save/xxh3.h"

namespace plumb::save {
namespace {

using test::Scratch;
using ::testing::HasSubstr;

std::string refused(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Json, GivesBackWhatItWrote) {
  const Json value = Json::Object{{"a\n\"\\", Json::Array{1, -7, 0.1, 1e300, true, Json(), "ü\x01"}},
                                  {"big", int64_t{9007199254740993}},
                                  {"empty", Json::Object{}}};
  for (const int levels : {0, 1, 5}) {
    const std::string text = value.write(levels);
    EXPECT_EQ(Json::parse(text, "it").write(), value.write());
  }
  EXPECT_EQ(Json::parse("\"\\ud83d\\ude00\\u00e9\"", "it").text("it"), "\xf0\x9f\x98\x80\xc3\xa9");
  EXPECT_EQ(Json::parse("9007199254740993", "it").integer("it"), 9007199254740993);
}

TEST(Json, RefusesWhatIsNotOneStrictValue) {
  for (const char* text : {"",
                           " ",
                           "{",
                           "[1,]",
                           "{\"a\":1,}",
                           "{\"a\":1 \"b\":2}",
                           "{\"a\":1,\"a\":2}",
                           "{a:1}",
                           "'a'",
                           "01",
                           "+1",
                           "1.",
                           ".5",
                           "1e",
                           "nul",
                           "tru",
                           "NaN",
                           "Infinity",
                           "\"\n\"",
                           "\"\\x\"",
                           "\"\\ud800\"",
                           "\"\\udc00\"",
                           "\"\\u12g4\"",
                           "\"open",
                           "[1] 2",
                           "//\n1",
                           "9223372036854775808",
                           "1e999",
                           "\xef\xbb\xbf{}"}) {
    EXPECT_THAT(refused([&] { Json::parse(text, "it"); }), HasSubstr("no valid JSON")) << text;
  }
  EXPECT_THAT(refused([&] { Json::parse(std::string(100'000, '['), "it"); }), HasSubstr("deep"));
}

std::string header(const std::string& json) {
  std::string text(8, '\0');
  const uint64_t length = json.size();
  std::memcpy(text.data(), &length, 8);
  return text + json;
}

TEST(TensorFile, ReadsWhatHeaderOfWrites) {
  Scratch scratch;
  std::vector<TensorInFile> tensors = {{"a", "F32", {2, 3}}, {"none", "I64", {0, 7}}, {"b", "BF16", {}}};
  std::string bytes = header_of(tensors, {{"format", "pt"}});
  EXPECT_EQ(bytes.size() % 8, 0u);
  const size_t head = bytes.size();
  for (int i = 0; i < 26; ++i) bytes += static_cast<char>(i);
  scratch.write("x.safetensors", bytes);
  const TensorFile file(scratch.path("x.safetensors"));
  ASSERT_EQ(file.tensors().size(), 3u);
  EXPECT_EQ(file.find("b")->begin, 24u);
  EXPECT_EQ(file.metadata().at("format"), "pt");
  char two[2];
  file.read(*file.find("b"), 0, two, 2);
  EXPECT_EQ(two[0], 24);
  EXPECT_EQ(file.header_checksum(), xxh3(bytes.data(), head));
}

// Others sort their headers otherwise than their data, and empty tensors lie wherever some other one begins or ends.
TEST(TensorFile, IsTheSameInWhateverOrderItsHeaderNamesTheTensors) {
  Scratch scratch;
  struct One {
    std::string name, shape;
    int begin, end;
  };
  std::vector<One> all = {
      {"a", "[0]", 0, 0}, {"b", "[2]", 0, 2}, {"c", "[3,0]", 2, 2}, {"d", "[1,3]", 2, 5}, {"e", "[0,4]", 5, 5}};
  const auto by_name = [](const One& x, const One& y) { return x.name < y.name; };
  do {
    std::string json = "{";
    for (const One& one : all) {
      json += (json == "{" ? "\"" : ", \"") + one.name + R"(": {"dtype": "U8", "shape": )" + one.shape +
              R"(, "data_offsets": [)" + std::to_string(one.begin) + ", " + std::to_string(one.end) + "]}";
    }
    scratch.write("x.safetensors", header(json + "}") + "01234");
    const TensorFile file(scratch.path("x.safetensors"));
    ASSERT_EQ(file.tensors().size(), all.size()) << json;
    for (const One& one : all) {
      const TensorInFile* found = file.find(one.name);
      ASSERT_NE(found, nullptr);
      std::string bytes(static_cast<size_t>(one.end - one.begin), '?');
      file.read(*found, 0, bytes.data(), bytes.size());
      EXPECT_EQ(bytes, std::string("01234").substr(static_cast<size_t>(one.begin), bytes.size())) << json;
    }
  } while (std::next_permutation(all.begin(), all.end(), by_name));
}

// Every dtype that a program can save has a name, and as many bytes by this name as it has in memory.
TEST(TensorFile, HasEveryDtypeInItsOwnBytes) {
  for (const auto dtype :
       {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort, at::kChar, at::kByte,
        at::kBool, at::kUInt16, at::kUInt32, at::kUInt64, at::kComplexFloat, at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    const std::string name = dtype_name(dtype, "a tensor");
    EXPECT_EQ(element_bytes(name), c10::elementSize(dtype)) << name;
    EXPECT_EQ(dtype_of(name), dtype) << name;
    std::vector<TensorInFile> tensors = {{"x", name, {3}}};
    header_of(tensors, {});
    EXPECT_EQ(tensors[0].end, 3 * c10::elementSize(dtype)) << name;
  }
  EXPECT_EQ(element_bytes("F99"), 0u);
}

TEST(TensorFile, HasNoTensorThatIsCalledAsItsMetadataIs) {
  std::vector<TensorInFile> tensors = {{"__metadata__", "F32", {1}}};
  EXPECT_THAT(refused([&] { header_of(tensors, {}); }), HasSubstr("a tensor is called '__metadata__'"));
}

TEST(TensorFile, RefusesHostileHeaders) {
  Scratch scratch;
  const std::string good = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  const std::string eight(8, 'x');
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "too short"},
      {"1234567", "too short"},
      {std::string(8, '\xff') + "{}", "header has"},
      {header(good).substr(0, 20), "header has"},
      {header("[1]"), "begin with '{'"},
      {header(" " + good) + eight, "begin with '{'"},
      {header("{}") + "x", "bytes of tensors"},
      {header(good) + "1234567", "bytes of tensors"},
      {header(good) + "123456789", "bytes of tensors"},
      {header(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,7]}})") + eight, "its bytes are"},
      {header(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})") + eight, "its bytes are"},
      {header(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}})") + eight, "negative"},
      {header(R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})") + eight, "impossible shape"},
      {header(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})"), "impossible shape"},
      {header(R"({"a":{"dtype":"F32","shape":[2305843009213693951,8],"data_offsets":[0,8]}})") + eight,
       "impossible shape"},
      {header(R"({"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0]}})"), "impossible shape"},
      {header(R"({"a":{"dtype":"F99","shape":[2],"data_offsets":[0,8]}})") + eight, "unknown dtype"},
      {header(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"more":1}})") + eight, "other fields"},
      {header(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}})") + eight, "not two numbers"},
      {header(R"({"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})") + eight, "not an integer"},
      {header(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})") + eight + eight, "one behind the other"},
      {header(
           R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})") +
           eight + "1234",
       "one behind the other"},
      {header(
           R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})") +
           eight + eight,
       "stands twice"},
      {header(R"({"__metadata__":{"a":1}})"), "not a string"},
  };
  for (const auto& [bytes, why] : cases) {
    scratch.write("x.safetensors", bytes);
    EXPECT_THAT(refused([&] { TensorFile(scratch.path("x.safetensors")); }), HasSubstr(why)) << bytes;
  }
  EXPECT_THAT(refused([&] { TensorFile(scratch.path(".")); }), HasSubstr("not a plain file"));
  EXPECT_THAT(refused([&] { TensorFile(scratch.path("absent")); }), HasSubstr("cannot open"));
}

TEST(Folder, FindsTheNewestByItsNumberAndSkipsWhatIsIncomplete) {
  Scratch scratch;
  EXPECT_FALSE(newest_in(scratch.path("absent")));
  Writer writer(scratch.path("root"));
  Manifest manifest;
  std::vector<std::string> paths;
  for (const int64_t step : {5, 9, 2}) {  // the last one goes on from an earlier checkpoint
    writer.begin();
    manifest.step = step;
    paths.push_back(writer.commit(manifest, 0));
  }
  EXPECT_EQ(newest_in(scratch.path("root")), paths[2]);
  std::filesystem::resize_file(paths[2] + "/manifest.json", 100);
  std::filesystem::create_directory(scratch.path("root/save-00000009-step-1"));
  std::vector<std::string> skipped;
  EXPECT_EQ(newest_in(scratch.path("root"), &skipped), paths[1]);
  EXPECT_EQ(skipped.size(), 2u);
  EXPECT_EQ(newest_in(paths[0]), paths[0]);
}

TEST(Folder, HasOneWriterAndClearsAwayWhatOneThatDiedLeft) {
  Scratch scratch;
  {
    const Writer writer(scratch.path("root"));
    EXPECT_THAT(refused([&] { Writer again(scratch.path("root")); }), HasSubstr("another run"));
  }
  std::filesystem::create_directory(scratch.path("root/.unfinished-7-0"));
  scratch.write("root/.unfinished-7-0/weights", "half");
  Writer writer(scratch.path("root"));
  EXPECT_FALSE(std::filesystem::exists(scratch.path("root/.unfinished-7-0")));
}

TEST(Folder, KeepsTheNewest) {
  Scratch scratch;
  Writer writer(scratch.path("root"));
  for (int64_t step = 1; step <= 5; ++step) {
    writer.begin();
    Manifest manifest;
    manifest.step = step;
    writer.commit(manifest, 2);
  }
  const auto left = checkpoints_in(scratch.path("root"));
  ASSERT_EQ(left.size(), 2u);
  EXPECT_EQ(left[0].step, 4);
  EXPECT_EQ(left[1].step, 5);
}

}  // namespace
}  // namespace plumb::save
