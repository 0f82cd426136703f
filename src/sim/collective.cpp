// How a collective is enqueued on one rank, and how its clocks meet.
#include "sim/collective.h"

#include "sim/memory.h"

namespace plumb::sim {

Communicator::Communicator(int size, std::string name) : impl_(std::make_shared<Impl>(size, std::move(name))) {}
int Communicator::size() const { return impl_->size; }

int Communicator::Impl::stream_of(int rank, int device) {
  Machine& machine = Machine::get();
  auto& [index, session] = streams[rank];
  if (index < 0 || session != machine.generation()) {
    index = machine.add_stream(device, "communicator " + name).id();
    session = machine.generation();
  }
  return machine.id_of(device, index);
}

// NCCL would hang or mix up data when ranks call different collectives; here it is an error at the call.
std::shared_ptr<Meeting> Communicator::Impl::meet(int rank, const Collective& collective, uint64_t& number) {
  number = next[rank]++;
  auto& slot = meetings[number];
  if (!slot) slot = std::make_shared<Meeting>(size);
  const auto meeting = slot;
  const std::string description = collective.kind + " of " + collective.agreement;
  if (meeting->first_rank < 0) {
    meeting->first_rank = rank;
    meeting->description = description;
  } else if (meeting->description != description) {
    --next[rank];
    throw Error(rank, "collective " + std::to_string(number) + " of communicator '" + name + "' is " + description +
                          " here and " + meeting->description + " on rank " + std::to_string(meeting->first_rank) +
                          "; every rank must call the same collectives in the same order");
  }
  if (++meeting->enqueued == size) meetings.erase(number);
  return meeting;
}

Communicator::Impl::Started Communicator::Impl::start(int rank, const Collective& collective) {
  Machine& machine = Machine::get();
  ++machine.statistics.collectives;
  uint64_t number = 0;
  const auto meeting = meet(rank, collective, number);
  machine.progress();
  const auto arrive = [&](const Clock& clock) {
    meeting->promise->clock.join(clock);
    if (meeting->enqueued == size) meeting->promise->kept = true;
  };
  const Tensors& any = collective.outputs.empty() ? collective.inputs : collective.outputs;
  if (any.empty() || any.front().is_cpu()) {
    for (const at::Tensor& input : collective.inputs) meeting->contributions[rank].push_back(input.clone());
    arrive(machine.host(machine.host_of(place().device)).clock);
    meeting->fills.push_back([fill = collective.fill, outputs = collective.outputs, meeting = meeting.get()] {
      if (fill) fill(meeting->contributions, outputs);
    });
    if (++meeting->arrived == size) {
      for (const auto& fill : meeting->fills) fill();
      meeting->fills.clear();
    }
    return {meeting, {}, place().device};
  }

  const int device = any.front().device().index();
  const int stream = stream_of(rank, device);
  machine.wait(stream, machine.record(current_id(device)));
  std::vector<Range> reads, writes;
  Tensors inputs, outputs;
  for (const at::Tensor& input : collective.inputs) {
    add_ranges(reads, input, false);
    inputs.push_back(cpu_alias(input));
  }
  for (const at::Tensor& output : collective.outputs) {
    add_ranges(writes, output, true);
    outputs.push_back(cpu_alias(output));
  }
  const std::string what = collective.kind + " " + std::to_string(number) + " of " + name;
  machine.enqueue(stream, intern(what + " (arrive)"), reads, [meeting, rank, inputs] {
    for (const at::Tensor& input : inputs) meeting->contributions[rank].push_back(input.clone());
    ++meeting->arrived;
  });
  arrive(machine.clock_of(stream));
  machine.enqueue(
      stream, intern(what), writes,
      [meeting, outputs, fill = collective.fill] {
        if (fill) fill(meeting->contributions, outputs);
      },
      [meeting, all = size] { return meeting->arrived == all; });
  machine.promise(stream, meeting->promise);
  return {meeting, machine.record(stream), device};
}

}  // namespace plumb::sim
