// Segments, their allocator, and the bells by which sleeping ranks are woken.
#include "backend/shm_heap.h"

#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <climits>
#include <cstring>
#include <random>
#include <sstream>

#include "backend/machines.h"
#include "backend/round.h"
#include "backend/shm_ring.h"

namespace plumb {
namespace {

constexpr int64_t page = 4096;
constexpr int64_t idle_limit = 64 << 20;      // of borrowed blocks that came back
constexpr int64_t all_segments = 32LL << 40;  // of address space, in one process

std::string reason() { return std::strerror(errno); }

constexpr const char* record_key = "shm/segment/";  // and the rank

// The segments that this process owns, by their tokens: ranks that are its threads share one mapping.
struct Own {
  std::mutex mutex;
  std::map<uint64_t, std::weak_ptr<void>> segments;
};
Own& own_segments() {
  static Own own;
  return own;
}

}  // namespace

ShmHeap::Segment::~Segment() {
  if (base) munmap(base, bytes);
  if (fd >= 0) ::close(fd);
}

ShmHeap::ShmHeap(int rank, int size) : rank_(rank), size_(size), segments_(size), pids_(size), pidfds_(size, -1) {
  cpu_set_t cores;
  const bool enough = sched_getaffinity(0, sizeof cores, &cores) == 0 && CPU_COUNT(&cores) >= size;
  patience_ = std::chrono::microseconds(enough ? 100 : 2);
}

ShmHeap::~ShmHeap() {
  for (const int fd : pidfds_) {
    if (fd >= 0) ::close(fd);
  }
}

// Makes this rank's segment; returns what others need to find it, empty (with errno) when that failed.
std::string ShmHeap::make_own() {
  struct sysinfo machine{};
  if (sysinfo(&machine) != 0) return {};
  int64_t memory = static_cast<int64_t>(machine.totalram) * machine.mem_unit;
  rlimit files{};  // a file beyond this limit is answered with a signal
  if (getrlimit(RLIMIT_FSIZE, &files) == 0 && files.rlim_cur < static_cast<rlim_t>(memory)) {
    memory = static_cast<int64_t>(files.rlim_cur);
  }
  auto own = std::make_shared<Segment>();
  const int64_t bytes = std::min(memory, all_segments / size_) / page * page;
  own->fd = memfd_create("plumb", MFD_CLOEXEC);
  if (own->fd < 0 || ftruncate(own->fd, bytes) != 0) return {};
  const int64_t head = round_up(sizeof(Header), page);
  errno = ENOSPC;
  if (bytes <= head) return {};
  if (fallocate(own->fd, 0, 0, head) != 0) return {};
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, own->fd, 0);
  if (base == MAP_FAILED) return {};
  madvise(base, bytes, MADV_DONTDUMP);
  own->base = static_cast<char*>(base);
  own->bytes = bytes;
  std::random_device device;
  const uint64_t token = (static_cast<uint64_t>(device()) << 32) | device();
  new (base) Header{};  // over zeroed pages
  reinterpret_cast<Header*>(base)->token = token;
  free_[head] = bytes - head;
  segments_[rank_] = own;
  {
    std::lock_guard lock(own_segments().mutex);
    std::erase_if(own_segments().segments, [](const auto& entry) { return entry.second.expired(); });
    own_segments().segments[token] = own;
  }
  std::ostringstream record;
  record << machine_identity() << ' ' << getpid() << ' ' << own->fd << ' ' << bytes << ' ' << token;
  return record.str();
}

// Maps the segment of another rank; returns why not, or nothing.
std::string ShmHeap::attach(int other, const std::string& name, const std::string& record) {
  std::string where;
  int pid = 0;
  int fd = -1;
  int64_t bytes = 0;
  uint64_t token = 0;
  if (!(std::istringstream(record) >> where >> pid >> fd >> bytes >> token)) return name + " " + record;
  const std::string mine = machine_identity();
  if (where.substr(0, where.find('/')) != mine.substr(0, mine.find('/'))) return name + " runs on another machine";
  if (where != mine) return name + " runs in another process namespace (a container of its own)";
  if (pid == getpid()) {
    std::lock_guard lock(own_segments().mutex);
    segments_[other] = std::static_pointer_cast<Segment>(own_segments().segments[token].lock());
    return segments_[other] ? "" : name + " has ended";
  }
  pids_[other] = pid;
  pidfds_[other] = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  auto segment = std::make_shared<Segment>();
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  segment->fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (segment->fd < 0) return "the memory of " + name + " cannot be opened (" + path + ": " + reason() + ")";
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, segment->fd, 0);
  if (base == MAP_FAILED) return "the memory of " + name + " cannot be mapped (" + reason() + ")";
  madvise(base, bytes, MADV_DONTDUMP);
  segment->base = static_cast<char*>(base);
  segment->bytes = bytes;
  ::close(std::exchange(segment->fd, -1));
  segments_[other] = segment;
  if (header(other).token != token) return name + " is not where its record says";
  return {};
}

