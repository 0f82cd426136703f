"""A compiled backward that throws while it runs, some of its gradients delivered and some not: everybody's failure, and nothing of
it is left behind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import plumb
from inside import passed, when_passed
from plumb import compiled
from stage import WIDTH, Play, distance, step_twin
from test_compiled import AOT_EAGER, NO_KERNELS, engine_for
from test_compiled_modules import Small, little


class Throws(Small):
    """Between its two layers, so that each graph has delivered one of them by then, and owes the other."""

    def __init__(self) -> None:
        super().__init__()
        self.down = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any, **_: Any) -> Any:
        return x + self.down(passed(torch.tanh(self.up(x))))


WAYS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "by operator": functools.partial(torch.compile, backend=AOT_EAGER),
    "by operator, in one graph": functools.partial(torch.compile, backend=AOT_EAGER, fullgraph=True),
    "by inductor": functools.partial(torch.compile, options=NO_KERNELS),
    "by inductor, in one graph": functools.partial(torch.compile, options=NO_KERNELS, fullgraph=True),
}


def boom() -> None:
    raise ValueError("boom")


def fails_while_it_runs(strategy: str, way: str, who: tuple[int, ...], transport: str) -> tuple[float, list[int], int]:
    """Before each of three steps a pass whose backward throws. How far the parameters are, what those passes delivered, and what is
    delivered by one that does not throw."""
    world = plumb.World.join(backend=transport, timeout=60)
    model, twin = little(Throws)(), little(Throws)()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    delivered: list[int] = []
    with engine_for(model, strategy, world) as engine:
        play = Play(WAYS[way](model), world.rank, 2, 1.0, engine)
        for i in range(3):
            loss, before = play.loss(i + 7), compiled.counts().delivered
            if world.rank in who:
                when_passed(boom)
            with pytest.raises((RuntimeError, ValueError), match="boom" if world.rank in who else "failed on rank"):
                loss.backward()
            when_passed()
            delivered.append(compiled.counts().delivered - before)
            engine.zero_grad()
            before = compiled.counts().delivered
            play.backward(play.loss(i))
            everything = compiled.counts().delivered - before
            engine.step()
            engine.zero_grad()
            step_twin(twin, optimizer, 2, i)
        assert engine.gathered_bytes == 0 and compiled.gathers().bytes == 0
        return distance(engine, model, twin), delivered, everything


CASES = [
    ("ddp", "by operator", (1,), "shm"), ("ddp", "by operator", (0, 1), "shm"), ("ddp", "by inductor", (1,), "shm"),
    ("zero2", "by operator", (1,), "shm"), ("zero2", "by operator", (0, 1), "shm"),
    ("zero3", "by operator", (1,), "shm"), ("zero3", "by operator", (0, 1), "shm"),
    ("zero3", "by operator, in one graph", (1,), "shm"), ("zero3", "by operator, in one graph", (0, 1), "gloo"),
    ("zero3", "by inductor, in one graph", (1,), "shm"),
]  # fmt: skip


@pytest.mark.parametrize("strategy,way,who,transport", CASES)
def test_a_compiled_backward_that_throws_while_it_runs_leaves_nothing_behind(
    strategy: str, way: str, who: tuple[int, ...], transport: str
) -> None:
    env = {"PLUMB_SHM": "0"} if transport == "gloo" else None  # parameters travel, also on one machine
    everybody = plumb.spawn(fails_while_it_runs, 2, (strategy, way, who, transport), env=env, timeout=200)
    for rank, (far, delivered, everything) in enumerate(everybody):
        assert far < 1e-10, f"rank {rank} is {far:.1e} away"
        assert everything == (8 if (strategy, way) == ("zero3", "by operator") else 12)  # breaks at units leave the rest to eager
        if rank in who:
            assert all(0 < some < everything for some in delivered), f"rank {rank} did not fail in the middle: {delivered}"


def gathers_alone() -> list[str]:
    """Rank 0 goes on and gathers what rank 1, whose backward threw, does not send any more."""
    world = plumb.World.join(backend="gloo", timeout=60)
    model = little(Throws)()
    told = []
    with engine_for(model, "zero3", world) as engine:
        play = Play(WAYS["by operator, in one graph"](model), world.rank, 2, 1.0, engine)
        if world.rank == 1:
            when_passed(boom)
        for i in range(2):
            try:
                play.backward(play.loss(i))
            except (RuntimeError, ValueError) as error:
                told.append(str(error))
            when_passed()
    return told


def test_where_parameters_travel_the_ranks_that_gather_on_are_told_where_both_are() -> None:
    for rank, told in enumerate(plumb.spawn(gathers_alone, 2, env={"PLUMB_SHM": "0"}, timeout=100)):
        assert len(told) == 2, f"rank {rank}: {told}"
        assert rank == 0 or told[0] == "boom", told
        assert "rank 0" in told[-1] and "gathering the parameters beside" in told[-1], told
