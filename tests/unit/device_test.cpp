// Units on a device whose streams run in any order: gathered, read, kept and freed without a race, with the numbers of the CPU, also
// where ranks use different ones.
#include "sim/support/on_streams.h"

namespace plumb::sim {
namespace {

const auto* const accelerator = testing::AddGlobalTestEnvironment(new Accelerator);

class UnitsOnStreams : public OnStreams {};

TEST_P(UnitsOnStreams, RaceWithNobody) { plays(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Table, UnitsOnStreams, each_under({"zero3", "hsdp"}), name_of);

}  // namespace
}  // namespace plumb::sim
