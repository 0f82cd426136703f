#include "save/json.h"

#include <charconv>
#include <cmath>
#include <set>

#include "plumb/error.h"

namespace plumb::save {
namespace {

constexpr int kDeepest = 64;

class Reader {
 public:
  Reader(std::string_view text, const std::string& what) : text_(text), what_(what) {}

  Json whole() {
    Json value = any(0);
    blank();
    if (at_ != text_.size()) fail("text after its end");
    return value;
  }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    throw Error(what_ + " is no valid JSON: " + why + " at byte " + std::to_string(at_));
  }
  bool more() const { return at_ < text_.size(); }
  char peek() const { return more() ? text_[at_] : '\0'; }
  void blank() {
    while (more() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos) ++at_;
  }
  void expect(char c) {
    if (!more() || text_[at_] != c) fail(std::string("expected '") + c + "'");
    ++at_;
  }
  bool word(std::string_view expected) {
    if (text_.substr(at_, expected.size()) != expected) return false;
    at_ += expected.size();
    return true;
  }

  Json any(int depth) {
    if (depth > kDeepest) fail("it is nested too deeply");
    blank();
    switch (peek()) {
      case '{':
        return object(depth);
      case '[':
        return array(depth);
      case '"':
        return string();
      case 't':
        if (word("true")) return true;
        break;
      case 'f':
        if (word("false")) return false;
        break;
      case 'n':
        if (word("null")) return {};
        break;
      default:
        return number();
    }
    fail("an unknown word");
  }

  Json object(int depth) {
    Json::Object members;
    std::set<std::string> keys;
    expect('{');
    blank();
    if (peek() == '}') return ++at_, members;
    for (;;) {
      blank();
      std::string key = string();
      if (!keys.insert(key).second) fail("the key '" + key + "' stands twice");
      blank();
      expect(':');
      members.emplace_back(std::move(key), any(depth + 1));
      blank();
      if (peek() == '}') return ++at_, members;
      expect(',');
    }
  }

  Json array(int depth) {
    Json::Array items;
    expect('[');
    blank();
    if (peek() == ']') return ++at_, items;
    for (;;) {
      items.push_back(any(depth + 1));
      blank();
      if (peek() == ']') return ++at_, items;
      expect(',');
    }
  }

  uint32_t hex4() {
    uint32_t code = 0;
    for (int i = 0; i < 4; ++i) {
      const char c = peek();
      const int digit = c >= '0' && c <= '9'   ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit < 0) fail("a \\u without four hexadecimal digits");
      code = code * 16 + static_cast<uint32_t>(digit);
      ++at_;
    }
    return code;
  }

  static void append_utf8(std::string& out, uint32_t code) {
    const auto byte = [&](uint32_t bits) { out += static_cast<char>(bits); };
    if (code < 0x80) {
      byte(code);
    } else if (code < 0x800) {
      byte(0xc0 | (code >> 6)), byte(0x80 | (code & 0x3f));
    } else if (code < 0x10000) {
      byte(0xe0 | (code >> 12)), byte(0x80 | ((code >> 6) & 0x3f)), byte(0x80 | (code & 0x3f));
    } else {
      byte(0xf0 | (code >> 18)), byte(0x80 | ((code >> 12) & 0x3f)), byte(0x80 | ((code >> 6) & 0x3f)),
          byte(0x80 | (code & 0x3f));
    }
  }

  void escape(std::string& out) {
    const char c = peek();
    ++at_;
    constexpr std::string_view kinds = "\"\\/bfnrt", meant = "\"\\/\b\f\n\r\t";
    if (const size_t kind = kinds.find(c); c != '\0' && kind != std::string_view::npos) {
      out += meant[kind];
      return;
    }
    if (c != 'u') fail("an unknown escape");
    uint32_t code = hex4();
    if (code >= 0xd800 && code < 0xdc00) {
      if (!word("\\u")) fail("half of a surrogate pair");
      const uint32_t low = hex4();
      if (low < 0xdc00 || low > 0xdfff) fail("half of a surrogate pair");
      code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    } else if (code >= 0xdc00 && code <= 0xdfff) {
      fail("half of a surrogate pair");
    }
    append_utf8(out, code);
  }

  std::string string() {
    std::string out;
    expect('"');
    for (;;) {
      if (!more()) fail("a string without its end");
      const char c = text_[at_++];
      if (c == '"') return out;
      if (static_cast<unsigned char>(c) < 0x20) fail("a control character in a string");
      if (c == '\\') {
        escape(out);
      } else {
        out += c;
      }
    }
  }

