"""When a compiled backward hands its gradients over, by what it has computed until then, and how many reductions have begun beside it;
and what is written down of it."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import plumb
from plumb import compiled
from stage import Play, make
from test_compiled import AOT_EAGER, engine_for

GRADIENTS = 22  # of a Net


class Products(TorchDispatchMode):
    """Looks before each matrix product that runs, in whatever order the compiler has put them."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self.look = look

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.look()
        return function(*args, **(kwargs or {}))


def overlap(inside: bool, strategy: str, backend: Any) -> tuple[list[int], list[int], int, list[float]]:
    """Gradients that were delivered and reductions that had begun before each product of a compiled backward and when it returned, of
    how many; and where in its graph gradients are delivered. (Before the first delivery, the reductions are those of the pass before.)"""
    compiled.deliver_inside = inside
    world = plumb.World.join(backend="shm", timeout=100)
    model = make()
    with engine_for(model, strategy, world) as engine:
        seen = torch.compile(model, backend=backend)
        for i in range(3):
            x = Play(model, world.rank, 2, 1.0).data(i).requires_grad_()
            delivered: list[int] = []
            begun: list[int] = []
            before = compiled.counts().delivered

            def look(*_: Any) -> None:
                delivered.append(compiled.counts().delivered - before)
                begun.append(engine._engine.reductions[0])

            loss = seen(x).pow(2).mean()
            x.register_hook(look)  # runs when the graph has returned, before anything it returned is accumulated
            with Products(look):
                loss.backward()
            buckets = engine._engine.reductions[1]
            engine.step()
            engine.zero_grad()
        return delivered, begun, buckets, [one.at for made in compiled.explain() for one in made.deliveries]


@pytest.mark.parametrize("backend", [AOT_EAGER, "inductor"])
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_reductions_begin_while_a_compiled_backward_runs(strategy: str, backend: Any) -> None:
    for delivered, begun, buckets, at in plumb.spawn(overlap, 2, (True, strategy, backend), timeout=300):
        middle = len(delivered) // 2
        assert delivered[0] <= 2 and delivered[-1] == GRADIENTS, delivered
        assert GRADIENTS // 3 < delivered[middle] < 2 * GRADIENTS // 3, delivered
        assert buckets >= 4 and begun[-1] >= buckets - 2, (begun, buckets)
        assert 0 < begun[middle] < begun[-1], begun
        if backend is AOT_EAGER:  # a graph that came from the cache is not explained
            assert at[0] < 0.4 < at[len(at) // 2] < 0.8, at


def test_without_deliveries_inside_a_compiled_backward_hands_everything_over_at_its_end() -> None:
    delivered, begun, buckets, at = plumb.spawn(overlap, 2, (False, "ddp", AOT_EAGER))[0]
    assert not any(delivered) and begun[-1] < buckets - 2 and at == [], (delivered, begun, at)


def dumps() -> tuple[int, list[tuple[int, str]]]:
    world = plumb.World.join(backend="shm", timeout=100)
    model = make()
    for inside in (True, False):
        compiled.deliver_inside = inside
        torch._dynamo.reset()
        with engine_for(model, "ddp", world) as engine:
            Play(torch.compile(model, backend=AOT_EAGER), world.rank, 2, 1.0, engine).loss(0).backward()
    return os.getpid(), [(len(made.deliveries), made.code) for made in compiled.explain()]


def test_a_folder_that_is_named_gets_every_backward_and_what_was_put_into_it(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "not" / "there"
    expected = {}
    for number, backwards in plumb.spawn(dumps, 2, env={"PLUMB_COMPILE_DUMP": str(folder)}):
        assert [found for found, _ in backwards] == [GRADIENTS, 0]
        expected.update({f"backward-{number}-{i}.txt": one for i, one in enumerate(backwards)})
    assert {path.name for path in folder.iterdir()} == expected.keys()
    for name, (found, code) in expected.items():
        lines = (folder / name).read_text().splitlines()
        assert lines[0] == (f"# {GRADIENTS} deliveries" if found else "# plumb.compiled.deliver_inside is False")
        assert [line.startswith("Delivery(argument=") for line in lines[1 : found + 2]] == [True] * found + [False]
        assert "\n".join(lines[found + 1 :]).strip() == code.strip() and code.count("torch.ops.plumb.deliver.output") == found


def test_nothing_is_written_where_no_folder_is_named(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(plumb.spawn(dumps, 2, env={"PLUMB_COMPILE_DUMP": ""})) == 2 and not list(tmp_path.iterdir())
