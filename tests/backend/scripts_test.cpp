// Scripts of messages, played on a network of the test's own for every number of ranks: what each ends with, in how many
// rounds, and that every message has its receiver.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <deque>
#include <map>
#include <random>

#include "backend/links.h"
#include "backend/rounds.h"

namespace plumb {
namespace {

// Plays all ranks' scripts, one round of one rank at a time, in an order that the seed draws. Messages between two ranks come
// in the order of their sending, and are what was there when they were sent, or anything later where `late`: a message may
// leave at any time before its round has ended. By rank: its rounds.
std::vector<int> play(std::vector<Links::Script> scripts, uint64_t seed, bool late) {
  struct Post {
    at::Tensor memory, copy;
  };
  const int size = static_cast<int>(scripts.size());
  std::map<std::pair<int, int>, std::deque<Post>> mail;  // from, to
  struct Player {
    std::vector<Links::Message> waits_for;
    bool begun = false, ended = false;
  };
  std::vector<Player> players(scripts.size());
  std::vector<int> rounds(scripts.size());
  std::mt19937_64 random(seed);
  for (int idle = 0; idle < 1000;) {
    const int rank = static_cast<int>(random() % static_cast<uint64_t>(size));
    Player& player = players[rank];
    if (player.ended) {
      ++idle;
      continue;
    }
    // Whatever has come finds its place.
    for (size_t i = 0; i < player.waits_for.size();) {
      auto& box = mail[{player.waits_for[i].peer, rank}];
      if (box.empty()) {
        ++i;
        continue;
      }
      const Post post = box.front();
      box.pop_front();
      EXPECT_EQ(post.copy.numel(), player.waits_for[i].memory.numel()) << "to rank " << rank;
      player.waits_for[i].memory.copy_(late ? post.memory : post.copy);
      player.waits_for.erase(player.waits_for.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (!player.waits_for.empty()) {
      ++idle;
      continue;
    }
    idle = 0;
    const Links::Round round = scripts[rank]();
    if (round.sends.empty() && round.receives.empty()) {
      player.ended = true;
      continue;
    }
    ++rounds[rank];
    player.waits_for = round.receives;
    for (const Links::Message& message : round.sends) {
      EXPECT_NE(message.peer, rank);
      EXPECT_TRUE(message.memory.is_contiguous());
      mail[{rank, message.peer}].push_back({message.memory, message.memory.clone()});
    }
  }
  for (const Player& player : players) EXPECT_TRUE(player.ended) << "somebody waits for ever";
  for (const auto& [pair, box] : mail) EXPECT_TRUE(box.empty()) << pair.first << " to " << pair.second;
  return rounds;
}

int logarithm(int size) { return std::bit_width(static_cast<unsigned>(size - 1)); }

TEST(Scripts, SpreadBringsEverybodysBlockInRankOrder) {
  for (int size = 1; size <= 17; ++size) {
    for (const int64_t block : {1, 3}) {
      std::vector<Links::Script> scripts;
      std::vector<at::Tensor> all;
      for (int rank = 0; rank < size; ++rank) {
        all.push_back(at::full({size * block}, -1, at::kLong));
        scripts.push_back(spread(rank, size, at::arange(block, at::kLong) + 100 * rank, all.back()));
      }
      const auto rounds = play(scripts, size, false);
      for (int rank = 0; rank < size; ++rank) {
        EXPECT_EQ(rounds[rank], logarithm(size)) << size;
        for (int r = 0; r < size; ++r) {
          EXPECT_TRUE(all[rank].narrow(0, r * block, block).equal(at::arange(block, at::kLong) + 100 * r))
              << "rank " << rank << " of " << size << " about " << r;
        }
      }
    }
  }
}

TEST(Scripts, CombinationIsEverybodysOnceOnEveryRank) {
  for (int size = 1; size <= 17; ++size) {
    for (uint64_t seed = 1; seed <= 3; ++seed) {
      std::vector<Links::Script> scripts;
      std::vector<at::Tensor> mine;
      for (int rank = 0; rank < size; ++rank) {
        // A place of its own for each, so that who is missing or counted twice shows.
        at::Tensor own = at::zeros({size + 1}, at::kLong);
        own[rank] = 1;
        own[size] = 10 + rank;
        mine.push_back(own);
        scripts.push_back(
            combination(rank, size, own, [own](const at::Tensor& other) { at::Tensor(own).add_(other); }));
      }
      const auto rounds = play(scripts, seed, /*late=*/true);
      const at::Tensor wanted =
          at::cat({at::ones({size}, at::kLong), at::full({1}, 10 * size + size * (size - 1) / 2, at::kLong)});
      const bool power = std::has_single_bit(static_cast<unsigned>(size));
      const int doubling = static_cast<int>(std::bit_floor(static_cast<unsigned>(size)));
      int most = 0;
      for (int rank = 0; rank < size; ++rank) {
        EXPECT_TRUE(mine[rank].equal(wanted)) << "rank " << rank << " of " << size << ": " << mine[rank];
        most = std::max(most, rounds[rank]);
      }
      EXPECT_EQ(most, power ? logarithm(size) : logarithm(doubling) + 2) << size;
      EXPECT_EQ(most, rounds_of_control(size)) << size;
    }
  }
}

TEST(Scripts, DirectGatherFillsEveryPartInOneRound) {
  for (int size = 1; size <= 9; ++size) {
    for (const bool in_place : {false, true}) {
      std::vector<Links::Script> scripts;
      std::vector<at::Tensor> full;
      for (int rank = 0; rank < size; ++rank) {
        full.push_back(at::full({size * 5}, -1.0f));
        at::Tensor shard = in_place ? full.back().narrow(0, rank * 5, 5) : at::empty({5});
        shard.copy_(at::arange(5) + 10 * rank);
        scripts.push_back(direct_gather(rank, size, full.back(), shard));
      }
      const auto rounds = play(scripts, size, true);
      for (int rank = 0; rank < size; ++rank) {
        EXPECT_EQ(rounds[rank], size > 1 ? 1 : 0);
        for (int r = 0; r < size; ++r) {
          EXPECT_TRUE(full[rank].narrow(0, r * 5, 5).equal((at::arange(5) + 10 * r).to(at::kFloat))) << size;
        }
      }
    }
  }
}

TEST(Scripts, RoundsAreCountedByWhatCarriesThem) {
  EXPECT_EQ(carriage_of("shm"), Carriage::memory);
  EXPECT_EQ(carriage_of("shm+tcp"), Carriage::memory);
  EXPECT_EQ(carriage_of("tcp"), Carriage::direct);
  for (const char* ring : {"gloo", "nccl", "local"}) EXPECT_EQ(carriage_of(ring), Carriage::ring) << ring;
  for (int64_t ranks = 1; ranks <= 20; ++ranks) {
    for (const int64_t times : {1, 2}) {
      EXPECT_EQ(rounds_around(Carriage::ring, times, ranks), times * (ranks - 1));
      EXPECT_EQ(rounds_around(Carriage::direct, times, ranks), ranks > 1 ? times : 0);
      EXPECT_EQ(rounds_around(Carriage::memory, times, ranks), ranks > 1 ? 1 : 0);
    }
    int64_t tree = 0;  // after so many rounds, twice as many know it as before
    while ((int64_t{1} << tree) < ranks) ++tree;
    EXPECT_EQ(rounds_of_tree(ranks), tree);
    const int64_t below = (int64_t{1} << tree) == ranks ? tree : tree - 1;
    EXPECT_EQ(rounds_of_control(ranks), below + (below == tree ? 0 : 2)) << ranks;
  }
}

}  // namespace
}  // namespace plumb
