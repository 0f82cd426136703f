// Loading the weights and buffers alone; optimizer and step stay as they are.
#pragma once

#include <set>
#include <string>

#include "engine/impl.h"
#include "plumb/save.h"

namespace plumb {

// See Engine::load_weights. Collective; throws on every rank, and then nothing was changed.
// `passing`: buffers that are no part of a model's files, as torch's non-persistent ones; where they are there, they are taken.
// `refusal`: why this rank cannot begin; empty: it can.
LoadInfo load_weights(Engine::Impl& impl, const std::string& path, const LoadOptions& options,
                      const std::set<std::string>& passing = {}, const std::string& refusal = "");

}  // namespace plumb
