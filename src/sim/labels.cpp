// Interning, scopes through autograd's threads, and names of memory.
#include "sim/labels.h"

#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/function.h>

#include <deque>
#include <typeindex>

#include "plumb/sim.h"
#include "sim/machine.h"

namespace plumb::sim {
namespace {

struct Table {
  std::unordered_map<std::string_view, Label> labels;
  std::deque<std::string> texts;
  std::vector<uint64_t> hashes;
};

Table& table() {
  static Table* const table = new Table;
  if (table->texts.empty()) {
    table->texts.emplace_back();
    table->hashes.push_back(0);
    table->labels.emplace(table->texts.back(), 0);
  }
  return *table;
}

// Debug info is what at::ThreadLocalState carries from the thread that calls backward into autograd's threads.
struct ScopeInfo final : c10::DebugInfoBase {
  explicit ScopeInfo(Label label) : label(label) {}
  Label label;
};
c10::DebugInfoKind scope_kind() { return c10::DebugInfoKind::PRODUCER_INFO; }

}  // namespace

Label intern(std::string_view text) {
  Table& all = table();
  if (const auto it = all.labels.find(text); it != all.labels.end()) return it->second;
  const auto label = static_cast<Label>(all.texts.size());
  all.texts.emplace_back(text);
  uint64_t hash = 0xcbf29ce484222325ull;
  for (const unsigned char c : text) hash = (hash ^ c) * 0x100000001b3ull;
  all.hashes.push_back(hash);
  all.labels.emplace(all.texts.back(), label);
  return label;
}

const std::string& text_of(Label label) { return table().texts[label]; }
uint64_t hash_of(Label label) { return table().hashes[label]; }

Label current_scope() {
  const auto* info = dynamic_cast<const ScopeInfo*>(c10::ThreadLocalDebugInfo::get(scope_kind()));
  return info ? info->label : 0;
}

Label current_node() {
  const auto node = torch::autograd::get_current_node();
  if (!node) return 0;
  static auto& labels = *new std::unordered_map<std::type_index, Label>;
  auto& actual = *node;
  auto& label = labels[std::type_index(typeid(actual))];
  if (label == 0) label = intern(node->name());
  return label;
}

void Names::set(char* begin, char* end, const std::string& name) { names_[{begin, end}] = name; }

void Names::drop(char* begin, char* end) {
  if (names_.empty()) return;
  auto first = names_.lower_bound({begin, nullptr});
  auto last = first;
  while (last != names_.end() && last->first.first < end) ++last;
  names_.erase(first, last);
}

std::pair<std::string, char*> Names::find(char* at, char* search_from) const {
  std::pair<std::string, char*> best{"", nullptr};
  char* best_end = nullptr;
  for (auto it = names_.lower_bound({search_from, nullptr}); it != names_.end() && it->first.first <= at; ++it) {
    const auto& [begin, end] = it->first;
    if (at >= end) continue;
    if (!best.second || end - begin < best_end - best.second) {
      best = {it->second, begin};
      best_end = end;
    }
  }
  return best;
}

struct Scope::Guard {
  explicit Guard(Label label) : guard(scope_kind(), std::make_shared<ScopeInfo>(label)) {}
  c10::DebugInfoGuard guard;
};

Scope::Scope(const std::string& what, std::source_location where) {
  const std::string file = where.file_name();
  const auto lock = Machine::lock();
  std::string text = current_scope() ? text_of(current_scope()) + " > " : "";
  text += what + " (" + file.substr(file.find_last_of('/') + 1) + ":" + std::to_string(where.line()) + ")";
  guard_ = std::make_unique<Guard>(intern(text));
}

Scope::~Scope() = default;

}  // namespace plumb::sim
