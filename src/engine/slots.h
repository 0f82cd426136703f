// Slots: where on this rank everything lives that a checkpoint holds of an engine: parameters, the optimizer's memory,
// buffers. Saving reads them, loading fills them.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "engine/impl.h"
#include "save/manifest.h"

namespace plumb {

struct SavedSlot {
  save::Kind kind = save::Kind::weight;
  std::string name, key;
  at::Tensor owner;  // of the shape, dtype and device
  at::Tensor
      memory;  // flat: elements [begin, end) in the order of memory; undefined: `owner` has gaps, or is a view of other numbers, and is copied
  int64_t begin = 0, end = 0;
  bool sharded = false;  // over the mesh's shard axis; otherwise every rank holds all of it

  at::ScalarType dtype() const { return memory.defined() ? memory.scalar_type() : owner.scalar_type(); }
  std::vector<int64_t> shape() const { return owner.sizes().vec(); }
  std::vector<int64_t> strides() const;  // empty: in the order of the shape
};

// `updates`: by parameter, how often the optimizer has updated it: those above zero have optimizer memory. All ranks get
// the same slots in the same order, with their own ranges. Between Units::begin_update() and end_update().
std::vector<SavedSlot> slots_of(Engine::Impl& impl, const std::map<std::string, int64_t>& updates);
std::map<std::string, int64_t> updates_of(Engine::Impl& impl);

// torch's random generators that a checkpoint holds of this rank.
std::vector<at::Generator> saved_generators();

// As the safetensors format spells a dtype; an Error where it has no word for it. And back.
std::string dtype_name(at::ScalarType dtype, const std::string& what);
at::ScalarType dtype_of(const std::string& name);

}  // namespace plumb
