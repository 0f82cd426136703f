#include "grad/piece.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "grad/piece_dispatch.h"
#include "layout/digest.h"

namespace plumb {
namespace {

using pieces::kKey;
using torch::jit::Stack;

// ---- the tensor

class PieceImpl final : public c10::TensorImpl {
 public:
  PieceImpl(const c10::TensorImpl& view, std::shared_ptr<const PieceOf> of, uint64_t made_by,
            const c10::VariableVersion& version)
      : TensorImpl(c10::Storage(view.storage()), view.key_set().add(kKey), view.dtype()), of_(std::move(of)),
        made_by_(made_by) {
    set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
    if (!is_inference()) set_version_counter(version);
  }

  const std::shared_ptr<const PieceOf>& of() const { return of_; }
  uint64_t made_by() const { return made_by_; }

  // What detach() and data() make is a piece, too.
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version,
                                                         bool allow_tensor_metadata_change) const override {
    auto copy = c10::make_intrusive<PieceImpl>(*this, of_, made_by_, version);
    copy->set_allow_tensor_metadata_change(allow_tensor_metadata_change);
    return copy;
  }
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version,
                                                         bool allow_tensor_metadata_change) const override {
    return shallow_copy_and_detach(static_cast<const c10::VariableVersion&>(version), allow_tensor_metadata_change);
  }
  void shallow_copy_from(const c10::intrusive_ptr<TensorImpl>&) override {
    pieces::refuse(*of_, "set_data", "it would be other memory than the engine's");
  }
  const char* tensorimpl_type_name() const override { return "plumb::Piece"; }

 private:
  std::shared_ptr<const PieceOf> of_;
  uint64_t made_by_;
};

const PieceImpl* impl_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.key_set().has(kKey)) return nullptr;
  return dynamic_cast<const PieceImpl*>(tensor.unsafeGetTensorImpl());
}

// ---- what goes through

// Beside everything that torch itself calls pointwise: what fills and copies, what only changes dtype, device or the
// tensor around the numbers, and second names of pointwise operations, which carry no tag.
const std::unordered_set<std::string_view>& known_elementwise() {
  static const std::unordered_set<std::string_view> names = {
      "copy_",     "copy",         "zero_",         "zero",         "fill_",      "fill",        "clone",
      "detach",    "detach_",      "alias",         "lift_fresh",   "empty_like", "zeros_like",  "ones_like",
      "full_like", "new_empty",    "new_zeros",     "new_ones",     "new_full",   "to",          "_to_copy",
      "type_as",   "contiguous",   "resolve_conj",  "resolve_neg",  "pin_memory", "_pin_memory", "record_stream",
      "is_pinned", "is_same_size", "result_type",   "can_cast",     "absolute",   "negative",    "subtract",
      "multiply",  "divide",       "true_divide",   "floor_divide", "rsub",       "square",      "fix",
      "xlogy",     "greater",      "greater_equal", "less",         "less_equal", "not_equal",   "arccos",
      "arccosh",   "arcsin",       "arcsinh",       "arctan",       "arctan2",    "arctanh",     "isclose",
      "isreal",    "__and__",      "__or__",        "__iand__",     "__ior__",    "masked_fill", "hardswish",
      "threshold"};
  return names;
}

// Of every operation with a pointwise form.
const std::unordered_set<std::string>& pointwise_names() {
  static const std::unordered_set<std::string> names = [] {
    std::unordered_set<std::string> found;
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      const auto op = dispatcher.findSchema(name);
      if (op && op->hasTag(at::Tag::pointwise)) found.insert(name.name);
    }
    return found;
  }();
  return names;
}

bool is_elementwise(const c10::OperatorHandle& op) {
  if (op.hasTag(at::Tag::nondeterministic_seeded)) return false;  // each rank would draw numbers of its own
  if (op.hasTag(at::Tag::pointwise)) return true;
  constexpr std::string_view home = "aten::", list = "_foreach_";
  const std::string& full = op.operator_name().name;
  if (!full.starts_with(home)) return false;
  std::string_view name = std::string_view(full).substr(home.size());
  if (known_elementwise().contains(name)) return true;
  if (name == "where") return !op.operator_name().overload_name.empty();  // the one without gives indices
  // In-place forms and those over lists carry no tags.
  const bool over_list = name.starts_with(list), in_place = name.ends_with('_');
  if (over_list) name.remove_prefix(list.size());
  if (in_place) name.remove_suffix(1);
  if (!over_list && !in_place) return false;
  return known_elementwise().contains(name) || pointwise_names().contains(std::string(home).append(name));
}

