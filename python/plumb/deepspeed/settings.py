"""What of DeepSpeed's engine asks and sets: rates, sizes of batches, the world, the config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from . import build
from .config import ConfigError
from .methods import ANSWERS, GETTERS
from .optimizers import NAMES
from .state import State


class Settings(State):
    """The part of ``DeepSpeedEngine`` that runs nothing."""

    basic_optimizer: torch.optim.Optimizer | None
    client_optimizer: Any
    collate_fn: Callable[..., Any] | None
    train_micro_batch_size_per_gpu: Callable[[], int]  # as all of methods.GETTERS
    gradient_accumulation_steps: Callable[[], int]
    train_batch_size: Callable[[], int]
    zero_optimization_stage: Callable[[], int]

    def _needs_optimizer(self, what: str) -> None:
        if self._destroyed:
            raise ConfigError(f"{what}() of an engine that was destroyed; initialize a new one")
        if self.basic_optimizer is None:
            raise ConfigError(f"must provide optimizer during init in order to use {what}")

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """Weights whose gradients the config calls sparse; they are summed as dense ones."""
        kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
        named = self.module.named_modules() if self._config["sparse_gradients"] else ()
        return {f"{name}.weight" for name, module in named if isinstance(module, kinds)}

    # ---- rates

    def get_lr(self) -> list[float]:
        return self._of_groups("lr")

    def set_lr(self, lr: float) -> None:
        self._needs_optimizer("set_lr")
        self.engine.set_lr(lr)

    def get_type(self) -> list[Any]:
        return self._of_groups("type")

    def get_mom(self) -> list[Any]:
        return self._of_groups("momentum" if self.optimizer_name() in ("SGD", "RMSprop") else "betas")

    def _of_groups(self, key: str) -> list[Any]:
        groups = self.basic_optimizer.param_groups if self.basic_optimizer is not None else []
        return [group.get(key, 0.0) for group in groups]

    # ---- batches

    def get_batch_info(self) -> tuple[Any, Any, Any]:
        return self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """By another number of micro-batches."""
        part = self.train_micro_batch_size_per_gpu() * self.world_size
        if train_batch_size <= 0 or train_batch_size % part != 0:
            raise ConfigError("Train batch size must be divisible by micro-batch data parallelism")
        self._config.values["train_batch_size"] = train_batch_size
        self._config.values["gradient_accumulation_steps"] = train_batch_size // part

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        self._config.values["train_micro_batch_size_per_gpu"] = micro_batch_size
        self._config.values["train_batch_size"] = micro_batch_size * self.gradient_accumulation_steps() * self.world_size

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> torch.utils.data.DataLoader[Any]:
        """A loader of this rank's part of ``dataset``."""
        self._check_dataset(dataset)
        if data_sampler is None and hasattr(dataset, "__len__"):
            data_sampler = torch.utils.data.DistributedSampler(
                dataset, num_replicas=self.world_size, rank=self.global_rank, shuffle=route == "train"
            )
        return torch.utils.data.DataLoader(
            dataset,
            batch_size=self.train_micro_batch_size_per_gpu() if batch_size is None else batch_size,
            sampler=data_sampler,
            collate_fn=self.collate_fn if collate_fn is None else collate_fn,
            num_workers=num_local_io_workers or 0,
            pin_memory=pin_memory and self.device.type == "cuda",
            drop_last=self._config["dataloader_drop_last"],
        )

    @staticmethod
    def _check_dataset(dataset: Any) -> None:
        """An Error if there is nothing to load from it."""
        if not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")):
            raise ConfigError("Training data must be a torch Dataset")

    # ---- the world

    @property
    def world_size(self) -> int:
        return self._world.size

    dp_world_size = world_size

    @property
    def global_rank(self) -> int:
        return self._world.rank

    @property
    def local_rank(self) -> int:
        return self._world.local_rank

    @property
    def mp_world_size(self) -> int:
        return 1

    @property
    def data_parallel_group(self) -> Any:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None

    def get_data_parallel_rank(self) -> int:
        return self.global_rank

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_tensor_parallel_rank(self) -> int:
        return 0

    def get_sequence_parallel_group(self) -> None:
        return None

    # ---- what was configured

    def zero_cpu_offload(self) -> bool:
        return build.offloads(self._config, "optimizer")

    def zero_use_cpu_optimizer(self) -> bool:
        return self.zero_cpu_offload()

    @staticmethod
    def is_map_style_dataset(dataset: Any) -> bool:
        return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")

    @staticmethod
    def is_iterable_style_dataset(dataset: Any) -> bool:
        return isinstance(dataset, torch.utils.data.IterableDataset)

    def optimizer_name(self) -> str | None:
        if self.basic_optimizer is None:
            return None
        given: str | None = self._config["optimizer.type"]
        if self.client_optimizer is not None or given is None:
            return type(self.basic_optimizer).__name__
        return given.lower() if given.lower() in NAMES else given  # DeepSpeed's own are in small letters

    def zero_optimization(self) -> bool:
        return bool(self._config["zero_optimization.stage"] > 0)

    def zero_optimization_partition_gradients(self) -> bool:
        return bool(self._config["zero_optimization.stage"] >= 2)

    def dynamic_loss_scale(self) -> bool:
        return bool(self._config["fp16.loss_scale"] == 0)

    def initial_dynamic_scale(self) -> float:
        return float(2 ** self._config["fp16.initial_scale_power"])

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": self._config["fp16.loss_scale_window"],
            "delayed_shift": self._config["fp16.hysteresis"],
            "consecutive_hysteresis": self._config["fp16.consecutive_hysteresis"],
            "min_scale": self._config["fp16.min_loss_scale"],
        }

    def postscale_gradients(self) -> bool:
        return not self._config["prescale_gradients"]

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        model = self._config.half or torch.float32
        return model, self._config["data_types.grad_accum_dtype"] or model

    @property
    def communication_data_type(self) -> torch.dtype:
        return self._config.sums or torch.float32


def _getter(name: str, key: str) -> Callable[[Settings], Any]:
    def get(self: Settings) -> Any:
        return self._config[key]

    get.__name__, get.__doc__ = name, f"``{key}`` of the config."
    return get


def _answer(name: str, value: Any) -> Callable[[Settings], Any]:
    def get(self: Settings) -> Any:
        return value

    get.__name__, get.__doc__ = name, f"{value!r}: what it asks about is not here."
    return get


for _name, _key in GETTERS.items():
    setattr(Settings, _name, _getter(_name, _key))
for _name, _value in ANSWERS.items():
    setattr(Settings, _name, _answer(_name, _value))
