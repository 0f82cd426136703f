// Sockets by themselves: what is asked of connections that are broken.
#include "backend/sockets.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace plumb {
namespace {

using ::testing::HasSubstr;

// However many connections there are, and whoever asks: over one that is broken nothing comes, and that is said at once.
TEST(Sockets, NothingIsWaitedForOverBrokenConnections) {
  for (const int size : {2, 5, 9, 10, 20}) {
    Sockets sockets(c10::make_intrusive<c10d::HashStore>(), 0, size, "127.0.0.1");
    const at::Tensor memory = at::zeros({1}, at::kLong);
    const Sockets::Span span{memory, static_cast<char*>(memory.data_ptr()), sizeof(int64_t)};
    std::vector<Sockets::Ref> all;
    const auto ask = [&] {
      for (int peer = 1; peer < size; ++peer) {
        all.push_back(sockets.receive(peer, Sockets::Lane::control, 7, span));
        all.push_back(sockets.send(peer, Sockets::Lane::issued, 7, span));
      }
    };
    ask();  // before it breaks
    sockets.close("is lost");
    ask();
    sockets.move();
    ask();
    for (size_t i = 0; i < all.size(); ++i) {
      EXPECT_TRUE(all[i]->ended) << i << " of " << size;
      EXPECT_THAT(all[i]->failure, HasSubstr(" is lost")) << i << " of " << size;
    }
  }
}

}  // namespace
}  // namespace plumb
