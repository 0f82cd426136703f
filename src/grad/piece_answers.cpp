// What is asked of pieces and answered for the whole gradient: each rank reduces its piece, the ranks exchange a few
// numbers, and everybody combines them.
#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <map>
#include <set>
#include <string_view>
#include <unordered_map>

#include "grad/piece_call.h"
#include "grad/piece_dispatch.h"
#include "layout/digest.h"

namespace plumb::pieces {
namespace {

using torch::jit::Stack;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// ---- asking

// Lists of like lengths take messages of one size, so that ranks which ask for different things find that out.
int64_t message_size(int64_t values) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(values, 31) + 1)));
}

// Everybody's numbers, a row for each rank. They travel as they are, 64 bits each, behind a digest of the question and of
// what it is `about`.
at::Tensor everybodys(const PieceOf& piece, const std::string& question, const at::Tensor& mine,
                      const std::string& about) {
  const std::shared_ptr<const Holders> holders = piece.holders.lock();
  if (!holders) {
    refuse(piece, question, "its engine has ended, and nobody can ask the other ranks any more");
  }
  Group shard = holders->shard;
  const int64_t count = mine.numel(), size = message_size(count);
  Digest digest;
  digest.add(question);
  digest.add(about);
  digest.add(static_cast<uint64_t>(holders->asked));
  at::Tensor wire = at::zeros({size}, mine.options().dtype(at::kLong));
  wire.narrow(0, 0, 1).fill_(digest.value());
  wire.narrow(0, 1, count).copy_(mine.contiguous().view(at::kLong));
  at::Tensor all = at::empty({shard.size() * size}, wire.options());
  try {
    const Where where = holders->ask(question);
    shard.all_gather(all, wire).wait(where);
  } catch (const Error& error) {
    // A backend may notice before the watch does, and knows no question.
    if (std::string_view(error.what()).find(question) != std::string_view::npos) throw;
    throw Error(piece.rank, "nobody answers what this rank asked for, " + question + ": " + error.what());
  }
  all = all.view({shard.size(), size});
  at::Tensor rows = all.narrow(1, 1, count).contiguous().view(mine.scalar_type());
  const at::Tensor other = all.select(1, 0).ne(all[0][0]).any();
  if (other.is_cpu()) {
    if (other.item<bool>()) {
      throw Error(piece.rank,
                  c10::str("this rank asked for ", question,
                           ", another rank of its shard axis for something else; what is asked of pieces of "
                           "gradients must be asked on every rank, in the same order"));
    }
  } else {
    // The host does not wait for a device: what cannot be told apart from a right number here is none.
    rows = rows.is_floating_point() ? rows.masked_fill(other, std::numeric_limits<double>::quiet_NaN())
                                    : rows.masked_fill(other, std::numeric_limits<int64_t>::min());
  }
  return rows;
}

std::string question_about(const std::string& what, const PieceOf& piece) {
  return what + " of the gradient of parameter '" + piece.parameter + "'";
}

// f32 at least, so that the only rounding to less is that of the result.
at::ScalarType wide(at::ScalarType dtype) {
  return c10::isIntegralType(dtype, /*includeBool=*/true) ? at::kLong : c10::promoteTypes(dtype, at::kFloat);
}

// A single number as it travels: complex ones are two.
at::Tensor as_values(const at::Tensor& number) {
  if (number.is_complex()) return at::view_as_real(number).to(at::kDouble).view({-1});
  return number.to(number.is_floating_point() ? at::kDouble : at::kLong).view({-1});
}
at::Tensor as_result(const at::Tensor& values, at::ScalarType dtype) {
  const at::Tensor number = values.numel() == 2 ? at::view_as_complex(values.contiguous()) : values.squeeze(0);
  return number.to(dtype);
}

// From here on it counts as asked, though torch may yet refuse it on this rank: those behind it are not taken for it.
struct Asking : Below {
  explicit Asking(const PieceOf& piece) { count(piece); }
  explicit Asking(const std::vector<at::Tensor>& parts) {
    std::set<std::shared_ptr<const Holders>> engines;
    for (const at::Tensor& part : parts) {
      const auto of = piece_of(part);
      if (of && engines.insert(of->holders.lock()).second) count(*of);
    }
  }
  static void count(const PieceOf& piece) {
    if (const auto holders = piece.holders.lock()) ++holders->asked;
  }
};

