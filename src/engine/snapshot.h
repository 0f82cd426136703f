// Snapshot: what a rank's state was at one moment, in memory of the host that serves the next one, too.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace plumb {

// Bytes that are to be copied from one place to another, by any number of threads that share the work.
class Copying {
 public:
  void add(const at::Tensor& from, const at::Tensor& to);  // on the host, contiguous, of one length
  void add(const char* from, const at::Tensor& to);        // somebody else sees to it that `from` stays
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

// Memory of somebody else's, as it is now, whatever is written through torch from here on: such a write finds other memory,
// with the same numbers (copy-on-write). Memory that torch did not allocate cannot be held so.
class Held {
 public:
  Held() = default;
  ~Held() { let_go(); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  // Where the bytes of a contiguous tensor of the host lie until let_go(); null: they cannot be held.
  const char* hold(const at::Tensor& tensor);
  // What nobody has written to is its owner's as before, at the same place; on the thread of whoever writes to it.
  void let_go();

 private:
  struct Memory {
    c10::Storage owners;
    c10::intrusive_ptr<c10::StorageImpl> ours;
  };
  std::unordered_map<const c10::StorageImpl*, Memory> memories_;  // by the owner's
};

// What is to be copied: tensors in whose place a copy is put.
struct ToCopy {
  std::vector<at::Tensor*> now;    // may be written at any moment, in any way
  std::vector<at::Tensor*> held;   // may be written at any moment, through torch
  std::vector<at::Tensor*> later;  // nobody writes before finish()
};

class Snapshot {
 public:
  // Puts a copy in the place of each (flat, on any device); those of the call before are overwritten. The copies are
  // complete once finish() has returned.
  void take(const ToCopy& tensors);
  // Any thread may call it, several at once.
  void finish() { rest_.work(); }
  // finish(), and what was held is its owner's alone, who is about to write to it: on his thread.
  void settle();
  // The originals are not held any longer; nobody needs the copies now.
  void let_go();

 private:
  at::Tensor memory_;
  Held held_;
  Copying rest_;
};

}  // namespace plumb
