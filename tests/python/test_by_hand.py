"""Gradients in the user's hands between the backward and the step: torch's norms, clipping and GradScaler are one process's."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import plumb
from stage import Block, Play, distance, make

PLACES = [("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 2), ("hsdp", 4)]
INF = float("inf")


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def clipped(strategy: str, kind: str) -> dict[str, float]:
    """Two micro-batches a step, unused parameters, a gradient that only one rank has; clipped by both norms, one after the other."""
    model, twin = make(), make()
    optimizer: Any = plumb.SGD(lr=0.1, momentum=0.9)
    if kind == "torch":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = plumb.Engine(model, optimizer, strategy=strategy, units=[Block], bucket_bytes=4096, first_bucket_bytes=1024)
    others = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    size, wrong = engine.world.size, {"norm": 0.0, "total": 0.0}

    def loss(play: Play, i: int) -> torch.Tensor:
        own = play.model.spare(play.data(i)).pow(2).mean() if play.rank == 1 and i % 2 else 0.0
        return play.loss(i) + own  # type: ignore[no-any-return]

    for step in range(3):
        for i in (2 * step, 2 * step + 1):
            play = Play(model, engine.world.rank, size, 1.0, engine)
            play.backward(loss(play, i))
            for rank in range(size):
                other = Play(twin, rank, size, 1 / size)
                other.backward(loss(other, i))
        for order, limit in ((2.0, 0.05), (INF, 0.004)):
            total = nn.utils.get_total_norm(gradients(model), norm_type=order)
            norm = nn.utils.clip_grad_norm_(model.parameters(), limit, norm_type=order)
            expected = nn.utils.clip_grad_norm_(twin.parameters(), limit, norm_type=order)
            assert expected > limit, "nothing is clipped"
            wrong["norm"] = max(wrong["norm"], float((norm - expected).abs() / expected))
            wrong["total"] = max(wrong["total"], float((total - expected).abs() / expected))
        one = nn.utils.clip_grad_norm_([model.last.weight], 1e-3)  # of one parameter, which other ranks may have no part of
        expected = nn.utils.clip_grad_norm_([twin.last.weight], 1e-3)
        wrong["norm"] = max(wrong["norm"], float((one - expected).abs() / expected))
        engine.step()
        others.step()
        engine.zero_grad()
        others.zero_grad()
    return {**wrong, "parameters": distance(engine, model, twin)}


@pytest.mark.parametrize("kind", ["plumb", "torch"])
@pytest.mark.parametrize(("strategy", "ranks"), PLACES)
def test_norms_and_clipping_of_torch_are_those_of_one_process(strategy: str, ranks: int, kind: str) -> None:
    for wrong in plumb.spawn(clipped, ranks, (strategy, kind)):
        assert max(wrong.values()) < 1e-10, wrong


def scaled(strategy: str, unscales: bool) -> tuple[float, list[float], list[float], list[bool]]:
    """GradScaler as its page tells: the gradient of one rank is infinite in the second step."""
    model, twin = make(), make()
    mine, others = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, twin))
    engine = plumb.Engine(model, mine, strategy=strategy, units=[Block], bucket_bytes=4096, first_bucket_bytes=1024)
    scaler, expected = (torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2))
    size = engine.world.size

    def loss(play: Play, step: int) -> torch.Tensor:
        return play.loss(step) * (INF if step == 1 and play.rank == size - 1 else play.share)

    def finish(optimizer: torch.optim.Optimizer, its: torch.amp.GradScaler, model: nn.Module) -> None:
        if unscales:
            its.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        its.step(optimizer)
        its.update()
        optimizer.zero_grad()

    scales: tuple[list[float], list[float]] = ([], [])
    moved = []
    for step in range(4):
        before = engine.full_parameter(model.last.weight)
        scaler.scale(loss(Play(model, engine.world.rank, size, 1.0), step)).backward()
        for rank in range(size):
            expected.scale(loss(Play(twin, rank, size, 1 / size), step)).backward()
        finish(mine, scaler, model)
        finish(others, expected, twin)
        for seen, one in zip(scales, (scaler, expected), strict=True):
            seen.append(one.get_scale())
        moved.append(not torch.equal(before, engine.full_parameter(model.last.weight)))
    return distance(engine, model, twin), *scales, moved


@pytest.mark.parametrize("unscales", [True, False], ids=["unscaled and clipped", "by step"])
@pytest.mark.parametrize(("strategy", "ranks"), PLACES)
def test_a_grad_scaler_skips_on_every_rank_what_is_infinite_on_one(strategy: str, ranks: int, unscales: bool) -> None:
    for far, scales, expected, moved in plumb.spawn(scaled, ranks, (strategy, unscales)):
        assert scales == expected == [1024.0, 512.0, 512.0, 1024.0]
        assert moved == [True, False, True, True]
        assert far < 1e-10


WAYS_OUT: list[tuple[str, Callable[[torch.Tensor], object]]] = [
    ("deepcopy", copy.deepcopy),
    ("copy", copy.copy),
    ("pickle", pickle.dumps),
    ("save", lambda g: torch.save(g, io.BytesIO())),
    ("dlpack", torch.from_dlpack),
    ("numpy", lambda g: g.numpy()),
    ("asarray", numpy.asarray),
    ("norm", numpy.linalg.norm),
]


def refusals(strategy: str) -> list[str]:
    """What each way out of a gradient says, and 'none' where it says nothing."""
    p = torch.nn.Parameter(torch.zeros(6))
    engine = plumb.Engine([("p", p)], plumb.SGD(lr=1.0), strategy=strategy)
    (p * torch.arange(6.0)).sum().backward()
    assert p.grad is not None
    texts = []
    for _, way in WAYS_OUT:
        try:
            way(p.grad)
            texts.append("none")
        except plumb.Error as error:
            texts.append(str(error))
        way(torch.ones(3))
    numbers = torch.empty(p.grad.shape).copy_(p.grad)
    assert numbers.numpy().size == numbers.numel() == len(numbers.reshape(-1).tolist())
    engine.step()
    return texts


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_piece_does_not_leave_torch_as_this_ranks_own_numbers(strategy: str) -> None:
    for texts in plumb.spawn(refusals, 2, (strategy,)):
        for (name, _), text in zip(WAYS_OUT, texts, strict=True):
            if strategy == "ddp":
                assert text == "none", name
            else:
                assert "'p'" in text and "this rank's own" in text and "full_gradient" in text, f"{name}: {text}"