std::shared_ptr<ShmHeap> ShmHeap::meet(c10d::Store& store, int rank, int size, std::string& why_not,
                                       const Names& names) {
  std::shared_ptr<ShmHeap> heap(new ShmHeap(rank, size));
  std::string record = why_no_sharing();
  if (record.empty()) record = heap->make_own();
  if (record.empty()) record = "cannot make shared memory: " + reason();
  store.set(record_key + std::to_string(rank), record);
  std::string verdict = heap->segments_[rank] ? "" : record;
  if (verdict.empty()) {
    const std::vector<std::string> records = read_all(store, record_key, size);
    for (int r = 0; r < size && verdict.empty(); ++r) {
      if (r != rank) verdict = heap->attach(r, names.rank(r), records[static_cast<size_t>(r)]);
    }
  }
  why_not = first_objection(store, "shm/verdict", size,
                            verdict.empty() ? "" : "as " + names.rank(rank) + " sees it, " + verdict);
  return why_not.empty() ? heap : nullptr;
}

bool ShmHeap::within(int rank, int64_t offset, int64_t bytes) const {
  const int64_t end = segments_[rank]->bytes;
  return offset >= 0 && bytes >= 0 && offset <= end && bytes <= end - offset;
}

int64_t ShmHeap::offset_of(const void* memory) const {
  const char* base = segments_[rank_]->base;
  const char* byte = static_cast<const char*>(memory);
  return byte >= base && byte < base + segments_[rank_]->bytes ? byte - base : -1;
}

ShmHeap::Block ShmHeap::allocate(int64_t bytes) {
  bytes = round_up(std::max<int64_t>(bytes, 1), page);
  std::lock_guard lock(mutex_);
  const auto it = std::find_if(free_.begin(), free_.end(), [&](const auto& entry) { return entry.second >= bytes; });
  if (it == free_.end()) return {};
  const auto [offset, had] = *it;
  // Now, so that a lack of memory shows here and not as a signal at some later write.
  while (fallocate(segments_[rank_]->fd, 0, offset, bytes) != 0) {
    if (errno != EINTR) return {};
  }
  free_.erase(it);
  if (had > bytes) free_[offset + bytes] = had - bytes;
  return {offset, bytes};
}

void ShmHeap::free(Block block) {
  if (block.offset < 0 || inherited()) return;
  std::lock_guard lock(mutex_);
  const auto condemned = condemned_.lower_bound(block.offset);
  if (condemned != condemned_.end() && *condemned < block.offset + block.bytes) return;
  fallocate(segments_[rank_]->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, block.offset, block.bytes);
  auto next = free_.lower_bound(block.offset);
  if (next != free_.end() && next->first == block.offset + block.bytes) {
    block.bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == block.offset) {
      before->second += block.bytes;
      return;
    }
  }
  free_[block.offset] = block.bytes;
}

at::Tensor ShmHeap::tensor(int64_t numel, const at::TensorOptions& options) {
  const Block block = allocate(numel * static_cast<int64_t>(options.dtype().itemsize()));
  if (block.offset < 0) return {};
  return at::from_blob(
      at(rank_, block.offset), {numel}, [heap = shared_from_this(), block](void*) { heap->free(block); }, options);
}

ShmHeap::Readers& ShmHeap::readers(int rank, int64_t window) const {
  return *reinterpret_cast<Readers*>(at(rank, window - static_cast<int64_t>(sizeof(Readers))));
}

at::Tensor ShmHeap::window(int64_t numel, const at::TensorOptions& options) {
  sweep();
  const Block block =
      allocate(static_cast<int64_t>(sizeof(Readers)) + numel * static_cast<int64_t>(options.dtype().itemsize()));
  if (block.offset < 0) return {};
  const int64_t offset = block.offset + static_cast<int64_t>(sizeof(Readers));
  new (at(rank_, block.offset)) Readers{size_};
  const auto let_go = [heap = shared_from_this(), block, offset](void*) {
    if (heap->inherited()) return;
    heap->readers(heap->rank_, offset).left.fetch_sub(1);
    {
      std::lock_guard lock(heap->rings_mutex_);
      heap->left_.push_back(block);
    }
    heap->sweep();
  };
  return at::from_blob(at(rank_, offset), {numel}, let_go, options);
}

