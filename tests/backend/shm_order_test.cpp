// When a collective of the shm backend has ended, in which order its effects come, and who is named when it has not.
#include <algorithm>
#include <atomic>
#include <random>

#include "backend/local.h"
#include "world/support/plain.h"
#include "world/support/shm_threads.h"

namespace plumb::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Backend = c10::intrusive_ptr<c10d::Backend>;
using Work = c10::intrusive_ptr<c10d::Work>;

// A verb on shared memory of `bytes` per rank.
enum class Verb { all_reduce, broadcast, all_gather, reduce_scatter };
Work issue(const Backend& group, Verb verb, int64_t bytes, std::vector<at::Tensor>& keep) {
  const int size = group->getSize();
  at::Tensor input = group->allocateTensor(bytes / 4, at::kFloat).fill_(1);
  at::Tensor whole = at::empty({input.numel() * size});
  at::Tensor shard = at::empty({input.numel() / size});
  keep.insert(keep.end(), {input, whole, shard});
  std::vector<at::Tensor> one{input};
  switch (verb) {
    case Verb::all_reduce:
      return group->allreduce(one);
    case Verb::broadcast: {
      c10d::BroadcastOptions options;
      options.rootRank = 0;
      return group->broadcast(one, options);
    }
    case Verb::all_gather:
      return group->_allgather_base(whole, input);
    case Verb::reduce_scatter:
      return group->_reduce_scatter_base(shard, input);
  }
  return {};
}

