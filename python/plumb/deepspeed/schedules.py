"""DeepSpeed's learning-rate schedules, by the names and arguments of its config."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Union

import torch

from .config import ConfigError, nearest

PerGroup = Union[float, Sequence[float]]


class Schedule:
    """Sets the groups' rates after each step; ``last_batch_iteration`` is the number of the last one, -1 before the first."""

    def __init__(self, optimizer: Any, last_batch_iteration: int = -1) -> None:
        self.optimizer: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] | None = None

    def get_lr(self) -> list[float]:
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        if self._last_lr is None:
            raise ConfigError("need to call step() first")
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._set(self.get_lr())

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_batch_iteration = state["last_batch_iteration"]

    def _set(self, lrs: list[float]) -> None:
        for group, lr in zip(self.optimizer.param_groups, lrs, strict=True):
            if torch.is_tensor(group["lr"]):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self._last_lr = list(lrs)

    def _begin(self, lrs: list[float]) -> None:
        if self.last_batch_iteration == -1:
            self._set(lrs)

    def _each(self, name: str, value: PerGroup) -> list[float]:
        groups = len(self.optimizer.param_groups)
        if isinstance(value, (list, tuple)):
            if len(value) != groups:
                raise ConfigError(f"'{name}' has {len(value)} values, and the optimizer has {groups} groups")
            return [float(one) for one in value]
        if not isinstance(value, (int, float)):
            raise ConfigError(f"'{name}' is {value!r}; expected a number, or one for each of the optimizer's groups")
        return [float(value)] * groups


def _positive(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"{name} must be a positive integer, got {value}")
    return value


class _Warmup(Schedule):
    """The part of a schedule that rises, as a share of what it rises to."""

    def __init__(self, optimizer: Any, warmup_num_steps: int, warmup_type: str, last_batch_iteration: int) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if warmup_type not in ("log", "linear"):
            raise ConfigError(f"'warmup_type' is {warmup_type!r}; expected 'log' or 'linear'")
        self.warmup_num_steps = max(2, _positive("warmup_num_steps", warmup_num_steps))
        self.warmup_type = warmup_type

    def _warmup(self) -> float | None:
        """None once it is over."""
        step = self.last_batch_iteration
        if step >= self.warmup_num_steps:
            return None
        if self.warmup_type == "linear":
            return step / self.warmup_num_steps
        return math.log(step + 1) / math.log(self.warmup_num_steps)


class WarmupLR(_Warmup):
    """From ``warmup_min_lr`` to ``warmup_max_lr`` (the optimizer's own rates where it is not given), and then constant."""

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.min_lrs = self._each("warmup_min_lr", warmup_min_lr)
        self.max_lrs = self._each("warmup_max_lr", warmup_max_lr)
        self._begin(self.get_lr())

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        share = self._warmup()
        share = self._afterwards() if share is None else share
        return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _afterwards(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """As ``WarmupLR``, and then linearly down to ``warmup_min_lr`` at ``total_num_steps``."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _positive("total_num_steps", total_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _afterwards(self) -> float:
        left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Warmup):
    """The optimizer's own rates, from ``warmup_min_ratio`` of them up, and then as a cosine down to ``cos_min_ratio``."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        self.total_num_steps = _positive("total_num_steps", total_num_steps)
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.org_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._begin(self.get_lr())

    def get_lr_ratio(self) -> float:
        if self.last_batch_iteration < 0:
            return 0.0
        share = self._warmup()
        if share is not None:
            return self.warmup_min_ratio + share * (1.0 - self.warmup_min_ratio)
        gone = self.last_batch_iteration - self.warmup_num_steps + 1
        progress = min(1.0, gone / max(1, self.total_num_steps - self.warmup_num_steps))
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2)

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.org_lrs]


