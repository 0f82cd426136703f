// What a test allows for under a sanitizer: repetitions that show nothing new are fewer there, and limits of time longer.
#pragma once

namespace plumb {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int slowness = 10;  // what is repeated is repeated so many times less often
constexpr int patience = 3;   // what must happen in time may take so many times longer
#else
constexpr int slowness = 1;
constexpr int patience = 1;
#endif

}  // namespace plumb
