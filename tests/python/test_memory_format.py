"""A model whose memory format is changed after its engine was built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import plumb

STEPS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.conv(x)))


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Conv2d(4, 2, 1)).double()


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(100 * rank + step)).double()


def channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)


def turned(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.transpose(0, 1).contiguous().transpose(0, 1)


WAYS: dict[str, Callable[[nn.Module], None]] = {"channels_last": channels_last, "turned": turned}


def change(engine: plumb.Engine, model: nn.Module, way: str, strategy: str) -> None:
    if strategy == "zero3":
        with engine.gathered(list(model.parameters()), write=True):
            WAYS[way](model)
    else:
        WAYS[way](model)


def train(strategy: str, way: str, when: int, own: bool, folder: str | None = None) -> float:
    """How far from one process. With a folder, what it saved right after the change goes on in another engine, in the old order."""
    model, twin = make(), make()

    def engine_of(model: nn.Module) -> plumb.Engine:
        optimizer: Any = plumb.AdamW(lr=1e-2) if own else torch.optim.AdamW(model.parameters(), lr=1e-2)
        return plumb.Engine(model, optimizer, strategy=strategy, units=[Block])

    engine = engine_of(model)
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for step in range(STEPS):
        if step == when:
            WAYS[way](twin)
            change(engine, model, way, strategy)
            if folder is not None:
                path = engine.save(folder)
                engine.close()
                model = make()
                engine = engine_of(model)
                engine.load(path)
        for rank in range(engine.world.size):
            (twin(data(rank, step)).pow(2).mean() / engine.world.size).backward()
        reference.step()
        reference.zero_grad()
        model(data(engine.world.rank, step)).pow(2).mean().backward()
        if strategy == "zero2":  # a whole gradient of the user's own, in the order that the parameter has now
            last = list(model.parameters())[0]
            its = engine.full_gradient(last)
            last.grad = None if its is None else its.clone(memory_format=torch.preserve_format)
        engine.step()
        engine.zero_grad()
    with engine:
        return max(float((engine.full_parameter(mine) - its).abs().max()) for mine, its in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_another_order_of_elements_changes_nothing(strategy: str) -> None:
    def everything() -> dict[tuple[str, int, bool], float]:
        return {(way, when, own): train(strategy, way, when, own) for way in WAYS for when in (0, 2) for own in (False, True)}

    for outcome in plumb.spawn(everything, 2, timeout=120):
        for case, found in outcome.items():
            assert found < 1e-9, (case, found)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_what_is_saved_in_another_order_is_what_goes_on(strategy: str, tmp_path: Path) -> None:
    def everything() -> dict[tuple[str, bool], float]:
        return {(way, own): train(strategy, way, 2, own, str(tmp_path / f"{way}{own}")) for way in WAYS for own in (False, True)}

    for outcome in plumb.spawn(everything, 2, timeout=120):
        for case, found in outcome.items():
            assert found < 1e-9, (case, found)
