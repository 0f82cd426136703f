// Gathering: what the reducer asks of the units whose parameters ranks gather together.
#pragma once

#include <cstdint>

#include "watch/where.h"

namespace plumb {

class Gathering {
 public:
  virtual ~Gathering() = default;

  // Whether ranks ask each other before each gather: then one that waits for another anywhere else must be sure that it comes.
  virtual bool asks() const = 0;
  // This rank needs nothing more: takes part in what others still gather, until none of them does.
  virtual void serve(const Where& where) = 0;
  // Waits for what was gathered without asking; a digest of it.
  virtual int64_t settle() = 0;
  // Those digests differ: an Error that tells by what. Collective.
  virtual void explain(const Where& where) = 0;
};

}  // namespace plumb
