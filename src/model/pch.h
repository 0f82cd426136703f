// The precompiled header of the program, the examples and the benchmarks: all of libtorch's front end.
#pragma once

#include <torch/torch.h>
