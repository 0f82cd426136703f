// An engine's state in memory, for those who bring it to a disk and back by themselves (torch.distributed.checkpoint).
#pragma once

#include <map>
#include <string>
#include <vector>

#include "engine/slots.h"
#include "save/json.h"

namespace plumb {

// Slots as of an engine whose every trained parameter was updated, so that all engines of a model have the same: there is
// memory for it, and the buckets keep their layout from here on. Changes no value. All ranks call it.
std::vector<SavedSlot> all_slots(Engine::Impl& impl);

// What belongs to the slots: step, rates, loss scale, updates by parameter.
save::Json::Object words_of(Engine::Impl& impl);

// An Error where `words` are of an engine that this one cannot follow.
void check_words(Engine::Impl& impl, const save::Json& words);

// Fills the slots with `values`, in their order and of their length, on the host; and takes the words, which were checked.
// Gradients are forgotten.
void refill(Engine::Impl& impl, const std::vector<at::Tensor>& values, const save::Json& words);

}  // namespace plumb
