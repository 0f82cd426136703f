// What is thrown on every rank, together, where a NaN or an inf ends a step and nothing was updated.
#pragma once

#include "plumb/error.h"

namespace plumb {

class NotFinite : public Error {
  using Error::Error;
};

}  // namespace plumb
