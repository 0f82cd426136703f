// What all collectives of a group share: their checks, the form in which memory travels, and the watched wait.
#pragma once

#include "world/world_impl.h"

namespace plumb {

void check_contiguous(const Group::Impl& group, const char* verb, const at::Tensor& tensor);
void check_parts(const Group::Impl& group, const char* verb, const at::Tensor& full, const at::Tensor& shard);

// The memory of a contiguous tensor as real numbers.
at::Tensor as_real(const at::Tensor& tensor);
// What a part takes in a message of several, so that the next begins where a number of any type may.
int64_t padded(const at::Tensor& part);

Cargo cargo_of(const Ticket& ticket);
// `work`, issued on `group`, to be waited for.
Pending under_way(Group::Impl& group, c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> keep, Ticket ticket,
                  Wire::Moment arrival, std::function<void()> finish);

}  // namespace plumb
