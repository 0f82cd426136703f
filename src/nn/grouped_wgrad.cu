// The weight gradient of all experts in one launch: for each group g of rows, sums[g] (+)= dy[rows of g]ᵀ · x[rows of g].
//
// Written by hand because both operands are slices of two big matrices: one tensor map each serves every group, where a
// general grouped GEMM would rebuild maps per group; and a group may end at any row, which the last block masks.
// Persistent blocks of three warpgroups: one fetches tiles with the copy engine, two multiply. The sums leave through
// shared memory in boxes that the copy engine stores or reduces, while the next tile is multiplied already.
#include <cuda_runtime.h>

#include <algorithm>

#include "nn/grouped_wgrad.h"
#include "nn/hopper.cuh"
#include "nn/tensor_map.h"
#include "nn/token_ends.h"
#include "nn/wgmma.cuh"

namespace plumb::kernel {
namespace {

constexpr int sums_box_bytes = 16 * 32 * 4;
constexpr int most_maps = 64;
constexpr int threads = 384;  // two warpgroups multiply; the third fetches, and lends them its registers
constexpr int tile_m = 128;   // rows of `sums` per block: 64 for each of the two multiplying warpgroups

template <int TileN, int TileK, int Stages, int Cluster, int Reduced, int Buffers, int Lag>
struct Shape {
  static constexpr int tile_n = TileN, tile_k = TileK, stages = Stages, cluster = Cluster;
  static constexpr int box_bytes = 128 * TileK;  // what one copy brings: 64 columns, 128 bytes per row
  static constexpr int boxes_n = TileN / 64;
  static constexpr int stage_bytes = (2 + boxes_n) * box_bytes;
  // Sums are staged in boxes of 16 rows and 32 columns; each warp has a ring of buffers for its own.
  static constexpr int chunks = TileN / 32;
  // Of a tile's boxes, so many are added to the old sums by the second-level cache, which knows how to reduce; the others
  // here, to old sums that were fetched while the tile was multiplied. Each way alone has a limit of its own.
  static constexpr int reduced = Reduced;
  static constexpr bool fetches = Reduced < chunks;
  static constexpr int buffers = Buffers;
  static constexpr int lag = Lag;  // boxes on their way out when a buffer is filled again
  static constexpr int staged_bytes = 8 * buffers * sums_box_bytes;
  static constexpr int barriers = 2 * Stages + (fetches ? 8 * Buffers : 0);
  static constexpr int smem_bytes = Stages * stage_bytes + staged_bytes + barriers * 8;
};

struct Arguments {
  CUtensorMap sums[most_maps];  // one for all groups where they are evenly spaced in memory, otherwise one each
  const int32_t* ends;
  int first_group, groups, rows, out, in;
  int tiles_m, tiles_n, strip;  // tiles_m in units of a cluster; strip: tiles_m walked before tiles_n moves on
  bool evenly, accumulate;
};

// A 64-column box: 8 rows of 128 swizzled bytes repeat every 1024 bytes, the next 64 columns follow box_bytes later.
template <class S>
__device__ __forceinline__ uint64_t descriptor(uint32_t at) {
  return static_cast<uint64_t>((at & 0x3FFFF) >> 4) | static_cast<uint64_t>(S::box_bytes >> 4) << 16 |
         static_cast<uint64_t>(1024 >> 4) << 32 | 1ull << 62;
}

struct Tile {
  int group, m, n, begin, rows;
};

__device__ __forceinline__ Tile tile_at(const Arguments& a, int index, int tile_n, int cluster, int rank) {
  const int per_group = a.tiles_m * a.tiles_n;
  Tile t;
  t.group = index / per_group;
  const int i = index - t.group * per_group;
  const int per_strip = a.strip * a.tiles_n;
  const int first = i / per_strip * a.strip;
  const int width = min(a.tiles_m - first, a.strip);
  const int j = i - first * a.tiles_n;
  t.n = j / width * tile_n;
  t.m = ((first + j % width) * cluster + rank) * tile_m;
  // Whatever the offsets say, no row outside the matrices is read.
  const int group = a.first_group + t.group;
  const int begin = group == 0 ? 0 : __ldg(a.ends + group - 1);
  const int end = __ldg(a.ends + group);
  t.begin = min(max(begin, 0), a.rows);
  t.rows = max(min(end, a.rows) - t.begin, 0);
  return t;
}

// Puts zeros where a stage holds rows past the end of its group, in both operands: a zero times an infinity is none.
template <class S>
__device__ __forceinline__ void mask(char* stage, int rows, int group, int thread) {
  const int pieces = (S::tile_k - rows) * 8;
  for (int box = 0; box < 1 + S::boxes_n; ++box) {
    char* const from = stage + (box == 0 ? group : 1 + box) * S::box_bytes + rows * 128;
    for (int i = thread; i < pieces; i += 128) reinterpret_cast<uint4*>(from)[i] = make_uint4(0, 0, 0, 0);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

// One warp's part of the way out: 16 rows of sums, staged in boxes of 32 columns; lane 0 speaks to the copy engine.
template <class S>
struct Exit {
  const Arguments& a;
  char* staged;       // this warp's buffers
  uint32_t arrivals;  // this warp's barriers, one per buffer
  int warp, lane, rank, tiles, stride;
  int sent = 0;    // boxes so far
  int phases = 0;  // of the barriers, a bit each
  // Lane 0: the next box of old sums to fetch.
  int wanted_index = 0, wanted_chunk = 0, wanted = 0;

  __device__ Tile tile(int index) const { return tile_at(a, index, S::tile_n, S::cluster, rank); }
  // The tile at `index`, or the first after it that has work: a group without rows adds nothing, but overwrites.
  __device__ int skip_empty(int index) const {
    while (index < tiles && a.accumulate && tile(index).rows == 0) index += stride;
    return index;
  }
  __device__ const CUtensorMap* map_of(const Tile& t) const { return &a.sums[a.evenly ? 0 : t.group]; }
  __device__ int depth_of(const Tile& t) const { return a.evenly ? t.group : 0; }

  __device__ void begin(int index) {
    if (!S::fetches || !a.accumulate || lane != 0) return;
    wanted_index = index;
    for (int i = 0; i < S::buffers; ++i) fetch_old();
  }

  __device__ void fetch_old() {
    if (wanted_index >= tiles) return;
    const int buffer = wanted % S::buffers;
    if (wanted_chunk >= S::reduced) {
      const Tile t = tile(wanted_index);
      const uint32_t barrier = arrivals + 8 * buffer;
      barrier_expect(barrier, sums_box_bytes);
      asm volatile(
          "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
          "[%2];" ::"r"(address(staged + buffer * sums_box_bytes)),
          "l"(map_of(t)), "r"(barrier), "r"(t.n + wanted_chunk * 32), "r"(t.m + warp * 16), "r"(depth_of(t))
          : "memory");
    }
    ++wanted;
    if (++wanted_chunk == S::chunks) {
      wanted_chunk = 0;
      wanted_index = skip_empty(wanted_index + stride);
    }
  }

  template <int R>
  __device__ void send(const Tile& t, const float (&d)[R]) {
    const int octet = lane / 4;
#pragma unroll
    for (int c = 0; c < S::chunks; ++c, ++sent) {
      const int buffer = sent % S::buffers;
      char* const box = staged + buffer * sums_box_bytes;
      const bool add = c >= S::reduced && a.accumulate;
      if (add) {
        barrier_wait(arrivals + 8 * buffer, phases >> buffer & 1);
        phases ^= 1 << buffer;
      } else {
        if (lane == 0) wait_until_read<S::buffers - 1>();
        __syncwarp();
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = (c * 4 + j) * 4;
        // The copy engine's order: 16-byte pieces of a row, exchanged by the row's number.
        char* const upper = box + octet * 128 + (((j * 2 + lane % 4 / 2) ^ octet) * 16) + lane % 2 * 8;
        char* const lower = upper + 8 * 128;
        float2 high = make_float2(d[i], d[i + 1]), low = make_float2(d[i + 2], d[i + 3]);
        if (add) {
          const float2 old_high = *reinterpret_cast<float2*>(upper);
          const float2 old_low = *reinterpret_cast<float2*>(lower);
          high.x += old_high.x, high.y += old_high.y, low.x += old_low.x, low.y += old_low.y;
        }
        *reinterpret_cast<float2*>(upper) = high;
        *reinterpret_cast<float2*>(lower) = low;
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      if (lane == 0) {
        if (c < S::reduced && a.accumulate) {
          asm volatile(
              "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
                  map_of(t)),
              "r"(address(box)), "r"(t.n + c * 32), "r"(t.m + warp * 16), "r"(depth_of(t))
              : "memory");
        } else {
          asm volatile(
              "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map_of(t)),
              "r"(address(box)), "r"(t.n + c * 32), "r"(t.m + warp * 16), "r"(depth_of(t))
              : "memory");
        }
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        if (S::fetches && a.accumulate && sent >= S::lag) {
          wait_until_read<S::lag>();
          fetch_old();
        }
      }
    }
  }
};

template <class S>
__global__ void __launch_bounds__(threads, 1)
    grouped_wgrad_kernel(const __grid_constant__ CUtensorMap dy, const __grid_constant__ CUtensorMap x,
                         const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) char smem[];  // the stages, what is staged, the barriers
  char* const staged = smem + S::stages * S::stage_bytes;
  const uint32_t tiles_at = address(smem);
  const uint32_t full = tiles_at + S::stages * S::stage_bytes + S::staged_bytes;
  const uint32_t empty = full + 8 * S::stages, arrivals = empty + 8 * S::stages;
  const int rank = S::cluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int tiles = a.groups * a.tiles_m * a.tiles_n;
  const int first = static_cast<int>(blockIdx.x) / S::cluster, stride = static_cast<int>(gridDim.x) / S::cluster;

  if (threadIdx.x == 0) {
    for (int s = 0; s < S::stages; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, 8 * S::cluster);  // the multiplying warps of every block that receives
    }
    for (int i = 2 * S::stages; i < S::barriers; ++i) barrier_init(full + 8 * i, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if constexpr (S::cluster > 1)
    cluster_meet();
  else
    __syncthreads();

  int stage = 0, phase = 0;
  const auto next = [&] {
    if (++stage == S::stages) stage = 0, phase ^= 1;
  };
  if (threadIdx.x >= 256) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 256) {
      for (int index = first; index < tiles; index += stride) {
        const Tile t = tile_at(a, index, S::tile_n, S::cluster, rank);
        for (int k = 0; k < t.rows; k += S::tile_k) {
          barrier_wait(empty + 8 * stage, phase ^ 1);
          const uint32_t at = tiles_at + stage * S::stage_bytes, barrier = full + 8 * stage;
          barrier_expect(barrier, S::stage_bytes);
          fetch(&dy, at, barrier, t.m, t.begin + k);
          fetch(&dy, at + S::box_bytes, barrier, t.m + 64, t.begin + k);
          if constexpr (S::cluster == 1) {
#pragma unroll
            for (int j = 0; j < S::boxes_n; ++j) {
              fetch(&x, at + (2 + j) * S::box_bytes, barrier, t.n + j * 64, t.begin + k);
            }
          } else {
            constexpr int share = S::boxes_n / S::cluster;
#pragma unroll
            for (int j = 0; j < share; ++j) {
              const int box = rank * share + j;
              fetch_for_all(&x, at + (2 + box) * S::box_bytes, barrier, t.n + box * 64, t.begin + k,
                            (1 << S::cluster) - 1);
            }
          }
          next();
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int group = threadIdx.x / 128, in_group = threadIdx.x % 128, lane = threadIdx.x % 32;
    const auto release = [&](int s) {
      if (lane < S::cluster) barrier_arrive(empty + 8 * s, lane);
    };
    const int warp = threadIdx.x / 32;
    Exit<S> exit{
        a,     staged + warp * S::buffers * sums_box_bytes, arrivals + warp * 8 * S::buffers, warp, lane, rank, tiles,
        stride};
    float d[S::tile_n / 2];
    int index = exit.skip_empty(first);
    exit.begin(index);
    for (; index < tiles; index = exit.skip_empty(index + stride)) {
      const Tile t = exit.tile(index);
#pragma unroll
      for (int i = 0; i < S::tile_n / 2; ++i) d[i] = 0.f;
      int held = -1;  // the stage that the multiplication in flight reads
      for (int k = 0; k < t.rows; k += S::tile_k) {
        barrier_wait(full + 8 * stage, phase);
        const uint32_t at = tiles_at + stage * S::stage_bytes;
        if (t.rows - k < S::tile_k) mask<S>(smem + stage * S::stage_bytes, t.rows - k, group, in_group);
        const uint64_t da = descriptor<S>(at + group * S::box_bytes), db = descriptor<S>(at + 2 * S::box_bytes);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int step = 0; step < S::tile_k / 16; ++step) wgmma(d, da + step * (2048 >> 4), db + step * (2048 >> 4), 1);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (held >= 0) release(held);
        held = stage;
        next();
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (held >= 0) release(held);
      exit.send(t, d);
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  // Nobody leaves while another block may still send to it or arrive at its barriers.
  if constexpr (S::cluster > 1) cluster_meet();
}

// The distance in bytes between neighbours when all are evenly spaced, otherwise 0.
int64_t spacing_of(const GroupedWgrad& p) {
  const int64_t matrix = p.out * p.in * 4;
  if (p.groups == 1) return matrix;
  const int64_t spacing = reinterpret_cast<intptr_t>(p.sums[1]) - reinterpret_cast<intptr_t>(p.sums[0]);
  bool evenly = spacing >= matrix && spacing % 16 == 0;
  for (int g = 2; g < p.groups; ++g) {
    evenly &= reinterpret_cast<intptr_t>(p.sums[g]) - reinterpret_cast<intptr_t>(p.sums[g - 1]) == spacing;
  }
  return evenly ? spacing : 0;
}

// The maps of `a.groups` groups of sums from `a.first_group` on.
bool map_sums(Arguments& a, const GroupedWgrad& p, int64_t spacing) {
  if (a.evenly) return encode_sums(a.sums[0], p.sums[a.first_group], p.out, p.in, a.groups, spacing);
  bool right = true;
  for (int g = 0; g < a.groups; ++g) {
    right &= encode_sums(a.sums[g], p.sums[a.first_group + g], p.out, p.in, 1, p.out * p.in * 4);
  }
  return right;
}

template <class S>
const char* launch(const GroupedWgrad& p, CUstream_st* stream, int strip) {
  int device = 0, processors = 0;
  if (const auto e = cudaGetDevice(&device)) return cudaGetErrorString(e);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  const auto kernel = grouped_wgrad_kernel<S>;
  if (const auto e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::smem_bytes)) {
    return cudaGetErrorString(e);
  }
  Arguments a;
  a.ends = p.ends;
  a.rows = static_cast<int>(p.rows);
  a.out = static_cast<int>(p.out);
  a.in = static_cast<int>(p.in);
  a.tiles_m = static_cast<int>((p.out + tile_m * S::cluster - 1) / (tile_m * S::cluster));
  a.tiles_n = static_cast<int>((p.in + S::tile_n - 1) / S::tile_n);
  a.strip = std::min(strip, a.tiles_m);
  a.accumulate = p.accumulate;
  CUtensorMap dy, x;
  const char* const refused = "the tensor maps were refused";
  if (!encode(dy, p.dy, p.rows, p.out, S::tile_k) || !encode(x, p.x, p.rows, p.in, S::tile_k)) return refused;

  cudaLaunchConfig_t config = {};
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = S::smem_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = S::cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;

  const int64_t spacing = spacing_of(p);
  a.evenly = spacing != 0;
  const int per_launch = a.evenly ? p.groups : most_maps;
  for (a.first_group = 0; a.first_group < p.groups; a.first_group += per_launch) {
    a.groups = std::min(per_launch, p.groups - a.first_group);
    if (!map_sums(a, p, spacing)) return refused;
    const int64_t tiles = static_cast<int64_t>(a.groups) * a.tiles_m * a.tiles_n;
    const int64_t clusters = std::min<int64_t>(tiles, processors / S::cluster);
    config.gridDim = dim3(static_cast<unsigned>(clusters * S::cluster));
    if (const auto e = cudaLaunchKernelEx(&config, kernel, dy, x, a)) return cudaGetErrorString(e);
  }
  return nullptr;
}

}  // namespace

bool grouped_wgrad_fits(const GroupedWgrad& p) {
  const auto aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; };
  if (p.groups < 1 || p.out < 1 || p.in < 1 || p.rows < 1 || p.rows > INT32_MAX - 64) return false;
  if (p.out % 8 != 0 || p.in % 8 != 0 || !aligned(p.dy) || !aligned(p.x)) return false;
  if (!std::all_of(p.sums, p.sums + p.groups, aligned)) return false;
  return runs_here() && encoder() != nullptr;
}

const char* grouped_wgrad(const GroupedWgrad& p, CUstream_st* stream, int variant) {
  // Many rows per group: arithmetic decides; a wide tile shared by two blocks reads the inputs the least. Few: memory
  // decides; a smaller tile leaves room to fetch old sums ahead, and one box in four is left to the cache.
  using Wide = Shape<256, 64, 4, 2, 8, 2, 1>;
  using Square = Shape<128, 64, 4, 1, 1, 6, 3>;
  const bool few = p.accumulate && p.rows < 1024 * static_cast<int64_t>(p.groups);
  if (variant == 1 || (variant < 0 && few)) return launch<Square>(p, stream, 16);
  return launch<Wide>(p, stream, 8);
}

}  // namespace plumb::kernel

// The same for callers without C++: benchmarks load the library and call this. Null, or what went wrong.
extern "C" const char* plumb_grouped_wgrad(const void* dy, const void* x, const int32_t* ends, float* const* sums,
                                           int groups, long rows, long out, long in, int accumulate, int variant,
                                           CUstream_st* stream) {
  const plumb::kernel::GroupedWgrad problem{dy, x, ends, sums, groups, rows, out, in, accumulate != 0};
  if (!plumb::kernel::grouped_wgrad_fits(problem)) return "the kernel does not take this problem";
  return plumb::kernel::grouped_wgrad(problem, stream, variant);
}
