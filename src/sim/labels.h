// Words for reports: interned strings, the scope an operation is enqueued in, and the names of memory.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace plumb::sim {

// A string as a number. Interned strings live as long as the process; the caller holds the machine's lock.
using Label = uint32_t;
Label intern(std::string_view text);
const std::string& text_of(Label label);
uint64_t hash_of(Label label);  // of the text: the same in every process

// The scopes open on this thread (autograd carries them into its own threads), outermost first; 0 when none is.
Label current_scope();
// The autograd node that is running on this thread; 0 when none is.
Label current_node();

// Names of byte ranges; the smallest range around an address wins.
class Names {
 public:
  void set(char* begin, char* end, const std::string& name);
  void drop(char* begin, char* end);
  // The name and start of the smallest named range around `at`; an empty name when there is none.
  std::pair<std::string, char*> find(char* at, char* search_from) const;
  void clear() { names_.clear(); }

 private:
  std::map<std::pair<char*, char*>, std::string> names_;
};

}  // namespace plumb::sim
