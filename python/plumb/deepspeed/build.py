"""From a config to what ``plumb.Engine`` is built with."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .._C import LossScale
from . import muon, optimizers, schedules, zero
from .config import Config, ConfigError

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


def check_mpu(mpu: Any, size: int) -> None:
    if mpu is None:
        return
    if not hasattr(mpu, "get_data_parallel_world_size"):
        raise ConfigError("mpu has no get_data_parallel_world_size(); expected a unit of model parallelism")
    if mpu.get_data_parallel_world_size() != size:
        raise ConfigError(
            f"mpu says that {mpu.get_data_parallel_world_size()} of {size} ranks are data parallel; model parallelism is not"
            " supported here"
        )


def offloads(config: Config, what: str) -> bool:
    """``what``: optimizer or param."""
    old = {"optimizer": "cpu_offload", "param": "cpu_offload_param"}[what]
    given = config[f"zero_optimization.offload_{what}"] or {}
    return given.get("device") == "cpu" or bool(config[f"zero_optimization.{old}"])


def cast(module: nn.Module, config: Config) -> None:
    """Parameters and buffers become what the config says. Parameters keep their identity."""
    half, buffers = config.half, config["data_types.buffer_dtype"]
    floats = (torch.float32, torch.float16, torch.bfloat16)
    for name, parameter in module.named_parameters():
        if parameter.device.type != "cpu" and (offloads(config, "optimizer") or offloads(config, "param")):
            raise ConfigError(f"offloading to the CPU is not supported here, and '{name}' is on {parameter.device}")
        if half is not None and parameter.dtype in floats and parameter.dtype != half:
            parameter.data = parameter.data.to(half)
    kept = _kept_in_f32(module, config)
    for name, buffer in module.named_buffers():
        wanted = torch.float32 if kept(name) else buffers
        if wanted is not None and buffer.dtype in floats:
            buffer.data = buffer.data.to(wanted)


def _kept_in_f32(module: nn.Module, config: Config) -> Callable[[str], bool]:
    """Whether a buffer of this name is f32 beside half-precision parameters. A name of the list matches anywhere in the
    buffer's; models of transformers bring lists of their own, of which one is for f16 alone."""
    given, patterns = config["data_types.keep_in_fp32_modules"], []
    if config.half is None:
        return lambda name: False
    if given == "auto":
        lists = ("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules")[: 2 if config.half == torch.float16 else 1]
        for owner, child in module.named_modules():
            inside = f"^{re.escape(owner)}\\..*" if owner else ""
            patterns += [inside + _pattern(one) for each in lists for one in getattr(child, each, None) or ()]
    else:
        patterns = [_pattern(one) for one in given]
    found = re.compile("|".join(patterns)) if patterns else None
    return lambda name: found is not None and found.search(name) is not None


def _pattern(name: str) -> str:
    return name.replace("*", ".*")


def optimizer(module: nn.Module, config: Config, given: Any, parameters: Any) -> torch.optim.Optimizer | None:
    """The user's, or what his function returns, or what the config names."""
    # Also those that are frozen: who unfreezes them later wants them trained.
    wanted = list(module.parameters() if parameters is None else parameters)
    kind = config["optimizer.type"]
    if given is not None:
        made = given if isinstance(given, torch.optim.Optimizer) else given(wanted) if callable(given) else None
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(
                f"the optimizer is a {type(given).__name__}; expected a torch.optim object, or a function of parameters that"
                " returns one"
            )
        return made
    if kind is None:
        return None
    if not wanted or (parameters is None and not any(p.requires_grad for p in wanted)):
        raise ConfigError("the DeepSpeed config names an optimizer, and the model has no parameter that is trained")
    if kind.lower() == "muon":
        muon.choose(module)
    return optimizers.build(kind, config["optimizer.params"] or {}, wanted)


def scheduler(config: Config, given: Any, over: torch.optim.Optimizer | None, client_optimizer: Any) -> Any:
    """The user's, or what his function returns, or what the config names."""
    kind = config["scheduler.type"]
    if given is not None:
        if isinstance(given, torch.optim.lr_scheduler.LRScheduler):
            if not isinstance(client_optimizer, torch.optim.Optimizer):
                raise ConfigError(
                    "the lr_scheduler is an object over an optimizer, and the optimizer is none: pass the optimizer that it is"
                    " over, or a function of an optimizer"
                )
            return given
        return given if hasattr(given, "step") else given(over)
    if kind is None:
        return None
    if over is None:
        raise ConfigError("the DeepSpeed config names a scheduler, and there is no optimizer")
    return schedules.build(kind, config["scheduler.params"] or {}, over)


def loss_scale(config: Config) -> LossScale | None:
    if config["fp16.enabled"]:
        fixed = config["fp16.loss_scale"]
        if fixed:
            return LossScale(fixed, growth=1.0, minimum=fixed)
        return LossScale(
            2.0 ** config["fp16.initial_scale_power"],
            interval=config["fp16.loss_scale_window"],
            minimum=config["fp16.min_loss_scale"],
            hysteresis=config.hysteresis,
            consecutive_hysteresis=config["fp16.consecutive_hysteresis"],
            delay=1,
        )
    return None


def options(module: nn.Module, config: Config, has_optimizer: bool) -> dict[str, Any]:
    """Keyword arguments of ``plumb.Engine``."""
    stage = config["zero_optimization.stage"]
    result: dict[str, Any] = {
        "strategy": STRATEGIES[stage],
        "accumulate_dtype": config.sums,
        "loss_scale": loss_scale(config),
        "nonfinite": "skip" if config["bf16.enabled"] and config["bf16.check_grad_overflow"] else "continue",
    }
    if stage == 3:
        units = zero.units_of(module, config)
        shard = config["zero_optimization.mics_shard_size"]
        if units:
            result["units"] = units
            if shard != -1:
                result |= {"strategy": "hsdp", "mesh": (config.world_size // shard, shard)}
        else:
            result["strategy"] = STRATEGIES[2]  # all of it is under the persistence threshold
    if has_optimizer:
        result["master_weights"] = config.half is not None
    if config["gradient_clipping"] > 0:
        result["clip_norm"] = config["gradient_clipping"]
    if "zero_optimization.reduce_bucket_size" in config.was_given:
        result["bucket_bytes"] = min(25 << 20, 4 * config["zero_optimization.reduce_bucket_size"])
    return result
