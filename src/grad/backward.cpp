#include "grad/backward.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "grad/node.h"
#include "plumb/error.h"

namespace plumb::backward {
namespace {

using torch::autograd::GraphTask;
using torch::autograd::InputBuffer;

// The backwards under way: every graph task, nested or not, by id, with the outermost one it belongs to.
class Running {
 public:
  struct Outermost {
    std::vector<std::shared_ptr<Listener>> listeners;
  };

  void begin(int task, int parent) {
    std::lock_guard lock(mutex_);
    auto around = tasks_.find(parent);
    tasks_[task] = around == tasks_.end() ? std::make_shared<Outermost>() : around->second;
  }

  // Ends a task. The listeners to call, if it was an outermost one.
  std::vector<std::shared_ptr<Listener>> end(int task, bool outermost) {
    std::lock_guard lock(mutex_);
    auto node = tasks_.extract(task);
    if (!outermost) return {};
    auto listeners = std::move(node.mapped()->listeners);
    std::ranges::sort(listeners, {}, [](const auto& listener) { return listener->number; });
    return listeners;
  }

  bool listen(int task, const std::shared_ptr<Listener>& listener) {
    std::lock_guard lock(mutex_);
    auto it = tasks_.find(task);
    if (it == tasks_.end()) {
      throw Error(
          "a gradient arrived outside every backward Plumb knows of; create the engine before the backward begins, and "
          "run backwards through libtorch's default autograd engine");
    }
    auto& listeners = it->second->listeners;
    if (std::find(listeners.begin(), listeners.end(), listener) != listeners.end()) return false;
    listeners.push_back(listener);
    return true;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int, std::shared_ptr<Outermost>> tasks_;
};

Running& running() {
  static Running instance;
  return instance;
}

std::atomic<MakeHooks> make_hooks{nullptr};
std::atomic<uint64_t> listeners_made{0};

class AnnouncingEngine final : public torch::autograd::Engine {
 public:
  AnnouncingEngine() = default;
  ~AnnouncingEngine() override { stop(); }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    const MakeHooks make = make_hooks.load(std::memory_order_relaxed);
    return make != nullptr ? make() : nullptr;
  }

  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(const std::shared_ptr<GraphTask>& task, NodePtr root,
                                                                 InputBuffer&& inputs) override {
    const int id = static_cast<int>(task->id_);
    const int parent = torch::autograd::get_current_graph_task_id();
    const bool outermost = parent < 0;
    running().begin(id, parent);
    start_threads();
    c10::intrusive_ptr<at::ivalue::Future> result;
    std::exception_ptr failure;
    try {
      result = Engine::execute_with_graph_task(task, std::move(root), std::move(inputs));
      if (result->hasError()) failure = result->exception_ptr();
    } catch (...) {
      failure = std::current_exception();
    }
    for (const auto& listener : running().end(id, outermost)) {
      try {
        listener->backward_ended(failure);
      } catch (...) {
        // Every listener gets its call, so that all engines of a process stay in step with their peers.
        if (!failure) failure = std::current_exception();
      }
    }
    if (failure && (!result || !result->hasError())) std::rethrow_exception(failure);
    return result;
  }

 private:
  // libtorch starts device threads once per process, for the engine that runs the first backward. When that was another
  // engine, ours needs its own.
  void start_threads() {
    std::call_once(started_, [this] {
      initialize_device_threads_pool();
      if (device_ready_queues_.empty()) start_device_threads();
    });
  }
  std::once_flag started_;
};

torch::autograd::Engine& announcing_engine() {
  static AnnouncingEngine engine;
  return engine;
}

}  // namespace

Listener::Listener() : number(listeners_made++) {}

void install() {
  static std::once_flag once;
  std::call_once(once, [] {
    running();  // outlives the engine, whose threads may still use it at exit
    torch::autograd::set_default_engine_stub(&announcing_engine);
  });
}

void save_with(MakeHooks make) { make_hooks = make; }

bool listen(const std::shared_ptr<Listener>& listener) {
  return running().listen(torch::autograd::get_current_graph_task_id(), listener);
}

}  // namespace plumb::backward
