// Loading the weights and buffers alone; optimizer and step stay as they are.
#pragma once

#include <string>

#include "engine/impl.h"
#include "plumb/save.h"

namespace plumb {

// See Engine::load_weights. Collective; throws on every rank, and then nothing was changed.
LoadInfo load_weights(Engine::Impl& impl, const std::string& path, const LoadOptions& options);

}  // namespace plumb
