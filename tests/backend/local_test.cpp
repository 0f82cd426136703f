// The local backend: every collective at every small size, and what happens when ranks disagree, fail or stay away.
#include <atomic>
#include <chrono>

#include "backend/local.h"
#include "plumb/world.h"
#include "world/group.h"
#include "world/world_impl.h"

namespace plumb {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

const Where here{.detail = "a test"};

c10d::Backend& backend_of(const World& world) { return *world.impl().data->backend; }

// What run_local throws, as text.
std::string error_of(int ranks, const std::function<void(World)>& body, milliseconds timeout = milliseconds(20'000)) {
  try {
    run_local(ranks, body, {.timeout = timeout});
  } catch (const std::exception& e) {
    return e.what();
  }
  return "no error";
}

class LocalSizes : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, LocalSizes, ::testing::Values(1, 2, 3, 4));

TEST_P(LocalSizes, TellEachThreadItsRank) {
  std::atomic<int> seen{0};
  run_local(GetParam(), [&](World world) {
    EXPECT_EQ(world.size(), GetParam());
    EXPECT_EQ(world.local_rank(), world.rank());
    EXPECT_EQ(world.backend(), "local");
    seen |= 1 << world.rank();
    world.barrier();
  });
  EXPECT_EQ(seen, (1 << GetParam()) - 1);
}

TEST_P(LocalSizes, AllReduceSumsEveryDtype) {
  run_local(GetParam(), [&](World world) {
    const int n = world.size();
    for (auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kComplexFloat}) {
      at::Tensor tensor = at::full({5001}, world.rank() + 1, dtype);
      data_group(world).all_reduce(tensor).wait(here);
      EXPECT_TRUE(at::equal(tensor, at::full({5001}, n * (n + 1) / 2, dtype))) << c10::toString(dtype);
    }
  });
}

TEST_P(LocalSizes, GatherReduceScatterAndBroadcastPutEveryPartInItsPlace) {
  run_local(GetParam(), [&](World world) {
    const int n = world.size();
    const int me = world.rank();
    Group group = data_group(world);
    at::Tensor full = at::empty({n * 7}, at::kLong);
    group.all_gather(full, at::full({7}, me + 5, at::kLong)).wait(here);
    EXPECT_TRUE(at::equal(full, at::arange(n, at::kLong).add(5).repeat_interleave(7)));

    at::Tensor shard = at::empty({7});
    group.reduce_scatter(shard, at::arange(n).to(at::kFloat).repeat_interleave(7).add(me)).wait(here);
    EXPECT_TRUE(at::equal(shard, at::full({7}, n * me + n * (n - 1) / 2.0)));

    at::Tensor in_place = at::ones({n * 3});
    group.reduce_scatter(in_place.slice(0, me * 3, me * 3 + 3), in_place).wait(here);
    EXPECT_TRUE(at::equal(in_place.slice(0, me * 3, me * 3 + 3), at::full({3}, n)));

    for (int root = 0; root < n; ++root) {
      at::Tensor tensor = at::full({11}, me == root ? 3.5 : -1.0, at::kBFloat16);
      group.broadcast(tensor, root).wait(here);
      EXPECT_TRUE(at::equal(tensor, at::full({11}, 3.5, at::kBFloat16)));
    }
  });
}

TEST_P(LocalSizes, ExchangeGivesEverybodysMessageInRankOrder) {
  run_local(GetParam(), [&](World world) {
    const std::vector<int64_t> mine{world.rank(), -7, 1'000'000'000'000 + world.rank()};
    const auto all = exchange(world, mine, here);
    ASSERT_EQ(all.size(), static_cast<size_t>(world.size()));
    for (int r = 0; r < world.size(); ++r) {
      EXPECT_EQ(all[r], (std::vector<int64_t>{r, -7, 1'000'000'000'000 + r}));
    }
    const auto texts = exchange_text(world, std::string(world.rank() * 3, 'x'), here);
    for (int r = 0; r < world.size(); ++r) EXPECT_EQ(texts[r], std::string(r * 3, 'x'));
  });
}

