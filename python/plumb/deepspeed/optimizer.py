"""The optimizer as DeepSpeed's engine shows it where parameters are half precision, or its state is sharded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .._C import StepInfo
from .config import ConfigError
from .errors import NotHere
from .methods import PARTITIONS

if TYPE_CHECKING:
    from .engine import DeepSpeedEngine


class LossScaleConfig:
    """What became of the loss scale, under the names that DeepSpeed's optimizers have for it."""

    def __init__(self, engine: "DeepSpeedEngine") -> None:
        config = engine._config
        self._engine = engine
        self.use_grad_scaling: bool = config["fp16.enabled"]
        self.dynamic_loss_scale: bool = self.use_grad_scaling and config["fp16.loss_scale"] == 0
        self.scale_factor = 2.0
        self.scale_window: int = config["fp16.loss_scale_window"]
        self.min_loss_scale: float = config["fp16.min_loss_scale"]
        self.delayed_shift: int = config.hysteresis
        self.consecutive_hysteresis: bool = config["fp16.consecutive_hysteresis"]
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.cur_hysteresis = self.delayed_shift

    @property
    def cur_scale(self) -> float:
        return self._engine.engine.loss_scale

    loss_scale = cur_scale

    def stepped(self, info: StepInfo) -> None:
        """Follows a step. An Error where DeepSpeed gives up: the scale cannot fall any more, and gradients still overflow."""
        spent = self.cur_hysteresis == 1
        if info.skipped:
            self.cur_hysteresis = max(1, self.cur_hysteresis - 1)
            self.last_overflow_iter = self.cur_iter
        elif self.consecutive_hysteresis or self.cur_scale > info.loss_scale:
            self.cur_hysteresis = self.delayed_shift
        self.cur_iter += 1
        zero = self._engine.zero_optimization_stage() > 0
        if info.skipped and self.dynamic_loss_scale and zero and spent and info.loss_scale <= self.min_loss_scale:
            raise ConfigError(
                "Current loss scale already at minimum - cannot decrease scale anymore. Gradients are not finite at a loss scale"
                f" of {info.loss_scale:g}: lower the learning rate, or 'fp16.min_loss_scale'"
            )


class DeepSpeedOptimizer:
    """The user's ``torch.optim`` object with DeepSpeed's words around it; everything else is the object's own."""

    def __init__(self, engine: "DeepSpeedEngine", optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._engine = engine
        self.loss_scale_config = LossScaleConfig(engine)
        self.overflow = False

    @property
    def loss_scaler(self) -> LossScaleConfig:
        return self.loss_scale_config

    @property
    def loss_scale(self) -> float:
        return self.loss_scale_config.cur_scale

    cur_scale = loss_scale

    @property
    def cur_iter(self) -> int:
        return self.loss_scale_config.cur_iter

    @property
    def dynamic_loss_scale(self) -> bool:
        return self.loss_scale_config.dynamic_loss_scale

    @property
    def low_precision_dtype(self) -> torch.dtype:
        return self._engine._config.half or torch.float32

    @property
    def _global_grad_norm(self) -> float | None:
        return self._engine.get_global_grad_norm()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(*(() if closure is None else (closure,)))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._engine.zero_grad()

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        self._engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def get_lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any], **_: Any) -> None:
        self.optimizer.load_state_dict(state)

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__["optimizer"]
        if name in PARTITIONS and not hasattr(inner, name):
            raise NotHere(f"'{name}' of DeepSpeed's optimizers is not here: {PARTITIONS[name]}")
        return getattr(inner, name)
