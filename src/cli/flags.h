// Tables of flags: name, where the value goes, and what --help says. The command line and TOML read them alike.
#pragma once

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "cli/settings.h"

namespace plumb::cli {

using Target = std::variant<int64_t*, double*, std::string*, bool*>;

struct Flag {
  std::string name;  // without dashes; the same word is the key in a TOML file
  std::string group;
  std::string value;  // what --help calls the value
  std::string help;
  Target target;
};

// The table of `plumb train`, bound to the fields of `settings`.
std::vector<Flag> flags(Settings& settings);

struct Parsed {
  std::vector<std::string> given;     // names of the flags that were there
  std::optional<std::string> config;  // the file that --config named
  bool help = false;                  // nothing was read then
};

// Reads the words after `plumb <command>` into the table's fields. Throws UsageError.
Parsed parse(const std::string& command, const std::vector<std::string>& words, const std::vector<Flag>& table);

// The table for --help, with the defaults that its fields hold.
std::string describe(const std::vector<Flag>& table);

// Reads `text` into the flag's field; a UsageError says what kind of value was expected.
void assign(const Flag& flag, const std::string& text, const std::string& where);

// Sets every key of the file at `path` that `given` (names of flags seen on the command line) does not hold.
// Returns the names that the file sets.
std::vector<std::string> read_toml(const std::string& path, const std::vector<Flag>& table,
                                   const std::vector<std::string>& given);

}  // namespace plumb::cli
