// The engine's checkpoints, as its users see them.
#include "engine/impl.h"
#include "engine/loading.h"
#include "engine/saving.h"
#include "engine/weights.h"
#include "grad/mode.h"

namespace plumb {
namespace {

Saving& saving_of(Engine::Impl& impl) {
  if (!impl.saving) impl.saving = std::make_shared<Saving>(impl);
  return *impl.saving;
}

}  // namespace

std::string Engine::save(const std::string& folder, const SaveOptions& options) {
  const TrainingMode training;
  Saving& saving = saving_of(*impl_);
  saving.begin(folder, options, nullptr, Copy::no);
  return saving.finish();
}

void Engine::save_in_background(const std::string& folder, const SaveOptions& options) {
  const TrainingMode training;
  saving_of(*impl_).begin(folder, options, nullptr, Copy::yes);
}

std::string Engine::finish_save() {
  const TrainingMode training;
  return impl_->saving ? impl_->saving->finish() : "";
}

LoadInfo Engine::load(const std::string& path, const LoadOptions& options) {
  const TrainingMode training;
  finish_save();
  Loading loading(*impl_, path, options, OuterState::none);
  loading.accept("");
  loading.apply();
  return loading.info();
}

LoadInfo Engine::load_weights(const std::string& path, const LoadOptions& options) {
  const TrainingMode training;
  finish_save();
  return plumb::load_weights(*impl_, path, options);
}

int64_t Engine::steps() const { return impl_->reducer->steps(); }

}  // namespace plumb
