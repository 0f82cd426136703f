// Snapshot: what a rank's state was at one moment, in memory of the host that serves the next one, too.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <vector>

namespace plumb {

// Bytes that are to be copied from one place to another, by any number of threads that share the work.
class Copying {
 public:
  void add(const at::Tensor& from, const at::Tensor& to);  // on the host, contiguous, of one length
  int64_t bytes() const { return bytes_; }
  // Returns when all of it is copied, by whomever.
  void work();
  // The tensors are let go of; nobody is at work.
  void clear();

 private:
  struct Block {
    const char* from;
    char* to;
    size_t bytes;
  };
  std::vector<at::Tensor> tensors_;  // both ends live until they are copied
  std::vector<Block> blocks_;
  int64_t bytes_ = 0;
  std::atomic<size_t> next_{0}, copied_{0};
};

class Snapshot {
 public:
  // Puts a copy in the place of each (flat, on any device); those of the call before are overwritten. What may change at any
  // moment, `now`, is copied when it returns; `later` is once finish() has returned, and may not change before.
  void take(const std::vector<at::Tensor*>& now, const std::vector<at::Tensor*>& later);
  // Any thread may call it, several at once.
  void finish() { rest_.work(); }
  // The originals are not held any longer; nobody needs the copies now.
  void let_go() { rest_.clear(); }

 private:
  at::Tensor memory_;
  Copying rest_;
};

}  // namespace plumb
