// JSON as checkpoints use it: a value, a strict reader, a writer. Numbers without a fraction stay exact integers.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace plumb::save {

class Json {
 public:
  using Array = std::vector<Json>;
  using Object = std::vector<std::pair<std::string, Json>>;  // in the order of the text, each key once

  Json() = default;
  Json(bool value) : value_(value) {}
  Json(int value) : value_(static_cast<int64_t>(value)) {}
  Json(int64_t value) : value_(value) {}
  Json(double value) : value_(value) {}
  Json(const char* value) : value_(std::string(value)) {}
  Json(std::string value) : value_(std::move(value)) {}
  Json(Array value) : value_(std::move(value)) {}
  Json(Object value) : value_(std::move(value)) {}

  bool is_null() const { return std::holds_alternative<std::monostate>(value_); }

  // An Error that names `what` where it is something else.
  bool boolean(const std::string& what) const;
  int64_t integer(const std::string& what) const;
  double number(const std::string& what) const;  // an integer is one, too
  const std::string& text(const std::string& what) const;
  const Array& array(const std::string& what) const;
  const Object& object(const std::string& what) const;

  // The member of an object; an Error where there is none, or null.
  const Json& at(const std::string& key, const std::string& what) const;
  const Json* find(const std::string& key) const;

  // The whole text is one value: no comments, no trailing commas, no repeated keys, no lone surrogates, bounded depth.
  static Json parse(std::string_view text, const std::string& what);
  // Members of the outer `levels` levels are on lines of their own. Doubles are written so
  // that reading gives the same bits; what is not finite is no JSON and an Error.
  std::string write(int levels = 0) const;

 private:
  void write(std::string& out, int levels, int indent) const;
  std::variant<std::monostate, bool, int64_t, double, std::string, Array, Object> value_;
};

}  // namespace plumb::save
