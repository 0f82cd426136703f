// The placement table and its meshes, and the digest: against what is written down, and against every possible answer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "layout/digest.h"
#include "paths.h"
#include "plumb/error.h"
#include "plumb/strategy.h"

namespace plumb {
namespace {

TEST(Table, IsTheOneOfTheDesignPage) {
  std::ifstream page(PLUMB_SOURCE_DIR "/docs/design.md");
  std::vector<std::string> written, rows;
  for (std::string line; std::getline(page, line);) {
    for (const Strategy& row : strategies()) {
      if (line.starts_with("| `" + row.name + "` |")) written.push_back(line);
    }
  }
  for (const Strategy& row : strategies()) {
    const auto word = [](Placement placement) { return placement == Placement::sharded ? "sharded" : "replicated"; };
    rows.push_back("| `" + row.name + "` | " + word(row.parameter) + " | " + word(row.gradient) + " | " +
                   word(row.state) + " |");
  }
  ASSERT_EQ(rows.size(), 5u);
  rows[4] = "| `hsdp` | `zero3` inside the `shard` axis, replicated over the `replicate` axis | | |";
  EXPECT_EQ(written, rows);
  const Strategy &inside = strategy("zero3"), &both = strategy("hsdp");
  EXPECT_EQ(both.parameter, inside.parameter);
  EXPECT_EQ(both.gradient, inside.gradient);
  EXPECT_EQ(both.state, inside.state);
  for (const Strategy& row : strategies()) EXPECT_EQ(row.replicate, row.name == "hsdp" ? 2 : 1);
}

TEST(Table, FindsEveryRowByItsNameAndListsThemOtherwise) {
  for (const Strategy& row : strategies()) EXPECT_EQ(&strategy(row.name), &row);
  try {
    strategy("zero4");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(),
                testing::HasSubstr("unknown strategy 'zero4'; known strategies: ddp, zero1, zero2, zero3, hsdp"));
  }
}

// Every mesh one can ask for in every world: the one answer there is, or an error that names what was asked for.
TEST(Meshes, AreTheOnlyOnesThatFit) {
  for (const Strategy& row : strategies()) {
    for (int size = 1; size <= 12; ++size) {
      for (int replicate = -1; replicate <= size + 1; ++replicate) {
        for (int shard = -1; shard <= size + 1; ++shard) {
          std::vector<Mesh> fitting;
          for (int r = 1; r <= size; ++r) {
            if (size % r != 0) continue;
            const Mesh mesh{r, size / r};
            if ((replicate == 0 || replicate == mesh.replicate) && (shard == 0 || shard == mesh.shard))
              fitting.push_back(mesh);
          }
          if (replicate == 0 && shard == 0) {
            const int groups = size % row.replicate == 0 ? row.replicate : 1;
            fitting = {{groups, size / groups}};
          }
          const std::string asked = row.name + ", replicate=" + std::to_string(replicate) +
                                    ", shard=" + std::to_string(shard) + " of " + std::to_string(size);
          try {
            const Mesh mesh = mesh_of(row, {replicate, shard}, size);
            ASSERT_EQ(fitting.size(), 1u) << asked;
            EXPECT_EQ(mesh.replicate, fitting[0].replicate) << asked;
            EXPECT_EQ(mesh.shard, fitting[0].shard) << asked;
          } catch (const Error& error) {
            const std::string said = error.what();
            EXPECT_TRUE(fitting.empty()) << asked << ": " << said;
            if (replicate < 0 || shard < 0) {
              EXPECT_THAT(said, testing::HasSubstr("the mesh is replicate=" + std::to_string(replicate) +
                                                   ", shard=" + std::to_string(shard) + "; both must be positive"));
              continue;
            }
            const bool both = replicate != 0 && shard != 0;
            const std::string world = "the world of " + std::to_string(size) + (size == 1 ? " rank;" : " ranks;");
            std::string axes =
                both ? "replicate=" + std::to_string(replicate) + ", shard=" + std::to_string(shard)
                     : (shard != 0 ? "shard=" + std::to_string(shard) : "replicate=" + std::to_string(replicate));
            axes += both ? " does not multiply to " : " does not divide ";
            EXPECT_THAT(said, testing::HasSubstr("the mesh " + axes + world)) << asked;
          }
        }
      }
    }
  }
}

// The published vectors of 64-bit FNV-1a.
TEST(Digests, AreFnv1a) {
  const auto of = [](std::string_view text) {
    Digest digest;
    digest.add(std::span<const char>(text.data(), text.size()));
    return static_cast<uint64_t>(digest.value());
  };
  EXPECT_EQ(of(""), 0xcbf29ce484222325u);
  EXPECT_EQ(of("a"), 0xaf63dc4c8601ec8cu);
  EXPECT_EQ(of("foobar"), 0x85944171f73967e8u);
  EXPECT_EQ(of("\xff"), 0xaf64724c8602eb6eu);  // bytes, not signed characters
  Digest one, other;
  for (const uint64_t word : {1, 2}) one.add(word);
  for (const uint64_t word : {2, 1}) other.add(word);
  EXPECT_NE(one.value(), other.value()) << "the order counts";
}

}  // namespace
}  // namespace plumb
