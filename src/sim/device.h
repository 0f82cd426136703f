// The device as c10 and ATen see it: guard, events, hooks.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace plumb::sim {

const c10::impl::DeviceGuardImplInterface* device_guard();
void register_hooks();

}  // namespace plumb::sim
