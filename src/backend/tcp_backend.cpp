// The c10d face of the `tcp` backend: what its collectives send to whom. TcpCalls moves it on.
//
// All ranks of a group send to each other directly, so that a collective is one round of messages, and an all-reduce two:
// everybody's numbers for a part go to its owner, who sums them in rank order, and sends the sum to everybody.
#include "backend/tcp.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "backend/arguments.h"
#include "backend/round.h"
#include "backend/tcp_calls.h"
#include "plumb/error.h"

namespace plumb {
namespace {

using c10d::OpType;
using c10d::Work;
using Lane = Sockets::Lane;
using Ref = Sockets::Ref;

constexpr int64_t kSlice = 2 << 20;  // bytes that are summed, and sent on, while the next ones come

class TcpBackend final : public c10d::Backend {
 public:
  TcpBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const std::string& address,
             std::chrono::microseconds patience, Names names)
      : Backend(rank, size),
        calls_(std::make_shared<TcpCalls>(store, rank, size, address, patience, std::move(names))) {}
  ~TcpBackend() override { calls_->leave(); }

  const std::string getBackendName() const override { return "tcp"; }

  c10::intrusive_ptr<Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) override;
  c10::intrusive_ptr<Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<Work> broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& opts) override;
  c10::intrusive_ptr<Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                         std::vector<int64_t>& input_splits,
                                         const c10d::AllToAllOptions& opts) override;
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& opts) override;
  c10::intrusive_ptr<Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override;
  c10::intrusive_ptr<Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override;

  void shutdown() override { calls_->close(); }

 private:
  using Call = TcpCalls::Call;

  Sockets::Span span_of(const std::vector<at::Tensor>& tensors) const;
  Lane lane_of(int tag);
  using Spans = std::function<Sockets::Span(int rank)>;
  void exchange(TcpCall& call, uint64_t label, const Spans& from, const Spans& into);
  int peer(int rank) const;

  const std::shared_ptr<TcpCalls> calls_;
  const arguments::Checker check_{"the tcp backend", calls_->me(), size_};
};

// ---- collectives

// To each its part, and from each its own; neighbours first, so that no rank is everybody's first.
void TcpBackend::exchange(TcpCall& call, uint64_t label, const Spans& from, const Spans& into) {
  Sockets& sockets = calls_->sockets();
  for (int i = 1; i < size_; ++i) {
    const int source = (rank_ + size_ - i) % size_;
    if (const auto span = into(source); span.bytes > 0) {
      call.rest.push_back(sockets.receive(source, Lane::issued, label, span));
    }
  }
  for (int i = 1; i < size_; ++i) {
    const int target = (rank_ + i) % size_;
    if (const auto span = from(target); span.bytes > 0) {
      call.rest.push_back(sockets.send(target, Lane::issued, label, span));
    }
  }
}

c10::intrusive_ptr<Work> TcpBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                   std::vector<int64_t>& output_splits,
                                                   std::vector<int64_t>& input_splits, const c10d::AllToAllOptions&) {
  check_.contiguous_on_cpu(input);
  check_.contiguous_on_cpu(output);
  check_.one_dtype(input, output);
  const auto places = [](const at::Tensor& tensor, const std::vector<int64_t>& elements) {
    std::vector<Sockets::Span> all;
    char* place = static_cast<char*>(tensor.data_ptr());
    for (const int64_t count : elements) {
      const auto bytes = static_cast<size_t>(count) * tensor.element_size();
      all.push_back({tensor, place, bytes});
      place += bytes;
    }
    return all;
  };
  const auto from = places(input, check_.in_elements(input, input_splits));
  const auto into = places(output, check_.in_elements(output, output_splits));
  if (const size_t sent = from[rank_].bytes, expected = into[rank_].bytes; sent != expected) {
    throw Error(calls_->me(), "all_to_all: this rank sends " + std::to_string(sent / input.element_size()) +
                                  " elements to itself, and expects " +
                                  std::to_string(expected / input.element_size()));
  }
  const auto entered = calls_->lock();
  const auto [call, label] = calls_->begin(Verb::all_to_all);
  exchange(*call, label, [&](int r) { return from[r]; }, [&](int r) { return into[r]; });
  if (from[rank_].bytes > 0) std::memcpy(into[rank_].place, from[rank_].place, from[rank_].bytes);
  return calls_->issue(call);
}

c10::intrusive_ptr<Work> TcpBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::AllgatherOptions&) {
  check_.divide(output, input);
  check_.contiguous_on_cpu(input);
  check_.contiguous_on_cpu(output);
  char* const whole = static_cast<char*>(output.data_ptr());
  char* const mine = static_cast<char*>(input.data_ptr());
  const size_t bytes = input.nbytes();
  const auto entered = calls_->lock();
  const auto [call, label] = calls_->begin(Verb::all_gather);
  exchange(
      *call, label, [&](int) { return Sockets::Span{input, mine, bytes}; },
      [&](int r) { return Sockets::Span{output, whole + static_cast<size_t>(r) * bytes, bytes}; });
  if (char* const own = whole + static_cast<size_t>(rank_) * bytes; bytes > 0 && own != mine)
    std::memcpy(own, mine, bytes);
  return calls_->issue(call);
}

