// JSON, as properties: any value there is, written in any way the standard allows.
#include "save/json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <random>

#include "save/support/refused.h"

namespace plumb::save {
namespace {

using test::refused;
using ::testing::HasSubstr;

// A value as the test sees it.
struct Tree {
  enum class Kind { null, boolean, integer, real, text, array, object };
  Kind kind = Kind::null;
  bool truth = false;
  int64_t whole = 0;
  double real = 0;
  std::vector<uint32_t> text;                                   // code points
  std::vector<std::pair<std::vector<uint32_t>, Tree>> members;  // of an array: without their keys
};

class Some {
 public:
  explicit Some(uint64_t seed) : random_(seed) {}
  size_t below(size_t bound) { return random_() % bound; }

  std::vector<uint32_t> text() {
    // The edges of what one, two, three and four bytes hold, of control characters and of surrogates.
    constexpr std::array<uint32_t, 22> edges = {0,       1,        0x1f,  0x20,  '"',    '\\',   '/',    0x7f,
                                                0x80,    0x7ff,    0x800, 0xfff, 0xd7ff, 0xe000, 0xfffd, 0xffff,
                                                0x10000, 0x10ffff, '\b',  '\f',  '\n',   '\t'};
    std::vector<uint32_t> points(below(6));
    for (uint32_t& point : points)
      point = below(2) ? edges[below(edges.size())] : 'a' + static_cast<uint32_t>(below(26));
    return points;
  }
  Tree tree(int depth) {
    Tree tree;
    tree.kind = static_cast<Tree::Kind>(below(depth > 0 ? 7 : 5));
    tree.truth = below(2) == 1;
    constexpr std::array<int64_t, 7> wholes = {
        0, -1, 7, 9007199254740993, std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min(), -120};
    tree.whole = wholes[below(wholes.size())];
    constexpr std::array<double, 9> reals = {0.1,        -0.5, 1e300, 5e-324, 3, -2e22, 1.7976931348623157e308,
                                             123456.789, 1e-7};
    tree.real = reals[below(reals.size())];
    tree.text = text();
    if (tree.kind == Tree::Kind::array || tree.kind == Tree::Kind::object) {
      const size_t count = below(4);
      for (size_t i = 0; i < count; ++i) {
        auto key = text();
        key.push_back('0' + static_cast<uint32_t>(i));  // each once
        tree.members.emplace_back(std::move(key), this->tree(depth - 1));
      }
    }
    return tree;
  }

