// The precompiled header of the library and the program: libtorch's heavy headers, once.
#pragma once

#include <torch/torch.h>
