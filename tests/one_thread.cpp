// One thread per rank, also where a test is run by hand: ranks are already as many as the cores, and what fork() leaves of a pool
// of threads is nobody to wait for.
#include <ATen/Parallel.h>

#include <cstdlib>

namespace {

[[maybe_unused]] const bool one_thread = [] {
  if (std::getenv("OMP_NUM_THREADS") == nullptr) at::set_num_threads(1);
  return true;
}();

}  // namespace