TEST_P(LocalSizes, TheBackendItselfSpeaksAllOfC10d) {
  if (GetParam() == 1) GTEST_SKIP() << "a world of one has no backend";
  run_local(GetParam(), [&](World world) {
    c10d::Backend& backend = backend_of(world);
    const int n = world.size();
    const int me = world.rank();
    for (auto [op, want] : {std::pair{c10d::ReduceOp::AVG, (n + 1) / 2.0}, std::pair{c10d::ReduceOp::MAX, 1.0 * n},
                            std::pair{c10d::ReduceOp::MIN, 1.0}}) {
      std::vector<at::Tensor> tensors{at::full({9}, me + 1.0f)};
      c10d::AllreduceOptions options;
      options.reduceOp = op;
      backend.allreduce(tensors, options)->wait();
      EXPECT_TRUE(at::equal(tensors[0], at::full({9}, want)));
    }
    std::vector<std::vector<at::Tensor>> outputs(1);
    for (int r = 0; r < n; ++r) outputs[0].push_back(at::empty({4}));
    std::vector<at::Tensor> inputs{at::full({4}, me * 1.0f)};
    backend.allgather(outputs, inputs)->wait();
    for (int r = 0; r < n; ++r) EXPECT_TRUE(at::equal(outputs[0][r], at::full({4}, r * 1.0f)));

    std::vector<at::Tensor> shard{at::empty({4})};
    backend.reduce_scatter(shard, outputs)->wait();
    EXPECT_TRUE(at::equal(shard[0], at::full({4}, me * n * 1.0f)));

    // Rank a sends b + 1 rows to rank b.
    std::vector<int64_t> in_splits;
    std::vector<int64_t> out_splits(n, me + 1);
    for (int r = 0; r < n; ++r) in_splits.push_back(r + 1);
    at::Tensor sent = at::full({n * (n + 1) / 2, 2}, me * 1.0f);
    at::Tensor received = at::empty({n * (me + 1), 2});
    backend.alltoall_base(received, sent, out_splits, in_splits)->wait();
    EXPECT_TRUE(at::equal(received.select(1, 1), at::arange(n).to(at::kFloat).repeat_interleave(me + 1)));
    backend.barrier()->wait();
  });
}

TEST(Local, SumsAreInRankOrderAndNarrowDtypesAccumulateInF32) {
  run_local(4, [](World world) {
    // In bf16 each of the three small addends would vanish beside 256; together they do not.
    at::Tensor tensor = at::full({3}, world.rank() == 0 ? 256.0 : 0.75, at::kBFloat16);
    data_group(world).all_reduce(tensor).wait(here);
    EXPECT_EQ(tensor[0].item<float>(), 258.0f);
    // (1e8 + -1e8) + 1 + 1 in this order only.
    const float values[] = {1e8f, -1e8f, 1.0f, 1.0f};
    at::Tensor ordered = at::full({3}, values[world.rank()]);
    data_group(world).all_reduce(ordered).wait(here);
    EXPECT_EQ(ordered[2].item<float>(), 2.0f);
  });
}

TEST(Local, ManyCollectivesMayBeUnderWayAndBeWaitedForInAnyOrder) {
  run_local(3, [](World world) {
    Group group = data_group(world);
    std::vector<at::Tensor> tensors;
    std::vector<Pending> pending;
    for (int i = 0; i < 40; ++i) {
      tensors.push_back(at::full({100 + i}, i + world.rank() * 1.0f));
      pending.push_back(group.all_reduce(tensors.back()));
    }
    for (int i = 39; i >= 0; --i) {
      pending[i].wait(here);
      EXPECT_EQ(tensors[i][99].item<float>(), 3 * i + 3);
    }
  });
}

TEST(Local, ACollectiveEndsWhenAllHaveArrivedThoughNobodyWaits) {
  run_local(2, [](World world) {
    std::vector<at::Tensor> tensors{at::ones({4})};
    auto work = backend_of(world).allreduce(tensors);
    backend_of(world).barrier()->wait();  // the other one has arrived too
    EXPECT_TRUE(work->isCompleted());
    EXPECT_EQ(tensors[0][0].item<float>(), 2.0f);
  });
}

