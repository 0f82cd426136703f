// The precompiled header of all tests: GoogleTest and libtorch's heavy headers, once.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include "libtorch.h"
