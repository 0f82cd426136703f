// Training across a cable that is pulled: both machines end with a message, and go on from the checkpoint when it is back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "cli/support/program.h"
#include "slowness.h"
#include "world/support/cable.h"

namespace plumb::test {
namespace {

using plumb::testing::Cable;
using ::testing::AnyOf;
using ::testing::HasSubstr;

Words training(const std::string& saved) {
  return tiny({"--json", "--deterministic", "--virtual-ranks", "2", "--steps", "150", "--questions", "8",
               "--save-every", "10", "--eval-every", "0", "--timeout", std::to_string(6 * patience), "--checkpoint",
               saved});
}

// One rank, as the launcher of its machine would start it.
std::unique_ptr<Program> at_end(const Cable& cable, int rank, const std::string& saved) {
  std::string inside;
  for (const std::string& word : cable.inside(rank)) inside += word + " ";
  Words words = {"-c", "exec " + inside + "\"$PLUMB\" \"$@\"", "sh"};
  for (const std::string& word : training(saved)) words.push_back(word);
  words.insert(words.end(), {"--strategy", "zero3"});
  const Environment environment = {
      {"PLUMB", program()}, {"PLUMB_SHM", "0"},        {"RANK", std::to_string(rank)}, {"WORLD_SIZE", "2"},
      {"LOCAL_RANK", "0"},  {"LOCAL_WORLD_SIZE", "1"}, {"MASTER_ADDR", "10.77.0.1"},   {"MASTER_PORT", "29500"}};
  return std::make_unique<Program>(words, environment, "/bin/sh");
}

TEST(Cable, ThatIsPulledEndsTheRunAndPluggedInItGoesOnToTheSameBits) {
  NEEDS(cable);
  const Scratch scratch;
  Words alone = training(scratch.path("alone"));
  alone.insert(alone.end(), {"--ranks", "1"});
  const Result undisturbed = run(alone);
  ASSERT_EQ(undisturbed.code, 0) << undisturbed.err;
  const std::string saved = scratch.path("saved");
  auto zero = at_end(cable, 0, saved), one = at_end(cable, 1, saved);
  zero->wait_for_lines(40);
  cable.pull();
  for (Program* rank : {zero.get(), one.get()}) {
    const Result ended = rank->wait();
    EXPECT_EQ(ended.code, 1) << ended.err;
    EXPECT_THAT(ended.err, AnyOf(HasSubstr("rank 0"), HasSubstr("rank 1"), HasSubstr("store"))) << ended.err;
  }
  cable.plug();
  auto again = at_end(cable, 0, saved), other = at_end(cable, 1, saved);
  const Result whole = again->wait(), listener = other->wait();
  ASSERT_EQ(whole.code, 0) << whole.err;
  EXPECT_EQ(listener.code, 0) << listener.err;
  EXPECT_GE(whole.last()["resumed_from_step"], 30);
  EXPECT_LT(whole.last()["resumed_from_step"], 150);
  EXPECT_EQ(whole.last()["model_digest"], undisturbed.last()["model_digest"]);
}

}  // namespace
}  // namespace plumb::test
