// Piece: this rank's part of a sharded gradient as .grad holds it, a tensor that knows what it is a part of.
//
// It lies in the bucket's memory, and carries a dispatch key of its own above all others, so that every operation of the
// user's comes here first:
//   - what is done element by element (also copies, fills, casts, in place, `_foreach_`) goes through, and what comes out
//     is a piece of the same gradient. The other operands are pieces of it too, tensors of the piece's own shape, or
//     single numbers;
//   - norms, sums, means, extrema, variances, counts and tests of all elements (`.all()`, `equal`, GradScaler's check) are
//     answered for the whole gradient: ranks that hold its pieces ask alike, in one order, as with any collective. A list
//     of pieces is one message. A rank that asks something else is an error, one that does not ask ends the wait of the
//     others within the time-out;
//   - everything else is an Error that names the parameter and what to call: never this rank's own result in silence.
// `copy_` into a plain tensor of the piece's shape is the one way out: afterwards the numbers are just this rank's.
//
// The engine works on the plain view beside it, of the same memory and version, and pays nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "layout/layout.h"
#include "world/group.h"

namespace plumb {

// The ranks that hold an engine's gradients between them. Pieces refer to it weakly: they may outlive their engine.
struct Holders {
  Group shard;
  // Where a rank stands that asks everybody for `what`; throws if nobody can be asked now.
  std::function<Where(const std::string& what)> ask;
  // So much this rank has asked since all of them last met.
  mutable std::atomic<int64_t> asked = 0;
};

// What a piece is a piece of.
struct PieceOf {
  std::weak_ptr<const Holders> holders;
  int rank = 0;  // of this process, for errors
  std::string parameter;
  std::vector<int64_t> shape;  // of the whole gradient
  Range range;                 // of its elements: this piece

  int64_t numel() const;  // of the whole
};

// The piece over `view`'s memory: another tensor with its shape, storage and version.
at::Tensor mark_piece(const at::Tensor& view, std::shared_ptr<const PieceOf> of);

// What a tensor is a piece of; null where it is none.
std::shared_ptr<const PieceOf> piece_of(const at::Tensor& tensor);

// Whether two pieces are of the same elements of the same gradient.
bool same_piece(const PieceOf& a, const PieceOf& b);

// A digest of the operations that made a piece of the one in .grad; 0: it has the same numbers. Ranks compare it when they ask.
uint64_t made_by(const at::Tensor& tensor);

// The same memory without the mark; a tensor that is no piece as it is.
at::Tensor unmarked(const at::Tensor& tensor);

// The Error that `what` of a piece is, where it would be this rank's own; nothing of another tensor.
void refuse_piece(const at::Tensor& tensor, const std::string& what);

// In words: which elements of which gradient, and where the rest is.
std::string describe(const PieceOf& piece);

}  // namespace plumb
