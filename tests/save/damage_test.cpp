// A thousand damaged checkpoints: each is refused with a message, and the engine stays as it was.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "save/folder.h"
#include "save/support/folder.h"
#include "save/support/trained.h"
#include "save/xxh3.h"

namespace plumb {
namespace {

using namespace test;

using Files = std::map<std::string, std::string>;  // contents by name

// With the checksum that the changed text asks for, as an attacker would.
std::string sealed(const std::string& text) {
  const size_t cut = text.rfind(",\n \"xxh3\": \"");
  const std::string body = text.substr(0, cut);
  return body + ",\n \"xxh3\": \"" + save::hex(save::xxh3(body.data(), body.size())) + "\"\n}\n";
}

std::string replaced(std::string text, const std::string& from, const std::string& to, size_t nth = 0) {
  size_t at = text.find(from);
  for (; nth > 0 && at != std::string::npos; --nth) at = text.find(from, at + 1);
  if (at == std::string::npos) at = text.find(from);
  return text.replace(at, from.size(), to);
}

// What was done to the files, in words.
std::string damage(Files& files, std::mt19937_64& random) {
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  const auto any = [&] {
    auto it = files.begin();
    std::advance(it, static_cast<int64_t>(below(files.size())));
    return it;
  };
  auto it = any();
  std::string& bytes = it->second;
  std::string& manifest = files.at("manifest.json");
  switch (below(12)) {
    case 0:
    case 1: {
      const size_t at = below(bytes.size());
      bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
      return "a bit of " + it->first + " at " + std::to_string(at);
    }
    case 2:
      bytes.resize(below(bytes.size()));
      return it->first + " cut to " + std::to_string(bytes.size());
    case 3:
      bytes.append(1 + below(9), static_cast<char>(random()));
      return it->first + " longer";
    case 4: {
      auto other = any();
      while (other == it) other = any();
      std::swap(bytes, other->second);
      return it->first + " swapped with " + other->first;
    }
    case 5:
      files.erase(it);
      return "a file removed";
    case 6: {  // without the checksum
      const size_t at = below(manifest.size() - 40);
      manifest[at] = manifest[at] == '1' ? '2' : '1';
      return "the manifest edited at " + std::to_string(at);
    }
    case 7: {
      constexpr const char* names[] = {
          "../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".hidden", "", "x\\u0000y"};
      const std::string name = names[below(std::size(names))];
      manifest =
          sealed(replaced(manifest, "\"name\": \"weights-00000-of-00002.safetensors\"", "\"name\": \"" + name + "\""));
      return "a file called '" + name + "'";
    }
    case 8: {  // ranges
      const std::string from = below(2) ? "\"begin\": 0" : "\"end\": ";
      const std::string to = from.starts_with("\"b") ? "\"begin\": " + std::to_string(1 + below(50)) : "\"end\": 9";
      manifest = sealed(replaced(manifest, from, to, below(20)));
      return "a range changed to " + to;
    }
    case 9: {
      constexpr std::pair<const char*, const char*> edits[] = {
          {"\"version\": 1", "\"version\": 2"},
          {"\"format\": \"plumb checkpoint\"", "\"format\": \"other\""},
          {"\"step\": ", "\"stop\": "},
          {"\"kind\": \"weight\"", "\"kind\": \"wait\""},
          {"\"dtype\": \"BF16\"", "\"dtype\": \"F8\""},
          {"\"dtype\": \"BF16\"", "\"dtype\": \"F16\""},
          {"\"shape\": [", "\"shape\": [4294967296, 4294967296, "},
          {"\"shape\": [", "\"shape\": [-1, "},
          {"\"strides\": []", "\"strides\": [3, 3, 3, 3, 3]"},
          {"\"file\": 0", "\"file\": 99"},
          {"\"file\": 0", "\"file\": -1"},
          {"\"file\": 0", "\"file\": 1"},
          {"\"key\": \"master\"", "\"key\": \"mean\""},
          {"\"files\": [", "\"files\": {"},
          {"\"loss_scale\"", "\"lost_scale\""},
          {"\"optimizer\": \"AdamW\"", "\"optimizer\": 3"},
          {"\"samples\": ", "\"samples\": -"},
          {"\"kind\": \"buffer\"", "\"kind\": \"extra\""},
      };
      const auto& [from, to] = edits[below(std::size(edits))];
      manifest = sealed(replaced(manifest, from, to, below(3)));
      return std::string(from) + " became " + to;
    }
    case 10: {  // a hostile header, vouched for by the manifest
      std::string& file = files.at("weights-00001-of-00002.safetensors");
      const std::string before = save::hex(0);
      uint64_t length = 0;
      std::memcpy(&length, file.data(), 8);
      const std::string old = save::hex(save::xxh3(file.data(), 8 + length));
      constexpr std::pair<const char*, const char*> edits[] = {{"\"data_offsets\": [", "\"data_offsets\": [1"},
                                                               {"\"shape\": [", "\"shape\": [9"},
                                                               {"BF16", "F999"},
                                                               {"{", "["}};
      const auto& [from, to] = edits[below(std::size(edits))];
      const std::string head = replaced(file.substr(8, length), from, to);
      length = head.size();
      file = std::string(reinterpret_cast<char*>(&length), 8) + head + file.substr(8 + head.size());
      manifest = sealed(replaced(manifest, old, save::hex(save::xxh3(file.data(), 8 + length))));
      return std::string("a header's ") + from + " became " + to;
    }
    default: {  // a header of any length
      const uint64_t length = random() >> below(64);
      std::string& file = files.at("optimizer-00000-of-00002.safetensors");
      uint64_t old = 0;
      std::memcpy(&old, file.data(), 8);
      std::memcpy(file.data(), &length, 8);
      if (old == length) file[0] ^= 1;
      return "a header of " + std::to_string(length) + " bytes";
    }
  }
}

TEST(Damage, IsRefusedAThousandTimesAndChangesNothing) {
  Scratch scratch;
  run_local(2, [&](World world) {
    Model model(3, at::kBFloat16);
    Engine engine(world, model, AdamW{}, {.strategy = "zero3", .accumulate_dtype = at::kFloat});
    train(engine, model, 2, at::kBFloat16);
    engine.save(scratch.path("good"), {.samples = 17});
  });
  const std::string good = *save::newest_in(scratch.path("good"));
  Files original;
  for (const std::string& name : save::names_in(good)) original[name] = Scratch::read_file(good + "/" + name);
  ASSERT_EQ(original.size(), 7u);

  Model model(4, at::kBFloat16);
  Engine engine(World(), model, AdamW{}, {.accumulate_dtype = at::kFloat});
  train(engine, model, 1, at::kBFloat16);
  Everything before;
  before.add(engine);
  const at::Tensor random_state = at::globalContext().defaultGenerator(at::kCPU).get_state().clone();
  const std::string bad = scratch.path("bad");
  // What hostile names point to: the folder's neighbours.
  Scratch::write_file(scratch.path("neighbour.safetensors"), original.at("weights-00000-of-00002.safetensors"));
  Scratch::write_file(scratch.path("outside.safetensors"), original.at("weights-00000-of-00002.safetensors"));
  const auto around = [&] {
    Files all;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(scratch.path(""))) {
      const std::string path = entry.path().string();
      if (path.starts_with(bad)) continue;
      all[path] = entry.is_regular_file() ? Scratch::read_file(path) : "a folder";
    }
    return all;
  };
  const Files neighbours = around();
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    std::mt19937_64 random(seed);
    Files files = original;
    const std::string what = damage(files, random);
    ASSERT_NE(files, original) << "seed " << seed << ": " << what;
    std::filesystem::remove_all(bad);
    std::filesystem::create_directory(bad);
    for (const auto& [name, bytes] : files) Scratch::write_file(bad + "/" + name, bytes);
    std::string message;
    try {
      engine.load(bad);
    } catch (const Error& error) {
      message = error.what();
    }
    ASSERT_NE(message, "") << "seed " << seed << ": " << what;
    ASSERT_THAT(message, testing::HasSubstr("load() failed")) << "seed " << seed << ": " << what;
    if (seed % 50 != 0) continue;
    ASSERT_EQ(around(), neighbours) << "seed " << seed << ": " << what;
    for (const auto& [name, bytes] : files) ASSERT_EQ(Scratch::read_file(bad + "/" + name), bytes);
    Everything after;
    after.add(engine);
    ASSERT_EQ(before.difference(after), "") << "seed " << seed << ": " << what;
  }
  Everything after;
  after.add(engine);
  EXPECT_EQ(before.difference(after), "");
  EXPECT_TRUE(at::globalContext().defaultGenerator(at::kCPU).get_state().equal(random_state));
  // What only its name speaks against: the very file that is meant, beside the folder and below it.
  for (const std::string name : {"../outside.safetensors", "a/b.safetensors", "../bad/weights.safetensors"}) {
    std::filesystem::remove_all(bad);
    std::filesystem::copy(good, bad);
    std::filesystem::create_directory(bad + "/a");
    std::filesystem::copy(good + "/weights-00000-of-00002.safetensors", bad + "/a/b.safetensors");
    std::filesystem::rename(bad + "/weights-00000-of-00002.safetensors", bad + "/weights.safetensors");
    const std::string manifest =
        sealed(replaced(original.at("manifest.json"), "\"name\": \"weights-00000-of-00002.safetensors\"",
                        "\"name\": \"" + name + "\""));
    Scratch::write_file(bad + "/manifest.json", manifest);
    EXPECT_THAT(errors(1, [&](World) { engine.load(bad); })[0],
                testing::HasSubstr("is called '" + name + "', which is no plain name"));
  }
  // A link out of the folder is no file of it.
  std::filesystem::remove_all(bad);
  std::filesystem::copy(good, bad);
  std::filesystem::rename(bad + "/weights-00000-of-00002.safetensors", scratch.path("elsewhere"));
  std::filesystem::create_symlink(scratch.path("elsewhere"), bad + "/weights-00000-of-00002.safetensors");
  EXPECT_THROW(engine.load(bad), Error);
  EXPECT_NO_THROW(engine.load(good));
}

}  // namespace
}  // namespace plumb
