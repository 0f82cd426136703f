// Prints the table of operations in docs/sim.md: build/bin/example_sim_coverage
#include <plumb/sim.h>

#include <iostream>

int main() { std::cout << plumb::sim::coverage_table(); }
