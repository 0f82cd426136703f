// Everything: the world, the engine, units, checkpointing, the optimizers, checkpoints, traces.
#pragma once

#include <plumb/checkpoint.h>
#include <plumb/engine.h>
#include <plumb/error.h>
#include <plumb/optim.h>
#include <plumb/save.h>
#include <plumb/strategy.h>
#include <plumb/trace.h>
#include <plumb/unit.h>
#include <plumb/world.h>
