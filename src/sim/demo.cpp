// The program of `plumb sim --demo`.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include <sstream>

#include "plumb/sim.h"

namespace plumb::sim {

// A data-parallel step in small: two streams fill one bucket, a third reduces it. It makes three famous mistakes.
std::string demo(uint64_t seed) {
  init(1);
  Session session(seed);
  const auto on_device = at::device(device(0)).dtype(at::kFloat);
  const auto forward = current_stream(0);
  const auto left = new_stream(0, "left branch");
  const auto right = new_stream(0, "right branch");
  const auto reducing = new_stream(0, "reduce");

  at::Tensor bucket = at::zeros({64}, on_device);
  name(bucket, "bucket 0");
  for (const auto& stream : {left, right, reducing}) wait_for(stream, forward);
  {
    const Scope scope("backward of the left branch");
    const c10::StreamGuard guard(left);
    bucket.narrow(0, 0, 32).fill_(1);
  }
  {
    const Scope scope("backward of the right branch");
    const c10::StreamGuard guard(right);
    bucket.narrow(0, 32, 32).fill_(2);
  }
  at::Tensor total;
  {
    const Scope scope("reduce bucket 0");
    wait_for(reducing, left);  // and nobody waits for the right branch
    const c10::StreamGuard guard(reducing);
    total = bucket.sum();
  }
  {
    const Scope scope("next backward of the left branch");
    const c10::StreamGuard guard(left);
    bucket.narrow(0, 0, 32).fill_(3);  // the reduction may still be reading
  }
  {
    const Scope scope("a temporary of the forward");
    at::Tensor temporary = at::ones({64}, on_device);
    name(temporary, "temporary");
    wait_for(reducing, forward);
    const c10::StreamGuard guard(reducing);
    total.add_(temporary.sum());
  }  // freed here, never recorded on the reducing stream
  at::Tensor other = at::full({64}, 5, on_device);
  wait_for(forward, reducing);
  const auto value = total.item<float>();
  session.finish();

  std::ostringstream out;
  out << "Two streams fill a bucket and a third sums it: 32 x 1 + 32 x 2, plus a temporary of 64 ones, is 160.\n"
      << "Under seed " << seed << " the sum came out as " << value << ". Other seeds give other orders; the report is\n"
      << "the same under each, because what is checked is what the program orders, not what happened:\n\n"
      << session.report();
  return out.str();
}

}  // namespace plumb::sim
