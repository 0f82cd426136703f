// Gathers: how homes are filled with every rank's shard, when, and in which order.
//
// Ranks that share memory read each other's shards in place, alone. Others gather by collectives, a window ahead: what is used
// next, as after the last backward. Where a message can say what it gathers they do so in program order and without asking, and
// what they gathered is compared with the facts of the pass. Where a backend would mix up what ranks gather they ask first, a
// window at a time: all take part in whatever anybody needs, so that ranks may use different units.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "layout/digest.h"
#include "unit/home.h"
#include "unit/order.h"

namespace plumb {

class Gathers {
 public:
  Gathers(Reducer& reducer, std::deque<Home>& homes);

  void fill(Home& home);      // it is whole for the current stream
  void release(Home& home);   // also one that is on its way
  void set_down(Home& home);  // nobody uses it: kept, out of reach, when it is used soon; otherwise released
  void backward_ended();

  // Whether ranks ask before they gather; then this rank takes part in what others need, until none of them wants anything.
  bool asks() const { return asks_; }
  void serve(const Where& where);

  // Everything that was sent for has come; a digest of all that was, in order. 0 where nobody has to gather alike.
  int64_t settle();
  // Ranks found different ones: an Error that names the first units that differ. Collective.
  [[noreturn]] void explain(const Where& where);

  int64_t count() const { return count_; }  // so far
  void set_window(int64_t bytes);

 private:
  void read_in_place(Home& home);
  void gather_together(Home& home);
  void look_ahead();
  std::vector<Home*> due(const Home& now) const;
  void send_for(const std::vector<Home*>& homes);
  void send_message(const std::vector<Home*>& homes);
  bool take_part(Home* wanted, const std::vector<Home*>& ahead, const Where& where);
  void gather(Home& home);
  void lend(Home& home, const Where& where);
  void begin(Home& home);
  void receive(Home& home);
  void lose();
  void release_ahead();
  Where place_of(const Home& home) const;

  Reducer& reducer_;
  std::deque<Home>& homes_;
  std::unordered_map<int, Home*> home_of_bucket_;      // by the bucket's index
  bool asks_ = false;                                  // of any home
  Order order_;                                        // of gathers by collectives
  int64_t window_bytes_ = 0;                           // of the window in which homes are whole before their use
  std::vector<Home*> soon_;                            // the window
  std::deque<std::shared_ptr<Pending>> on_their_way_;  // messages, in the order of their sending
  Digest sent_for_;                                    // every gather so far, in order
  std::vector<int64_t> sent_since_;                    // those since ranks last but one compared
  size_t compared_ = 0;                                // how many of them the last comparison covers
  int64_t count_ = 0;
};

}  // namespace plumb