// Operations that are nothing but others, each of which comes here by itself.
bool is_composed(const c10::OperatorHandle& op) {
  static const std::unordered_set<std::string_view> names = {"aten::std", "aten::var", "aten::std_mean",
                                                             "aten::var_mean", "aten::nanmean"};
  return names.contains(op.operator_name().name) &&
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

// The same elements in one row, or that row as the piece again.
bool is_reshaping(const c10::OperatorHandle& op) {
  static const std::unordered_set<std::string_view> names = {"aten::view",  "aten::reshape", "aten::flatten",
                                                             "aten::ravel", "aten::view_as", "aten::reshape_as"};
  const std::string& overload = op.operator_name().overload_name;
  return names.contains(op.operator_name().name) && (overload.empty() || overload == "using_ints");
}

enum class Kind : uint8_t { refused, elementwise, reshaping, composed, answered };

struct Known {
  std::string name;
  std::string overload;
  Kind kind = Kind::refused;
  pieces::Answer answer = nullptr;
};

Known look_at(const c10::OperatorHandle& op) {
  const c10::OperatorName& name = op.operator_name();
  Known known{name.name, name.overload_name};
  known.answer = pieces::answer_to(name);
  if (known.answer != nullptr) {
    known.kind = Kind::answered;
  } else if (is_composed(op)) {
    known.kind = Kind::composed;
  } else if (is_reshaping(op)) {
    known.kind = Kind::reshaping;
  } else if (is_elementwise(op)) {
    known.kind = Kind::elementwise;
  }
  return known;
}

// By the address of the schema, and by name: an operation that was taken back may leave its address to another.
const Known& known(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const void*, Known> all;
  Known& entry = all[&op.schema()];
  const c10::OperatorName& name = op.operator_name();
  if (entry.name != name.name || entry.overload != name.overload_name) entry = look_at(op);
  return entry;
}

// ---- element by element

// The operands of one result: what a list holds at one place, and what stands beside the lists.
struct Operands {
  std::shared_ptr<const PieceOf> of;
  at::IntArrayRef shape;
  Digest made_by;
  uint64_t first_made_by = 0;

  void add(const at::Tensor& tensor) {
    const PieceImpl* piece = impl_of(tensor);
    if (piece == nullptr) return;
    made_by.add(piece->made_by());
    if (of) return;
    first_made_by = piece->made_by();
    of = piece->of();
    shape = piece->sizes();
  }
};

void check(const Operands& operands, const c10::OperatorHandle& op, const c10::Argument& argument,
           const at::Tensor& tensor) {
  if (!operands.of || !tensor.defined()) return;
  const std::string& what = op.operator_name().name;
  pieces::check_operand(*operands.of, operands.shape, tensor, what);
  const auto* alias = argument.alias_info();
  if (alias == nullptr || !alias->isWrite() || impl_of(tensor) != nullptr) return;
  if (what == "aten::copy_" && tensor.sizes() == operands.shape) return;
  pieces::refuse(
      *operands.of, what,
      "the tensor it is written to is not marked as a piece; make it with zeros_like(p.grad()), or copy_() the "
      "piece into a tensor of its shape if this rank's numbers are what you want");
}

at::Tensor mark(const at::Tensor& view, std::shared_ptr<const PieceOf> of, uint64_t made_by) {
  const c10::TensorImpl& impl = *view.unsafeGetTensorImpl();
  return at::detail::make_tensor<PieceImpl>(impl, std::move(of), made_by, impl.version_counter());
}

// What has the operand's numbers is made by what made that one.
uint64_t made_by(const Operands& operands, std::string_view what) {
  static const std::unordered_set<std::string_view> same = {
      "aten::clone",       "aten::detach",     "aten::alias",      "aten::lift_fresh",
      "aten::to",          "aten::_to_copy",   "aten::contiguous", "aten::resolve_conj",
      "aten::resolve_neg", "aten::pin_memory", "aten::_pin_memory"};
  if (same.contains(what)) return operands.first_made_by;
  Digest digest = operands.made_by;
  digest.add(what);
  return static_cast<uint64_t>(digest.value());
}

at::Tensor marked(const at::Tensor& result, const Operands& operands, std::string_view what) {
  const bool half_marked = result.defined() && result.key_set().has(kKey) && impl_of(result) == nullptr;
  if (!operands.of || !result.defined() || impl_of(result) != nullptr) return result;
  if (!half_marked && result.sizes() != operands.shape) return result;
  if (result.requires_grad()) {
    pieces::refuse(*operands.of, what,
                   "its result would have a graph, which a piece cannot carry; detach() the others");
  }
  return mark(result, operands.of, made_by(operands, what));
}

void go_through(const c10::OperatorHandle& op, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  const size_t returns = op.schema().returns().size();
  std::vector<Operands> places;  // of the lists
  Operands beside;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = (*stack)[first + i];
    if (value.isTensor()) {
      beside.add(value.toTensor());
    } else if (value.isTensorList()) {
      const auto list = value.toTensorList();
      if (places.size() < list.size()) places.resize(list.size());
      for (size_t at = 0; at < list.size(); ++at) places[at].add(list.get(at));
    }
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = (*stack)[first + i];
    if (value.isTensor()) {
      check(beside, op, arguments[i], value.toTensor());
      for (const Operands& place : places) check(place, op, arguments[i], value.toTensor());
    } else if (value.isTensorList()) {
      const auto list = value.toTensorList();
      for (size_t at = 0; at < list.size(); ++at) check(places[at], op, arguments[i], list.get(at));
    }
  }
  {
    const pieces::Below below;
    op.callBoxed(stack);
  }
  for (size_t i = stack->size() - returns; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      if (beside.of) value = marked(value.toTensor(), beside, op.operator_name().name);
    } else if (value.isTensorList()) {
      auto list = value.toTensorList();
      for (size_t at = 0; at < list.size() && at < places.size(); ++at) {
        list.set(at, marked(list.get(at), places[at], op.operator_name().name));
      }
    }
  }
}

