// The order in which units are gathered up to the end of a backward, as up to the last one: what to gather ahead.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

namespace plumb {

class Order {
 public:
  // `home` is used now.
  void use(int home) {
    now_.push_back(home);
    auto here = last_.begin() + static_cast<ptrdiff_t>(std::min(at_, last_.size()));
    here = std::find(here, last_.end(), home);
    if (here == last_.end()) here = std::find(last_.begin(), last_.end(), home);
    known_ = here != last_.end();
    if (known_) at_ = static_cast<size_t>(here - last_.begin()) + 1;
  }

  // All that were used after it last time, in order.
  std::span<const int> following() const {
    return known_ ? std::span<const int>(last_).subspan(at_) : std::span<const int>();
  }

  // A backward has ended.
  void restart() {
    if (!now_.empty()) last_ = std::move(now_);
    now_.clear();
    at_ = 0;
    known_ = false;
  }

 private:
  std::vector<int> last_, now_;
  size_t at_ = 0;
  bool known_ = false;  // what was used now
};

}  // namespace plumb