 private:
  std::mt19937_64 random_;
};

std::string utf8(const std::vector<uint32_t>& points) {
  std::string out;
  for (const uint32_t point : points) {
    const int more = point < 0x80 ? 0 : point < 0x800 ? 1 : point < 0x10000 ? 2 : 3;
    constexpr std::array<uint32_t, 4> leads = {0x00, 0xc0, 0xe0, 0xf0};
    out += static_cast<char>(leads[static_cast<size_t>(more)] + (point >> (6 * more)));
    for (int left = more - 1; left >= 0; --left) out += static_cast<char>(0x80 + ((point >> (6 * left)) % 64));
  }
  return out;
}

// The text of a value, each time in another one of the ways that mean it.
std::string any_text(const Tree& tree, Some& some) {
  const auto blank = [&] {
    std::string out;
    while (some.below(3) == 0) out += " \t\r\n"[some.below(4)];
    return out;
  };
  const auto string = [&](const std::vector<uint32_t>& points) {
    std::string out = "\"";
    const auto unit = [&](uint32_t value) {
      std::array<char, 8> digits;
      std::snprintf(digits.data(), digits.size(), some.below(2) ? "\\u%04x" : "\\u%04X", value);
      out += digits.data();
    };
    for (const uint32_t point : points) {
      constexpr std::string_view shorts = "\"\\/\b\f\n\r\t", letters = "\"\\/bfnrt";
      const size_t known = point < 0x80 ? shorts.find(static_cast<char>(point)) : std::string_view::npos;
      if (point != 0 && known != std::string_view::npos && some.below(2)) {
        out += std::string("\\") + letters[known];
      } else if (point < 0x20 || point == '"' || point == '\\' || some.below(3) == 0) {
        if (point < 0x10000) {
          unit(point);
        } else {
          unit(0xd800 + ((point - 0x10000) >> 10));
          unit(0xdc00 + ((point - 0x10000) & 0x3ff));
        }
      } else {
        out += utf8({point});
      }
    }
    return out + "\"";
  };
  std::string out;
  switch (tree.kind) {
    case Tree::Kind::null:
      out = "null";
      break;
    case Tree::Kind::boolean:
      out = tree.truth ? "true" : "false";
      break;
    case Tree::Kind::integer:
      out = std::to_string(tree.whole);
      break;
    case Tree::Kind::real: {
      std::array<char, 40> digits;
      constexpr std::array<const char*, 3> forms = {"%.17e", "%.17E", "%.20e"};
      std::snprintf(digits.data(), digits.size(), forms[some.below(forms.size())], tree.real);
      out = digits.data();
      break;
    }
    case Tree::Kind::text:
      out = string(tree.text);
      break;
    default: {
      const bool object = tree.kind == Tree::Kind::object;
      out = (object ? "{" : "[") + blank();
      for (size_t i = 0; i < tree.members.size(); ++i) {
        if (i > 0) out += "," + blank();
        if (object) out += string(tree.members[i].first) + blank() + ":" + blank();
        out += any_text(tree.members[i].second, some);
      }
      out += object ? "}" : "]";
    }
  }
  return blank() + out + blank();
}

Json json_of(const Tree& tree) {
  switch (tree.kind) {
    case Tree::Kind::null:
      return {};
    case Tree::Kind::boolean:
      return tree.truth;
    case Tree::Kind::integer:
      return tree.whole;
    case Tree::Kind::real:
      return tree.real;
    case Tree::Kind::text:
      return utf8(tree.text);
    case Tree::Kind::array: {
      Json::Array items;
      for (const auto& [key, value] : tree.members) items.push_back(json_of(value));
      return items;
    }
    default: {
      Json::Object members;
      for (const auto& [key, value] : tree.members) members.emplace_back(utf8(key), json_of(value));
      return members;
    }
  }
}

// It is this value, and no other question about it has an answer.
void expect_same(const Tree& tree, const Json& json) {
  using Kind = Tree::Kind;
  const auto is = [&](Kind kind) { return tree.kind == kind; };
  EXPECT_EQ(json.is_null(), is(Kind::null));
  const auto asked = [&](bool right, const auto& ask, const char* said) {
    EXPECT_EQ(refused([&] { ask(); }), right ? "" : std::string("it is not ") + said);
  };
  asked(is(Kind::boolean), [&] { EXPECT_EQ(json.boolean("it"), tree.truth); }, "true or false");
  asked(is(Kind::integer), [&] { EXPECT_EQ(json.integer("it"), tree.whole); }, "an integer");
  asked(
      is(Kind::integer) || is(Kind::real),
      [&] { EXPECT_EQ(json.number("it"), is(Kind::integer) ? static_cast<double>(tree.whole) : tree.real); },
      "a number");
  asked(is(Kind::text), [&] { EXPECT_EQ(json.text("it"), utf8(tree.text)); }, "a string");
  asked(
      is(Kind::array),
      [&] {
        const Json::Array& items = json.array("it");
        ASSERT_EQ(items.size(), tree.members.size());
        for (size_t i = 0; i < items.size(); ++i) expect_same(tree.members[i].second, items[i]);
      },
      "a list");
  asked(
      is(Kind::object),
      [&] {
        const Json::Object& members = json.object("it");
        ASSERT_EQ(members.size(), tree.members.size());
        for (size_t i = 0; i < members.size(); ++i) {
          EXPECT_EQ(members[i].first, utf8(tree.members[i].first));
          expect_same(tree.members[i].second, members[i].second);
          EXPECT_EQ(&json.at(members[i].first, "it"), &members[i].second);
          EXPECT_EQ(json.find(members[i].first), &members[i].second);
        }
        EXPECT_EQ(refused([&] { json.at("absent", "it"); }), "it has no 'absent'");
      },
      "an object");
  EXPECT_EQ(json.find("absent"), nullptr);
}

TEST(JsonProperty, AnyTextOfAValueIsThatValue) {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(seed);
    Some some(seed);
    const Tree tree = some.tree(3);
    expect_same(tree, Json::parse(any_text(tree, some), "it"));
  }
}

TEST(JsonProperty, WhatIsWrittenIsReadAgain) {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(seed);
    Some some(seed);
    const Tree tree = some.tree(3);
    const std::string text = json_of(tree).write(static_cast<int>(some.below(4)));
    for (const char c : text) EXPECT_TRUE(static_cast<unsigned char>(c) >= 0x20 || c == '\n') << text;
    expect_same(tree, Json::parse(text, "it"));
  }
}

