// The reducer on a device whose streams run in any order: gradients that several streams make, reduce, keep and free, without a
// race, and with the numbers of the CPU.
#include "sim/support/on_streams.h"

namespace plumb::sim {
namespace {

const auto* const accelerator = testing::AddGlobalTestEnvironment(new Accelerator);

class GradientsOnStreams : public OnStreams {};

TEST_P(GradientsOnStreams, RaceWithNobody) { plays(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Table, GradientsOnStreams, each_under({"ddp", "zero1", "zero2"}), name_of);

}  // namespace
}  // namespace plumb::sim
