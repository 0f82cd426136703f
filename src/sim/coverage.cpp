// The table of operations: which have the CPU's bits on the simulator, which make the host wait, which do not work.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <set>
#include <sstream>

#include "plumb/sim.h"
#include "sim/ops.h"

namespace plumb::sim {
namespace {

using torch::jit::Stack;

// Generic arguments: the schema's defaults, and small tensors of one of three shapes.
std::optional<Stack> arguments_for(const c10::FunctionSchema& schema, const at::Device& where, int variant) {
  at::manual_seed(5);
  const auto tensor = [&] {
    const auto values = variant == 2   ? at::randint(0, 3, {4, 4})
                        : variant == 1 ? at::rand({2, 4, 4}) + .5
                                       : at::rand({4, 4}) + .1;
    return values.to(where);
  };
  Stack stack;
  for (const auto& argument : schema.arguments()) {
    const std::string type = argument.type()->str();
    if (type == "Tensor" || (type == "Tensor?" && !argument.default_value())) {
      stack.emplace_back(tensor());
    } else if (argument.default_value()) {
      stack.push_back(*argument.default_value());
    } else if (type == "Tensor[]") {
      stack.emplace_back(c10::List<at::Tensor>({tensor(), tensor()}));
    } else if (type == "Tensor?[]") {
      c10::List<std::optional<at::Tensor>> list;
      list.push_back(at::tensor({0, 1}).to(where));
      stack.emplace_back(list);
    } else if (type == "int" || type == "SymInt") {
      stack.emplace_back(1);
    } else if (type == "float") {
      stack.emplace_back(.5);
    } else if (type == "bool") {
      stack.emplace_back(true);
    } else if (type == "Scalar" || type == "number") {
      stack.emplace_back(at::Scalar(1.5));
    } else if (type == "int[]" || type == "SymInt[]") {
      stack.emplace_back(c10::List<int64_t>({4, 4}));
    } else if (type.rfind("int[", 0) == 0 || type.rfind("SymInt[", 0) == 0) {
      stack.emplace_back(c10::List<int64_t>({1}));
    } else if (argument.type()->kind() == c10::TypeKind::OptionalType) {
      stack.emplace_back();
    } else if (type == "ScalarType") {
      stack.emplace_back(static_cast<int64_t>(at::kDouble));
    } else {
      return std::nullopt;
    }
  }
  return stack;
}

std::vector<at::Tensor> tensors_in(const Stack& stack) {
  std::vector<at::Tensor> all;
  for (const auto& value : stack) {
    if (value.isTensor()) all.push_back(value.toTensor());
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) all.push_back(tensor);
    }
  }
  return all;
}

std::string compare(const std::string& name, const Stack& cpu, const Stack& sim) {
  const auto expected = tensors_in(cpu), found = tensors_in(sim);
  if (expected.size() != found.size()) return "differs";
  for (size_t i = 0; i < expected.size(); ++i) {
    if (expected[i].defined() != found[i].defined()) return "differs";
    if (!expected[i].defined()) continue;
    if (expected[i].layout() != at::kStrided || found[i].layout() != at::kStrided) return "skipped";
    const auto a = expected[i].contiguous(), b = found[i].cpu().contiguous();
    if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return "differs";
    if (name.find("empty") != std::string::npos) continue;  // nobody's bits
    if (a.numel() == 0 || std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()) == 0) continue;
    const bool close = at::allclose(a.to(at::kDouble), b.to(at::kDouble), 1e-4, 1e-5, /*equal_nan=*/true);
    return close ? "close" : "differs";
  }
  return "same";
}

std::string try_operation(const c10::OperatorHandle& operation) {
  const at::NoGradGuard no_grad;
  const std::string name = facts_of(operation).name;
  for (int variant = 0; variant < 3; ++variant) {
    auto cpu = arguments_for(operation.schema(), at::kCPU, variant);
    if (!cpu) return "skipped";
    try {
      at::manual_seed(9);
      operation.callBoxed(&*cpu);
    } catch (const std::exception&) {
      continue;
    }
    try {
      Session session(0);
      auto sim = arguments_for(operation.schema(), device(0), variant);
      at::manual_seed(9);
      operation.callBoxed(&*sim);
      session.finish();
      const std::string verdict = compare(name, *cpu, *sim);
      const auto routes = routes_taken();
      const auto route = routes.find(name);
      return verdict == "same" && route != routes.end() && route->second == "synchronised" ? "waits" : verdict;
    } catch (const std::exception&) {
      return "unsupported";
    }
  }
  return "skipped";
}