// What is told beside the words of a question: in which numbers, of which part of the program's.
std::string beside(const at::Tensor& part, std::optional<at::ScalarType> dtype) {
  return c10::str(part.scalar_type(), " ", dtype.value_or(part.scalar_type()), " ", made_by(part), ";");
}

struct Asked {
  at::Tensor local;  // the piece; only to be used below the key
  std::shared_ptr<const PieceOf> of;
  std::string about;
};

Asked asked(const Call& call) {
  const at::Tensor local = call.self();
  auto of = piece_of(local);
  if (!of) {
    // The piece is another operand: `plain.equal(piece)`.
    throw Error(c10::str(call.name(), " of a plain tensor and a piece of a gradient; ask the piece: p.grad().",
                         call.name(), "(…)"));
  }
  call.check_all_of(*of);
  return {local, std::move(of), beside(local, call.dtype())};
}

at::Tensor scalar(double value, const at::Tensor& like) {
  return at::full({}, value, like.options().dtype(at::kDouble));
}

// ---- norms

// One zero for an empty part, so that torch refuses there what it refuses of the others.
at::Tensor never_empty(const at::Tensor& part) { return part.numel() > 0 ? part : at::zeros({1}, part.options()); }

// Of one part of a gradient, also an empty one.
at::Tensor norm_of(const at::Tensor& part, double order, at::ScalarType dtype) {
  const at::Tensor norm = at::linalg_vector_norm(never_empty(part), order, std::nullopt, false, wide(dtype));
  if (part.numel() == 0) return scalar(order < 0 ? kInfinity : 0.0, part);
  return norm.to(at::kDouble);
}

// From the parts' norms, a row for each rank: their norm, but for the number of elements that are not zero.
at::Tensor norm_of_norms(const at::Tensor& rows, double order) {
  return order == 0 ? rows.sum(0) : at::linalg_vector_norm(rows, order, at::IntArrayRef{0});
}

void check_has_norm(const PieceOf& piece, const at::Tensor& part, const std::string& what) {
  if (part.is_floating_point() || part.is_complex()) return;
  refuse(piece, what, c10::str("expected floating-point numbers, found ", part.scalar_type()));
}

at::ScalarType dtype_of_norm(const at::Tensor& part, std::optional<at::ScalarType> dtype) {
  return c10::toRealValueType(dtype.value_or(part.scalar_type()));
}

void answer_norm(const c10::OperatorHandle& op, Stack& stack) {
  Call call(op, stack);
  const auto [local, of, about] = asked(call);
  const bool matrix = call.name() == "linalg_norm" && call["ord"] != nullptr && of->shape.size() != 1;
  if (matrix) refuse(*of, call.name(), "a norm of matrices needs them whole");
  const char* order_name = op.schema().argumentIndexWithName("ord") ? "ord" : "p";
  const double order = call.number(order_name, 2.0);
  check_has_norm(*of, local, call.name());
  const Asking asking(*of);
  if (of->numel() == 0) return call.ask_empty(*of);
  const at::ScalarType dtype = call.dtype().value_or(local.scalar_type());
  const at::Tensor mine = norm_of(local, order, dtype).view({-1});
  const at::Tensor rows = everybodys(*of, question_about(c10::str("the ", order, "-norm"), *of), mine, about);
  call.give({norm_of_norms(rows, order).squeeze(0).to(dtype_of_norm(local, call.dtype()))});
}

// ---- lists

// Asks once per engine for one number of each piece of a list; `numbers` holds everybody's sum, say, afterwards.
void ask_list(const std::vector<at::Tensor>& parts, std::vector<at::Tensor>& numbers, const std::string& what,
              std::optional<at::ScalarType> dtype, const std::function<at::Tensor(const at::Tensor& rows)>& combine) {
  std::vector<std::pair<std::shared_ptr<const Holders>, std::vector<size_t>>> engines;
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto of = piece_of(parts[i]);
    if (!of) continue;
    const auto holders = of->holders.lock();
    auto it = std::find_if(engines.begin(), engines.end(), [&](const auto& one) { return one.first == holders; });
    if (it == engines.end()) it = engines.insert(it, {holders, {}});
    it->second.push_back(i);
  }
  for (const auto& [holders, places] : engines) {
    const PieceOf& first = *piece_of(parts[places[0]]);
    std::string question = question_about(what, first), names;
    if (places.size() > 1) question += c10::str(" and ", places.size() - 1, " more");
    std::vector<at::Tensor> mine;
    for (const size_t i : places) {
      mine.push_back(numbers[i].to(parts[places[0]].device()));
      names += piece_of(parts[i])->parameter + "," + beside(parts[i], dtype);
    }
    const at::Tensor totals = combine(everybodys(first, question, at::stack(mine), names));
    for (size_t j = 0; j < places.size(); ++j) numbers[places[j]] = totals[static_cast<int64_t>(j)];
  }
}

