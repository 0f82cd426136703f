// Errors that libtorch throws in our name say what we said, without the frames it adds behind.
#pragma once

namespace plumb::trace {

// From here on errors about parameters that are released end with their message. All others keep their frames.
void install();

}  // namespace plumb::trace
