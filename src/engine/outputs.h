// How the operator plumb::deliver.output (outputs.cpp) finds the output of a node that is meant.
#pragma once

#include <cstdint>

namespace torch::autograd {
struct Node;
}

namespace plumb {

// Which output of a node is the gradient of its function's argument of that number; -1: none. By itself the same number;
// functions written in Python have outputs for those arguments alone that are tensors.
using OutputFor = int64_t (*)(const torch::autograd::Node& node, int64_t argument);
void find_outputs_with(OutputFor find);

// So far in this process: outputs that an engine took where they were made, and those that went on to autograd.
struct OutputCounts {
  int64_t handed_over = 0;
  int64_t handed_back = 0;
};
OutputCounts output_counts();

}  // namespace plumb
