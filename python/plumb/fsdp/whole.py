"""Optimizers of torch's that need more than rows, over the DTensors of ``plumb.fully_shard``.

Muon and Adafactor look at a whole parameter, LBFGS at all of them. Over DTensors torch's kernels round partial sums per rank (Muon's, in
bf16), or refuse them. Here such an optimizer is handed whole tensors, Muon and Adafactor one parameter after another.
Every rank computes the same, and keeps its rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from .sharded import ShardedParameter


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _cut(whole: torch.Tensor, like: DTensor) -> DTensor:
    """This rank's part of what every rank has."""
    mesh = like.device_mesh
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(mesh, like.placements)


def _one_by_one(inner: Callable[..., None]) -> Callable[..., None]:
    """``inner(parameters, gradients, *states)``, each a list by parameter: it changes parameters and states, each by itself."""

    @functools.wraps(inner)
    def stepped(*lists: list[Any], **settings: Any) -> None:
        parameters = lists[0]
        if not any(isinstance(parameter, ShardedParameter) for parameter in parameters):
            return inner(*lists, **settings)
        for of_one in zip(*lists, strict=True):
            wholes = [_whole(value) for value in of_one]
            inner(*([whole] for whole in wholes), **settings)
            for i, (value, whole) in enumerate(zip(of_one, wholes, strict=True)):
                if i != 1 and isinstance(value, DTensor):
                    value.copy_(_cut(whole, value))

    return stepped


def _orthogonal(inner: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Muon's iterations, which begin by casting a matrix to bf16: so it travels."""

    @functools.wraps(inner)
    def whole_orthogonal(grad: torch.Tensor, *settings: Any) -> torch.Tensor:
        if not isinstance(grad, DTensor):
            return inner(grad, *settings)
        whole = _whole(grad.bfloat16())
        made = _cut(inner(whole, *settings), grad)
        if grad.dtype == torch.bfloat16:  # torch norms it in place then, and it may be the momentum
            grad.copy_(_cut(whole, grad))
        return made

    return whole_orthogonal


# ---- LBFGS, whose vectors are of all parameters


def _real(value: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(value) if value.is_complex() else value


def _gather_flat_grad(inner: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(inner)
    def flat(self: Any) -> torch.Tensor:
        if not any(isinstance(parameter, ShardedParameter) for parameter in self._params):
            return inner(self)
        gradients = [
            torch.zeros(p.shape, dtype=p.dtype, device=p.device) if p.grad is None else _whole(p.grad) for p in self._params
        ]
        return torch.cat([_real(gradient.to_dense()).reshape(-1) for gradient in gradients])

    return flat


def _add_grad(inner: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(inner)
    def add(self: Any, step_size: Any, update: torch.Tensor) -> None:
        if not any(isinstance(parameter, ShardedParameter) for parameter in self._params):
            return inner(self, step_size, update)
        offset = 0
        for p in self._params:
            length = p.numel() * (2 if p.is_complex() else 1)
            part = update[offset : offset + length]
            part = torch.view_as_complex(part.view(*p.shape, 2).clone()) if p.is_complex() else part.view(p.shape)
            p.add_(_cut(part, p) if isinstance(p, DTensor) else part, alpha=step_size)
            offset += length

    return add


def watch() -> None:
    """From now on. Nothing changes over plain tensors."""
    found: dict[str, Any] = {name: getattr(torch.optim, name, None) for name in ("_adafactor", "_muon", "LBFGS")}
    for owner, name, wrapped in (
        ("_adafactor", "_single_tensor_adafactor", _one_by_one),
        ("_adafactor", "_multi_tensor_adafactor", _one_by_one),
        ("_muon", "_zeropower_via_newtonschulz", _orthogonal),
        ("LBFGS", "_gather_flat_grad", _gather_flat_grad),
        ("LBFGS", "_add_grad", _add_grad),
    ):
        inner = getattr(found[owner], name, None)
        if inner is not None:  # an older torch has not all of them
            setattr(found[owner], name, wrapped(inner))
