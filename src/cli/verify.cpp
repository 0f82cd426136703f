#include "cli/verify.h"

#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "engine/filling.h"
#include "save/xxh3.h"
#include "world/group.h"

namespace plumb::cli {

namespace {

int64_t digest(const at::Tensor& tensor) {
  const at::Tensor there = tensor.detach().cpu().contiguous();
  const auto word = static_cast<int64_t>(save::xxh3(there.const_data_ptr(), there.nbytes()));
  return word == 0 ? 1 : word;
}

std::string rank_named(int rank) { return "rank " + std::to_string(rank); }

// The first parameter whose digest differs; -1: none. What the owner did not hand to the reduction itself is not compared.
int first_difference(const std::vector<int64_t>& own, const std::vector<int64_t>& other) {
  for (size_t i = 0; i < own.size(); ++i) {
    if (own[i] != 0 && own[i] != other[i]) return static_cast<int>(i);
  }
  return -1;
}

}  // namespace

Verifier::~Verifier() { engine_.impl().reducer->on_gradient = nullptr; }

void Verifier::before(int64_t step, int64_t micro) {
  if (!due(step)) return;
  Reducer& reducer = *engine_.impl().reducer;
  reducer.on_gradient = nullptr;
  if (micro != turn(step)) return;
  own_.assign(reducer.sinks().size(), 0);
  reducer.on_gradient = [this](const Sink& sink, const at::Tensor& gradient) {
    const auto index = static_cast<size_t>(sink.index);
    if (index >= own_.size()) own_.resize(index + 1);
    own_[index] = digest(gradient);
  };
}

// Everything that is looked at travels in one message: waiting for each other would cost more than digests do.
void Verifier::after(int64_t step, int64_t samples) {
  if (!due(step)) return;
  engine_.impl().reducer->on_gradient = nullptr;
  const int rank = engine_.world().rank(), ranks = engine_.world().size();
  const size_t count = engine_.impl().reducer->sinks().size();
  own_.resize(count);
  const State state = state_now();
  Digests words(state.words.begin(), state.words.end());
  words.insert(words.end(), own_.begin(), own_.end());
  // What this rank computes of the samples of the one before it.
  const Digests other = recomputed(samples, (rank + ranks - 1) % ranks, turn(step));
  words.insert(words.end(), other.begin(), other.end());
  std::vector<State::Words> states;
  std::vector<Digests> own, checked;
  for (const Digests& said : everybodys(words, "--verify", step)) {
    const auto begin = said.begin() + static_cast<int64_t>(std::tuple_size_v<State::Words>);
    const auto middle = begin + static_cast<int64_t>(count);
    std::copy(said.begin(), begin, states.emplace_back().begin());
    own.emplace_back(begin, middle);
    checked.emplace_back(middle, said.end());
  }
  check_state(step, state, states);
  check_contributions(step, samples, own, checked);
}

Verifier::Digests Verifier::recomputed(int64_t samples, int rank, int64_t micro) {
  const auto& sinks = engine_.impl().reducer->sinks();
  std::vector<at::Tensor> parameters;
  std::vector<size_t> indices;
  for (const Sink& sink : sinks) {
    if (!sink.parameter.requires_grad()) continue;
    parameters.push_back(sink.parameter);
    indices.push_back(static_cast<size_t>(sink.index));
  }
  const at::Tensor share = job_.share_of(job_.loss(job_.batch(samples, rank, micro)));
  const auto gradients = torch::autograd::grad({share}, parameters, {}, std::nullopt, /*create_graph=*/false,
                                               /*allow_unused=*/true);
  Digests digests(sinks.size());
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].defined()) digests[indices[i]] = digest(gradients[i]);
  }
  return digests;
}

std::vector<Verifier::Digests> Verifier::everybodys(const Digests& mine, const std::string& what, int64_t step) const {
  return exchange(engine_.world(), mine, {.kind = Where::Kind::step, .step = step, .pass = 0, .detail = what});
}

