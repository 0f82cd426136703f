// Weights and buffers alone, for fine-tuning: of a checkpoint, or of plain safetensors files.
#include "engine/weights.h"

#include <ATen/ATen.h>

#include <deque>
#include <map>
#include <memory>
#include <set>

#include "engine/filling.h"
#include "save/folder.h"
#include "save/tensors.h"

namespace plumb {

using save::Kind;
using save::SavedTensor;

namespace {

// Weights and buffers by name, wherever they lie.
class WeightSource {
 public:
  explicit WeightSource(const std::string& path) {
    if (const auto found = save::is_folder(path) ? save::newest_in(path) : std::nullopt) {
      checkpoint_ = std::make_unique<save::Checkpoint>(*found);
      for (const SavedTensor& tensor : checkpoint_->manifest().tensors) {
        if (tensor.kind == Kind::weight || tensor.kind == Kind::buffer) saved_[tensor.name] = &tensor;
      }
      return;
    }
    std::vector<std::string> files;
    if (save::is_folder(path)) {
      for (const std::string& name : save::names_in(path)) {
        if (name.ends_with(".safetensors")) files.push_back(path + "/" + name);
      }
    } else {
      files.push_back(path);
    }
    if (files.empty()) throw Error("there is no checkpoint and no safetensors file in '" + path + "'");
    for (const std::string& file : files) files_.emplace_back(file);
    for (const save::TensorFile& file : files_) {
      for (const save::TensorInFile& tensor : file.tensors()) {
        if (!plain_.try_emplace(tensor.name, &file, &tensor).second) {
          throw Error("tensor '" + tensor.name + "' stands in two files of '" + path + "'");
        }
      }
    }
  }
  WeightSource(const WeightSource&) = delete;
  WeightSource& operator=(const WeightSource&) = delete;

  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto& [name, tensor] : saved_) all.push_back(name);
    for (const auto& [name, tensor] : plain_) all.push_back(name);
    return all;
  }
  const std::vector<int64_t>* shape(const std::string& name) const {
    if (const auto found = saved_.find(name); found != saved_.end()) return &found->second->shape;
    if (const auto found = plain_.find(name); found != plain_.end()) return &found->second.second->shape;
    return nullptr;
  }
  // Whole, in its shape.
  at::Tensor read(const std::string& name) const {
    if (const auto found = saved_.find(name); found != saved_.end()) {
      const SavedTensor& tensor = *found->second;
      const at::Tensor flat = read_range(*checkpoint_, tensor, 0, tensor.numel());
      return tensor.strides.empty() ? flat.view(tensor.shape) : flat.as_strided(tensor.shape, tensor.strides);
    }
    const auto& [file, tensor] = plain_.at(name);
    const at::Tensor value = at::empty(tensor->shape, dtype_of(tensor->dtype));
    file->read(*tensor, 0, value.mutable_data_ptr(), value.nbytes());
    return value;
  }

 private:
  std::unique_ptr<save::Checkpoint> checkpoint_;
  std::map<std::string, const SavedTensor*> saved_;
  std::deque<save::TensorFile> files_;
  std::map<std::string, std::pair<const save::TensorFile*, const save::TensorInFile*>> plain_;
};

}  // namespace

LoadInfo load_weights(Engine::Impl& impl, const std::string& path, const LoadOptions& options,
                      const std::set<std::string>& passing, const std::string& refusal) {
  at::NoGradGuard no_grad;
  const Where where = impl.reducer->here(Where::Kind::step, "load_weights()");
  LoadInfo info;
  info.path = path;
  begin_loading(impl, where, refusal, [] { return std::string(); });
  info.step = impl.reducer->steps();
  std::unique_ptr<WeightSource> source;
  std::vector<Filling> fillings;
  on_every_rank(
      impl.world,
      [&] {
        at::NoGradGuard off;
        source = std::make_unique<WeightSource>(path);
        std::set<std::string> known;
        for (const SavedSlot& slot : slots_of(impl, {})) {
          known.insert(slot.name);
          const auto* shape = source->shape(slot.name);
          if (shape == nullptr && passing.contains(slot.name)) continue;
          if (shape == nullptr) {
            info.mismatches.push_back(
                {Mismatch::Kind::missing, title_of(slot), "", c10::str(at::IntArrayRef(slot.shape()))});
          } else if (*shape != slot.shape()) {
            info.mismatches.push_back({Mismatch::Kind::reshaped, title_of(slot), c10::str(at::IntArrayRef(*shape)),
                                       c10::str(at::IntArrayRef(slot.shape()))});
          } else {
            const at::Tensor whole = source->read(slot.name);
            const at::Tensor flat = at::empty({slot.owner.numel()}, whole.options().dtype(slot.owner.scalar_type()));
            // In the order of its memory, or where it is copied, of its shape.
            (slot.memory.defined() ? view_in(flat, 0, slot.owner) : flat.view(slot.shape())).copy_(whole);
            fillings.push_back({slot, flat.narrow(0, slot.begin, slot.end - slot.begin).clone()});
          }
        }
        for (const std::string& name : source->names()) {
          if (!known.contains(name))
            info.mismatches.push_back({Mismatch::Kind::extra, "weight '" + name + "'", "", ""});
        }
        if (options.strict && !info.mismatches.empty()) {
          throw Error("the weights at '" + path +
                      "' do not fit this engine, and nothing was loaded (strict = false loads what "
                      "fits):\n" +
                      info.table());
        }
        return std::string();
      },
      where);
  fill(impl, fillings, [] {});
  impl.reducer->resume(impl.reducer->steps());
  return info;
}

}  // namespace plumb