c10::intrusive_ptr<Work> TcpBackend::allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) {
  const at::Tensor tensor = check_.one(tensors);
  check_.contiguous_on_cpu(tensor);
  const at::ScalarType dtype = tensor.scalar_type();
  const Reduction reduction = check_.reduction(opts.reduceOp, dtype);
  const int64_t width = tensor.element_size();
  char* const base = static_cast<char*>(tensor.data_ptr());
  // The part of a rank, in elements, of a slice.
  struct Part {
    int64_t begin, count;
  };
  const int64_t slice = kSlice / width;
  const auto part = [size = size_, slice, numel = tensor.numel()](int64_t at, int r) {
    const int64_t count = std::min(slice, numel - at);
    const int64_t each = round_up((count + size - 1) / size, 16);
    const int64_t begin = std::min(count, r * each);
    return Part{at + begin, std::min(count, begin + each) - begin};
  };
  int64_t room = 0;  // of what others send for the parts of this rank
  for (int64_t at = 0; at < tensor.numel(); at += slice) room += part(at, rank_).count * (size_ - 1);
  const at::Tensor others = at::empty({room}, tensor.options());

  const auto entered = calls_->lock();
  const auto [call, label] = calls_->begin(Verb::all_reduce);
  Sockets& sockets = calls_->sockets();  // they live as long as the call
  const auto span = [=](const Part& where) {
    return Sockets::Span{tensor, base + where.begin * width, static_cast<size_t>(where.count * width)};
  };
  char* next = static_cast<char*>(others.data_ptr());
  for (int64_t at = 0; at < tensor.numel(); at += slice) {
    const Part own = part(at, rank_);
    TcpCall::Step step;
    std::vector<const void*> inputs(static_cast<size_t>(size_), span(own).place);
    for (int i = 1; i < size_; ++i) {
      const int source = (rank_ + size_ - i) % size_;
      if (own.count > 0) {
        const Sockets::Span its{others, next, span(own).bytes};
        step.awaited.push_back(sockets.receive(source, Lane::issued, label, its));
        inputs[static_cast<size_t>(source)] = next;
        next += its.bytes;
      }
      if (const Part its = part(at, source); its.count > 0) {
        call->rest.push_back(sockets.receive(source, Lane::deferred, label, span(its)));
      }
    }
    step.then = [&sockets, rank = rank_, size = size_, inputs, others, own, span, label, dtype, reduction,
                 call = call.get()] {
      if (own.count == 0) return;
      void* out = span(own).place;
      reduce_in_order(inputs, {&out, 1}, own.count, dtype, reduction);
      for (int i = 1; i < size; ++i) {
        call->rest.push_back(sockets.send((rank + i) % size, Lane::deferred, label, span(own)));
      }
    };
    call->steps.push_back(std::move(step));
  }
  for (int64_t at = 0; at < tensor.numel(); at += slice) {
    for (int i = 1; i < size_; ++i) {
      const int target = (rank_ + i) % size_;
      const Part its = part(at, target);
      if (its.count > 0) call->rest.push_back(sockets.send(target, Lane::issued, label, span(its)));
    }
  }
  return calls_->issue(call);
}

// Everybody's numbers for this rank's part come, and are summed.
c10::intrusive_ptr<Work> TcpBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                          const c10d::ReduceScatterOptions& opts) {
  check_.divide(input, output);
  check_.contiguous_on_cpu(input);
  check_.contiguous_on_cpu(output);
  const Reduction reduction = check_.reduction(opts.reduceOp, output.scalar_type());
  const size_t bytes = output.nbytes();
  const auto row = [bytes](const at::Tensor& of, int r) {
    return Sockets::Span{of, static_cast<char*>(of.data_ptr()) + static_cast<size_t>(r) * bytes, bytes};
  };
  const at::Tensor others = at::empty({output.numel() * size_}, output.options());  // this rank's row stays empty
  std::vector<const void*> inputs;
  for (int r = 0; r < size_; ++r) inputs.push_back(row(r == rank_ ? input : others, r).place);
  const auto entered = calls_->lock();
  const auto [call, label] = calls_->begin(Verb::reduce_scatter);
  exchange(*call, label, [&](int r) { return row(input, r); }, [&](int r) { return row(others, r); });
  // The output may be part of the input: nothing is written before everything was sent.
  call->steps.push_back({std::exchange(call->rest, {}), [inputs, others, input, output, reduction] {
                           void* out = output.data_ptr();
                           reduce_in_order(inputs, {&out, 1}, output.numel(), output.scalar_type(), reduction);
                         }});
  return calls_->issue(call);
}

