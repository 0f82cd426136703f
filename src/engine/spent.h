// Where the time of a rank's steps went, told from the timelines of all ranks.
#pragma once

#include <string>
#include <vector>

#include "plumb/trace.h"
#include "watch/timeline.h"

namespace plumb {

// When this rank came to what ranks do together (host messages, reductions, gathers), since `zero`, as text for the others.
std::string arrivals(const std::vector<Timeline::Event>& events, Timeline::Moment zero);

// `everybody`: the arrivals of all ranks, in rank order. What only some ranks came to is left out.
TimeSpent time_spent(const std::vector<Timeline::Event>& events, Timeline::Moment zero, int rank,
                     const std::vector<std::string>& everybody);

}  // namespace plumb
