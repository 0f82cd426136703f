// A call that may take for ever, waited for no longer than one cares.
#pragma once

#include <chrono>
#include <future>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>

namespace plumb {

// What `task` returns or throws, from a thread of its own; nothing when it took longer than `limit`. It is then left to itself,
// and must hold all it needs.
template <class Task>
std::optional<std::invoke_result_t<Task>> bounded(std::chrono::milliseconds limit, Task task) {
  std::packaged_task<std::invoke_result_t<Task>()> packaged(std::move(task));
  auto result = packaged.get_future();
  std::thread thread(std::move(packaged));
  if (result.wait_for(limit) != std::future_status::ready) {
    thread.detach();
    return std::nullopt;
  }
  thread.join();
  return result.get();
}

}  // namespace plumb