enum class Listed { norm, power_sum, max };

template <Listed which>
void answer_list(const c10::OperatorHandle& op, Stack& stack) {
  Call call(op, stack);
  const std::vector<at::Tensor> parts = stack[stack.size() - op.schema().arguments().size()].toTensorVector();
  const double order = call.number("ord", 2.0);
  for (const at::Tensor& part : parts) {
    if (const auto of = piece_of(part)) {
      check_has_norm(*of, part, call.name());
      if (of->numel() == 0 && (which == Listed::max || std::abs(order) == kInfinity)) {
        refuse(*of, call.name(), "the gradient has no elements");
      }
    }
  }
  const Asking asking(parts);
  std::vector<at::Tensor> numbers;
  for (const at::Tensor& part : parts) {
    const at::ScalarType dtype = call.dtype().value_or(part.scalar_type());
    if (which == Listed::max) {
      const at::Tensor most = never_empty(part).max().to(at::kDouble);
      numbers.push_back(part.numel() == 0 ? scalar(-kInfinity, part) : most);
    } else if (which == Listed::norm || order == 0) {
      numbers.push_back(norm_of(part, order, dtype));
    } else {
      numbers.push_back(part.abs().to(c10::toRealValueType(wide(dtype))).pow(order).sum().to(at::kDouble));
    }
  }
  ask_list(parts, numbers, which == Listed::norm ? c10::str("the ", order, "-norm") : call.name(), call.dtype(),
           [&](const at::Tensor& rows) {
             if (which == Listed::max) return rows.amax(0);
             return which == Listed::norm ? norm_of_norms(rows, order) : rows.sum(0);
           });
  c10::List<at::Tensor> results;
  for (size_t i = 0; i < parts.size(); ++i) {
    results.push_back(numbers[i]
                          .to(which == Listed::max ? parts[i].scalar_type() : dtype_of_norm(parts[i], call.dtype()))
                          .to(parts[i].device()));
  }
  call.give({results});
}

// GradScaler: every rank divides its pieces, and all hear of a number that is not finite on any.
void answer_unscale(const c10::OperatorHandle& op, Stack& stack) {
  const size_t first = stack.size() - op.schema().arguments().size();
  const std::vector<at::Tensor> parts = stack[first].toTensorVector();
  const at::Tensor found = stack[first + 1].toTensor();
  const Asking asking(parts);
  op.callBoxed(&stack);
  std::vector<at::Tensor> numbers(parts.size(), found.to(at::kDouble).reshape({}));
  ask_list(parts, numbers, "whether all numbers are finite", std::nullopt,
           [](const at::Tensor& rows) { return rows.amax(0); });
  for (const at::Tensor& number : numbers) found.copy_(at::maximum(found, number.to(found.options())));
}

// ---- sums, extrema, tests

enum class Sum { sum, nansum, mean, prod, count };

template <Sum which>
void answer_sum(const c10::OperatorHandle& op, Stack& stack) {
  Call call(op, stack);
  const auto [local, of, about] = asked(call);
  const bool integral = c10::isIntegralType(local.scalar_type(), /*includeBool=*/true);
  at::ScalarType dtype = call.dtype().value_or(integral ? at::kLong : local.scalar_type());
  if (which == Sum::count) dtype = at::kLong;
  if (which == Sum::mean && c10::isIntegralType(dtype, true)) {
    refuse(*of, call.name(), c10::str("expected floating-point numbers, found ", dtype));
  }
  if (which == Sum::prod && c10::isComplexType(dtype)) refuse(*of, call.name(), "complex products are not supported");
  const Asking asking(*of);
  at::Tensor mine;
  if (which == Sum::count) mine = at::count_nonzero(local);
  if (which == Sum::sum || which == Sum::mean) mine = at::sum(local, wide(dtype));
  if (which == Sum::nansum) mine = at::nansum(local, std::nullopt, false, wide(dtype));
  if (which == Sum::prod) mine = at::prod(local, wide(dtype));
  const at::Tensor rows = everybodys(*of, question_about("the " + call.name(), *of), as_values(mine), about);
  at::Tensor total = which == Sum::prod ? rows.prod(0) : rows.sum(0);
  if (which == Sum::mean) total = total / static_cast<double>(of->numel());
  call.give({as_result(total, dtype)});
}