TEST(Local, ATimeOutNamesTheRankThatDidNotCome) {
  std::atomic<int> timed_out{0};
  const std::string text = error_of(
      3,
      [&](World world) {
        at::Tensor tensor = at::ones({4});
        if (world.rank() == 2) {
          // Leaving as soon as one has timed out would give the other another reason.
          while (timed_out < 2) std::this_thread::yield();
          return;
        }
        try {
          data_group(world).all_reduce(tensor).wait({.kind = Where::Kind::backward, .step = 3, .pass = 1});
        } catch (...) {
          ++timed_out;
          throw;
        }
      },
      milliseconds(200));
  EXPECT_THAT(text, AllOf(HasSubstr("backward 1 of step 3"), HasSubstr("rank 2 did not come")));
}

TEST(Local, DifferentCollectivesAreAnErrorOnEveryRankThatSaysBoth) {
  std::atomic<int> errors{0};
  const std::string text = error_of(3, [&](World world) {
    at::Tensor tensor = world.rank() == 1 ? at::ones({5}) : at::ones({4});
    try {
      data_group(world).all_reduce(tensor).wait(here);
    } catch (const Error& e) {
      EXPECT_THAT(e.what(), AllOf(HasSubstr("all_reduce(sum) of 4 Float"), HasSubstr("all_reduce(sum) of 5 Float"),
                                  HasSubstr("rank 1"), HasSubstr("plumb: rank " + std::to_string(world.rank()))));
      ++errors;
      throw;
    }
  });
  EXPECT_EQ(errors, 3);
  EXPECT_NE(text, "no error");

  EXPECT_THAT(error_of(2,
                       [&](World world) {
                         at::Tensor tensor = at::ones({4}, world.rank() == 1 ? at::kDouble : at::kFloat);
                         data_group(world).all_reduce(tensor).wait(here);
                       }),
              AllOf(HasSubstr("4 Float"), HasSubstr("4 Double")));
  EXPECT_THAT(error_of(2,
                       [&](World world) {
                         at::Tensor tensor = at::ones({4});
                         if (world.rank() == 0) data_group(world).all_reduce(tensor).wait(here);
                         if (world.rank() == 1) data_group(world).broadcast(tensor, 1).wait(here);
                       }),
              AllOf(HasSubstr("rank 0 called all_reduce"), HasSubstr("rank 1 called broadcast from rank 1")));
}

TEST(Local, ARankThatThrowsReleasesTheOthersAndItsOwnErrorComesOut) {
  std::atomic<int> released{0};
  const std::string text = error_of(4, [&](World world) {
    if (world.rank() == 2) throw std::runtime_error("the loader found no file");
    at::Tensor tensor = at::ones({4});
    try {
      data_group(world).all_reduce(tensor).wait(here);
    } catch (const Error& e) {
      EXPECT_THAT(e.what(), AllOf(HasSubstr("rank 2 failed"), HasSubstr("the loader found no file")));
      ++released;
      EXPECT_THROW(data_group(world).all_reduce(tensor).wait(here), Error);  // later ones too
      throw;
    }
  });
  EXPECT_EQ(released, 3);
  EXPECT_EQ(text, "the loader found no file");
}

TEST(Local, ARankThatEndsEarlyIsNamedAtOnce) {
  const std::string text = error_of(2, [](World world) {
    if (world.rank() == 1) return;
    at::Tensor tensor = at::ones({4});
    data_group(world).all_reduce(tensor).wait(here);
  });
  EXPECT_THAT(text, AllOf(HasSubstr("rank 1 has ended its part"), HasSubstr("all_reduce")));
}