class LRRangeTest(Schedule):
    """Rates that grow without end, to find out how far they may."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._each("lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = _positive("lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate, self.staircase = lr_range_test_step_rate, lr_range_test_staircase
        self._begin(self.min_lr)

    def step(self, batch_iteration: int | None = None) -> None:
        super().step(batch_iteration)

    def get_lr(self) -> list[float]:
        intervals = (self.last_batch_iteration + 1) / self.step_size
        growth = 1 + self.step_rate * (math.floor(intervals) if self.staircase else intervals)
        return [lr * growth for lr in self.min_lr]


class OneCycle(Schedule):
    """One cycle up and down, momentum the other way, and then a decay."""

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.first = float(cycle_first_step_size)
        self.second = self.first if cycle_second_step_size is None else float(cycle_second_step_size)
        if self.first <= 0 or self.second < 0:
            raise ConfigError(
                f"cycle_first_step_size is {self.first:g} and cycle_second_step_size {self.second:g}; expected a positive number"
                " and none that is negative"
            )
        self.stairs = (
            cycle_first_stair_count,
            cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count,
        )
        self.decay_step_size, self.decay_lr_rate, self.decay_mom_rate = decay_step_size, decay_lr_rate, decay_mom_rate
        self.min_lrs = self._each("cycle_min_lr", cycle_min_lr)
        self.max_lrs = self._each("cycle_max_lr", cycle_max_lr)
        self.cycle_momentum = cycle_momentum and "betas" in self.optimizer.defaults
        self.min_moms = self._each("cycle_min_mom", cycle_min_mom)
        self.max_moms = self._each("cycle_max_mom", cycle_max_mom)
        self._begin(self.min_lrs)
        if self.last_batch_iteration == -1 and self.cycle_momentum:
            self._set_momentum([(mom, 0.99) for mom in self.min_moms])

    @property
    def total_size(self) -> float:
        return self.first + self.second

    def _height(self) -> float:
        """Between 0, the cycle's ends, and 1, its middle."""
        at = (self.last_batch_iteration + 1) % self.total_size
        rising = at <= self.first
        height = at / self.first if rising else (self.total_size - at) / self.second
        stairs = self.stairs[0 if rising else 1]
        return math.floor(height * stairs + 1e-9) / stairs if stairs > 0 else height

    def _decay(self, rate: float) -> float:
        if self.decay_step_size == 0 or rate == 0:
            return 1.0
        return 1 + rate * (self.last_batch_iteration - self.total_size + 1) / self.decay_step_size

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration >= self.total_size:
            return [lr / self._decay(self.decay_lr_rate) for lr in self.min_lrs]
        height = self._height()
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration >= self.total_size:
            return [(mom * self._decay(self.decay_mom_rate), 0.99) for mom in self.max_moms]
        height = self._height()
        return [(high - (high - low) * height, 0.99) for low, high in zip(self.min_moms, self.max_moms, strict=True)]

    def step(self, batch_iteration: int | None = None) -> None:
        super().step(batch_iteration)
        momentum = self.get_mom()
        if momentum is not None:
            self._set_momentum(momentum)

    def _set_momentum(self, each: list[tuple[float, float]]) -> None:
        for group, betas in zip(self.optimizer.param_groups, each, strict=True):
            group["betas"] = betas


SCHEDULES: dict[str, type[Schedule]] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def build(kind: str, params: dict[str, Any], optimizer: torch.optim.Optimizer) -> Any:
    """The schedule that a config names: one of DeepSpeed's, or a class of ``torch.optim.lr_scheduler``."""
    found: Any = SCHEDULES.get(kind) or getattr(torch.optim.lr_scheduler, kind, None)
    if found is None:
        raise ConfigError(
            f"'scheduler.type' is '{kind}' in the DeepSpeed config, which is not known; the nearest one is"
            f" '{nearest(kind, list(SCHEDULES))}'"
        )
    given = {key: value for key, value in params.items() if value != "auto"}
    try:
        return found(optimizer, **given)
    except TypeError as error:
        raise ConfigError(f"'scheduler.params' of {kind} in the DeepSpeed config: {error}") from None