enum class End { max, min };

// Of one part; of an empty one, what no number goes beyond.
at::Tensor extremum(const at::Tensor& part, End end) {
  const at::Tensor some = never_empty(part);
  const at::Tensor number = end == End::max ? some.max() : some.min();
  if (part.numel() > 0) return as_values(number);
  const double sign = end == End::max ? -1 : 1;
  if (part.is_floating_point()) return scalar(sign * kInfinity, part).view({-1});
  using Long = std::numeric_limits<int64_t>;
  return at::full({1}, end == End::max ? Long::min() : Long::max(), part.options().dtype(at::kLong));
}

template <End end>
void answer_extremum(const c10::OperatorHandle& op, Stack& stack) {
  Call call(op, stack);
  const auto [local, of, about] = asked(call);
  if (local.is_complex()) refuse(*of, call.name(), "complex numbers have no order");
  const Asking asking(*of);
  if (of->numel() == 0) return call.ask_empty(*of);
  const at::Tensor rows = everybodys(*of, question_about("the " + call.name(), *of), extremum(local, end), about);
  call.give({as_result(end == End::max ? rows.amax(0) : rows.amin(0), local.scalar_type())});
}

void answer_both_extrema(const c10::OperatorHandle& op, Stack& stack) {
  Call call(op, stack);
  const auto [local, of, about] = asked(call);
  if (local.is_complex()) refuse(*of, call.name(), "complex numbers have no order");
  const Asking asking(*of);
  if (of->numel() == 0) return call.ask_empty(*of);
  const at::Tensor mine = at::cat({extremum(local, End::min), extremum(local, End::max)});
  const at::Tensor rows = everybodys(*of, question_about("the " + call.name(), *of), mine, about);
  call.give({rows.select(1, 0).amin().to(local.scalar_type()), rows.select(1, 1).amax().to(local.scalar_type())});
}

template <End end>  // max: any, min: all
void answer_test(const c10::OperatorHandle& op, Stack& stack) {
  Call call(op, stack);
  const auto [local, of, about] = asked(call);
  const Asking asking(*of);
  const at::Tensor mine = as_values(end == End::max ? local.any() : local.all());
  const at::Tensor rows = everybodys(*of, question_about(call.name() + "()", *of), mine, about);
  const at::ScalarType dtype = local.scalar_type() == at::kByte ? at::kByte : at::kBool;
  call.give({as_result(end == End::max ? rows.amax(0) : rows.amin(0), dtype)});
}

// From every part's count, mean and sum of squares about its mean.
void answer_variance(const c10::OperatorHandle& op, Stack& stack) {
  Call call(op, stack);
  const auto [local, of, about] = asked(call);
  check_has_norm(*of, local, call.name());
  if (local.is_complex()) refuse(*of, call.name(), "complex numbers are not supported");
  const Asking asking(*of);
  at::Tensor mine = at::zeros({3}, local.options().dtype(at::kDouble));
  if (local.numel() > 0) {
    const auto [variance, mean] = at::var_mean(local.to(wide(local.scalar_type())), std::nullopt, at::Scalar(0), false);
    const auto count = static_cast<double>(local.numel());
    mine = at::stack({scalar(count, local), mean.to(at::kDouble), variance.to(at::kDouble) * count});
  }
  const at::Tensor rows = everybodys(*of, question_about("the " + call.name(), *of), mine, about);
  const at::Tensor counts = rows.select(1, 0), means = rows.select(1, 1);
  const auto total = static_cast<double>(of->numel());
  const at::Tensor mean = (counts * means).sum() / total;
  const at::Tensor squares = rows.select(1, 2).sum() + (counts * (means - mean).square()).sum();
  const at::Tensor variance = squares / std::max(0.0, total - call.number("correction", 1.0));
  const at::Tensor spread = (call.name().starts_with("std") ? variance.sqrt() : variance).to(local.scalar_type());
  if (call.name().ends_with("_mean")) {
    call.give({spread, mean.to(local.scalar_type())});
  } else {
    call.give({spread});
  }
}

