// What loading a checkpoint and loading weights alone share: the ranks begin together, read parts of saved tensors, and fill
// them into the places where an engine keeps them.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "engine/slots.h"
#include "save/checkpoint.h"
#include "world/outcome.h"

namespace plumb {

// What is filled into a slot: elements [begin, end), on the host.
struct Filling {
  SavedSlot slot;
  at::Tensor value;
};

// "weight 'a'", as the manifest calls what belongs there.
std::string title_of(save::Kind kind, const std::string& name, const std::string& key = "");
std::string title_of(const SavedSlot& slot);

// Every rank may load now (it is between steps), or an Error on all of them. `refusal`: why this one may not. What rank 0
// chose. Collective.
std::string begin_loading(Engine::Impl& impl, const Where& where, const std::string& refusal,
                          const std::function<std::string()>& choose);

// Work that may take as long as a disk takes. What one rank finds, all of them throw. Collective.
std::vector<std::string> on_every_rank(const World& world, std::function<std::string()> work, const Where& where);

// Elements [begin, end) in the order of the file.
at::Tensor read_range(const save::Checkpoint& checkpoint, const save::SavedTensor& tensor, int64_t begin, int64_t end);

// The same of many tensors: they are listed first, and then read by a few threads at once.
class Reads {
 public:
  explicit Reads(const save::Checkpoint& checkpoint) : checkpoint_(checkpoint) {}
  // The next ones lie in one piece of memory, as far as these bytes go, which lives as long as any of them; 0: each has its own.
  void share(int64_t bytes);
  // Memory that run() fills.
  at::Tensor add(const save::SavedTensor& tensor, int64_t begin, int64_t end);
  // Only its checksums are compared.
  void verify(const save::SavedTensor& tensor) { reads_.push_back({&tensor, 0, 0, {}}); }
  // All of them, or the Error of the first.
  void run();

 private:
  struct Read {
    const save::SavedTensor* tensor;
    int64_t begin, end;
    at::Tensor memory;  // undefined: none is wanted
  };
  const save::Checkpoint& checkpoint_;
  std::vector<Read> reads_;
  at::Tensor shared_;
  int64_t taken_ = 0;  // bytes of it
};

// Cannot fail. Gradients are forgotten; `before`: what is to be done to the engine while nobody uses it. The parameters are
// the engine's own from here on, as after a step.
void fill(Engine::Impl& impl, const std::vector<Filling>& fillings, const std::function<void()>& before);

}  // namespace plumb
