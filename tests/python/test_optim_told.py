"""What an engine is told about a torch.optim object: whether it is elementwise, and whether it steps masters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import plumb


class Unknown(torch.optim.SGD):
    """Nobody knows what a derived class does."""


def leaves(kind: str, elementwise: bool | None) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """What is stepped on this rank for each parameter, by its shape."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = {"known": torch.optim.SGD, "unknown": Unknown}[kind](model.parameters(), lr=0.1, momentum=0.5)
    with plumb.Engine(model, optimizer, strategy="zero1", elementwise=elementwise) as engine:
        model(torch.ones(2, 8)).sum().backward()
        engine.step()
        assert isinstance(engine._steps, plumb.optim.Pieces)
        return [(tuple(p.shape), tuple(engine._steps.leaf_of[id(p)].shape)) for p in model.parameters()]


@pytest.mark.parametrize(
    ("kind", "elementwise", "whole"),
    [("known", None, False), ("known", True, False), ("known", False, True), ("unknown", None, True), ("unknown", True, False), ("unknown", False, True)],
)
def test_parameters_are_cut_anywhere_only_for_what_is_elementwise(kind: str, elementwise: bool | None, whole: bool) -> None:
    ranks = plumb.spawn(leaves, 2, (kind, elementwise))
    for one, other in zip(*ranks, strict=True):
        assert one[0] == other[0]
        if whole:  # one rank's alone
            assert sorted([one[1], other[1]], key=len) in ([(0,), one[0]], [one[0], (0,)])
        else:
            assert len(one[1]) == len(other[1]) == 1 and one[1][0] + other[1][0] == torch.Size(one[0]).numel()


def many_small_steps(halves: list[bool], master_weights: bool | None, strategy: str) -> list[float]:
    """Of 2^-10 each, which bf16 cannot add to 1."""
    model = nn.ParameterList([nn.Parameter(torch.ones(6, dtype=torch.bfloat16 if half else torch.float32)) for half in halves])
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10)
    with plumb.Engine(model, optimizer, strategy=strategy, master_weights=master_weights) as engine:
        for _ in range(32):
            sum(p.float().sum() for p in model).backward()
            engine.step()
            engine.zero_grad()
        return [float(p.detach()[-1]) for p in model]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
@pytest.mark.parametrize("halves", [[False, True], [True, False], [True, True]], ids=str)
@pytest.mark.parametrize("masters", [None, False, True])
def test_masters_are_kept_where_they_are_asked_for_and_of_halves_alone(strategy: str, halves: list[bool], masters: bool | None) -> None:
    moved = 1 - 32 * 2.0**-10
    expected = [moved if masters or not half else 1.0 for half in halves]
    assert plumb.spawn(many_small_steps, 2, (halves, masters, strategy)) == [expected, expected]


def rates_in_closures() -> list[Any]:
    """A closure runs with gradients, whoever calls step() where."""
    found: list[Any] = []
    for optimizer in (None, plumb.SGD(lr=0.5), "torch"):
        parameter = nn.Parameter(torch.ones(3))
        given = torch.optim.SGD([parameter], lr=0.5) if optimizer == "torch" else optimizer
        with plumb.Engine([("p", parameter)], given) as engine, torch.no_grad():  # type: ignore[arg-type]

            def closure(parameter: nn.Parameter = parameter) -> torch.Tensor:
                found.append(torch.is_grad_enabled())
                loss = parameter.sum()
                loss.backward()
                return loss

            engine.step(closure)
            found.append(parameter.tolist()[0])
    return found


def test_a_closure_runs_with_gradients_also_where_step_is_called_without() -> None:
    assert rates_in_closures() == [True, 1.0, True, 0.5, True, 0.5]
