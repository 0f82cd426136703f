"""The norm of all gradients that DeepSpeed's engine tells, whoever reduced them and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import plumb
from deepspeeds import batch, engine_of, make

SGD = {"type": "SGD", "params": {"lr": 0.1}}


def in_both_ways(engine: Any, loss: Callable[[int], torch.Tensor]) -> None:
    engine.backward(loss(0))  # held: the boundary is still to come
    engine.step()
    loss(1).backward()
    engine.step()


def with_its_scale(engine: Any, loss: Callable[[int], torch.Tensor]) -> None:
    engine.backward(loss(0))
    engine.step()
    engine.scale(loss(1)).backward()
    engine.step()


def held_to_the_end(engine: Any, loss: Callable[[int], torch.Tensor]) -> None:
    with engine.no_sync():
        engine.backward(loss(0))
    engine.step()
    with engine.no_sync():
        engine.backward(loss(1))
    engine.step()


def by_ours_alone(engine: Any, loss: Callable[[int], torch.Tensor]) -> None:
    for i in range(2):
        engine.backward(loss(i))
        engine.step()


def told(ways: list[str], more: dict[str, Any]) -> list[float]:
    """By stage and way: how far the norm of each of two steps is from that of one process, as a share of it."""
    wrong = []
    for stage in (0, 1):
        for way in ways:
            dtype = torch.float16 if "fp16" in more else torch.float32
            engine, twin = engine_of(stage=stage, gas=2, optimizer=SGD, gradient_clipping=0.0, **more), make(dtype)
            for step in range(2):
                globals()[way](engine, lambda i, step=step: engine(*batch(engine.global_rank, 2 * step + i, dtype)))
                for i in range(2):
                    for rank in range(2):
                        (twin(*batch(rank, 2 * step + i, dtype)) * 64 / 4).backward()
                norm = torch.nn.utils.get_total_norm([p.grad.float() for p in twin.parameters() if p.grad is not None]) / 64
                found = engine.get_global_grad_norm()
                assert found is not None, (stage, way)
                wrong.append(abs(found - float(norm)) / float(norm))
                with torch.no_grad():
                    for p, mine in zip(twin.parameters(), engine.module.parameters(), strict=True):
                        p.copy_(mine)
                        p.grad = None
            assert engine.global_steps == 2
            engine.destroy()
    return wrong


@pytest.mark.parametrize("half", [False, True])
def test_the_norm_is_told_also_where_step_reduces_what_was_held(half: bool) -> None:
    ways = ["in_both_ways", "with_its_scale", "held_to_the_end", "by_ours_alone"]
    more = {"fp16": {"enabled": True, "loss_scale": 64}} if half else {}
    for wrong in plumb.spawn(told, 2, (ways[1:] if half else ways, more)):
        assert max(wrong) < (1e-2 if half else 1e-5), wrong