// ---- answers on the host

void answer_item(const c10::OperatorHandle& op, Stack& stack) {
  Call call(op, stack);
  const auto [local, of, about] = asked(call);
  if (of->numel() != 1) refuse(*of, call.name(), c10::str("the gradient has ", of->numel(), " elements; expected one"));
  const Asking asking(*of);
  const at::Tensor mine = as_values(at::sum(local, wide(local.scalar_type())));
  const at::Tensor rows = everybodys(*of, question_about("item()", *of), mine, about);
  const at::Scalar number = as_result(rows.sum(0), local.scalar_type()).item();
  if (call.name() == "is_nonzero") return call.give({!number.equal(0)});
  call.give({number});
}

void answer_equal(const c10::OperatorHandle& op, Stack& stack) {
  Call call(op, stack);
  const auto [local, of, about] = asked(call);
  const at::Tensor other = call["other"]->toTensor();
  check_operand(*of, local.sizes(), other, call.name());
  const Asking asking(*of);
  const at::Tensor mine =
      at::full({1}, static_cast<int64_t>(at::equal(local, other)), local.options().dtype(at::kLong));
  call.give({everybodys(*of, question_about("equal()", *of), mine, about).all().item<bool>()});
}

void answer_allclose(const c10::OperatorHandle& op, Stack& stack) {
  Call call(op, stack);
  const at::Tensor close = at::isclose(call.self(), call["other"]->toTensor(), call["rtol"]->toDouble(),
                                       call["atol"]->toDouble(), call["equal_nan"]->toBool());
  call.give({close.all().item<bool>()});
}

}  // namespace

// Overloads with `out` are not among them: the answer is a new number.
Answer answer_to(const c10::OperatorName& name) {
  static const std::unordered_map<std::string_view, Answer> answers = {
      {"aten::norm.Scalar", answer_norm},
      {"aten::norm.ScalarOpt_dtype", answer_norm},
      {"aten::norm.ScalarOpt_dim", answer_norm},
      {"aten::norm.ScalarOpt_dim_dtype", answer_norm},
      {"aten::linalg_vector_norm", answer_norm},
      {"aten::linalg_norm", answer_norm},
      {"aten::_foreach_norm.Scalar", answer_list<Listed::norm>},
      {"aten::_foreach_powsum.Scalar", answer_list<Listed::power_sum>},
      {"aten::_foreach_max", answer_list<Listed::max>},
      {"aten::_amp_foreach_non_finite_check_and_unscale_", answer_unscale},
      {"aten::sum", answer_sum<Sum::sum>},
      {"aten::sum.dim_IntList", answer_sum<Sum::sum>},
      {"aten::nansum", answer_sum<Sum::nansum>},
      {"aten::mean", answer_sum<Sum::mean>},
      {"aten::mean.dim", answer_sum<Sum::mean>},
      {"aten::prod", answer_sum<Sum::prod>},
      {"aten::count_nonzero", answer_sum<Sum::count>},
      {"aten::count_nonzero.dim_IntList", answer_sum<Sum::count>},
      {"aten::max", answer_extremum<End::max>},
      {"aten::min", answer_extremum<End::min>},
      {"aten::amax", answer_extremum<End::max>},
      {"aten::amin", answer_extremum<End::min>},
      {"aten::aminmax", answer_both_extrema},
      {"aten::any", answer_test<End::max>},
      {"aten::any.dims", answer_test<End::max>},
      {"aten::all", answer_test<End::min>},
      {"aten::all.dims", answer_test<End::min>},
      {"aten::_is_any_true", answer_test<End::max>},
      {"aten::_is_all_true", answer_test<End::min>},
      {"aten::var.correction", answer_variance},
      {"aten::std.correction", answer_variance},
      {"aten::var_mean.correction", answer_variance},
      {"aten::std_mean.correction", answer_variance},
      {"aten::item", answer_item},
      {"aten::is_nonzero", answer_item},
      {"aten::_local_scalar_dense", answer_item},
      {"aten::equal", answer_equal},
      {"aten::allclose", answer_allclose},
  };
  const auto it = answers.find(name.overload_name.empty() ? name.name : name.name + "." + name.overload_name);
  return it != answers.end() ? it->second : nullptr;
}

}  // namespace plumb::pieces
