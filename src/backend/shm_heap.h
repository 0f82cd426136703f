// Memory that every rank of one machine sees: each rank owns one sparse segment, and maps everybody's.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "backend/names.h"
#include "watch/process.h"

namespace c10d {
class Store;
}

namespace plumb {

class ShmRing;

// A place is (rank, offset in that rank's segment). Segments are anonymous files (memfd): they end with the last process
// that maps them, however it ends. They are reserved at the size of the machine's memory and filled page by page.
class ShmHeap : public std::enable_shared_from_this<ShmHeap> {
 public:
  struct Block {
    int64_t offset = -1;  // -1: none
    int64_t bytes = 0;
  };

  // Collective. Either every rank gets a heap, or none does, and `why_not` says which rank cannot share with which, by their
  // `names`.
  static std::shared_ptr<ShmHeap> meet(c10d::Store& store, int rank, int size, std::string& why_not,
                                       const Names& names = {});
  ~ShmHeap();

  int rank() const { return rank_; }
  int size() const { return size_; }
  // By this process, which was forked since and has no part in it: nothing is freed or ended here.
  bool inherited() const { return process_.left(); }

  // The address here of a place; the caller has checked that it lies `within`.
  char* at(int rank, int64_t offset) const { return segments_[rank]->base + offset; }
  bool within(int rank, int64_t offset, int64_t bytes) const;
  // The offset of memory of this rank's own segment; -1 for any other memory.
  int64_t offset_of(const void* memory) const;

  // Zeroed pages; no block when memory is short.
  Block allocate(int64_t bytes);
  void free(Block block);
  // A tensor that frees its block; undefined when memory is short.
  at::Tensor tensor(int64_t numel, const at::TensorOptions& options);
  // A tensor that every rank may read in place, each through one of its own: the block is freed when all have let go, so
  // that nobody reads what its owner has left. Undefined when memory is short.
  at::Tensor window(int64_t numel, const at::TensorOptions& options);
  at::Tensor window_of(int rank, int64_t offset, int64_t numel, const at::TensorOptions& options);
  // Nobody but this rank reads it after all.
  void keep_window(const at::Tensor& mine);
  // As allocate and free, with contents left as they were: for blocks that come and go all the time.
  Block borrow(int64_t bytes);
  void give_back(Block block);

  // The rings of this rank: whoever waits in one moves all of them on.
  void enlist(const std::shared_ptr<ShmRing>& ring);
  void advance_all();
  // This rank's part of group `serial` has ended. What others may still touch is freed when theirs have ended too.
  void close(int64_t serial, std::vector<Block> blocks);
  // The allocation at `offset` is never used again: others may write to it at any time.
  void condemn(int64_t offset);

  // Sleeps until somebody rings, at most `limit`. `ready` is asked once more after the sleep was announced, so that no
  // ring is missed. False when the limit passed.
  template <class Ready>
  bool sleep(std::chrono::nanoseconds limit, const Ready& ready) {
    Header& own = header(rank_);
    own.sleepers.fetch_add(1);
    const uint32_t heard = own.bell.load();
    const bool woken = ready() || doze(own.bell, heard, limit);
    own.sleepers.fetch_sub(1);
    return woken;
  }
  // Wakes every rank that sleeps. To be called after the news has been stored (sequentially consistent).
  void ring();

  // Ranks whose processes have ended.
  std::vector<int> gone() const;
  // How long a wait may keep its core before it sleeps: long enough for a peer on a core of its own to answer.
  std::chrono::microseconds patience() const { return patience_; }

 private:
  struct Segment {
    char* base = nullptr;
    int64_t bytes = 0;
    int fd = -1;
    ~Segment();
  };
  static constexpr int64_t serials = 1 << 14;  // groups whose memory is reclaimed; later ones keep theirs
  struct Header {
    uint64_t token;
    alignas(64) std::atomic<uint32_t> bell;
    std::atomic<uint32_t> sleepers;
    alignas(64) std::atomic<bool> closed[serials];
  };
  struct Closing {
    int64_t serial;
    std::vector<Block> blocks;
  };
  // In front of a window's elements.
  struct alignas(64) Readers {
    std::atomic<int> left;  // ranks that have not let go
  };

  ShmHeap(int rank, int size);
  std::string make_own();
  std::string attach(int other, const std::string& name, const std::string& record);
  Header& header(int rank) const { return *reinterpret_cast<Header*>(segments_[rank]->base); }
  static bool doze(std::atomic<uint32_t>& bell, uint32_t heard, std::chrono::nanoseconds limit);
  Readers& readers(int rank, int64_t window) const;
  void sweep();

  const int rank_;
  const int size_;
  const OwnProcess process_;
  std::chrono::microseconds patience_{0};
  std::vector<std::shared_ptr<Segment>> segments_;  // by rank
  std::vector<int> pids_;                           // by rank; 0: this process
  std::vector<int> pidfds_;                         // by rank; -1: none

  std::mutex mutex_;                           // guards the memory
  std::map<int64_t, int64_t> free_;            // offset to bytes, merged
  std::multimap<int64_t, int64_t> lent_back_;  // bytes to offset: borrowed blocks that came back
  int64_t idle_ = 0;                           // bytes of lent_back_

  std::mutex rings_mutex_;  // guards the rest; one of its own, since filling pages takes time
  std::vector<std::weak_ptr<ShmRing>> rings_;
  std::vector<Closing> closing_;
  std::vector<Block> left_;      // windows that this rank has let go
  std::set<int64_t> condemned_;  // guarded by mutex_
};

}  // namespace plumb
