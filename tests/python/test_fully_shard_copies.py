"""Gradients that plumb.fully_shard keeps in a wider dtype than it shows them in: what a program does to what it sees counts, as under torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs

import plumb
from sharding import Cases

case = Cases(2)


def trained(shards: Any, change: Callable[[list[Any]], object], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """The parameters after two steps, with ``change`` between the backward and the step; 3 rows, so that ranks have not the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).to(dtype)
    for one in (*model, model):
        shards(one, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(2):
        model(torch.full((2, 4), step + 1.0, dtype=dtype)).sum().backward()
        change(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().full_tensor().float() for parameter in model.parameters()]


def unscale(parameters: list[Any]) -> None:
    gradients = [parameter.grad for parameter in parameters]
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, torch.zeros(1), torch.tensor(0.25))


def through_data(parameters: list[Any]) -> None:
    for parameter in parameters:
        parameter.grad.data.mul_(0.5)


def through_rows(parameters: list[Any]) -> None:
    for parameter in parameters:
        parameter.grad.to_local().data.mul_(0.5)


changes: dict[str, Callable[[list[Any]], object]] = {
    "norm": lambda ps: torch.nn.utils.clip_grad_norm_(ps, 0.01),
    "norm by foreach": lambda ps: torch.nn.utils.clip_grad_norm_(ps, 0.01, foreach=True),
    "value": lambda ps: torch.nn.utils.clip_grad_value_(ps, 0.125),
    "foreach": lambda ps: torch._foreach_mul_([p.grad for p in ps], 0.0),
    "unscale": unscale,
    "data": through_data,
    "rows": through_rows,
    "negative zeros": lambda ps: torch._foreach_mul_([p.grad for p in ps], -0.0),
}


@case
def every_change_of_a_shown_gradient_is_stepped_with() -> None:
    for what, change in changes.items():
        for dtype in (torch.bfloat16, torch.float16):
            mine, theirs = (trained(shards, change, dtype) for shards in (plumb.fully_shard, torchs))
            for one, other in zip(mine, theirs, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3, msg=lambda text, what=what: f"{what}: {text}")


def linear(shards: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(4, 3).bfloat16()
    shards(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    return model


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()


@case
def a_gradient_that_is_held_is_the_gradient() -> None:
    def program(shards: Any) -> list[Any]:
        model = linear(shards)
        backward(model)
        held: Any = model.weight.grad
        same = held is model.weight.grad
        held.mul_(3)
        seen = [model.weight.grad.full_tensor().clone()]
        backward(model)
        seen.append(held.full_tensor().clone())  # follows what was added
        held.data.zero_()
        backward(model)
        seen += [held.full_tensor().clone(), model.weight.grad.full_tensor().clone()]
        return [same, held is model.weight.grad, *[float(one.sum()) for one in seen]]

    assert program(plumb.fully_shard) == program(torchs)


@case
def a_gradient_that_is_zeroed_in_place_starts_again() -> None:
    for foreach in (False, True):
        model = linear(plumb.fully_shard)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=foreach)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            backward(model)
            assert (model.weight.grad.full_tensor() == 2).all()
            optimizer.step()


@case
def a_gradient_that_is_looked_at_keeps_the_wider_sum() -> None:
    model = linear(plumb.fully_shard)
    for i in range(64):  # more than bf16 counts in steps of 2
        for _ in range(5):
            backward(model)
        held: Any = model.weight.grad
        with torch.inference_mode():
            seen = model.weight.grad
        assert held is seen
        torch.testing.assert_close(held.full_tensor(), torch.full((3, 4), 10.0 * (i + 1)).bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("name", case.all)
def test_fully_shard_copies(name: str) -> None:
    case.check(name)
