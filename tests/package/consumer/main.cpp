// A user's program: two ranks meet through the installed package.
#include <plumb/world.h>

#include <atomic>
#include <cstdio>

int main() {
  std::atomic<int> sum{0};
  plumb::run_local(2, [&](plumb::World world) {
    sum += world.rank() + world.size();
    world.barrier();
  });
  if (sum != 5) return 1;
  std::puts("consumer: 2 ranks agree");
}