  Json number() {
    const size_t begin = at_;
    const auto digits = [&] {
      const size_t first = at_;
      while (peek() >= '0' && peek() <= '9') ++at_;
      if (at_ == first) fail("expected a value");
    };
    if (peek() == '-') ++at_;
    const size_t first = at_;
    digits();
    if (text_[first] == '0' && at_ > first + 1) fail("a number that begins with 0");
    bool whole = true;
    if (peek() == '.') ++at_, whole = false, digits();
    if (peek() == 'e' || peek() == 'E') {
      ++at_, whole = false;
      if (peek() == '+' || peek() == '-') ++at_;
      digits();
    }
    const std::string_view span = text_.substr(begin, at_ - begin);
    if (whole) {
      int64_t value = 0;
      if (std::from_chars(span.begin(), span.end(), value).ec != std::errc()) fail("an integer outside of 64 bits");
      return value;
    }
    double value = 0;
    if (std::from_chars(span.begin(), span.end(), value).ec != std::errc()) fail("a number outside of double's range");
    return value;
  }

  std::string_view text_;
  const std::string& what_;
  size_t at_ = 0;
};

void write_string(std::string& out, const std::string& text) {
  out += '"';
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20) {
      constexpr const char* digits = "0123456789abcdef";
      out += std::string("\\u00") + digits[byte / 16] + digits[byte % 16];
    } else {
      out += c;
    }
  }
  out += '"';
}

template <class T>
const T& as(const auto& value, const std::string& what, const char* kind) {
  if (const T* found = std::get_if<T>(&value)) return *found;
  throw Error(what + " is not " + kind);
}

}  // namespace

bool Json::boolean(const std::string& what) const { return as<bool>(value_, what, "true or false"); }
int64_t Json::integer(const std::string& what) const { return as<int64_t>(value_, what, "an integer"); }
double Json::number(const std::string& what) const {
  if (const auto* whole = std::get_if<int64_t>(&value_)) return static_cast<double>(*whole);
  return as<double>(value_, what, "a number");
}
const std::string& Json::text(const std::string& what) const { return as<std::string>(value_, what, "a string"); }
const Json::Array& Json::array(const std::string& what) const { return as<Array>(value_, what, "a list"); }
const Json::Object& Json::object(const std::string& what) const { return as<Object>(value_, what, "an object"); }

const Json* Json::find(const std::string& key) const {
  const auto* members = std::get_if<Object>(&value_);
  if (members == nullptr) return nullptr;
  for (const auto& [name, value] : *members) {
    if (name == key) return &value;
  }
  return nullptr;
}

const Json& Json::at(const std::string& key, const std::string& what) const {
  object(what);
  if (const Json* found = find(key)) return *found;
  throw Error(what + " has no '" + key + "'");
}

Json Json::parse(std::string_view text, const std::string& what) { return Reader(text, what).whole(); }

std::string Json::write(int levels) const {
  std::string out;
  write(out, levels, 0);
  return out;
}

void Json::write(std::string& out, int levels, int indent) const {
  const auto members = [&](char open, char close, const auto& all, const auto& one) {
    out += open;
    const bool lines = levels > 0 && !all.empty();
    for (size_t i = 0; i < all.size(); ++i) {
      if (i > 0) out += lines ? "," : ", ";
      if (lines) out += "\n" + std::string(static_cast<size_t>(indent) + 1, ' ');
      one(all[i]);
    }
    if (lines) out += "\n" + std::string(static_cast<size_t>(indent), ' ');
    out += close;
  };
  if (is_null()) {
    out += "null";
  } else if (const auto* truth = std::get_if<bool>(&value_)) {
    out += *truth ? "true" : "false";
  } else if (const auto* whole = std::get_if<int64_t>(&value_)) {
    out += std::to_string(*whole);
  } else if (const auto* real = std::get_if<double>(&value_)) {
    if (!std::isfinite(*real)) throw Error("a number that is not finite cannot be written as JSON");
    char digits[32];
    const auto end = std::to_chars(digits, digits + sizeof(digits), *real).ptr;
    const std::string_view span(digits, static_cast<size_t>(end - digits));
    out += span;
    if (span.find_first_of(".e") == std::string_view::npos) out += ".0";
  } else if (const auto* text = std::get_if<std::string>(&value_)) {
    write_string(out, *text);
  } else if (const auto* array = std::get_if<Array>(&value_)) {
    members('[', ']', *array, [&](const Json& item) { item.write(out, levels - 1, indent + 1); });
  } else {
    members('{', '}', std::get<Object>(value_), [&](const auto& member) {
      write_string(out, member.first);
      out += ": ";
      member.second.write(out, levels - 1, indent + 1);
    });
  }
}

}  // namespace plumb::save
