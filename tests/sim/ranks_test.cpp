// Ranks, collectives and replay: one seed is one order.
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <set>

#include "sim/support/support.h"

namespace plumb::sim {
namespace {

// A data-parallel model trained on all ranks; the parameters of each.
std::vector<at::Tensor> train_together(int ranks, bool waits) {
  const Communicator world(ranks);
  std::vector<at::Tensor> parameters(ranks);
  run_ranks(ranks, [&](int rank) {
    torch::manual_seed(3);
    torch::nn::Sequential model(torch::nn::Linear(6, 8), torch::nn::GELU(), torch::nn::Dropout(0.3),
                                torch::nn::Linear(8, 2));
    model->to(device(rank));
    torch::manual_seed(100 + rank);
    const auto backend = world.backend(rank);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      const auto x = torch::randn({4, 6}).to(device(rank));
      model->forward(x).square().mean().backward();
      for (auto& parameter : model->parameters()) {
        std::vector<at::Tensor> gradient{parameter.grad()};
        const auto work = backend->allreduce(gradient);
        if (waits) work->wait();
        if (step == 1) (void)gradient[0].sum().item<float>();  // a blocking call in the middle
      }
      optimizer.step();
    }
    std::vector<at::Tensor> flat;
    for (auto& parameter : model->parameters()) flat.push_back(parameter.detach().view({-1}));
    parameters[rank] = torch::cat(flat).cpu();
  });
  return parameters;
}

TEST(Ranks, TrainAlikeUnderEverySeed) {
  at::Tensor expected;
  for (uint64_t seed = 0; seed < 24; ++seed) {
    Session session(seed);
    const auto parameters = train_together(4, true);
    if (!expected.defined()) expected = parameters[0];
    for (const auto& mine : parameters) EXPECT_TRUE(same_bits(mine, expected)) << "seed " << seed;
    EXPECT_EQ(session.report(), "no races\n") << "seed " << seed;
  }
}

TEST(Ranks, ReplayOneOrderForOneSeedAndExploreOthers) {
  std::set<uint64_t> orders;
  for (uint64_t seed = 0; seed < 30; ++seed) {
    std::set<uint64_t> replays;
    std::set<std::string> reports;
    for (int repeat = 0; repeat < 3; ++repeat) {
      Session session(seed);
      train_together(3, false);
      replays.insert(session.statistics().order);
      reports.insert(session.report());
    }
    EXPECT_EQ(replays.size(), 1u) << "seed " << seed;
    EXPECT_EQ(reports.size(), 1u) << "seed " << seed;
    EXPECT_THAT(*reports.begin(), testing::HasSubstr("all_reduce"));
    orders.insert(replays.begin(), replays.end());
  }
  EXPECT_GT(orders.size(), 25u);
}

TEST(Ranks, HaveTheirOwnRandomNumbers) {
  for (uint64_t seed = 0; seed < few_seeds; ++seed) {
    Session session(seed);
    torch::manual_seed(8);
    std::vector<at::Tensor> drawn(3);
    run_ranks(3, [&](int rank) {
      torch::manual_seed(40 + rank);
      const auto a = torch::randn({4}, on(rank));
      synchronize(rank);  // others run here, and draw
      drawn[rank] = torch::cat({a, torch::randn({4}, on(rank))}).cpu();
    });
    const auto after = torch::randn({4});
    for (int rank = 0; rank < 3; ++rank) {
      torch::manual_seed(40 + rank);
      const auto a = torch::randn({4});
      EXPECT_TRUE(same_bits(drawn[rank], torch::cat({a, torch::randn({4})})));
    }
    torch::manual_seed(8);
    EXPECT_TRUE(same_bits(after, torch::randn({4})));
  }
}

TEST(Collectives, GiveWhatTheyPromise) {
  for (uint64_t seed = 0; seed < few_seeds; ++seed) {
    Session session(seed);
    const Communicator world(3);
    for (const bool cpu : {false, true}) {
      run_ranks(3, [&](int rank) {
        const auto options = cpu ? at::TensorOptions(at::kFloat) : on(rank);
        const auto backend = world.backend(rank);
        const auto value = [](const at::Tensor& tensor) { return tensor.cpu(); };
        std::vector<at::Tensor> all{torch::full({2}, rank + 1, options)};
        backend->allreduce(all)->wait();
        EXPECT_TRUE(same_bits(value(all[0]), torch::full({2}, 6.f)));
        c10d::AllreduceOptions most;
        most.reduceOp = c10d::ReduceOp::MAX;
        all[0].fill_(rank);
        backend->allreduce(all, most)->wait();
        EXPECT_TRUE(same_bits(value(all[0]), torch::full({2}, 2.f)));

        c10d::BroadcastOptions from;
        from.rootRank = 1;
        std::vector<at::Tensor> one{torch::full({3}, rank, options)};
        backend->broadcast(one, from)->wait();
        EXPECT_TRUE(same_bits(value(one[0]), torch::full({3}, 1.f)));

        auto shard = torch::full({2}, rank, options), full = torch::zeros({6}, options);
        backend->_allgather_base(full, shard)->wait();
        EXPECT_TRUE(same_bits(value(full), torch::tensor({0.f, 0.f, 1.f, 1.f, 2.f, 2.f})));

        backend->_reduce_scatter_base(shard, full)->wait();
        EXPECT_TRUE(same_bits(value(shard), torch::full({2}, 3.f * rank)));

        auto sent = torch::arange(3, options) + 10 * rank, received = torch::zeros({3}, options);
        std::vector<int64_t> equal;
        backend->alltoall_base(received, sent, equal, equal)->wait();
        EXPECT_TRUE(same_bits(value(received), torch::arange(3, at::kFloat) * 10 + rank));

        // Uneven parts, of which some are empty: rank r sends r rows to rank 0 and the rest to rank 2.
        auto rows = torch::arange(3, options) + 10 * rank;
        std::vector<int64_t> to = {rank, 0, 3 - rank}, from_each = {0, 0, 0};
        if (rank == 0) from_each = {0, 1, 2};
        if (rank == 2) from_each = {3, 2, 1};
        auto got = torch::zeros({rank == 0 ? 3 : rank == 2 ? 6 : 0}, options);
        backend->alltoall_base(got, rows, from_each, to)->wait();
        const std::vector<std::vector<float>> wanted = {{10, 20, 21}, {}, {0, 1, 2, 11, 12, 22}};
        EXPECT_TRUE(same_bits(value(got), torch::tensor(wanted[rank], at::kFloat)));

        // As lists of tensors.
        std::vector<std::vector<at::Tensor>> lists(1);
        for (int r = 0; r < 3; ++r) lists[0].push_back(torch::zeros({2}, options));
        std::vector<at::Tensor> own{torch::full({2}, 5 + rank, options)};
        backend->allgather(lists, own)->wait();
        for (int r = 0; r < 3; ++r) EXPECT_TRUE(same_bits(value(lists[0][r]), torch::full({2}, 5.f + r)));
        for (int r = 0; r < 3; ++r) lists[0][r].fill_(100 * r + rank);
        c10d::ReduceScatterOptions least;
        least.reduceOp = c10d::ReduceOp::MIN;
        backend->reduce_scatter(own, lists, least)->wait();
        EXPECT_TRUE(same_bits(value(own[0]), torch::full({2}, 100.f * rank)));
        std::vector<at::Tensor> parts;
        for (int r = 0; r < 3; ++r) parts.push_back(torch::zeros({2}, options));
        backend->alltoall(parts, lists[0])->wait();
        for (int r = 0; r < 3; ++r) EXPECT_TRUE(same_bits(value(parts[r]), torch::full({2}, 100.f * rank + r)));

        backend->barrier()->wait();
      });
    }
    EXPECT_EQ(session.report(), "no races\n") << "seed " << seed;
  }
}

TEST(Collectives, DoNotBlockTheHostOnTheDevice) {
  Session session(0);
  const Communicator world(2);
  std::vector<int> order;
  run_ranks(2, [&](int rank) {
    std::vector<at::Tensor> tensor{torch::ones({4}, on(rank))};
    world.backend(rank)->allreduce(tensor)->wait();
    order.push_back(rank);  // no rank has handed over yet
    EXPECT_EQ(order.size(), static_cast<size_t>(order[0] == rank ? 1 : 2));
  });
  EXPECT_EQ(session.statistics().collectives, 2u);
}

TEST(Collectives, ThatDifferAreAnErrorThatNamesBoth) {
  Session session(0);
  const Communicator world(2, "data");
  try {
    run_ranks(2, [&](int rank) {
      std::vector<at::Tensor> tensor{torch::ones({rank ? 4 : 8}, on(rank))};
      world.backend(rank)->allreduce(tensor)->wait();
    });
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(),
                testing::AnyOf(testing::HasSubstr("communicator 'data'"), testing::HasSubstr("deadlock")));
  }
}

