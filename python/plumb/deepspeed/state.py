"""What of DeepSpeed's engine saves and loads."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from .._C import World
from ..engine import Engine
from .config import Config, ConfigError

logger = logging.getLogger("plumb.deepspeed")


class State(nn.Module):
    """The part of ``DeepSpeedEngine`` that needs its module and its ``plumb.Engine`` alone."""

    module: nn.Module
    engine: Engine
    _config: Config
    _world: World
    _destroyed: bool

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    def zero_optimization_partition_weights(self) -> bool:
        return bool(self._config["zero_optimization.stage"] >= 3)

    def _whole(self, write: bool = False) -> contextlib.AbstractContextManager[Any]:
        shards = self.zero_optimization_partition_weights() and not self._destroyed
        return self.engine.gathered(self.module, write=write) if shards or write else contextlib.nullcontext()

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The module's, with whole parameters, whatever the stage. Every rank calls it."""
        with self._whole():
            state = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
            if exclude_frozen_parameters:
                for name, parameter in self.module.named_parameters():
                    if not parameter.requires_grad:
                        state.pop(prefix + name, None)
            if self.zero_optimization_partition_weights() and not keep_vars:
                for name, value in state.items():
                    state[name] = value.detach().clone() if torch.is_tensor(value) else value
        return dict(state)

    def load_module_state_dict(
        self,
        state_dict: Any,
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Into whole parameters; rank 0's values are everybody's."""
        with self._whole(write=True):
            if custom_load_fn is not None:
                custom_load_fn(src=state_dict, dst=self.module)
            else:
                self.module.load_state_dict(state_dict, strict=strict)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        with self._whole():
            state = super().state_dict(*args, **kwargs)
            if self.zero_optimization_partition_weights() and not kwargs.get("keep_vars", False):
                for name, value in state.items():
                    state[name] = value.detach().clone() if torch.is_tensor(value) else value
        return state

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        with self._whole(write=True):
            return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """The whole model in one file, written by rank 0. False where stage 3 was not told to gather it."""
        gathers = (
            self._config["zero_optimization.stage3_gather_16bit_weights_on_model_save"]
            or self._config["zero_optimization.stage3_gather_fp16_weights_on_model_save"]
        )
        if self.zero_optimization_partition_weights() and not gathers:
            logger.warning(
                "did not save the model %s because 'stage3_gather_16bit_weights_on_model_save' is false", save_filename
            )
            return False
        state = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        if self._world.rank == 0:
            os.makedirs(save_dir, exist_ok=True)
            torch.save(state, os.path.join(save_dir, save_filename))
        if self._world.size > 1:
            self._world.barrier()
        return True

    save_fp16_model = save_16bit_model

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        raise ConfigError("save_checkpoint is not supported yet; use module_state_dict() and optimizer.state_dict() on each rank")

    def load_checkpoint(self, load_dir: str, tag: str | None = None, **_: Any) -> tuple[str | None, Any]:
        raise ConfigError("load_checkpoint is not supported yet; use load_module_state_dict() and optimizer.load_state_dict()")

    def offload_states(
        self,
        include: Iterable[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """On the CPU everything is there already."""
        if self.device.type != "cpu":
            raise ConfigError(f"offload_states is not supported for parameters on {self.device}")

    def reload_states(self, non_blocking: bool = False) -> None:
        self.offload_states()
