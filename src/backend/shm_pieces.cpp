// What is done with one piece of a collective, and the proof beforehand that all ranks mean the same.
#include <algorithm>
#include <cstring>

#include "backend/shm_work.h"
#include "plumb/error.h"

namespace plumb {
namespace {

const char* name_of(Reduction reduction) {
  switch (reduction) {
    case Reduction::sum:
      return "sum";
    case Reduction::average:
      return "avg";
    case Reduction::maximum:
      return "max";
    case Reduction::minimum:
      return "min";
  }
  return "other";
}

void move_bytes(void* to, const void* from, int64_t count) {
  if (count > 0 && to != from) std::memmove(to, from, static_cast<size_t>(count));
}

}  // namespace

const char* ShmRing::input(int rank, uint64_t number, int64_t part) const {
  const Slot& its = slot(rank, number);
  const char* base = its.place == Slot::Place::slot ? its.bytes : heap_->at(rank, its.offset);
  return base + part * its.stride;
}

// "all_reduce(sum) of 12 Float".
static std::string describe(Verb verb, Reduction reduction, int root, int64_t numel, int dtype) {
  std::string text = plumb::name_of(verb);
  if (verb == Verb::all_reduce || verb == Verb::reduce_scatter) {
    text += std::string("(") + name_of(reduction) + ")";
  }
  if (verb == Verb::broadcast || verb == Verb::scatter) text += " from rank " + std::to_string(root);
  if (dtype < 0) return text;
  return text + " of " + std::to_string(numel) + " " + c10::toString(static_cast<at::ScalarType>(dtype));
}

bool ShmRing::well_formed(int rank, const Slot& its) const {
  if (its.place == Slot::Place::nowhere) {
    const bool from_one = its.verb == Verb::broadcast || its.verb == Verb::scatter;
    return its.verb == Verb::barrier || (from_one && its.root != rank);
  }
  const int64_t item = static_cast<int64_t>(c10::elementSize(static_cast<at::ScalarType>(its.dtype)));
  const int64_t splits = its.verb == Verb::all_to_all ? int64_t{2} * size_ * static_cast<int64_t>(sizeof(int64_t)) : 0;
  const int64_t bytes = splits + (its.parts - 1) * its.stride + its.count * item;
  return its.place == Slot::Place::slot ? bytes <= payload : heap_->within(rank, its.offset, bytes);
}

bool ShmRing::of_one_mind(uint64_t number) const {
  for (int r = 1; r < size_; ++r) {
    if (slot(r, number).what != slot(0, number).what) return false;
  }
  return true;
}

// What two ranks disagree in; every rank finds the same two.
std::string ShmRing::mismatch(uint64_t number) const {
  const Slot& first = slot(0, number);
  const auto say = [this](const Slot& s) { return describe(s.verb, s.reduction, names_[s.root], s.numel, s.dtype); };
  for (int r = 0; r < size_; ++r) {
    const Slot& its = slot(r, number);
    const bool sizes = its.verb == Verb::all_to_all ||
                       (its.numel == first.numel && its.begin == first.begin && its.count == first.count);
    if (its.verb != first.verb || its.reduction != first.reduction || its.root != first.root ||
        its.reader != first.reader || its.dtype != first.dtype || !sizes) {
      return names_.rank(0) + " called " + say(first) + " where " + names_.rank(r) + " called " + say(its) +
             "; every rank must call the same collectives in the same order";
    }
    if (!well_formed(r, its)) return names_.rank(r) + " called " + say(its) + " outside its memory";
  }
  return {};
}

// Sums units that nobody has taken yet, for every rank.
void ShmRing::do_units(Piece& piece, uint64_t number) {
  Slot& home = slot(0, number);
  const int64_t unit = unit_bytes / piece.active->item;
  const at::ScalarType dtype = piece.active->call.input.scalar_type();
  std::vector<const void*> in(size_);
  std::vector<void*> out(size_);
  for (uint32_t u = home.claimed.fetch_add(1); u < piece.units; u = home.claimed.fetch_add(1)) {
    const int64_t begin = u * unit;
    for (int r = 0; r < size_; ++r) {
      in[r] = input(r, number, 0) + begin * piece.active->item;
      out[r] = const_cast<void*>(in[r]);
    }
    reduce_in_order(in, out, std::min(unit, piece.count - begin), dtype, piece.active->call.reduction);
    if (home.done.fetch_add(1) + 1 == piece.units) heap_->ring();
  }
}

void ShmRing::do_piece(Piece& piece, uint64_t number) {
  const ShmCall& call = piece.active->call;
  if (call.reader >= 0 && call.reader != rank_) return;
  const int64_t item = piece.active->item;
  const int64_t bytes = piece.count * item;
  char* output = call.output.defined() ? static_cast<char*>(call.output.data_ptr()) : nullptr;
  switch (call.verb) {
    case Verb::barrier:
      break;
    case Verb::broadcast:
      if (rank_ != call.root) move_bytes(output + piece.begin * item, input(call.root, number, 0), bytes);
      break;
    case Verb::scatter:
      move_bytes(output + piece.begin * item, input(call.root, number, rank_), bytes);
      break;
    case Verb::all_gather:
      for (int r = 0; r < size_; ++r) {
        move_bytes(output + (r * call.numel + piece.begin) * item, input(r, number, 0), bytes);
      }
      break;
    case Verb::reduce_scatter:
    case Verb::all_reduce: {
      const int part = call.verb == Verb::reduce_scatter ? rank_ : 0;
      std::vector<const void*> in;
      for (int r = 0; r < size_; ++r) in.push_back(input(r, number, part));
      void* out = output + piece.begin * item;
      reduce_in_order(in, std::span<void* const>(&out, 1), piece.count, call.input.scalar_type(), call.reduction);
      break;
    }
    case Verb::all_to_all:
      exchange_parts(call, number);
      break;
  }
}

// The copies begin with what their ranks send and expect. Everybody checks all pairs, to fail alike.
void ShmRing::exchange_parts(const ShmCall& call, uint64_t number) {
  const auto splits = [&](int rank, int64_t index) {
    int64_t value = 0;
    std::memcpy(&value, input(rank, number, 0) + index * sizeof value, sizeof value);
    return value;
  };
  for (int to = 0; to < size_; ++to) {
    for (int from = 0; from < size_; ++from) {
      const int64_t sent = splits(from, to);
      const int64_t expected = splits(to, size_ + from);
      if (sent == expected) continue;
      throw Error(me(), "all_to_all: " + names_.rank(from) + " sends " + std::to_string(sent) + " elements to " +
                            names_.rank(to) + ", which expects " + std::to_string(expected));
    }
  }
  const int64_t item = call.input.element_size();
  char* output = static_cast<char*>(call.output.data_ptr());
  for (int from = 0; from < size_; ++from) {
    int64_t before = 0;
    for (int r = 0; r < rank_; ++r) before += splits(from, r);
    const char* data = input(from, number, 0) + int64_t{2} * size_ * static_cast<int64_t>(sizeof(int64_t));
    const int64_t bytes = call.output_splits[from] * item;
    move_bytes(output, data + before * item, bytes);
    output += bytes;
  }
}

}  // namespace plumb