TEST(Collectives, WithoutOneRankAreADeadlockThatNamesTheStuckHeads) {
  for (uint64_t seed = 0; seed < few_seeds; ++seed) {
    Session session(seed);
    const Communicator world(2, "data");
    std::string message;
    try {
      run_ranks(2, [&](int rank) {
        std::vector<at::Tensor> tensor{torch::ones({4}, on(rank))};
        const Scope scope("reduce bucket 3");
        if (rank == 0) world.backend(rank)->allreduce(tensor)->wait();
      });
    } catch (const Error& error) {
      message = error.what();
    }
    EXPECT_THAT(message, testing::HasSubstr("rank 0: deadlock"));
    EXPECT_THAT(message, testing::HasSubstr("all_reduce 0 of data"));
    EXPECT_THAT(message, testing::HasSubstr("reduce bucket 3"));
  }
}

TEST(Collectives, InAnotherOrderOnAnotherRankAreFound) {
  Session session(4);
  const Communicator world(2, "data");
  EXPECT_THROW(run_ranks(2,
                         [&](int rank) {
                           std::vector<at::Tensor> a{torch::ones({4}, on(rank))}, b{torch::ones({5}, on(rank))};
                           const auto backend = world.backend(rank);
                           backend->allreduce(rank ? a : b);
                           backend->allreduce(rank ? b : a);
                         }),
               Error);
}

