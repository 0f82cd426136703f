"""``initialize``: from a model and a config to an engine; and ``torch.distributed`` from a launcher's variables."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..given import refuse
from ..world import world
from .config import ConfigError
from .engine import DeepSpeedEngine


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """The engine, its optimizer, a loader of ``training_data`` and the learning-rate schedule, as the config says.

    >>> import torch, plumb.deepspeed
    >>> model = torch.nn.Linear(4, 1)
    >>> config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    >>> engine, optimizer, _, _ = plumb.deepspeed.initialize(model=model, config=config)
    >>> engine.backward(engine(torch.ones(2, 4)).mean()).requires_grad
    True
    >>> engine.step()
    >>> engine.global_steps
    1
    """
    if dist_init_required is not False:
        init_distributed(distributed_port=distributed_port)
    try:
        config = _checked(args, model, config_params if config is None else config, mesh_param)
    except ConfigError as error:
        refuse(world(), error)  # the others are building their engines
        raise
    assert model is not None
    engine = DeepSpeedEngine(
        args, model, optimizer, model_parameters, training_data, lr_scheduler, mpu, dist_init_required, collate_fn, config
    )
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _checked(args: Any, model: Any, config: Any, mesh_param: Any) -> Any:
    """The config, wherever it was given."""
    if model is None:
        raise ConfigError("deepspeed.initialize requires a model")
    if mesh_param is not None and tuple(mesh_param)[1:] not in ((), (1,)):
        raise ConfigError(f"mesh_param is {mesh_param}; sequence parallelism is not supported, leave it out")
    from_args, old = getattr(args, "deepspeed_config", None), getattr(args, "deepscale_config", None)
    if from_args is not None and old is not None:
        raise ConfigError("Not sure how to proceed, we were given both a deepscale_config and deepspeed_config")
    from_args = old if from_args is None else from_args
    if from_args is not None:
        if config is not None:
            raise ConfigError(
                "Not sure how to proceed, we were given deepspeed configs in the deepspeed arguments and deepspeed.initialize()"
                " function call"
            )
        config = from_args
    if config is None:
        raise ConfigError("DeepSpeed requires --deepspeed_config to specify configuration file")
    return config


def init_distributed(
    dist_backend: str | None = None, auto_mpi_discovery: bool = True, distributed_port: int = 29500, **_: Any
) -> None:
    """``torch.distributed`` from the variables of the launcher, if there is one and nobody did so before."""
    if not dist.is_available() or dist.is_initialized() or "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(distributed_port))
    dist.init_process_group(dist_backend or ("nccl" if torch.cuda.is_available() else "gloo"))
