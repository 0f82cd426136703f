// Correct multi-stream programs: the simulator has nothing to say about them, and their numbers are right.
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "sim/support/support.h"

namespace plumb::sim {
namespace {

struct Program {
  const char* name;
  std::function<void()> run;
};

float total_of(const at::Tensor& tensor) { return tensor.sum().item<float>(); }

void one_stream() {
  auto x = torch::ones({16}, on(0));
  for (int i = 0; i < 5; ++i) x = x * 2;
  EXPECT_EQ(total_of(x), 16 * 32);
}

void producer_and_consumer() {
  const auto main = current_stream(0), side = new_stream(0);
  auto x = torch::ones({16}, on(0));
  wait_for(side, main);
  const auto y = with(side, [&] { return x + 1; });
  wait_for(main, side);
  EXPECT_EQ(total_of(y), 32);
}

void two_readers() {
  const auto main = current_stream(0), a = new_stream(0), b = new_stream(0);
  auto x = torch::ones({16}, on(0));
  wait_for(a, main);
  wait_for(b, main);
  const auto y = with(a, [&] { return x.sum(); });
  const auto z = with(b, [&] { return x.mean(); });
  wait_for(main, a);
  wait_for(main, b);
  x.zero_();
  EXPECT_EQ((y + z).item<float>(), 17);
}

void two_producers_of_one_bucket() {
  const auto main = current_stream(0), a = new_stream(0), b = new_stream(0), reduce = new_stream(0);
  auto bucket = torch::zeros({64}, on(0));
  for (const auto& s : {a, b}) wait_for(s, main);
  with(a, [&] { bucket.slice(0, 0, 32).fill_(1); });
  with(b, [&] { bucket.slice(0, 32, 64).fill_(2); });
  wait_for(reduce, a);
  wait_for(reduce, b);
  const auto total = with(reduce, [&] { return bucket.sum(); });
  wait_for(main, reduce);
  EXPECT_EQ(total.item<float>(), 96);
}

void interleaved_columns() {
  const auto main = current_stream(0), side = new_stream(0);
  auto m = torch::zeros({8, 8}, on(0));
  wait_for(side, main);
  m.slice(1, 0, 4).fill_(1);
  with(side, [&] { m.slice(1, 4, 8).fill_(2); });
  wait_for(main, side);
  EXPECT_EQ(total_of(m), 96);
}

void transposed_halves() {
  const auto main = current_stream(0), side = new_stream(0);
  auto m = torch::zeros({8, 8}, on(0));
  wait_for(side, main);
  m.t().slice(0, 0, 4).fill_(1);
  with(side, [&] { m.t().slice(0, 4, 8).fill_(2); });
  wait_for(main, side);
  EXPECT_EQ(total_of(m), 96);
}

void columns_of_more_rows_than_are_followed_one_by_one() {
  const auto main = current_stream(0), side = new_stream(0);
  auto m = torch::zeros({128, 128}, on(0));  // 8192 elements of half of it, in 128 runs
  wait_for(side, main);
  m.slice(1, 0, 64).fill_(1);
  with(side, [&] { m.slice(1, 64, 128).fill_(2); });
  wait_for(main, side);
  EXPECT_EQ(total_of(m), 3 * 8192);
}

void chain_of_three_streams() {
  const auto main = current_stream(0), a = new_stream(0), b = new_stream(0);
  auto x = torch::ones({8}, on(0));
  wait_for(a, main);
  with(a, [&] { x.add_(1); });
  wait_for(b, a);
  with(b, [&] { x.mul_(3); });
  wait_for(main, b);  // and through b, a
  EXPECT_EQ(total_of(x), 48);
}

void host_synchronisation_orders_streams() {
  const auto side = new_stream(0);
  auto x = torch::ones({8}, on(0));
  current_stream(0).synchronize();
  with(side, [&] { x.add_(1); });
  side.synchronize();
  EXPECT_EQ(total_of(x), 16);
}

void event_synchronised_by_the_host() {
  const auto side = new_stream(0);
  auto x = torch::ones({8}, on(0));
  auto event = event_on(current_stream(0));
  event.synchronize();
  with(side, [&] { x.add_(1); });
  wait_for(current_stream(0), side);
  EXPECT_EQ(total_of(x), 16);
}

void event_polled_by_the_host() {
  const auto side = new_stream(0);
  auto x = torch::ones({8}, on(0));
  auto event = event_on(current_stream(0));
  while (!event.query()) {
  }
  with(side, [&] { x.add_(1); });
  while (!side.query()) {
  }
  EXPECT_EQ(total_of(x), 16);
}

void event_recorded_again_after_the_wait() {
  const auto main = current_stream(0), side = new_stream(0);
  auto x = torch::ones({8}, on(0)), y = torch::ones({8}, on(0));
  auto event = event_on(main);
  event.block(side);
  y.add_(1);
  event.record(main);  // the waiter keeps the version it saw, which is enough for x
  const auto z = with(side, [&] { return x + 1; });
  wait_for(main, side);
  EXPECT_EQ(total_of(z) + total_of(y), 32);
}

void temporary_recorded_on_its_reader() {
  const auto main = current_stream(0), side = new_stream(0);
  at::Tensor out;
  {
    auto x = torch::ones({1024}, on(0));
    wait_for(side, main);
    out = with(side, [&] { return x.sum(); });
    x.record_stream(side);
  }
  for (int i = 0; i < 5; ++i) torch::full({1024}, 7, on(0));
  wait_for(main, side);
  EXPECT_EQ(out.item<float>(), 1024);
}

void temporary_recorded_on_two_readers() {
  const auto main = current_stream(0), one = new_stream(0), two = new_stream(0);
  at::Tensor a, b;
  {
    auto x = torch::ones({1024}, on(0));
    for (const auto& side : {one, two}) wait_for(side, main);
    a = with(one, [&] { return x.sum(); });
    b = with(two, [&] { return x.sum(); });
    x.record_stream(one);
    x.record_stream(two);
  }
  one.synchronize();  // the other may read still
  for (int i = 0; i < 5; ++i) torch::full({1024}, 7, on(0));
  for (const auto& side : {one, two}) wait_for(main, side);
  EXPECT_EQ((a + b).item<float>(), 2048);
}

void temporary_freed_after_its_owner_waited() {
  const auto main = current_stream(0), side = new_stream(0);
  at::Tensor out;
  {
    auto x = torch::ones({1024}, on(0));
    wait_for(side, main);
    out = with(side, [&] { return x.sum(); });
    wait_for(main, side);
  }
  torch::full({1024}, 7, on(0));
  EXPECT_EQ(out.item<float>(), 1024);
}

void temporary_freed_before_its_owner_waits_and_allocates() {
  const auto main = current_stream(0), side = new_stream(0);
  at::Tensor out;
  {
    auto x = torch::ones({1024}, on(0));
    wait_for(side, main);
    out = with(side, [&] { return x.sum(); });
  }
  wait_for(main, side);  // between the free and the next allocation of the owner: in time
  torch::full({1024}, 7, on(0));
  EXPECT_EQ(out.item<float>(), 1024);
}

void buffer_refilled_after_its_reduction() {
  const auto main = current_stream(0), reduce = new_stream(0);
  auto bucket = torch::zeros({64}, on(0));
  auto total = torch::zeros({}, on(0));
  for (int pass = 0; pass < 4; ++pass) {
    wait_for(main, reduce);
    bucket.fill_(pass);
    wait_for(reduce, main);
    with(reduce, [&] { total.add_(bucket.sum()); });
  }
  wait_for(main, reduce);
  EXPECT_EQ(total.item<float>(), 64 * 6);
}

void gather_ahead_with_two_buffers() {
  const auto main = current_stream(0), gather = new_stream(0);
  wait_for(gather, main);
  std::vector<at::Tensor> buffers;
  for (int i = 0; i < 2; ++i) buffers.push_back(torch::zeros({32}, on(0)));
  wait_for(gather, main);
  auto total = torch::zeros({}, on(0));
  for (int unit = 0; unit < 6; ++unit) {
    auto& full = buffers[unit % 2];
    with(gather, [&] { full.fill_(unit); });
    wait_for(main, gather);
    total.add_(full.sum());
    wait_for(gather, main);
  }
  EXPECT_EQ(total.item<float>(), 32 * 15);
}

void storage_resized_on_its_own_stream() {
  const auto main = current_stream(0), gather = new_stream(0);
  auto full = with(gather, [&] { return torch::empty({64}, on(0)); });
  float total = 0;
  for (int unit = 1; unit < 4; ++unit) {
    wait_for(gather, main);
    with(gather, [&] { full.resize_({128}).fill_(unit); });
    wait_for(main, gather);
    total += total_of(full);
  }
  EXPECT_EQ(total, 128 * 6);
}

void asynchronous_copy_to_the_host() {
  auto x = torch::ones({16}, on(0));
  auto host = torch::empty({16});
  host.copy_(x, /*non_blocking=*/true);
  current_stream(0).synchronize();
  EXPECT_EQ(host.sum().item<float>(), 16);
}

void asynchronous_copy_from_pinned_memory() {
  auto host = torch::ones({16}).pin_memory();
  auto x = torch::zeros({16}, on(0));
  x.copy_(host, /*non_blocking=*/true);
  auto event = event_on(current_stream(0));
  event.synchronize();
  host.fill_(9);
  EXPECT_EQ(total_of(x), 16);
}

void copy_from_pinned_memory_that_blocks() {
  auto host = torch::ones({16}).pin_memory();
  auto x = torch::zeros({16}, on(0));
  x.copy_(host);  // the host waits, or has handed the values over
  host.fill_(9);
  EXPECT_EQ(total_of(x), 16);
}

void pageable_memory_is_staged_during_the_call() {
  auto host = torch::ones({16});
  auto x = torch::zeros({16}, on(0));
  x.copy_(host, /*non_blocking=*/true);
  host.fill_(9);
  EXPECT_EQ(total_of(x), 16);
}

void copy_between_devices() {
  auto x = torch::ones({16}, on(0));
  auto y = x.to(device(1));
  x.fill_(3);  // the source's stream is ordered with the copy
  EXPECT_EQ(total_of(y) + total_of(x), 64);
}

void cast_on_the_consumers_stream() {
  const auto main = current_stream(0), reduce = new_stream(0);
  auto gradient = torch::ones({32}, on(0).dtype(at::kBFloat16));
  wait_for(reduce, main);
  gradient.record_stream(reduce);
  const auto total = with(reduce, [&] { return gradient.to(at::kFloat).sum(); });
  gradient = at::Tensor();
  torch::ones({32}, on(0));
  wait_for(main, reduce);
  EXPECT_EQ(total.item<float>(), 32);
}

void backward_over_two_streams() {
  const auto main = current_stream(0), a = new_stream(0), b = new_stream(0);
  auto w = torch::ones({4}, on(0)).requires_grad_();
  wait_for(a, main);
  wait_for(b, main);
  const auto x = with(a, [&] { return w * 2; });
  const auto y = with(b, [&] { return w * 3; });
  wait_for(main, a);
  wait_for(main, b);
  (x + y).sum().backward();
  EXPECT_EQ(total_of(w.grad()), 20);
}

void collective_waited_for_on_the_device() {
  const Communicator world(2);
  run_ranks(2, [&](int rank) {
    const auto backend = world.backend(rank);
    std::vector<at::Tensor> gradient{torch::full({8}, rank + 1, on(rank))};
    for (int i = 0; i < 3; ++i) {
      const auto work = backend->allreduce(gradient);
      work->wait();
      gradient[0].div_(2);
    }
    EXPECT_EQ(total_of(gradient[0]), 8 * 1.5f);
  });
}

// A collective comes between what ranks enqueued before it and what others enqueue after it, also in each other's memory.
void memory_of_another_rank_read_after_a_collective() {
  const Communicator world(2);
  std::vector<at::Tensor> shards(2);
  int reached = 0;
  const auto both = [&](int times) {
    ++reached;
    wait_until([&] { return reached >= 2 * times; }, "the other rank");
  };
  run_ranks(2, [&](int rank) {
    const auto main = current_stream(rank), side = new_stream(rank);
    shards[rank] = torch::empty({8}, on(rank));
    std::vector<at::Tensor> token{torch::ones({1}, on(rank))};
    wait_for(side, main);
    with(side, [&] {
      shards[rank].fill_(rank + 1);
      world.backend(rank)->allreduce(token)->wait();
    });
    wait_for(main, side);
    both(1);  // have called: no host knows more than that
    const auto copy = with(new_stream(1 - rank), [&] { return shards[1 - rank].to(device(rank)); });
    EXPECT_EQ(total_of(copy), 8 * (2 - rank));
    both(2);
  });
}

void two_communicators_at_once() {
  const Communicator one(2, "one"), two(2, "two");
  run_ranks(2, [&](int rank) {
    std::vector<at::Tensor> a{torch::ones({8}, on(rank))}, b{torch::ones({8}, on(rank))};
    const auto first = one.backend(rank)->allreduce(a);
    const auto second = two.backend(rank)->allreduce(b);
    second->wait();
    first->wait();
    EXPECT_EQ(total_of(a[0] + b[0]), 32);
  });
}

const Program programs[] = {
    {"one_stream", one_stream},
    {"producer_and_consumer", producer_and_consumer},
    {"two_readers", two_readers},
    {"two_producers_of_one_bucket", two_producers_of_one_bucket},
    {"interleaved_columns", interleaved_columns},
    {"transposed_halves", transposed_halves},
    {"columns_of_more_rows_than_are_followed_one_by_one", columns_of_more_rows_than_are_followed_one_by_one},
    {"chain_of_three_streams", chain_of_three_streams},
    {"host_synchronisation_orders_streams", host_synchronisation_orders_streams},
    {"event_synchronised_by_the_host", event_synchronised_by_the_host},
    {"event_polled_by_the_host", event_polled_by_the_host},
    {"event_recorded_again_after_the_wait", event_recorded_again_after_the_wait},
    {"temporary_recorded_on_its_reader", temporary_recorded_on_its_reader},
    {"temporary_recorded_on_two_readers", temporary_recorded_on_two_readers},
    {"temporary_freed_after_its_owner_waited", temporary_freed_after_its_owner_waited},
    {"temporary_freed_before_its_owner_waits_and_allocates", temporary_freed_before_its_owner_waits_and_allocates},
    {"buffer_refilled_after_its_reduction", buffer_refilled_after_its_reduction},
    {"gather_ahead_with_two_buffers", gather_ahead_with_two_buffers},
    {"storage_resized_on_its_own_stream", storage_resized_on_its_own_stream},
    {"asynchronous_copy_to_the_host", asynchronous_copy_to_the_host},
    {"asynchronous_copy_from_pinned_memory", asynchronous_copy_from_pinned_memory},
    {"copy_from_pinned_memory_that_blocks", copy_from_pinned_memory_that_blocks},
    {"pageable_memory_is_staged_during_the_call", pageable_memory_is_staged_during_the_call},
    {"copy_between_devices", copy_between_devices},
    {"cast_on_the_consumers_stream", cast_on_the_consumers_stream},
    {"backward_over_two_streams", backward_over_two_streams},
    {"collective_waited_for_on_the_device", collective_waited_for_on_the_device},
    {"memory_of_another_rank_read_after_a_collective", memory_of_another_rank_read_after_a_collective},
    {"two_communicators_at_once", two_communicators_at_once},
};

class CorrectProgram : public testing::TestWithParam<Program> {};

TEST_P(CorrectProgram, IsReportedUnderNoSeed) {
  for (uint64_t seed = 0; seed < 4 * few_seeds; ++seed) {
    Session session(seed);
    GetParam().run();
    session.finish();
    ASSERT_EQ(session.report(), "no races\n") << "seed " << seed;
  }
}

// It has passed, wherever in its own session it was.
TEST(Event, OfAnEarlierSessionHoldsNobodyUp) {
  c10::Event event(c10::DeviceType::PrivateUse1);
  {
    Session session(0);
    auto x = torch::ones({16}, on(0));
    for (int i = 0; i < 50; ++i) x.add_(1);
    event.record(current_stream(0));
    session.finish();
  }
  Session session(1);
  const auto side = new_stream(0);
  event.block(side);
  event.synchronize();
  EXPECT_TRUE(event.query());
  const auto y = with(side, [&] { return torch::ones({4}, on(0)); });
  wait_for(current_stream(0), side);
  EXPECT_EQ(total_of(y), 4);
  session.finish();
  EXPECT_EQ(session.report(), "no races\n");
}

INSTANTIATE_TEST_SUITE_P(All, CorrectProgram, testing::ValuesIn(programs),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace plumb::sim
