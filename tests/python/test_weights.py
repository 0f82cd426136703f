"""Losses that are sums: the step takes the mean over everything they summed, as one process would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import plumb
from stage import Block, Play, distance, make, reference

PLACES = [("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 2), ("hsdp", 4)]


def token_means(strategy: str, options: dict[str, Any]) -> tuple[float, float]:
    """Ranks and micro-batches of different lengths: one process would divide by the number of all tokens."""
    world = plumb.world()
    lengths = [[3, 7, 0], [11, 1, 5], [2, 0, 4], [0, 0, 0]][: world.size]  # by rank and micro-batch
    model, twin = make(), make()
    engine = plumb.Engine(model, plumb.SGD(lr=0.1), strategy=strategy, units=[Block], clip_norm=0.05, **options)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)

    def tokens(rank: int, i: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * rank + i)
        return torch.randn(lengths[rank][i], 12, generator=generator, dtype=torch.float64)

    norm = 0.0
    for step in range(2):
        for i in range(3):
            batch = tokens(world.rank, i)
            loss = model(batch).pow(2).sum() if len(batch) else None
            if step == 1 and i < 2:
                with engine.no_sync():
                    engine.backward(loss, weight=len(batch))
            else:
                engine.backward(loss, weight=len(batch))
        info = engine.step()
        engine.zero_grad()
        everything = torch.cat([tokens(rank, i) for rank in range(world.size) for i in range(3)])
        (twin(everything).pow(2).sum() / len(everything)).backward()
        expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
        assert info.grad_norm is not None
        norm = max(norm, float((info.grad_norm - expected).abs() / expected))
        optimizer.step()
        optimizer.zero_grad()
    return distance(engine, model, twin), norm


@pytest.mark.parametrize("options", [{}, {"loss_scale": 1024.0}], ids=["plain", "scaled"])
@pytest.mark.parametrize(("strategy", "ranks"), PLACES)
def test_a_loss_that_is_a_sum_becomes_the_mean_over_all_tokens(strategy: str, ranks: int, options: dict[str, Any]) -> None:
    for far, norm in plumb.spawn(token_means, ranks, (strategy, options)):
        assert far < 1e-10 and norm < 1e-6


def dropped_micro_batch(how: str) -> float:
    model, twin = make(), make()
    engine = plumb.Engine(model, plumb.SGD(lr=0.1))
    play, reference = Play(model, 0, 1, 1.0), Play(twin, 0, 1, 1.0)
    engine.backward(play.loss(0) * 5, weight=5)
    if how == "none":
        model.zero_grad(set_to_none=True)
    elif how == "zeros":
        model.zero_grad(set_to_none=False)
    else:
        engine.zero_grad()
    engine.backward(play.loss(1) * 3, weight=3)
    engine.step()
    reference.backward(reference.loss(1))
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    return distance(engine, model, twin)


@pytest.mark.parametrize("how", ["none", "zeros", "engine"])
def test_gradients_that_were_cleared_weigh_nothing(how: str) -> None:
    assert dropped_micro_batch(how) < 1e-12


def test_weights_are_of_all_backwards_of_a_step_or_of_none() -> None:
    model = make()
    engine = plumb.Engine(model, plumb.SGD(lr=0.1))
    play = Play(model, 0, 1, 1.0)
    engine.backward(play.loss(0), weight=1)
    play.loss(1).backward()
    with pytest.raises(plumb.Error, match="gave a weight to 1 of its 2 backwards"):
        engine.step()


def test_a_weight_does_not_join_gradients_of_another_kind() -> None:
    model = make()
    engine = plumb.Engine(model, plumb.SGD(lr=0.1))
    play = Play(model, 0, 1, 1.0)
    engine.backward(play.loss(0), weight=2)
    engine.step()  # and no zero_grad
    with pytest.raises(plumb.Error, match="zero_grad"):
        engine.backward(play.loss(0), weight=2)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_is_a_count(weight: float) -> None:
    model = make()
    engine = plumb.Engine(model, plumb.SGD(lr=0.1))
    with pytest.raises(plumb.Error, match="weight"):
        engine.backward(Play(model, 0, 1, 1.0).loss(0), weight=weight)