TEST(Local, RanksThatWaitForEachOtherInDifferentPlacesAreToldBothPlaces) {
  std::atomic<int> told{0};
  const std::string text = error_of(3, [&](World world) {
    try {
      if (world.rank() == 1) {
        const int64_t mine = 1;
        exchange(world, {&mine, 1}, {.kind = Where::Kind::step, .step = 5, .pass = 1});
      } else {
        at::Tensor tensor = at::ones({4});
        data_group(world).all_reduce(tensor).wait({.kind = Where::Kind::backward, .step = 5, .pass = 2});
      }
    } catch (const Error& e) {
      ++told;
      EXPECT_THAT(e.what(), HasSubstr("backward 2 of step 5"));
      throw;
    }
  });
  EXPECT_EQ(told, 3);
  EXPECT_THAT(text, AllOf(HasSubstr("is in backward 2 of step 5"), HasSubstr("called step() after 1 backward"),
                          HasSubstr("engine.backward(loss)")));
}

TEST(Local, ASlowRankIsWaitedForThoughOthersAreFurther) {
  // Rank 1 goes on to its exchange while rank 0 still waits for data that rank 2 brings late: no deadlock.
  std::atomic<int> waiting{0};
  run_local(3, [&](World world) {
    at::Tensor tensor = at::ones({4});
    const int64_t mine = world.rank();
    Pending pending;
    if (world.rank() == 2) {
      const auto begin = std::chrono::steady_clock::now();
      while (waiting < 2 || std::chrono::steady_clock::now() - begin < milliseconds(400)) std::this_thread::yield();
    }
    pending = data_group(world).all_reduce(tensor);
    ++waiting;
    if (world.rank() == 0) pending.wait({.kind = Where::Kind::backward, .pass = 1});
    exchange(world, {&mine, 1}, {.kind = Where::Kind::step, .pass = 1});
    pending.wait({.kind = Where::Kind::step, .pass = 1});
    EXPECT_EQ(tensor[0].item<float>(), 3.0f);
  });
}

TEST(Local, AReportedFailureReachesTheOthers) {
  const std::string text = error_of(2, [](World world) {
    if (world.rank() == 1) {
      report_failure(world, "plumb: rank 1: parameter 'w' was delivered twice", {});
      world.barrier();
    }
    at::Tensor tensor = at::ones({4});
    data_group(world).all_reduce(tensor).wait(here);
  });
  EXPECT_THAT(text, HasSubstr("parameter 'w' was delivered twice"));
}

TEST(Local, BadArgumentsAreRefusedBeforeAnythingTravels) {
  run_local(2, [](World world) {
    Group group = data_group(world);
    EXPECT_THROW(group.all_reduce(at::ones({3, 4}).t()), Error);
    EXPECT_THROW(group.reduce_scatter(at::ones({3}), at::ones({7})), Error);
    EXPECT_THROW(group.all_gather(at::ones({6}), at::ones({3}, at::kDouble)), Error);
    EXPECT_THROW(group.broadcast(at::ones({3}), 2), Error);
    at::Tensor tensor = at::ones({2});
    group.all_reduce(tensor).wait(here);
    EXPECT_EQ(tensor[0].item<float>(), 2.0f);
  });
  EXPECT_THROW(run_local(0, [](World) {}), Error);
}

TEST(World, OfOneCommunicatesNothingAndCopiesWhereMemoryDiffers) {
  World world;
  EXPECT_EQ(world.rank(), 0);
  EXPECT_EQ(world.size(), 1);
  Group group = data_group(world);
  at::Tensor shard = at::zeros({4});
  group.reduce_scatter(shard, at::ones({4})).wait(here);
  EXPECT_EQ(shard.sum().item<float>(), 4.0f);
  at::Tensor full = at::zeros({4});
  group.all_gather(full, shard).wait(here);
  EXPECT_EQ(full.sum().item<float>(), 4.0f);
  group.all_reduce(full).wait(here);
  world.barrier();
  EXPECT_EQ(exchange(world, std::vector<int64_t>{4, 2}, here), (std::vector<std::vector<int64_t>>{{4, 2}}));
  EXPECT_EQ(exchange_text(world, "text", here), std::vector<std::string>{"text"});
  EXPECT_EQ(group.allocate(10, at::kFloat).numel(), 10);
}

}  // namespace
}  // namespace plumb