TEST(Collectives, OfOneCommunicatorRunInTheOrderOfTheCalls) {
  for (uint64_t seed = 0; seed < few_seeds; ++seed) {
    Session session(seed);
    const Communicator world(2);
    run_ranks(2, [&](int rank) {
      const auto backend = world.backend(rank);
      std::vector<at::Tensor> tensor{torch::ones({4}, on(rank))};
      c10::intrusive_ptr<c10d::Work> last;
      for (int i = 0; i < 5; ++i) last = backend->allreduce(tensor);
      last->wait();  // covers the earlier ones: one stream
      EXPECT_EQ(tensor[0].sum().item<float>(), 4 * 32);
    });
    EXPECT_EQ(session.report(), "no races\n");
  }
}

TEST(Deadlock, OfStreamsThatNobodyFeedsIsAnError) {
  Session session(0);
  const Communicator world(2, "data");
  std::vector<at::Tensor> tensor{torch::ones({4}, on(0))};
  world.backend(0)->allreduce(tensor)->wait();
  EXPECT_THROW(synchronize(0), Error);
}

TEST(Ranks, ThatThrowEndTheOthersWithTheirOwnErrors) {
  Session session(0);
  const Communicator world(3);
  EXPECT_THROW(run_ranks(3,
                         [&](int rank) {
                           if (rank == 0) throw Error(0, "out of data");
                           std::vector<at::Tensor> tensor{torch::ones({4}, on(rank))};
                           world.backend(rank)->allreduce(tensor)->wait();
                           synchronize(rank);
                         }),
               Error);
  Session next(1);
  EXPECT_EQ(train_together(2, true).size(), 2u);
}

TEST(Ranks, WaitUntilAnotherRankHasDoneSomething) {
  Session session(5);
  int stage = 0;
  run_ranks(3, [&](int rank) {
    wait_until([&] { return stage == rank; }, "its stage");
    ++stage;
  });
  EXPECT_EQ(stage, 3);
}

