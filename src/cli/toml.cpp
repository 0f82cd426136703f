// Settings from a TOML file: the flags' names as keys, every complaint with the line it is about.
#include <toml++/toml.h>
#include <sstream>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "cli/flags.h"

namespace plumb::cli {

namespace {

std::string kind_of(const toml::node& node) {
  std::ostringstream text;
  text << node.type();
  return text.str();
}

void set(const Flag& flag, const toml::node& node, const std::string& where) {
  const auto wrong = [&](const std::string& expected) {
    throw UsageError(where + ": '" + flag.name + "' takes " + expected + ", not a value of type " + kind_of(node));
  };
  if (auto* const* whole = std::get_if<int64_t*>(&flag.target)) {
    if (!node.is_integer()) wrong("a whole number");
    **whole = node.as_integer()->get();
  } else if (auto* const* real = std::get_if<double*>(&flag.target)) {
    if (!node.is_number()) wrong("a number");
    **real = *node.value<double>();
    if (!std::isfinite(**real)) {
      std::ostringstream found;
      found << **real;
      throw UsageError(where + ": '" + flag.name + "' takes a number that is finite, not " + found.str());
    }
  } else if (std::holds_alternative<std::string*>(flag.target)) {
    if (!node.is_string()) wrong("a string");
    assign(flag, node.as_string()->get(), where + ": '" + flag.name + "'");
  } else {
    if (!node.is_boolean()) wrong("true or false");
    *std::get<bool*>(flag.target) = node.as_boolean()->get();
  }
}

}  // namespace

std::vector<std::string> read_toml(const std::string& path, const std::vector<Flag>& table,
                                   const std::vector<std::string>& given) {
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) throw UsageError("config file '" + path + "' does not exist");
  if (!std::filesystem::is_regular_file(path, ignored)) {
    throw UsageError("config file '" + path + "' cannot be read: it is no regular file");
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw UsageError("config file '" + path + "' cannot be read");
  }
  const std::string bytes(std::istreambuf_iterator<char>(file), {});
  if (bytes.empty()) throw UsageError("config file '" + path + "' is empty");
  toml::table root;
  try {
    root = toml::parse(bytes, path);
  } catch (const toml::parse_error& error) {
    throw UsageError("config file '" + path + "', line " + std::to_string(error.source().begin.line) + ": " +
                     std::string(error.description()));
  }
  if (root.empty()) throw UsageError("config file '" + path + "' is empty: it sets nothing");
  std::vector<std::string> names;
  for (const auto& [key, node] : root) {
    const std::string name(key.str());
    const std::string where = "config file '" + path + "', line " + std::to_string(key.source().begin.line);
    const auto flag = std::find_if(table.begin(), table.end(), [&](const Flag& f) { return f.name == name; });
    if (flag == table.end()) {
      throw UsageError(where + ": unknown key " + in_quotes(name) + "; the keys are the flags of `plumb train --help`");
    }
    if (std::find(given.begin(), given.end(), name) == given.end()) set(*flag, node, where);
    names.push_back(name);
  }
  return names;
}

}  // namespace plumb::cli
