// Items: what one rank writes of a checkpoint: some elements of some tensors, and in words what else there is.
#pragma once

#include <string>
#include <vector>

#include "engine/impl.h"
#include "plumb/save.h"
#include "save/manifest.h"

namespace plumb {

// State of an optimizer that is not the engine's: one value of one parameter.
struct OuterTensor {
  // Elements of the parameter's memory from `begin` on; the whole value of the parameter's shape; or a value of a shape of
  // its own, which one rank of a replica gives.
  enum class Place { piece, whole, other } place = Place::other;
  std::string parameter, key;
  at::Tensor value;
  int64_t begin = 0;
};

struct Outer {
  std::vector<OuterTensor> tensors;
  std::string text;  // JSON of everything else
};

// Some elements of one tensor.
struct SavedItem {
  save::SavedTensor tensor;  // without parts
  at::Tensor memory;         // contiguous, of elements [begin, end)
  int64_t begin = 0, end = 0;
  // Who may write to that memory before the next step or load: anybody in any way; whoever has it, through torch; nobody.
  enum class ChangedBy { anybody, torch, step } changed_by = ChangedBy::anybody;
  bool whole() const { return begin == 0 && end == tensor.numel(); }
};

// This rank's share, in the engine's own memory where that is in order. Between Units::begin_update() and end_update().
// `generators`: states of this rank's random generators beside torch's.
std::vector<SavedItem> items_of(Engine::Impl& impl, const SaveOptions& options, const Outer* outer,
                                const NamedTensors& generators);
// Without tensors and files.
save::Manifest manifest_of(Engine::Impl& impl, const SaveOptions& options, const Outer* outer);
// Brings items of the host to files of the folder `path` whose names end with `end`; the text of this rank's manifest.
std::string write_items(std::vector<SavedItem> items, save::Manifest manifest, const std::string& path,
                        const std::string& end);

// As a checkpoint spells it.
std::string optimizer_name(const Optimizer& optimizer);

}  // namespace plumb