TEST(Ranks, MayBlockOutsideTheSimulator) {
  Session session(2);
  std::mutex mutex;
  std::condition_variable changed;
  int there = 0;
  run_ranks(3, [&](int rank) {
    auto x = torch::ones({4}, on(rank));
    {
      const Outside outside;
      std::unique_lock lock(mutex);
      ++there;
      changed.notify_all();
      changed.wait(lock, [&] { return there == 3; });
    }
    EXPECT_EQ(x.sum().item<float>(), 4);
  });
}

// Hooks run on autograd's threads, on the streams it picks, and may block there.
TEST(Autograd, CarriesScopesAndTurnsIntoItsThreads) {
  for (uint64_t seed = 0; seed < few_seeds; ++seed) {
    Session session(seed);
    const Communicator world(3);
    std::vector<float> totals(3);
    run_ranks(3, [&](int rank) {
      const auto main = current_stream(rank), left = new_stream(rank), right = new_stream(rank);
      auto a = torch::full({4}, rank + 1, on(rank)).requires_grad_(), b = torch::ones({4}, on(rank)).requires_grad_();
      auto bucket = torch::zeros({8}, on(rank));
      const auto backend = world.backend(rank);
      std::vector<c10::Stream> producers;
      int left_to_come = 2;
      c10::intrusive_ptr<c10d::Work> work;
      const auto hook = [&](int64_t begin) {
        return [&, begin](const at::Tensor& gradient) {
          const torch::NoGradGuard no_grad;
          bucket.slice(0, begin, begin + 4).copy_(gradient);
          producers.push_back(current_stream(rank));
          if (--left_to_come) return;
          for (const auto& stream : producers) wait_for(current_stream(rank), stream);
          (void)bucket.sum().item<float>();  // blocks on autograd's thread: the turn passes on
          std::vector<at::Tensor> all{bucket};
          work = backend->allreduce(all);
        };
      };
      a.register_hook(hook(0));
      b.register_hook(hook(4));
      wait_for(left, main);
      wait_for(right, main);
      const auto x = with(left, [&] { return a * 2; });
      const auto y = with(right, [&] { return b * 3; });
      wait_for(main, left);
      wait_for(main, right);
      (x * y).sum().backward();
      work->wait();
      totals[rank] = bucket.sum().item<float>();
    });
    for (const float total : totals) EXPECT_EQ(total, 4 * (6 * 3) + 4 * (6 * 6)) << "seed " << seed;
    EXPECT_EQ(session.report(), "no races\n") << "seed " << seed;
  }
}

TEST(Autograd, NamesTheNodeAndTheScopeOfTheBackward) {
  Session session(0);
  const auto side = new_stream(0);
  auto w = torch::ones({4}, on(0)).requires_grad_();
  auto y = (w * w).sum();
  {
    const Scope scope("backward of step 7");
    y.backward();
  }
  with(side, [&] { return w.grad().sum(); });
  EXPECT_TRUE(reports(session.races(), "backward of step 7", "sum")) << session.report();
}

TEST(Autograd, AccumulatesOverSeveralStreamsWithoutARace) {
  const auto run = [](const at::Device& where, const std::vector<c10::Stream>& streams) {
    torch::manual_seed(2);
    auto w = torch::randn({16, 16}).to(where).requires_grad_();
    const auto x = torch::randn({4, 16}).to(where);
    std::vector<at::Tensor> losses;
    for (size_t i = 0; i < 4; ++i) {
      const auto part = [&] { return (x * static_cast<double>(i + 1)).mm(w).tanh().sum(); };
      if (streams.empty()) {
        losses.push_back(part());
      } else {
        wait_for(streams[i % 2], current_stream(0));
        losses.push_back(with(streams[i % 2], part));
      }
    }
    for (const auto& stream : streams) wait_for(current_stream(0), stream);
    (losses[0] + losses[1] + losses[2] + losses[3]).backward();
    return w.grad().cpu();
  };
  const auto expected = run(at::kCPU, {});
  for (uint64_t seed = 0; seed < 4 * few_seeds; ++seed) {
    Session session(seed);
    const auto found = run(device(0), {new_stream(0), new_stream(0)});
    EXPECT_TRUE(torch::allclose(found, expected, 1e-5, 1e-6)) << "seed " << seed;
    session.finish();
    EXPECT_EQ(session.report(), "no races\n") << "seed " << seed;
  }
}

}  // namespace
}  // namespace plumb::sim
