// --nonfinite error and --trace-nonfinite: where a NaN or an inf began.
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cli/job.h"

namespace plumb::cli {

// torch's generators, as they are now and again as they were.
std::vector<at::Tensor> generator_states();
void set_generators(const std::vector<at::Tensor>& states);

// "step 3: the loss of micro-batch 0 on rank 1 is not finite (--nonfinite error)".
std::string loss_not_finite(int64_t step, int64_t micro, int rank);

// Throws NotFinite on every rank where some micro-batch's loss is not finite: the first one, of the lowest rank. Collective.
void check_losses(const World& world, const std::vector<double>& losses, int64_t step);

// Runs the micro-batches of this step again, on all ranks, from `generators`, and says in which rank and micro-batch which
// operation made the first NaN or inf. Gradients are not to be used afterwards. Collective.
std::string trace_origin(Engine& engine, Job& job, const std::vector<model::Batch>& batches,
                         const std::vector<at::Tensor>& generators, int64_t step);

}  // namespace plumb::cli