const PieceOf& first_piece(const c10::OperatorHandle& op, const Stack& stack) {
  static const PieceOf nameless;
  for (size_t i = stack.size() - op.schema().arguments().size(); i < stack.size(); ++i) {
    if (stack[i].isTensor()) {
      if (const PieceImpl* piece = impl_of(stack[i].toTensor())) return *piece->of();
    } else if (stack[i].isTensorList()) {
      for (const at::Tensor& tensor : stack[i].toTensorVector()) {
        if (const PieceImpl* piece = impl_of(tensor)) return *piece->of();
      }
    }
  }
  return nameless;
}

void reshape(const c10::OperatorHandle& op, Stack* stack) {
  const at::Tensor self = (*stack)[stack->size() - op.schema().arguments().size()].toTensor();
  const PieceImpl* piece = impl_of(self);
  if (piece == nullptr) {  // a plain tensor, in the shape of a piece
    const pieces::Below below;
    return op.callBoxed(stack);
  }
  const auto refuse = [&](at::IntArrayRef shape) {
    pieces::refuse(*piece->of(), op.operator_name().name,
                   c10::str("a piece of ", self.numel(), " elements is of shape ", shape,
                            " or one row (view({-1}), flatten()), and of no other"));
  };
  std::vector<int64_t> shape(piece->of()->shape.size() + 1, 1);
  shape.back() = self.numel();
  const pieces::Below below;
  at::Tensor result;
  try {
    op.callBoxed(stack);
    result = stack->back().toTensor();
  } catch (const c10::Error&) {
    refuse(shape);
  }
  if (result.dim() != 1 && result.sizes() != at::IntArrayRef(shape)) refuse(shape);
  stack->back() = impl_of(result) != nullptr ? result : mark(result, piece->of(), piece->made_by());
}

// operator<< shows numbers by way of this cast, and nothing else of a tensor's own.
void say_what_is_printed(const c10::OperatorHandle& op, const Stack& stack) {
  if (op.operator_name().overload_name != "device" || op.operator_name().name != "aten::to") return;
  const size_t first = stack.size() - op.schema().arguments().size();
  const PieceImpl* piece = stack[first].isTensor() ? impl_of(stack[first].toTensor()) : nullptr;
  if (piece == nullptr || stack[first + 1].toDevice() != at::kCPU || stack[first + 2].toScalarType() != at::kDouble)
    return;
  TORCH_WARN("plumb: rank ", piece->of()->rank, ": this is ", describe(*piece->of()));
}

