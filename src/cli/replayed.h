// Forward and backward of a step as a graph (--graph): recorded once, replayed in every further step. The update stays outside,
// since its learning rate is another one each time.
#pragma once

#include <vector>

#include "cli/job.h"
#include "lane/graph.h"

namespace plumb::cli {

class Replayed {
 public:
  // What is current on this thread until it ends: a stream of its own.
  Replayed(Engine& engine, Job& job, const at::Device& device);

  // The gradients of these micro-batches, afresh; their losses. The first steps run as they are: they lay out memory.
  std::vector<double> run(const std::vector<model::Batch>& batches);

 private:
  std::vector<at::Tensor> run_now(const std::vector<model::Batch>& batches);

  Engine& engine_;
  Job& job_;
  Graph graph_;
  int64_t steps_ = 0;
  std::vector<model::Batch> inputs_;  // what the graph reads
  std::vector<at::Tensor> losses_;    // and writes
};

}  // namespace plumb::cli
