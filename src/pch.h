// The precompiled header of the library. Only what most files need: every file pays for loading all of it.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