void dispatch(const c10::OperatorHandle& op, Stack* stack) {
  const Known& how = known(op);
  switch (how.kind) {
    case Kind::elementwise:
      say_what_is_printed(op, *stack);
      return go_through(op, stack);
    case Kind::reshaping:
      return reshape(op, stack);
    case Kind::answered:
      return how.answer(op, *stack);
    case Kind::composed:
      return op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
    case Kind::refused:
      pieces::refuse(first_piece(op, *stack), op.operator_name().name, "it would be this rank's own");
  }
}

}  // namespace

int64_t PieceOf::numel() const { return c10::multiply_integers(shape); }

at::Tensor mark_piece(const at::Tensor& view, std::shared_ptr<const PieceOf> of) {
  return mark(view, std::move(of), 0);
}

bool same_piece(const PieceOf& a, const PieceOf& b) {
  return &a == &b || (a.parameter == b.parameter && a.range.begin == b.range.begin && a.range.end == b.range.end &&
                      a.shape == b.shape && !a.holders.owner_before(b.holders) && !b.holders.owner_before(a.holders));
}

uint64_t made_by(const at::Tensor& tensor) {
  const PieceImpl* piece = impl_of(tensor);
  return piece != nullptr ? piece->made_by() : 0;
}

std::shared_ptr<const PieceOf> piece_of(const at::Tensor& tensor) {
  const PieceImpl* piece = impl_of(tensor);
  return piece != nullptr ? piece->of() : nullptr;
}

at::Tensor unmarked(const at::Tensor& tensor) {
  if (impl_of(tensor) == nullptr) return tensor;
  at::Tensor plain = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(tensor.storage()),
                                                              tensor.key_set().remove(kKey), tensor.dtype());
  c10::TensorImpl* impl = plain.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (!impl->is_inference()) impl->set_version_counter(tensor.unsafeGetTensorImpl()->version_counter());
  return plain;
}

void refuse_piece(const at::Tensor& tensor, const std::string& what) {
  if (const auto of = piece_of(tensor)) pieces::refuse(*of, what, "it would be this rank's own");
}

std::string describe(const PieceOf& piece) {
  return c10::str("this rank's piece, elements [", piece.range.begin, ", ", piece.range.end, ") of ", piece.numel(),
                  ", of the gradient of parameter '", piece.parameter, "' of shape ", at::IntArrayRef(piece.shape),
                  "; the other ranks of the shard axis hold the rest, engine.full_gradient(p) gives all of it");
}

namespace pieces {

std::string_view short_name(std::string_view name) {
  constexpr std::string_view home = "aten::";
  return name.starts_with(home) ? name.substr(home.size()) : name;
}

void refuse(const PieceOf& piece, std::string_view what, const std::string& why) {
  throw Error(piece.rank,
              c10::str(short_name(what), " of a piece of a gradient: ", why, ". p.grad() is ", describe(piece),
                       " on every rank together, Options::clip_norm clips by the norm of all gradients; "
                       "norms, sums, means, extrema and elementwise operations work on pieces"));
}

void check_operand(const PieceOf& piece, at::IntArrayRef shape, const at::Tensor& other, std::string_view what) {
  if (const PieceImpl* its = impl_of(other)) {
    if (same_piece(*its->of(), piece) && other.sizes() == shape) return;
    if (its->of()->parameter == piece.parameter) {
      refuse(
          piece, what,
          c10::str("the other operand, of shape ", other.sizes(), ", is cut otherwise: it is ", describe(*its->of())));
    }
    refuse(piece, what,
           c10::str("the other operand is a piece of another gradient, that of parameter '", its->of()->parameter,
                    "', which is cut elsewhere"));
  }
  if (other.numel() == 1 && other.dim() <= static_cast<int64_t>(shape.size())) return;
  if (other.sizes() == shape) return;
  if (other.sizes() == at::IntArrayRef(piece.shape)) {
    refuse(piece, what, c10::str("the other operand, of shape ", other.sizes(), ", is as large as the whole gradient"));
  }
  refuse(piece, what,
         c10::str("the other operand has shape ", other.sizes(), "; expected ", shape,
                  ", the piece's, or a single number"));
}

}  // namespace pieces

// At load time: a table that every operation of every thread reads is not written later.
TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&dispatch>());
}

}  // namespace plumb