std::vector<c10::OperatorHandle> candidates() {
  auto& dispatcher = c10::Dispatcher::singleton();
  auto names = dispatcher.getAllOpNames();
  std::sort(names.begin(), names.end(), [](const auto& a, const auto& b) {
    return std::tie(a.name, a.overload_name) < std::tie(b.name, b.overload_name);
  });
  static const std::set<std::string> never = {"aten::get_gradients", "aten::sleep", "aten::from_file"};
  std::vector<c10::OperatorHandle> result;
  for (const auto& name : names) {
    if (name.name.rfind("aten::", 0) != 0 || never.count(name.name)) continue;
    const auto operation = dispatcher.findSchema(name);
    if (!operation || operation->schema().is_vararg()) continue;
    bool takes_tensor = false, has_out = false;
    for (const auto& argument : operation->schema().arguments()) {
      takes_tensor |= argument.type()->str().find("Tensor") != std::string::npos;
      has_out |= argument.is_out();
    }
    if (takes_tensor && !has_out) result.push_back(*operation);
  }
  return result;
}

// Tries operations from `begin` on in a child, since generic arguments crash some of the CPU's kernels. Returns how many
// were tried; the one after the last verdict crashed.
size_t try_in_child(const std::vector<c10::OperatorHandle>& all, size_t begin, std::vector<std::string>& verdicts) {
  int ends[2];
  if (pipe(ends) != 0) throw Error("cannot make a pipe for the coverage table");
  const pid_t child = fork();
  if (child < 0) throw Error("cannot start a process for the coverage table");
  if (child == 0) {
    close(ends[0]);
    if (!freopen("/dev/null", "w", stderr)) _exit(1);
    for (size_t i = begin; i < all.size(); ++i) {
      alarm(10);
      const std::string line = try_operation(all[i]) + "\n";
      if (write(ends[1], line.data(), line.size()) < 0) _exit(1);
    }
    _exit(0);
  }
  close(ends[1]);
  std::string text;
  char buffer[4096];
  for (ssize_t count = 0; (count = read(ends[0], buffer, sizeof buffer)) > 0;) text.append(buffer, count);
  close(ends[0]);
  waitpid(child, nullptr, 0);
  std::istringstream lines(text);
  size_t tried = 0;
  for (std::string line; std::getline(lines, line); ++tried) verdicts[begin + tried] = line;
  return tried;
}

}  // namespace

std::string coverage_table() {
  init(1);
  at::set_num_threads(1);
  const auto all = candidates();
  std::vector<std::string> verdicts(all.size());
  for (size_t next = 0; next < all.size();) {
    next += try_in_child(all, next, verdicts);
    if (next < all.size()) verdicts[next++] = "skipped";
  }
  std::map<std::string, std::vector<std::string>> names;
  for (size_t i = 0; i < all.size(); ++i) names[verdicts[i]].push_back("`" + facts_of(all[i]).name + "`");
  const size_t compared = all.size() - names["skipped"].size();
  const auto list = [&](const char* verdict) {
    std::string text;
    for (const auto& name : names[verdict]) text += (text.empty() ? "" : ", ") + name;
    return text.empty() ? std::string("–") : text;
  };
  std::ostringstream out;
  out << "| | operations | which |\n|---|---|---|\n"
      << "| the CPU's bits, queued | " << names["same"].size() << " | all that are not named below |\n"
      << "| the CPU's bits, the host waits (the result's shape or value is needed) | " << names["waits"].size() << " | "
      << list("waits") << " |\n"
      << "| close to the CPU's, other bits | " << names["close"].size() << " | " << list("close") << " |\n"
      << "| another result | " << names["differs"].size() << " | " << list("differs") << " |\n"
      << "| not supported | " << names["unsupported"].size() << " | " << list("unsupported") << " |\n\n"
      << compared << " operations compared; " << names["skipped"].size()
      << " more take arguments that generic ones do not fit, or fail on the CPU too.\n";
  return out.str();
}

}  // namespace plumb::sim
