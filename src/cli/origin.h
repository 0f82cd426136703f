// The origin of a NaN or an inf: the first operation that made one out of inputs that had none.
#pragma once

#include <ATen/record_function.h>

#include <cstdint>
#include <string>

namespace plumb::cli {

// Watches every operation of this thread, its backwards included, as long as it lives. Slow: it looks at every number.
class OriginWatch {
 public:
  OriginWatch();
  ~OriginWatch();
  OriginWatch(const OriginWatch&) = delete;
  OriginWatch& operator=(const OriginWatch&) = delete;

  // "aten::log made a NaN, operation 57, in the forward, of [4, 8]"; empty where nothing made one. A NaN comes before an
  // inf, which masks are made of.
  std::string found() const;

  struct Numbers {
    bool nan = false, inf = false;
  };

 private:
  struct Inputs;  // of an operation, as they were before it ran
  static void begin(OriginWatch& watch, const at::RecordFunction& function, Inputs& inputs);
  static void end(OriginWatch& watch, const at::RecordFunction& function, const Inputs& inputs);

  at::CallbackHandle handle_ = 0;
  int64_t operations_ = 0;
  std::string node_;  // of the backward that runs; empty in a forward
  std::string nan_, inf_;
};

}  // namespace plumb::cli
