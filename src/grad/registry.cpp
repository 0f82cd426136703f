// Which sink belongs to which parameter, for the whole process; and the sink that follows Megatron's convention.
#include <c10/core/TensorImpl.h>

#include <mutex>
#include <unordered_map>

#include "lane/lane.h"
#include "plumb/error.h"
#include "plumb/fused.h"

namespace plumb {
namespace {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// The address of a parameter that died may be another tensor's now, so both ends are watched.
struct Entry {
  WeakTensor parameter;
  std::weak_ptr<FusedSink> sink;
  bool alive() const { return !parameter.expired() && !sink.expired(); }
};

struct Registry {
  std::mutex mutex;
  std::unordered_map<const c10::TensorImpl*, Entry> entries;
  size_t sweep_at = 64;
};

Registry& registry() {
  static auto* const the_one = new Registry;  // outlives every static parameter
  return *the_one;
}

}  // namespace

void attach(const at::Tensor& parameter, const std::shared_ptr<FusedSink>& sink) {
  if (!parameter.defined()) throw Error("attach was given no parameter");
  if (!parameter.is_leaf()) {
    throw Error("attach was given a tensor that is computed from others; attach a sink to the parameter itself");
  }
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto* const key = parameter.unsafeGetTensorImpl();
  if (!sink) {
    all.entries.erase(key);
    return;
  }
  if (all.entries.size() >= all.sweep_at) {
    std::erase_if(all.entries, [](const auto& item) { return !item.second.alive(); });
    all.sweep_at = 2 * all.entries.size() + 64;
  }
  all.entries.insert_or_assign(key, Entry{WeakTensor(parameter.getIntrusivePtr()), sink});
}

std::shared_ptr<FusedSink> sink_of(const at::Tensor& parameter) {
  if (!parameter.defined()) return nullptr;
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto found = all.entries.find(parameter.unsafeGetTensorImpl());
  if (found == all.entries.end()) return nullptr;
  if (!found->second.alive()) {
    all.entries.erase(found);
    return nullptr;
  }
  return found->second.sink.lock();
}

MainGradSink::MainGradSink(MainGrad facts, std::string name)
    : facts(std::move(facts)), name_(std::move(name)), lanes_(std::make_shared<Lanes>()) {}

GradTarget MainGradSink::open() {
  if (facts.main_grad.defined()) lanes_->begin_all(facts.main_grad.device());
  return {facts.main_grad, !facts.overwrite_main_grad};
}

void MainGradSink::wrote() { lanes_->end_all(facts.main_grad.device()); }

void MainGradSink::stood_in() {
  if (facts.grad_added_to_main_grad) facts.grad_added_to_main_grad = true;
}

Tell MainGradSink::tell() const { return facts.grad_added_to_main_grad ? Tell::by_stand_in : Tell::nothing; }

std::shared_ptr<MainGradSink> attach_main_grad(const at::Tensor& parameter, MainGrad facts, std::string name) {
  auto sink = std::make_shared<MainGradSink>(std::move(facts), std::move(name));
  attach(parameter, sink);
  return sink;
}

}  // namespace plumb
