"""The optimizers that a DeepSpeed config names, as objects of torch.optim."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from .. import optim
from . import muon
from .config import ConfigError, nearest


@optim.elementwise
class FusedAdam(torch.optim.AdamW):
    """Adam as DeepSpeed's config means it: decay of the weights themselves unless ``adam_w_mode`` is false, 0 by default."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if not bias_correction:
            raise ConfigError("bias_correction=false of Adam is not supported; leave it out")
        super().__init__(params, lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)  # type: ignore[arg-type]
        self.adam_w_mode = int(adam_w_mode)
        if not adam_w_mode:
            for group in self.param_groups:
                group["decoupled_weight_decay"] = False
            self.defaults["decoupled_weight_decay"] = False


@optim.elementwise
class DeepSpeedCPUAdam(FusedAdam):
    """The same by the arguments, and their order, of DeepSpeed's Adam for the CPU."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)


@optim.elementwise
class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad by the arguments of DeepSpeed's for the CPU."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


def _loss_of(closure: Any) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


@optim.elementwise
class Lion(torch.optim.Optimizer):
    """Steps by the sign of a mixture of gradient and momentum."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = _loss_of(closure)
        for group in self.param_groups:
            one, two = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(momentum * one + p.grad * (1 - one)), alpha=-group["lr"])
                momentum.mul_(two).add_(p.grad, alpha=1 - two)
        return loss


@optim.elementwise
class DeepSpeedCPULion(Lion):
    """The same by the arguments of DeepSpeed's Lion for the CPU."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, betas, weight_decay)


class Lamb(torch.optim.Optimizer):
    """Adam whose step of each parameter is scaled by the parameter's norm over the step's, between two bounds."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        if max_grad_norm or amsgrad:
            raise ConfigError("max_grad_norm and amsgrad of Lamb are not supported; use 'gradient_clipping'")
        super().__init__(
            params,
            {
                "lr": lr, "bias_correction": bias_correction, "betas": tuple(betas), "eps": eps,
                "eps_inside_sqrt": eps_inside_sqrt, "weight_decay": weight_decay,
                "max_coeff": max_coeff, "min_coeff": min_coeff,
            },
        )  # fmt: skip

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = _loss_of(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)
        return loss

    def _update(self, p: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        one, two = group["betas"]
        state = self.state[p]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.mul_(one).add_(gradient, alpha=1 - one)
        square.mul_(two).addcmul_(gradient, gradient, value=1 - two)
        size = group["lr"]
        if group["bias_correction"]:
            size = size * (1 - two ** state["step"]) ** 0.5 / (1 - one ** state["step"])
        root = (square + group["eps"]).sqrt() if group["eps_inside_sqrt"] else square.sqrt() + group["eps"]
        update = mean / root + group["weight_decay"] * p
        weight, length = float(p.norm()), float(update.norm())
        coefficient = 1.0
        if weight and length:
            coefficient = min(max(weight / length, group["min_coeff"]), group["max_coeff"])
        p.add_(update, alpha=-size * coefficient)


#: By the names of a config, in small letters.
OPTIMIZERS: dict[str, Any] = {
    "adam": FusedAdam,
    "adamw": FusedAdam,
    "fusedadam": FusedAdam,
    "adagrad": torch.optim.Adagrad,
    "lamb": Lamb,
    "lion": Lion,
    "muon": muon.build,
    "sgd": torch.optim.SGD,
}

#: What DeepSpeed itself writes in small letters.
NAMES = ("adam", "adamw", "adagrad", "lamb", "lion", "muon")

#: Of DeepSpeed's own, and not here: their communication is part of their arithmetic, or they need another package.
REFUSED = ("onebitadam", "onebitlamb", "zerooneadam", "muadam", "muadamw", "musgd")

_DROPPED = ("fp32_optimizer_states",)


def _adam(kind: str, given: dict[str, Any]) -> Any:
    """``torch_adam``: torch's own class, with its own defaults. A config that says AdamW gets it, whatever ``adam_w_mode`` says."""
    decoupled = kind == "adamw" or given.get("adam_w_mode", True)
    if given.pop("torch_adam", False):
        given.pop("adam_w_mode", None)
        return torch.optim.AdamW if decoupled else torch.optim.Adam
    given["adam_w_mode"] = decoupled
    return FusedAdam


def build(kind: str, params: dict[str, Any], parameters: Any) -> torch.optim.Optimizer:
    """The optimizer that a config names, over ``parameters``."""
    found: Any = OPTIMIZERS.get(kind.lower())
    if found is None and kind.lower() not in REFUSED:
        found = getattr(torch.optim, kind, None)
        if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)):
            found = None
    if found is None:
        names = ["Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon", "SGD", "RMSprop", "Adafactor"]
        raise ConfigError(
            f"'optimizer.type' is '{kind}' in the DeepSpeed config, which is not supported; the nearest one is"
            f" '{nearest(kind, names)}'"
        )
    if "max_grad_norm" in params:
        raise ConfigError(
            "'max_grad_norm' is not supported as an optimizer parameter, please switch to using the deepspeed parameter"
            " 'gradient_clipping'"
        )
    given = {key: value for key, value in params.items() if value != "auto" and key not in _DROPPED}
    if kind.lower() in ("adam", "adamw"):
        found = _adam(kind.lower(), given)
    if "betas" in given:
        given["betas"] = tuple(given["betas"])
    try:
        return found(parameters, **given)  # type: ignore[no-any-return]
    except TypeError as error:
        raise ConfigError(f"'optimizer.params' of {kind} in the DeepSpeed config: {error}") from None
