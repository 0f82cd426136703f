// The page itself: markup, style and the script that draws the charts. `@DATA@` stands for the run's numbers.
#pragma once

namespace plumb::report {

extern const char* const kTemplate;

}  // namespace plumb::report