at::Tensor ShmHeap::window_of(int rank, int64_t offset, int64_t numel, const at::TensorOptions& options) {
  const auto let_go = [heap = shared_from_this(), rank, offset](void*) {
    if (heap->inherited()) return;
    heap->readers(rank, offset).left.fetch_sub(1);  // its owner frees it, at once or when it next looks
  };
  return at::from_blob(at(rank, offset), {numel}, let_go, options);
}

void ShmHeap::keep_window(const at::Tensor& mine) { readers(rank_, offset_of(mine.const_data_ptr())).left.store(1); }

ShmHeap::Block ShmHeap::borrow(int64_t bytes) {
  const int64_t class_of = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max(bytes, page))));
  {
    std::lock_guard lock(mutex_);
    if (const auto it = lent_back_.find(class_of); it != lent_back_.end()) {
      const Block block{it->second, class_of};
      lent_back_.erase(it);
      idle_ -= class_of;
      return block;
    }
  }
  return allocate(class_of);
}

void ShmHeap::give_back(Block block) {
  {
    std::lock_guard lock(mutex_);
    if (idle_ + block.bytes <= idle_limit) {
      lent_back_.emplace(block.bytes, block.offset);
      idle_ += block.bytes;
      return;
    }
  }
  free(block);
}

void ShmHeap::enlist(const std::shared_ptr<ShmRing>& ring) {
  sweep();
  std::lock_guard lock(rings_mutex_);
  std::erase_if(rings_, [](const auto& weak) { return weak.expired(); });
  rings_.push_back(ring);
}

void ShmHeap::advance_all() {
  for (size_t i = 0;; ++i) {
    std::shared_ptr<ShmRing> ring;
    {
      std::lock_guard lock(rings_mutex_);
      if (i >= rings_.size()) return;
      ring = rings_[i].lock();
    }
    if (ring) ring->advance();
  }
}

void ShmHeap::close(int64_t serial, std::vector<Block> blocks) {
  {
    std::lock_guard lock(rings_mutex_);
    closing_.push_back({serial, std::move(blocks)});
  }
  if (serial < serials) header(rank_).closed[serial].store(true);
  sweep();
}

void ShmHeap::condemn(int64_t offset) {
  std::lock_guard lock(mutex_);
  condemned_.insert(offset);
}

void ShmHeap::sweep() {
  std::vector<Closing> over;
  {
    std::lock_guard lock(rings_mutex_);
    std::erase_if(closing_, [&](Closing& one) {
      if (one.serial >= serials) return false;
      for (int r = 0; r < size_; ++r) {
        if (!header(r).closed[one.serial].load()) return false;
      }
      over.push_back(std::move(one));
      return true;
    });
    std::erase_if(left_, [&](const Block& block) {
      const int64_t offset = block.offset + static_cast<int64_t>(sizeof(Readers));
      if (readers(rank_, offset).left.load() > 0) return false;
      over.push_back({0, {block}});
      return true;
    });
  }
  for (const auto& one : over) {
    for (const Block& block : one.blocks) free(block);
  }
}

bool ShmHeap::doze(std::atomic<uint32_t>& bell, uint32_t heard, std::chrono::nanoseconds limit) {
  const timespec time{static_cast<time_t>(limit.count() / 1'000'000'000),
                      static_cast<long>(limit.count() % 1'000'000'000)};
  return syscall(SYS_futex, &bell, FUTEX_WAIT, heard, &time, nullptr, 0) == 0 || errno != ETIMEDOUT;
}

void ShmHeap::ring() {
  for (int r = 0; r < size_; ++r) {
    Header& other = header(r);
    if (other.sleepers.load() == 0) continue;
    other.bell.fetch_add(1);
    syscall(SYS_futex, &other.bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

std::vector<int> ShmHeap::gone() const {
  std::vector<int> ended;
  for (int r = 0; r < size_; ++r) {
    if (pids_[r] == 0) continue;
    // A process that nobody has waited for yet keeps its number after its death; the descriptor knows better.
    pollfd entry{pidfds_[r], POLLIN, 0};
    if (pidfds_[r] >= 0 ? poll(&entry, 1, 0) == 1 : kill(pids_[r], 0) != 0 && errno == ESRCH) ended.push_back(r);
  }
  return ended;
}

}  // namespace plumb
