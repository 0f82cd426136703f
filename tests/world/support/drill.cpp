// Jobs whose data is a hash of (rank, salt, place), so that each rank knows what every other one sent.
#include "world/support/drill.h"

#include <random>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "world/support/plain.h"

namespace plumb::testing {
namespace {

using Verb = Job::Verb;

at::Tensor data_of(int rank, uint32_t salt, int64_t numel, at::ScalarType dtype) {
  at::Tensor floats = at::empty({numel});
  float* value = floats.data_ptr<float>();
  uint32_t state = (salt * 2654435761u) ^ (static_cast<uint32_t>(rank + 1) * 40503u);
  for (int64_t i = 0; i < numel; ++i) {
    state = state * 1664525u + 1013904223u;
    value[i] = static_cast<float>(state >> 16) / 512.0f - 64.0f;
  }
  if (dtype == at::kByte) return floats.add(64).to(dtype);
  return dtype == at::kBool ? floats.gt(0) : floats.to(dtype);
}

Reduction reduction_of(c10d::ReduceOp::RedOpType reduction) {
  if (reduction == c10d::ReduceOp::AVG) return Reduction::average;
  if (reduction == c10d::ReduceOp::MAX) return Reduction::maximum;
  return reduction == c10d::ReduceOp::MIN ? Reduction::minimum : Reduction::sum;
}

// How many elements rank `from` sends to rank `to`.
int64_t sends(const Job& job, int from, int to) { return job.numel + (from * 5 + to * 3) % 4; }

at::Tensor expected(const Job& job, int rank, int size) {
  const auto all = [&](int r, int64_t numel) { return data_of(r, job.salt, numel, job.dtype); };
  switch (job.verb) {
    case Verb::all_reduce:
    case Verb::reduce_scatter: {
      const bool scatter = job.verb == Verb::reduce_scatter;
      std::vector<at::Tensor> inputs;
      for (int r = 0; r < size; ++r) {
        at::Tensor input = all(r, scatter ? job.numel * size : job.numel);
        inputs.push_back(scatter ? input.narrow(0, rank * job.numel, job.numel) : input);
      }
      return plain_reduction(inputs, reduction_of(job.reduction));
    }
    case Verb::all_gather: {
      std::vector<at::Tensor> parts;
      for (int r = 0; r < size; ++r) parts.push_back(all(r, job.numel));
      return at::cat(parts);
    }
    case Verb::broadcast:
      return all(job.root, job.numel);
    case Verb::all_to_all: {
      std::vector<at::Tensor> parts;
      for (int r = 0; r < size; ++r) {
        int64_t before = 0, total = 0;
        for (int to = 0; to < size; ++to) {
          before += to < rank ? sends(job, r, to) : 0;
          total += sends(job, r, to);
        }
        parts.push_back(all(r, total).narrow(0, before, sends(job, r, rank)));
      }
      return at::cat(parts);
    }
    case Verb::barrier:
      break;
  }
  return {};
}

}  // namespace

void Job::issue(c10d::Backend& backend) {
  const int rank = backend.getRank();
  const int size = backend.getSize();
  const bool shared =
      backend.supportsTensorAlloc(0) && (memory == Memory::shared || (memory == Memory::mixed && rank % 2 == 1));
  const auto make = [&](int64_t count) {
    return shared ? backend.allocateTensor(count, at::TensorOptions(dtype)) : at::empty({count}, dtype);
  };
  std::vector<int64_t> in_splits, out_splits;
  int64_t in_count = numel, out_count = 0;
  if (verb == Verb::reduce_scatter) in_count = numel * size, out_count = numel;
  if (verb == Verb::all_gather) out_count = numel * size;
  if (verb == Verb::all_to_all) {
    in_count = 0;
    for (int r = 0; r < size; ++r) {
      in_splits.push_back(sends(*this, rank, r));
      out_splits.push_back(sends(*this, r, rank));
      in_count += in_splits.back();
      out_count += out_splits.back();
    }
  }
  if (verb == Verb::barrier) {
    work = backend.barrier();
    return;
  }
  const bool in_place = verb == Verb::all_reduce || verb == Verb::broadcast;
  const bool gathered_inside = inside && verb == Verb::all_gather,
             scattered_inside = inside && verb == Verb::reduce_scatter;
  if (gathered_inside) output = make(out_count);
  input = gathered_inside ? output.narrow(0, rank * numel, numel) : make(in_count);
  input.copy_(data_of(rank, salt, in_count, dtype));
  if (scattered_inside) output = input.narrow(0, rank * numel, numel);
  if (!gathered_inside && !scattered_inside) output = in_place ? input : make(out_count);
  std::vector<at::Tensor> one{input};
  if (verb == Verb::all_reduce) {
    c10d::AllreduceOptions options;
    options.reduceOp = reduction;
    work = backend.allreduce(one, options);
  } else if (verb == Verb::broadcast) {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    work = backend.broadcast(one, options);
  } else if (verb == Verb::reduce_scatter) {
    c10d::ReduceScatterOptions options;
    options.reduceOp = reduction;
    work = backend._reduce_scatter_base(output, input, options);
  } else if (verb == Verb::all_gather) {
    work = backend._allgather_base(output, input);
  } else {
    work = backend.alltoall_base(output, input, out_splits, in_splits);
  }
}

void Job::finish(c10d::Backend& backend) {
  work->wait(std::chrono::seconds(60));
  if (verb == Verb::barrier) return;
  const bool written = verb == Verb::all_reduce || verb == Verb::broadcast || inside;
  const bool kept = written || same_bits(input, data_of(backend.getRank(), salt, input.numel(), dtype));
  if (kept && same_bits(output, expected(*this, backend.getRank(), backend.getSize()))) {
    input.reset();
    output.reset();
    return;
  }
  std::ostringstream text;
  text << "rank " << backend.getRank() << " of " << backend.getSize() << ": wrong " << (kept ? "result" : "input")
       << " of verb " << static_cast<int>(verb) << ", " << numel << " " << dtype << ", reduction "
       << static_cast<int>(reduction) << ", root " << root << ", salt " << salt << ", memory "
       << static_cast<int>(memory) << (inside ? ", inside" : "");
  throw std::runtime_error(text.str());
}

void drill(c10d::Backend& backend) {
  uint32_t salt = 0;
  const auto run = [&](Job job) {
    job.salt = ++salt;
    job.issue(backend);
    job.finish(backend);
  };
  const bool shares = backend.supportsTensorAlloc(0);
  const std::vector<Memory> memories =
      shares ? std::vector{Memory::ordinary, Memory::shared, Memory::mixed} : std::vector{Memory::ordinary};
  // In bytes: in the slot, a copy, pulled from the tensor, several units, several pieces.
  const std::vector<int64_t> sizes{1, 1000, 16'000, 40'000, 700'001};
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort,
                           at::kChar, at::kByte, at::kComplexFloat, at::kBool}) {
    for (const Memory memory : memories) {
      for (const int64_t bytes : sizes) {
        if (bytes > 16'000 && c10::elementSize(dtype) != 2 && dtype != at::kFloat && dtype != at::kLong) continue;
        const int64_t numel = std::max<int64_t>(bytes / static_cast<int64_t>(c10::elementSize(dtype)), 1);
        for (const Verb verb : {Verb::all_reduce, Verb::reduce_scatter, Verb::all_gather, Verb::broadcast,
                                Verb::all_to_all, Verb::barrier}) {
          const bool reduces = verb == Verb::all_reduce || verb == Verb::reduce_scatter;
          if (reduces && dtype == at::kBool) continue;
          run({.verb = verb, .dtype = dtype, .numel = numel, .root = backend.getSize() - 1, .memory = memory});
          if (!reduces || bytes > 16'000) continue;
          for (const auto reduction : {c10d::ReduceOp::MIN, c10d::ReduceOp::MAX, c10d::ReduceOp::AVG}) {
            if (reduction != c10d::ReduceOp::AVG && at::isComplexType(dtype)) continue;
            if (reduction == c10d::ReduceOp::AVG && at::isIntegralType(dtype, true)) continue;
            run({.verb = verb, .dtype = dtype, .numel = numel, .reduction = reduction, .memory = memory});
          }
        }
      }
    }
  }
  drill_limits(backend);
}

void drill_limits(c10d::Backend& backend) {
  uint32_t salt = 1'000'000;
  const int64_t size = backend.getSize();
  const bool shares = backend.supportsTensorAlloc(0);
  const auto run = [&](Job job) {
    job.salt = ++salt;
    job.root = static_cast<int>(salt % size);
    if (!shares && job.memory != Memory::ordinary) return;
    job.issue(backend);
    job.finish(backend);
  };
  const std::vector<Verb> verbs{Verb::all_reduce, Verb::reduce_scatter, Verb::all_gather, Verb::broadcast,
                                Verb::all_to_all};
  // How many elements are `bytes` in the input of one rank: that of a reduce-scatter holds everybody's part.
  const auto elements = [&](int64_t bytes, Verb verb, at::ScalarType dtype) {
    return bytes / (static_cast<int64_t>(c10::elementSize(dtype)) * (verb == Verb::reduce_scatter ? size : 1));
  };
  for (const Verb verb : verbs) {
    run({.verb = verb, .numel = 0});
    // What fits into a slot, goes as a copy, is one unit, is two.
    for (const int64_t limit : {1 << 10, 16 << 10, 64 << 10, 128 << 10}) {
      for (const auto dtype : {at::kFloat, at::kBFloat16, at::kChar}) {
        const int64_t edge = elements(limit, verb, dtype);
        for (const int64_t numel : {edge - 1, edge, edge + 1}) {
          for (const Memory memory : {Memory::ordinary, Memory::shared}) {
            run({.verb = verb, .dtype = dtype, .numel = numel, .memory = memory});
          }
        }
      }
    }
    if (verb == Verb::all_to_all) continue;
    // In what is summed by units, too; and where the shard is a part of the whole.
    for (const Memory memory : {Memory::ordinary, Memory::shared}) {
      for (const int64_t numel : {int64_t{7}, int64_t{40'001}}) {
        for (const auto reduction : {c10d::ReduceOp::AVG, c10d::ReduceOp::MAX, c10d::ReduceOp::MIN}) {
          if (verb != Verb::all_reduce && verb != Verb::reduce_scatter) break;
          run({.verb = verb, .numel = numel, .reduction = reduction, .memory = memory});
        }
        if (verb != Verb::all_gather && verb != Verb::reduce_scatter) continue;
        for (const auto dtype : {at::kFloat, at::kBFloat16}) {
          run({.verb = verb, .dtype = dtype, .numel = 20 * numel, .memory = memory, .inside = true});
        }
      }
    }
    // One piece, and several.
    const int64_t piece = elements(4 << 20, verb, at::kFloat);
    for (const Memory memory : {Memory::ordinary, Memory::mixed}) {
      run({.verb = verb, .numel = piece, .memory = memory});
      run({.verb = verb, .numel = piece + 1, .memory = memory});
    }
    run({.verb = verb, .numel = 2'300'007, .memory = Memory::shared});
  }
}

void soak(const std::vector<c10d::Backend*>& groups, uint32_t seed, int count) {
  std::mt19937 plan(seed);                                     // the same on every rank
  std::mt19937 whim(seed * 31 + groups[0]->getRank() + 1000);  // this rank's own
  struct Open {
    Job job;
    c10d::Backend* group;
  };
  std::vector<Open> open;
  const std::vector<at::ScalarType> dtypes{at::kFloat, at::kBFloat16, at::kLong, at::kDouble};
  const auto finish_one = [&] {
    const size_t which = whim() % open.size();
    open[which].job.finish(*open[which].group);
    open.erase(open.begin() + static_cast<std::ptrdiff_t>(which));
  };
  for (int i = 0; i < count; ++i) {
    Job job;
    job.verb = static_cast<Verb>(plan() % 6);
    job.dtype = dtypes[plan() % dtypes.size()];
    const uint32_t magnitude = plan() % 10;
    job.numel = 1 + static_cast<int64_t>(plan() % (magnitude < 6 ? 300 : magnitude < 9 ? 20'000 : 600'000));
    job.root = static_cast<int>(plan() % groups[0]->getSize());
    job.memory = static_cast<Memory>(plan() % 3);
    job.salt = plan();
    c10d::Backend* group = groups[plan() % groups.size()];
    open.push_back({job, group});
    open.back().job.issue(*group);
    if (whim() % 4 == 0) std::this_thread::yield();
    while (!open.empty() && (open.size() > 24 || whim() % 2 == 0)) finish_one();
  }
  while (!open.empty()) finish_one();
}

}  // namespace plumb::testing
