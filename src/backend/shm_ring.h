// One rank's part in the collectives of one group of the `shm` backend.
//
// Each rank has a mailbox that it alone writes: a ring of slots, one per *piece* of a collective (large tensors go in
// pieces). A rank *arrives* at a piece by filling its slot, which says where its input lies for all to read: in the
// tensor itself if that lies in shared memory, in a staged copy otherwise. When all have arrived, there are two ways:
//
//   pull     each rank makes its own output from everybody's input. It is through when it has; a rank whose own tensor is
//            read, and not a copy of it, waits until all are through.
//   claimed  a large all-reduce, in place: whoever comes claims the next unit, and writes its sum to every rank's memory.
//            It is through when all units are done. A rank that waits does the share of one that still computes.
//
// There is no thread: whoever issues or waits moves everything on. Sums are in rank order, so nothing depends on who
// does them, or when.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend/names.h"
#include "backend/shm_heap.h"
#include "backend/sum.h"
#include "backend/verb.h"
#include "watch/report.h"

namespace plumb {

// One rank's call of one collective.
struct ShmCall {
  Verb verb = Verb::barrier;
  Reduction reduction = Reduction::sum;
  int root = 0;
  int reader = -1;      // the one rank that makes an output of everybody's input; -1: each does
  uint64_t what = 0;    // what it is about: ranks that say different things touch nothing, and wait
  at::Tensor input{};   // what the others read
  at::Tensor output{};  // what this rank gets; the input itself for an all-reduce
  // Elements: all of them for all-reduce and broadcast, of the shard for all-gather, reduce-scatter and scatter.
  int64_t numel = 0;
  std::vector<int64_t> input_splits{};   // all-to-all; elements
  std::vector<int64_t> output_splits{};  // all-to-all; elements
};

class ShmWork;

class ShmRing : public std::enable_shared_from_this<ShmRing> {
 public:
  // Collective: the mailboxes are made known through `store`. `serial`: the number of the group in its world. `names`: of its
  // ranks in errors. `first`: the number of its rank 0 in the group that is told which ranks have ended.
  static std::shared_ptr<ShmRing> make(std::shared_ptr<ShmHeap> heap, c10d::Store& store, int64_t serial,
                                       Names names = {}, int first = 0);

  c10::intrusive_ptr<c10d::Work> issue(ShmCall call, std::chrono::milliseconds timeout);
  // Does what can be done without waiting.
  void advance();
  // This rank takes part no more. What has not ended ends with an Error.
  void close();

  ShmHeap& heap() const { return *heap_; }
  // What errors call this rank.
  int me() const { return names_[rank_]; }

 private:
  friend class ShmWork;
  static constexpr uint64_t slots = 64;
  static constexpr int64_t payload = 1024;  // bytes of input that fit into the slot

  struct Slot {
    enum class Place : uint32_t { nowhere, slot, heap };
    Verb verb;
    Reduction reduction;
    int32_t dtype;
    int32_t root;
    int32_t reader;
    uint64_t what;
    int64_t numel;   // of the call
    int64_t begin;   // of the piece, in elements
    int64_t count;   // of the piece, in elements of one part
    int64_t parts;   // of the input: as many as ranks for reduce-scatter and scatter, else 1
    int64_t stride;  // bytes from part to part
    Place place;
    int64_t offset;                             // in the heap
    alignas(64) std::atomic<uint32_t> claimed;  // rank 0's slot counts for all: units taken
    std::atomic<uint32_t> done;                 // and units done
    alignas(64) char bytes[payload];
  };
  struct Mailbox {
    alignas(64) std::atomic<uint64_t> arrived;  // pieces that this rank has filled a slot for
    alignas(64) std::atomic<uint64_t> retired;  // pieces that this rank no longer looks at
    Slot slot[slots];
  };
  // A call, until it has ended here.
  struct Active {
    ShmCall call;
    int64_t item = 1;    // bytes of an element
    int64_t parts = 1;   // of the input
    bool small = false;  // goes as a copy, even from shared memory: then nobody waits for the readers
    int64_t left = 0;    // pieces
    c10::intrusive_ptr<ShmWork> work;
  };
  struct Piece {
    std::shared_ptr<Active> active;
    int64_t begin = 0;  // elements, of each part
    int64_t count = 0;
    uint32_t units = 0;     // 0: pulled
    bool exposed = false;   // the others read the tensor itself
    bool complete = false;  // for this rank
    ShmHeap::Block staged{};
  };
  enum : int64_t { piece_bytes = 4 << 20, unit_bytes = 64 << 10, small_bytes = 16 << 10, staged_limit = 32 << 20 };

  ShmRing(std::shared_ptr<ShmHeap> heap, int64_t serial, Names names, int first);
  bool publish();
  bool work();
  bool retire();
  bool release();
  void advance_locked();

  void fill(Piece& piece, Slot& slot);
  void do_piece(Piece& piece, uint64_t number);
  void do_units(Piece& piece, uint64_t number);
  void exchange_parts(const ShmCall& call, uint64_t number);
  bool of_one_mind(uint64_t number) const;
  std::string mismatch(uint64_t number) const;
  bool well_formed(int rank, const Slot& slot) const;
  bool in_the_way(const Piece& piece) const;
  void part_done(Piece& piece);
  void fail(std::exception_ptr failure);

  Slot& slot(int rank, uint64_t number) const { return mailboxes_[rank]->slot[number % slots]; }
  const char* input(int rank, uint64_t number, int64_t part) const;
  bool all_arrived(uint64_t number);
  bool all_retired(uint64_t number);

  // For a wait for piece `number` in which nothing happened for a while: fails if a rank has ended that it needs.
  void look_for_the_dead(uint64_t number);
  // Who is waited for, as the end of a sentence.
  std::string missing(uint64_t number);

  const std::shared_ptr<ShmHeap> heap_;
  const int64_t serial_;
  const int rank_;
  const int size_;
  const Names names_;
  const int first_;
  ShmHeap::Block own_;
  std::vector<Mailbox*> mailboxes_;

  std::mutex mutex_;                    // guards the rest
  std::deque<Piece> pieces_;            // issued and not released; front is number released_
  uint64_t released_ = 0;               // pieces before it are over on every rank
  uint64_t retired_ = 0;                // … are over here
  uint64_t worked_ = 0;                 // … have their work done here, perhaps not elsewhere
  uint64_t published_ = 0;              // … have been arrived at here
  uint64_t issued_ = 0;                 // … were asked for
  std::vector<uint64_t> arrived_seen_;  // by rank: what its mailbox said last
  std::vector<uint64_t> retired_seen_;
  int64_t staged_ = 0;  // bytes of staged copies
  std::exception_ptr failure_;
};

// The memory behind a backend that make_shm_backend made; null for any other.
std::shared_ptr<ShmHeap> heap_of(c10d::Backend& backend);

c10::intrusive_ptr<c10d::Backend> make_shm_backend(std::shared_ptr<ShmHeap> heap, c10d::Store& store, int64_t serial,
                                                   std::chrono::milliseconds timeout, Names names = {});

}  // namespace plumb