TEST(JsonProperty, NoPartOfATextAndNothingAfterItIsOne) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    Some some(seed);
    Tree tree;
    tree.kind = seed % 2 ? Tree::Kind::object : Tree::Kind::array;
    tree.members.emplace_back(std::vector<uint32_t>{'k'}, some.tree(2));
    tree.members.emplace_back(std::vector<uint32_t>{'l'}, some.tree(2));
    const std::string text = json_of(tree).write();
    for (size_t length = 0; length < text.size(); ++length) {
      EXPECT_THAT(refused([&] { Json::parse(text.substr(0, length), "it"); }), HasSubstr("no valid JSON")) << text;
    }
    for (const std::string& more : {std::string("]"), std::string("}"), std::string(","), std::string("0"),
                                    std::string("\"\""), std::string("x"), std::string(1, '\0')}) {
      EXPECT_EQ(refused([&] { Json::parse(text + more, "it"); }),
                "it is no valid JSON: text after its end at byte " + std::to_string(text.size()));
    }
  }
}

TEST(JsonProperty, SaysWhereItIsWrong) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"[1, 2,]", "expected a value at byte 6"},
      {"{\"a\" 1}", "expected ':' at byte 5"},
      {"{\"a\":1 \"b\":2}", "expected ',' at byte 7"},
      {"[1 2]", "expected ',' at byte 3"},
      {std::string("[1\0]", 4), "expected ',' at byte 2"},
      {"{1:2}", "expected '\"' at byte 1"},
      {"\"\\ud83dx\"", "half of a surrogate pair"},
      {"\"\\ud83d\\u0041\"", "half of a surrogate pair"},
      {"\"\\ud83d\\ue000\"", "half of a surrogate pair"},
      {"\"\\udbff\\udbff\"", "half of a surrogate pair"},
      {"\"\\udfff\"", "half of a surrogate pair"},
      {"\"\\u00:0\"", "a \\u without four hexadecimal digits"},
      {"\"\\u00/0\"", "a \\u without four hexadecimal digits"},
      {"\"\\u00`0\"", "a \\u without four hexadecimal digits"},
      {"\"\\u00@0\"", "a \\u without four hexadecimal digits"},
      {"\"\\u00G0\"", "a \\u without four hexadecimal digits"},
      {std::string("\"\\\0\"", 4), "an unknown escape"},
      {"\"a\x1f\"", "a control character"},
      {"-", "expected a value"},
      {"-01", "a number that begins with 0"},
      {"1.5.", "text after its end at byte 3"},
      {"1e+", "expected a value at byte 3"},
      {"-9223372036854775809", "an integer outside of 64 bits"},
      {"falsy", "an unknown word"},
  };
  for (const auto& [text, why] : cases) {
    EXPECT_THAT(refused([&] { Json::parse(text, "it"); }), HasSubstr("it is no valid JSON: " + why)) << text;
  }
}

TEST(JsonProperty, IsAsDeepAsItSays) {
  const auto nested = [](size_t depth, const std::string& open, const std::string& inside, const std::string& close) {
    std::string text;
    for (size_t i = 0; i < depth; ++i) text += open;
    text += inside;
    for (size_t i = 0; i < depth; ++i) text += close;
    return text;
  };
  for (const auto& [open, close] : {std::pair("[", "]"), std::pair("{\"a\":", "}")}) {
    EXPECT_EQ(refused([&] { Json::parse(nested(64, open, "1", close), "it"); }), "") << open;
    EXPECT_THAT(refused([&] { Json::parse(nested(65, open, "1", close), "it"); }), HasSubstr("nested too deeply"));
  }
}

TEST(JsonProperty, LaysOutAsManyLevelsAsItIsTold) {
  const Json value = Json::Object{{"a", Json::Array{1, Json::Array{2, 3}}}, {"b", Json::Object{}}, {"c", 1.0}};
  EXPECT_EQ(value.write(), "{\"a\": [1, [2, 3]], \"b\": {}, \"c\": 1.0}");
  EXPECT_EQ(value.write(1), "{\n \"a\": [1, [2, 3]],\n \"b\": {},\n \"c\": 1.0\n}");
  EXPECT_EQ(value.write(2), "{\n \"a\": [\n  1,\n  [2, 3]\n ],\n \"b\": {},\n \"c\": 1.0\n}");
  EXPECT_EQ(Json("\x01\x1f\n").write(), "\"\\u0001\\u001f\\u000a\"");
  for (const double none : {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THAT(refused([&] { (void)Json(none).write(); }), HasSubstr("not finite"));
  }
}

}  // namespace
}  // namespace plumb::save