void Verifier::check_contributions(int64_t step, int64_t samples, const std::vector<Digests>& own,
                                   const std::vector<Digests>& checked) {
  const World& world = engine_.world();
  const int rank = world.rank(), ranks = world.size();
  const auto neighbour = [&](int of, int by) { return (of + ranks + by) % ranks; };
  const int64_t micro = turn(step);
  int accused = -1, parameter = -1;
  for (int r = 0; r < ranks && accused < 0; ++r) {
    parameter = first_difference(own[r], checked[neighbour(r, 1)]);
    if (parameter >= 0) accused = r;
  }
  if (accused < 0) return;

  // Both once more: whoever now says otherwise was wrong; where both stay with it, a third one decides.
  const int other = neighbour(accused, 1), third = neighbour(accused, 2);
  const auto again = everybodys(recomputed(samples, rank, micro), "--verify: recomputed", step);
  const auto again_checked = everybodys(recomputed(samples, neighbour(rank, -1), micro), "--verify: recomputed", step);
  const auto by_third = everybodys(recomputed(samples, neighbour(rank, -2), micro), "--verify: recomputed", step);
  const auto at = static_cast<size_t>(parameter);
  const int64_t truth = again[accused][at] == again_checked[other][at] ? again[accused][at] : by_third[third][at];
  const bool own_wrong = own[accused][at] != truth, other_wrong = checked[other][at] != truth;
  std::string who = own_wrong ? rank_named(accused) : rank_named(other);
  if (own_wrong == other_wrong || (ranks == 2 && again[accused][at] != again_checked[other][at])) {
    who = rank_named(accused) + " or " + rank_named(other);
  }
  throw Error(rank, "step " + std::to_string(step) + ": " + who + " computes wrong numbers: the gradient of '" +
                        engine_.impl().reducer->sinks()[at].name + "' that " + rank_named(accused) +
                        " contributed for micro-batch " + std::to_string(micro) + " is not what " + rank_named(other) +
                        " computes of the same samples (--verify). Take that machine out and go on from a checkpoint");
}

Verifier::State Verifier::state_now() {
  Engine::Impl& impl = engine_.impl();
  if (impl.units) impl.units->begin_update();
  State state;
  state.slots = slots_of(impl, updates_of(impl));
  for (const SavedSlot& slot : state.slots) {
    state.digests.push_back(digest(slot.memory.defined() ? slot.memory : slot.owner));
  }
  if (impl.units) impl.units->end_update();
  for (const bool sharded : {false, true}) {
    save::Xxh3 hash;
    for (size_t i = 0; i < state.slots.size(); ++i) {
      if (state.slots[i].sharded == sharded) hash.add(&state.digests[i], sizeof(state.digests[i]));
    }
    state.words[sharded ? 1 : 0] = static_cast<int64_t>(hash.value());
  }
  return state;
}

void Verifier::check_state(int64_t step, const State& state, const std::vector<State::Words>& said) {
  const std::vector<SavedSlot>& slots = state.slots;
  const int shard = engine_.impl().reducer->team().mesh().shard;
  const int rank = engine_.world().rank(), ranks = engine_.world().size();
  bool alike = true;
  for (int r = 0; r < ranks; ++r) alike = alike && said[r][0] == said[0][0] && said[r][1] == said[r % shard][1];
  if (alike) return;
  const auto all = everybodys(state.digests, "--verify: the state", step);
  for (size_t i = 0; i < slots.size(); ++i) {
    for (int first = 0; first < (slots[i].sharded ? shard : 1); ++first) {
      std::map<int64_t, std::vector<int>> holders;
      for (int r = first; r < ranks; r += slots[i].sharded ? shard : 1) holders[all[r][i]].push_back(r);
      if (holders.size() < 2) continue;
      size_t most = 0;
      for (const auto& [word, who] : holders) most = std::max(most, who.size());
      std::string names;
      const bool majority = 2 * most > static_cast<size_t>(ranks / (slots[i].sharded ? shard : 1));
      for (const auto& [word, who] : holders) {
        if (majority && who.size() == most) continue;
        for (const int r : who) names += (names.empty() ? "" : majority ? ", " : " or ") + rank_named(r);
      }
      throw Error(rank, "step " + std::to_string(step) + ": " + title_of(slots[i]) +
                            " is not the same on every rank: " + names +
                            " holds other bits (--verify). Take that machine out and go on from a checkpoint");
    }
  }
}

}  // namespace plumb::cli
