"""DeepSpeed's Muon: matrices inside of a model step by their orthogonalised momentum, everything else by Adam."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim._muon import _zeropower_via_newtonschulz as orthogonal

from .errors import ConfigError

_MUON = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "nesterov": True, "ns_steps": 5}
_ADAM = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0, "adam_w_mode": True}
_RATES = {"muon_lr", "adam_lr"}  # of one kind, before "lr" of both
_ACCEPTED = {"ns_method", "torch_adam", "foreach"}  # they choose between ways to the same numbers
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """A group says ``use_muon``: whether its parameters step as matrices (a filter as one of its outputs by the rest; others of
    more dimensions as many) or by Adam."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__([{**(_MUON if group["use_muon"] else _ADAM), **group} for group in groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            change = self._of_matrix if group["use_muon"] else self._of_adam
            for p in group["params"]:
                if p.grad is not None:
                    change(p, p.grad, group)
        return loss

    def _of_matrix(self, p: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        if not self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        momentum = self.state[p]["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        mixed = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        matrices = mixed.flatten(1).unsqueeze(0) if p.dim() == 4 else mixed.flatten(0, -3) if p.dim() > 3 else mixed.reshape(-1, *p.shape[-2:])
        turned = [orthogonal(matrix, _COEFFICIENTS, group["ns_steps"], 1e-7) for matrix in matrices]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        scale = max(1.0, p.size(-2) / p.size(-1)) ** 0.5
        p.add_(torch.stack(turned).reshape(p.shape).to(p.dtype), alpha=-group["lr"] * scale)

    def _of_adam(self, p: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state, (one, two) = self.state[p], group["betas"]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        if not group["adam_w_mode"]:
            gradient = gradient.add(p, alpha=group["weight_decay"])
        mean = state["exp_avg"].lerp_(gradient, 1 - one)
        square = state["exp_avg_sq"].mul_(two).addcmul_(gradient, gradient, value=1 - two)
        if group["adam_w_mode"]:
            p.mul_(1 - group["lr"] * group["weight_decay"])
        root = (square / (1 - two ** state["step"])).sqrt_().add_(group["eps"])
        p.addcdiv_(mean, root, value=-group["lr"] / (1 - one ** state["step"]))


def choose(module: nn.Module) -> None:
    """Marks who steps as a matrix: what has two dimensions and is neither an embedding nor the head, by its name."""
    for name, parameter in module.named_parameters():
        inside = not any(word in name.lower() for word in ("embed", "lm_head"))
        parameter.use_muon = parameter.dim() >= 2 and inside  # type: ignore[attr-defined]


def build(parameters: list[Any], **how: Any) -> Muon:
    """From a config's arguments: those of Muon and of Adam stand side by side. What a group of the caller's says goes before."""
    unknown = how.keys() - _MUON.keys() - _ADAM.keys() - _RATES - _ACCEPTED
    if unknown:
        raise ConfigError(
            f"'optimizer.params' of Muon in the DeepSpeed config has '{sorted(unknown)[0]}', which is not known; expected"
            f" {', '.join(sorted(_MUON.keys() | _ADAM.keys() | _RATES | _ACCEPTED))}"
        )
    given = [one if isinstance(one, dict) else {"params": [one]} for one in parameters]
    if not any(isinstance(one, dict) for one in parameters):
        given = [{"params": parameters}]
    groups: list[dict[str, Any]] = []
    for use, defaults, rate in ((True, _MUON, "muon_lr"), (False, _ADAM, "adam_lr")):
        said = {key: how[key] for key in defaults if key in how} | ({"lr": how[rate]} if rate in how else {})
        for group in given:
            mine = [p for p in group["params"] if getattr(p, "use_muon", p.dim() >= 2) == use]
            if mine:
                own = {key: value for key, value in group.items() if key != "params"}
                groups.append({"params": mine, "use_muon": use, "name": "muon-params" if use else "adam-params", **said, **own})
    return Muon(groups)
