#include "grad/backward.h"

#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "grad/mode.h"
#include "grad/trace.h"
#include "plumb/error.h"

namespace plumb::backward {
namespace {

// Who listens to one outermost backward.
class Record final : public c10::DebugInfoBase {
 public:
  const std::chrono::steady_clock::time_point began = std::chrono::steady_clock::now();

  bool add(const std::shared_ptr<Listener>& listener) {
    std::lock_guard lock(mutex_);
    if (std::find(listeners_.begin(), listeners_.end(), listener) != listeners_.end()) return false;
    listeners_.push_back(listener);
    return true;
  }

  // Every listener gets its call, so that all engines of a process stay in step with their peers.
  std::exception_ptr tell(std::exception_ptr failure) {
    std::vector<std::shared_ptr<Listener>> listeners;
    {
      std::lock_guard lock(mutex_);
      listeners.swap(listeners_);
    }
    std::ranges::sort(listeners, {}, [](const auto& listener) { return listener->number; });
    for (const auto& listener : listeners) {
      try {
        listener->backward_ended(failure);
      } catch (...) {
        if (!failure) failure = std::current_exception();
      }
    }
    return failure;
  }

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<Listener>> listeners_;
};

// The slot of libtorch's thread-local state that records travel in: one of our own from torch 2.13 on. Before, slots are
// an enumeration, whose last one serves libtorch's own tests and nobody else.
template <class Kind>
Kind record_kind() {
  if constexpr (std::is_enum_v<Kind>) {
    return Kind::TEST_INFO_2;
  } else {
    static constexpr std::string_view name = "PLUMB_OUTERMOST_BACKWARD";
    return Kind(&name);
  }
}

c10::DebugInfoKind kind() { return record_kind<c10::DebugInfoKind>(); }
Record* current() { return static_cast<Record*>(c10::ThreadLocalDebugInfo::get(kind())); }
int current_task() { return torch::autograd::get_current_graph_task_id(); }

// Backwards that nobody announced, by graph task. The task's final callback tells that one has ended, and the death of
// the callback without a call that it failed.
class Unannounced {
 public:
  static Unannounced& all() {
    static auto* instance = new Unannounced;  // never destroyed: backwards may run while main ends
    return *instance;
  }

  // Inside a hook of the task.
  std::shared_ptr<Record> record_of(int task) {
    std::lock_guard lock(mutex_);
    auto& record = records_[task];
    if (record) return record;
    record = std::make_shared<Record>();
    auto end = std::make_shared<End>(task);
    torch::autograd::Engine::get_default_engine().queue_callback([end] {
      if (auto thrown = end->now(nullptr)) std::rethrow_exception(thrown);
    });
    return record;
  }

 private:
  struct End {
    explicit End(int task) : task(task) {}
    ~End() {
      if (!over) (void)now(std::make_exception_ptr(Error("the backward was ended by an exception")));
    }
    End(const End&) = delete;
    End& operator=(const End&) = delete;
    std::exception_ptr now(std::exception_ptr failure) {
      over = true;
      return all().take(task)->tell(std::move(failure));
    }
    int task;
    bool over = false;
  };

  std::shared_ptr<Record> take(int task) {
    std::lock_guard lock(mutex_);
    return records_.extract(task).mapped();
  }

  std::mutex mutex_;
  std::unordered_map<int, std::shared_ptr<Record>> records_;
};

std::atomic<MakeHooks> make_hooks{nullptr};
std::atomic<uint64_t> listeners_made{0};

class AnnouncingEngine final : public torch::autograd::Engine {
 public:
  AnnouncingEngine() = default;
  ~AnnouncingEngine() override { stop(); }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return hooks_for_save(nullptr);
  }

  // The level at which a graph task takes its copy of the thread-local state, and at which a backward is waited for that
  // libtorch hands to a thread of its own.
  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs, bool keep_graph,
                                         bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    start_threads();
    // Called under InferenceMode, a backward is one all the same: what it makes takes part in training later.
    const TrainingMode training;
    torch::autograd::variable_list normal;
    for (const at::Tensor& input : inputs)
      normal.push_back(input.defined() && input.is_inference() ? input.clone() : input);
    Outermost outermost;
    torch::autograd::variable_list result;
    std::exception_ptr failure;
    try {
      result = Engine::execute(roots, normal, keep_graph, create_graph, accumulate_grad, outputs);
    } catch (...) {
      failure = std::current_exception();
    }
    if (const auto thrown = outermost.end(failure)) std::rethrow_exception(thrown);
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

// libtorch alone: an engine of ours below it, which asks for hooks at every save.
class OwnHost final : public Host {
 public:
  void install() override {
    torch::autograd::set_default_engine_stub(&announcing_engine);
    trace::install();
  }
  void begin_saving() override {}
  void end_saving() noexcept override {}
};

std::atomic<Host*>& host() {
  static OwnHost own;
  static std::atomic<Host*> chosen{&own};
  return chosen;
}

}  // namespace

Listener::Listener() : number(listeners_made++) {}

bool listen(const std::shared_ptr<Listener>& listener) {
  if (Record* record = current()) return record->add(listener);
  if (current_task() < 0) {
    throw Error("a gradient arrived outside of every backward; run backwards through libtorch's autograd engine");
  }
  return Unannounced::all().record_of(current_task())->add(listener);
}

struct Outermost::State {
  std::shared_ptr<Record> record;
  bool ours = false;  // to end
  bool saving = false;
  std::optional<c10::DebugInfoGuard> guard;

  void close() {
    guard.reset();
    if (std::exchange(saving, false)) end_saving();
  }
};

Outermost::Outermost() {
  if (current() != nullptr) return;
  const int task = current_task();
  state_ = std::make_unique<State>();
  state_->ours = task < 0;
  // Inside of one that nobody announced: what this one brings belongs to that one's end.
  state_->record = state_->ours ? std::make_shared<Record>() : Unannounced::all().record_of(task);
  if (make_hooks.load(std::memory_order_relaxed) != nullptr) {
    begin_saving();
    state_->saving = true;
  }
  state_->guard.emplace(kind(), state_->record);
}

Outermost::~Outermost() {
  if (state_) state_->close();
}

std::exception_ptr Outermost::end(std::exception_ptr failure) {
  if (!state_) return failure;
  state_->close();
  return state_->ours ? state_->record->tell(failure) : failure;
}

std::chrono::steady_clock::time_point began() {
  const Record* record = current();
  return record != nullptr ? record->began : std::chrono::steady_clock::now();
}

void save_with(MakeHooks make) { make_hooks = make; }

Hooks hooks_for_save(Hooks inner) {
  const MakeHooks make = make_hooks.load(std::memory_order_relaxed);
  return make != nullptr ? make(std::move(inner)) : std::move(inner);
}

void begin_saving() { host().load()->begin_saving(); }
void end_saving() noexcept { host().load()->end_saving(); }

void use_host(Host& the_host) { host() = &the_host; }

void install() {
  static std::once_flag once;
  std::call_once(once, [] { host().load()->install(); });
}

}  // namespace plumb::backward