TEST(ShmOrder, UpTo16KiBGoAsACopyAndNobodyWaitsForTheReaders) {
  for (const Verb verb : {Verb::all_reduce, Verb::broadcast, Verb::all_gather, Verb::reduce_scatter}) {
    for (const int64_t bytes : {4, 1024, 16 << 10, (16 << 10) + 8, 100 << 10}) {
      std::atomic<int> stage{0};
      expect_all_well(on_threads(2, [&](int rank, ShmHeap&, const ShmGroups& make) {
        const Backend group = make(0);
        std::vector<at::Tensor> keep;
        if (rank == 0) {
          while (stage < 1) std::this_thread::yield();
        }
        const Work work = issue(group, verb, std::max<int64_t>(bytes, 8), keep);
        if (rank == 1) {
          stage = 1;
          while (stage < 2) std::this_thread::yield();  // has arrived, and looks at nothing meanwhile
        } else {
          // A large all-reduce is done by whoever is there; the others' input is read by them alone.
          const bool ended = bytes <= (16 << 10) || verb == Verb::all_reduce;
          EXPECT_EQ(work->isCompleted(), ended) << static_cast<int>(verb) << ", " << bytes << " bytes";
          stage = 2;
        }
        work->wait(milliseconds(20'000));
      }));
    }
  }
}

// Collectives on overlapping parts of one tensor, issued in one go: as if each had ended before the next began.
TEST(ShmOrder, OfCollectivesOnOverlappingMemoryIsThatOfTheProgram) {
  for (int size = 2; size <= 4; ++size) {
    for (int turn = 0; turn < 12 / std::min(slowness, 4); ++turn) {
      const uint32_t seed = std::random_device()();
      SCOPED_TRACE("seed " + std::to_string(seed) + ", " + std::to_string(size) + " ranks");
      constexpr int64_t numel = 60'000;
      // What every rank holds, by the plain rules.
      std::vector<at::Tensor> right;
      for (int r = 0; r < size; ++r) right.push_back(varied(numel, at::kLong, seed + r));
      struct Step {
        Verb verb;
        int64_t from, to, count;
        int root;
      };
      std::vector<Step> steps;
      std::mt19937 random(seed);
      for (int i = 0; i < 12; ++i) {
        const int64_t shard = random() % 2 == 0 ? 1 + random() % 300 : 1 + random() % (numel / size / 2);
        const int64_t whole = shard * size;
        Step step{static_cast<Verb>(random() % 4), 0, 0, shard, static_cast<int>(random() % size)};
        const auto place = [&](int64_t length) { return static_cast<int64_t>(random() % (numel - length + 1)); };
        const bool gathers = step.verb == Verb::all_gather;
        step.from = place(gathers ? shard : whole);
        step.to = place(gathers ? whole : shard);
        // An output that overlaps the input of the same call is nobody's promise.
        if (step.verb == Verb::all_gather || step.verb == Verb::reduce_scatter) {
          const int64_t in = gathers ? shard : whole;
          const int64_t out = gathers ? whole : shard;
          if (step.from < step.to + out && step.to < step.from + in) continue;
        }
        steps.push_back(step);
      }
      for (const Step& step : steps) {
        const int64_t whole = step.count * size;
        std::vector<at::Tensor> before;
        for (const auto& one : right) before.push_back(one.clone());
        std::vector<at::Tensor> inputs;
        for (int r = 0; r < size; ++r) {
          inputs.push_back(before[r].narrow(0, step.from, step.verb == Verb::all_gather ? step.count : whole));
        }
        for (int r = 0; r < size; ++r) {
          if (step.verb == Verb::all_reduce) {
            right[r].narrow(0, step.from, whole).copy_(plain_reduction(inputs, Reduction::sum));
          } else if (step.verb == Verb::broadcast) {
            right[r].narrow(0, step.from, whole).copy_(inputs[step.root]);
          } else if (step.verb == Verb::all_gather) {
            right[r].narrow(0, step.to, whole).copy_(at::cat(inputs));
          } else {
            std::vector<at::Tensor> mine;
            for (const auto& input : inputs) mine.push_back(input.narrow(0, r * step.count, step.count));
            right[r].narrow(0, step.to, step.count).copy_(plain_reduction(mine, Reduction::sum));
          }
        }
      }
      expect_all_well(on_threads(size, [&](int rank, ShmHeap&, const ShmGroups& make) {
        const Backend group = make(0);
        at::Tensor mine = turn % 2 == 0 ? group->allocateTensor(numel, at::kLong) : at::empty({numel}, at::kLong);
        mine.copy_(varied(numel, at::kLong, seed + rank));
        std::vector<Work> works;
        for (const Step& step : steps) {
          const int64_t whole = step.count * size;
          const bool gathers = step.verb == Verb::all_gather;
          std::vector<at::Tensor> one{mine.narrow(0, step.from, gathers ? step.count : whole)};
          if (step.verb == Verb::all_reduce) works.push_back(group->allreduce(one));
          if (step.verb == Verb::broadcast) {
            c10d::BroadcastOptions options;
            options.rootRank = step.root;
            works.push_back(group->broadcast(one, options));
          }
          if (step.verb == Verb::all_gather) {
            at::Tensor out = mine.narrow(0, step.to, whole);
            works.push_back(group->_allgather_base(out, one[0]));
          }
          if (step.verb == Verb::reduce_scatter) {
            at::Tensor out = mine.narrow(0, step.to, step.count);
            works.push_back(group->_reduce_scatter_base(out, one[0]));
          }
        }
        std::mt19937 whim(seed * 7 + rank);
        std::shuffle(works.begin(), works.end(), whim);
        for (const Work& work : works) work->wait(milliseconds(60'000));
        if (!same_bits(mine, right[rank])) throw Error(rank, "the order was not that of the program");
      }));
    }
  }
}

TEST(ShmOrder, RanksThatDisagreeInAnythingHearOfIt) {
  // Two calls of three ranks that differ in one thing; everybody must hear both.
  struct Row {
    std::function<Work(const Backend&, bool other)> call;
    std::string one, another;
  };
  const auto reduce = [](const Backend& group, c10d::ReduceOp::RedOpType op) {
    std::vector<at::Tensor> one{at::ones({9})};
    c10d::AllreduceOptions options;
    options.reduceOp = op;
    return group->allreduce(one, options);
  };
  const std::vector<Row> rows{
      {[&](const Backend& g, bool other) { return reduce(g, other ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM); },
       "all_reduce(sum) of 9 Float", "all_reduce(max) of 9 Float"},
      {[&](const Backend& g, bool other) { return reduce(g, other ? c10d::ReduceOp::MIN : c10d::ReduceOp::AVG); },
       "all_reduce(avg) of 9 Float", "all_reduce(min) of 9 Float"},
      {[&](const Backend& g, bool other) {
         at::Tensor whole = at::ones({6}), part = at::ones({2});
         return other ? g->_reduce_scatter_base(part, whole) : g->_allgather_base(whole, part);
       },
       "all_gather of 2 Float", "reduce_scatter(sum) of 2 Float"},
      {[&](const Backend& g, bool other) {
         at::Tensor in = at::ones({6}), out = at::ones({6});
         std::vector<int64_t> equal;
         return other ? g->alltoall_base(out, in, equal, equal) : all_reduce(g, in);
       },
       "all_reduce(sum) of 6 Float", "all_to_all of 6 Float"},
      {[&](const Backend& g, bool other) {
         at::Tensor part = at::ones({other ? 3 : 2}), whole = at::ones({part.numel() * 3});
         return g->_allgather_base(whole, part);
       },
       "all_gather of 2 Float", "all_gather of 3 Float"},
  };
  for (const Row& row : rows) {
    for (int other = 1; other < 3; ++other) {
      const auto thrown = on_threads(3, [&](int rank, ShmHeap&, const ShmGroups& make) {
        row.call(make(0), rank == other)->wait(milliseconds(20'000));
      });
      for (int r = 0; r < 3; ++r) {
        EXPECT_THAT(thrown[r], AllOf(HasSubstr("rank " + std::to_string(r) + ": rank 0 called " + row.one),
                                     HasSubstr("rank " + std::to_string(other) + " called " + row.another)));
      }
    }
  }
}

// Lengths of whole pieces (4 MiB): the pieces that both have are alike, and only one has more of them.
TEST(ShmOrder, RanksThatDisagreeByWholePiecesHearOfIt) {
  constexpr int64_t piece = 1 << 20;
  const std::vector<std::pair<std::function<Work(const Backend&, int64_t)>, std::string>> verbs{
      {[](const Backend& g, int64_t n) { return all_reduce(g, at::ones({n})); }, "all_reduce(sum)"},
      {[](const Backend& g, int64_t n) { return all_reduce(g, g->allocateTensor(n, at::kFloat)); }, "all_reduce(sum)"},
      {[](const Backend& g, int64_t n) {
         std::vector<at::Tensor> one{at::ones({n})};
         return g->broadcast(one);
       },
       "broadcast from rank 0"},
      {[](const Backend& g, int64_t n) {
         at::Tensor whole = at::ones({n * 2}), part = at::ones({n});
         return g->_allgather_base(whole, part);
       },
       "all_gather"}};
  for (const auto& [call, name] : verbs) {
    const auto thrown = on_threads(2, [&](int rank, ShmHeap&, const ShmGroups& make) {
      call(make(0), rank == 1 ? 2 * piece : piece)->wait(milliseconds(20'000));
    });
    for (int r = 0; r < 2; ++r) {
      EXPECT_THAT(thrown[r],
                  HasSubstr("rank " + std::to_string(r) + ": rank 0 called " + name + " of " + std::to_string(piece) +
                            " Float where rank 1 called " + name + " of " + std::to_string(2 * piece) + " Float"));
    }
  }
}

TEST(ShmOrder, AllToAllBringsEveryPartToItsPlace) {
  for (int size = 1; size <= 5; ++size) {
    for (const auto dtype : {at::kFloat, at::kLong, at::kBFloat16, at::kByte}) {
      for (const int64_t scale : {int64_t{0}, int64_t{1}, int64_t{3}, int64_t{900}}) {
        // Rank r sends (r + 2 t) % 4 * scale elements to rank t.
        const auto sent = [&](int from, int to) { return (from + 2 * to) % 4 * scale; };
        const auto value = [](int from, int to) { return 10 * from + to + 1; };
        expect_all_well(on_threads(size, [&](int rank, ShmHeap&, const ShmGroups& make) {
          std::vector<int64_t> out, in;
          std::vector<at::Tensor> parts, right;
          for (int r = 0; r < size; ++r) {
            out.push_back(sent(rank, r));
            parts.push_back(at::full({out.back()}, value(rank, r), dtype));
            in.push_back(sent(r, rank));
            right.push_back(at::full({in.back()}, value(r, rank), dtype));
          }
          at::Tensor input = at::cat(parts), output = at::zeros_like(at::cat(right));
          make(0)->alltoall_base(output, input, in, out)->wait(milliseconds(20'000));
          if (!output.equal(at::cat(right))) throw Error(rank, "a part is not in its place");
        }));
      }
    }
  }
}

TEST(ShmOrder, AGroupKnowsItsHeapAndNoOtherBackendHasOne) {
  expect_all_well(
      on_threads(2, [](int, ShmHeap& heap, const ShmGroups& make) { EXPECT_EQ(heap_of(*make(0)).get(), &heap); }));
  EXPECT_EQ(heap_of(*make_local_backend(std::make_shared<LocalHub>(1, milliseconds(1)), 0)), nullptr);
}

TEST(ShmOrder, AWaitThatRanOutNamesExactlyTheRanksThatAreLateOrHaveNotDoneTheirPart) {
  std::atomic<int> came{0}, read{0};
  std::atomic<bool> late{true}, idle{true};
  const auto until = [](const auto& truth) {
    while (!truth()) std::this_thread::yield();
  };
  const auto told = [](const Work& work) -> std::string {
    try {
      work->wait(milliseconds::zero());  // as long as the group itself allows
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  };
  const auto body = [&](int rank, ShmHeap&, const ShmGroups& make) {
    const Backend group = make(0);
    at::Tensor part = group->allocateTensor(100'000, at::kFloat).fill_(rank);
    at::Tensor whole = at::empty({400'000});
    if (rank == 3) until([&] { return !late; });
    const Work work = group->_allgather_base(whole, part);
    ++came;
    if (rank == 0) {
      until([&] { return came == 3; });
      EXPECT_THAT(told(work), HasSubstr("rank 0: waited 300 ms in all_gather for rank 3, which did not come"));
      late = false;
    }
    until([&] { return came == 4; });
    if (rank > 1) {
      EXPECT_FALSE(work->isCompleted());  // reads everybody's, and its own is not read by all
      ++read;
    }
    if (rank == 0) {
      until([&] { return read == 2; });
      EXPECT_THAT(told(work), HasSubstr("for rank 1, which came, but did not do its part"));
      idle = false;
    }
    until([&] { return !idle; });
    work->wait(milliseconds(20'000));
    if (whole.sum().item<double>() != 600'000) throw Error(rank, "a wrong result");
  };
  expect_all_well(on_threads(4, body, milliseconds(300)));
}

TEST(ShmOrder, AWorkKnowsWhatItIs) {
  expect_all_well(on_threads(2, [](int, ShmHeap&, const ShmGroups& make) {
    using c10d::OpType;
    const Backend group = make(0);
    at::Tensor whole = at::ones({6}), part = at::ones({3}), other = at::ones({6});
    std::vector<at::Tensor> one{whole};
    std::vector<int64_t> equal;
    const std::vector<std::pair<Work, OpType>> works{
        {group->allreduce(one), OpType::ALLREDUCE},
        {group->broadcast(one), OpType::BROADCAST},
        {group->_allgather_base(whole, part), OpType::_ALLGATHER_BASE},
        {group->_reduce_scatter_base(part, whole), OpType::_REDUCE_SCATTER_BASE},
        {group->alltoall_base(other, whole, equal, equal), OpType::ALLTOALL_BASE},
        {group->barrier(), OpType::BARRIER}};
    for (const auto& [work, type] : works) {
      EXPECT_EQ(work->retrieveOpType(), type);
      EXPECT_TRUE(work->wait(milliseconds(20'000)));
      EXPECT_TRUE(work->isSuccess());
    }
  }));
}

}  // namespace
}  // namespace plumb::testing
