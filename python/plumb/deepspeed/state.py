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
from . import checkpoint
from .config import Config, ConfigError

logger = logging.getLogger("plumb.deepspeed")


class State(nn.Module):
    """The part of ``DeepSpeedEngine`` that needs its module and its ``plumb.Engine`` alone."""

    module: nn.Module
    engine: Engine
    _config: Config
    _world: World
    _destroyed: bool
    loaded_checkpoint_dp_world_size: int | None = None
    loaded_checkpoint_mp_world_size: int | None = None

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

    def _gathers(self) -> bool:
        """Whether the config lets a whole model be made."""
        given = (
            self._config["zero_optimization.stage3_gather_16bit_weights_on_model_save"]
            or self._config["zero_optimization.stage3_gather_fp16_weights_on_model_save"]
        )
        return not self.zero_optimization_partition_weights() or bool(given)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """The whole model in one file, written by rank 0. False where stage 3 was not told to gather it."""
        if not self._gathers():
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

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """The whole model on rank 0, None on the others. Every rank calls it."""
        if not self._gathers():
            raise ConfigError("set 'zero_optimization.stage3_gather_16bit_weights_on_model_save' for a whole model from stage 3")
        state = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        return {name: value.cpu() if torch.is_tensor(value) else value for name, value in state.items()} if self._world.rank == 0 else None

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        if not self.zero_optimization_partition_weights():
            raise ConfigError("this function requires ZeRO-3 mode")
        return self._consolidated_16bit_state_dict(exclude_frozen_parameters)

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves all that a run needs to go on, at the boundary of accumulation; every rank calls it.

        Complete or absent, and loaded by any stage and any number of ranks. ``client_state`` (rank 0's) may hold tensors,
        numbers, strings, lists and dictionaries. A ``plumb.SaveError``, on every rank, leaves earlier checkpoints as they were.
        """
        return checkpoint.save(self._self(), save_dir, tag, client_state, save_latest, exclude_frozen_parameters)

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Goes on from the checkpoint ``tag``, or the one that ``latest`` names: its path, and the ``client_state``.

        (None, None) where there is no ``latest``. What does not fit is an error before anything has changed.
        """
        return checkpoint.load(
            self._self(), load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only,
            custom_load_fn,
        )  # fmt: skip

    def _self(self) -> Any:
        if self._destroyed:
            raise ConfigError("this engine was destroyed; initialize a new one")
        return self

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