// A binomial tree: who has it passes it on to ranks further and further away.
c10::intrusive_ptr<Work> TcpBackend::broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& opts) {
  const at::Tensor tensor = check_.one(tensors);
  check_.contiguous_on_cpu(tensor);
  const int root = static_cast<int>(opts.rootRank);
  peer(root);
  const int mine = (rank_ - root + size_) % size_;  // counted from the root
  const auto real = [size = size_, root](int counted) { return (counted + root) % size; };
  const Sockets::Span span{tensor, static_cast<char*>(tensor.data_ptr()), tensor.nbytes()};
  const auto entered = calls_->lock();
  const auto [call, label] = calls_->begin(Verb::broadcast);
  Sockets& sockets = calls_->sockets();  // they live as long as the call
  int reach = 1;                         // the distance of the first that this rank passes it on to
  while (reach <= mine) reach *= 2;
  // The root sends when it begins, everybody else when it has come.
  const auto pass_on = [&sockets, size = size_, reach, mine, real, label, span, call = call.get()](Lane lane) {
    for (int distance = reach; mine + distance < size; distance *= 2) {
      call->rest.push_back(sockets.send(real(mine + distance), lane, label, span));
    }
  };
  if (mine == 0) {
    pass_on(Lane::issued);
  } else {
    const int parent = mine - reach / 2;
    const Lane lane = parent == 0 ? Lane::issued : Lane::deferred;
    call->steps.push_back({{sockets.receive(real(parent), lane, label, span)}, [pass_on] { pass_on(Lane::deferred); }});
  }
  return calls_->issue(call);
}

// By doubling distances: after round k, a rank has heard of the 2^k before it.
c10::intrusive_ptr<Work> TcpBackend::barrier(const c10d::BarrierOptions&) {
  const auto entered = calls_->lock();
  const auto [call, label] = calls_->begin(Verb::barrier);
  Sockets& sockets = calls_->sockets();  // they live as long as the call
  const at::Tensor word = at::empty({2}, at::kLong);
  const Sockets::Span out{word, static_cast<char*>(word.data_ptr()), sizeof(int64_t)};
  const Sockets::Span in{word, out.place + sizeof(int64_t), sizeof(int64_t)};
  for (int distance = 1; distance < size_; distance *= 2) {
    const Lane lane = distance == 1 ? Lane::issued : Lane::deferred;
    const Ref heard = sockets.receive((rank_ + size_ - distance) % size_, lane, label, in);
    if (distance == 1) call->rest.push_back(sockets.send((rank_ + 1) % size_, lane, label, out));
    call->steps.push_back({{heard}, [&sockets, rank = rank_, size = size_, distance, label, out, call = call.get()] {
                             if (distance * 2 >= size) return;
                             const int target = (rank + distance * 2) % size;
                             call->rest.push_back(sockets.send(target, Lane::deferred, label, out));
                           }});
  }
  return calls_->issue(call);
}

// ---- messages between two ranks

c10::intrusive_ptr<Work> TcpBackend::send(std::vector<at::Tensor>& tensors, int to, int tag) {
  const Sockets::Span span = span_of(tensors);
  const auto entered = calls_->lock();
  const Call call = calls_->begin(OpType::SEND);
  call->rest.push_back(calls_->sockets().send(peer(to), lane_of(tag), kMessage | static_cast<uint64_t>(tag), span));
  call->advance(true);
  return call;
}

c10::intrusive_ptr<Work> TcpBackend::recv(std::vector<at::Tensor>& tensors, int from, int tag) {
  const Sockets::Span span = span_of(tensors);
  const auto entered = calls_->lock();
  const Call call = calls_->begin(OpType::RECV);
  call->rest.push_back(
      calls_->sockets().receive(peer(from), lane_of(tag), kMessage | static_cast<uint64_t>(tag), span));
  return call;
}

Sockets::Span TcpBackend::span_of(const std::vector<at::Tensor>& tensors) const {
  const at::Tensor& tensor = check_.one(tensors);
  check_.contiguous_on_cpu(tensor);
  return {tensor, static_cast<char*>(tensor.data_ptr()), tensor.nbytes()};
}

// What is gathered comes while its rank computes; a host message is waited for.
Lane TcpBackend::lane_of(int tag) {
  if ((tag & kGatherTag) == 0) return Lane::control;
  calls_->need_thread();
  return Lane::gather;
}

int TcpBackend::peer(int rank) const {
  if (rank >= 0 && rank < size_) return rank;
  throw Error(calls_->me(),
              "a message to or from rank " + std::to_string(rank) + " in a group of " + std::to_string(size_));
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_tcp_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                   const std::string& address, std::chrono::microseconds patience,
                                                   Names names) {
  return c10::make_intrusive<TcpBackend>(store, rank, size, address, patience, std::move(names));
}

}  // namespace plumb
