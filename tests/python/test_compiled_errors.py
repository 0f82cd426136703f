"""What cannot be compiled ends in an error that says what to do, or in eager; never in numbers of this rank alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import pytest

import plumb
from stage import STEP, ZERO, Block, Net, Play, distance, make, one_step, reference, trained
from test_compiled import AOT_EAGER, engine_for


def compiled_autograd(strategy: str) -> str:
    world = plumb.World.join(backend="shm", timeout=30)
    model = make()
    with engine_for(model, strategy, world) as engine:
        play = Play(model, world.rank, 2, 1.0, engine)
        from torch._dynamo import compiled_autograd as taken_over

        with taken_over._enable(torch.compile(backend="eager")), pytest.raises(RuntimeError, match="without it"):
            play.loss(0).backward()
        engine.zero_grad()
        play.backward(play.loss(1))  # and nothing is broken
        engine.step()
        return ""


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_compiled_autograd_is_refused_with_what_to_do(strategy: str) -> None:
    plumb.spawn(compiled_autograd, 2, (strategy,), timeout=100)


def reads_pieces(backend: str) -> None:
    """A compiled function over gradients answers for whole ones, as in eager."""
    world = plumb.World.join(backend="shm", timeout=30)
    model = make()
    with engine_for(model, "zero2", world) as engine:
        play = Play(model, world.rank, 2, 1.0, engine)
        play.backward(play.loss(0))
        weight = model.first.weight
        expected = float(engine.full_gradient(weight).norm())

        def norm(parameter: torch.Tensor) -> torch.Tensor:
            return parameter.grad.norm() * 2.0

        assert float(torch.compile(norm, backend=backend)(weight)) == pytest.approx(2 * expected)
        assert float(torch.compile(lambda g: g.norm(), backend=backend)(weight.grad)) == pytest.approx(expected)
        with pytest.raises(RuntimeError, match="piece"):
            torch.compile(lambda p: p.grad.norm(), backend=backend, fullgraph=True)(weight)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_does_not_take_a_piece_for_a_whole_gradient(backend: str) -> None:
    plumb.spawn(reads_pieces, 2, (backend,), timeout=200)


def hook_throws(strategy: str) -> None:
    """A hook that throws on one rank, behind one of two compiled backwards (``test_compiled_failures.py`` has those that throw themselves)."""
    world = plumb.World.join(backend="shm", timeout=30)
    model = make()
    with engine_for(model, strategy, world) as engine:
        seen = torch.compile(model, backend=AOT_EAGER)
        play = Play(seen, world.rank, 2, 1.0, engine)
        loss = play.loss(0)
        if world.rank == 1:  # a second graph below the first, whose backward throws
            x = play.data(3).requires_grad_()
            x.register_hook(lambda g: (_ for _ in ()).throw(ValueError("boom")))
            loss = loss + seen(x).sum()
        with pytest.raises((RuntimeError, ValueError), match="boom" if world.rank == 1 else "failed on rank 1"):
            loss.backward()
        engine.zero_grad()
        play.backward(play.loss(1))
        engine.step()
        mine = [float(engine.full_parameter(p).sum()) for p in model.parameters()]
    assert all(value == value for value in mine)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_hook_that_throws_behind_a_compiled_backward_is_everybodys_failure(strategy: str) -> None:
    plumb.spawn(hook_throws, 2, (strategy,), timeout=100)


def different_graphs() -> float:
    """Ranks that compiled different graphs of one model: gradients come at other moments, and are the same."""
    world = plumb.World.join(backend="shm", timeout=30)
    model, twin = make(), make()
    with engine_for(model, "zero2", world) as engine:
        seen = torch.compile(model, backend=AOT_EAGER) if world.rank == 0 else model
        for i in range(3):
            play = Play(seen, world.rank, 2, 1.0, engine)
            play.backward(play.loss(i))
            engine.step()
            engine.zero_grad()
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        for i in range(3):
            for rank in range(2):
                part = Play(twin, rank, 2, 0.5)
                part.backward(part.loss(i))
            optimizer.step()
            optimizer.zero_grad()
        from stage import distance

        return distance(engine, model, twin)


def test_ranks_may_compile_different_graphs() -> None:
    assert max(plumb.spawn(different_graphs, 2, timeout=100)) < 1e-10


def backward_in_a_graph(strategy: str) -> tuple[float, str]:
    """torch can trace a backward into a graph: run before the engine is there, beside an eager one, and where nothing may break."""
    torch._dynamo.config.trace_autograd_ops = True
    world = plumb.World.join(backend="shm", timeout=60)
    model, twin = make(), make()

    def run(play: Play, i: int) -> None:
        play.backward(play.loss(i))

    seen = torch.compile(run, backend="aot_eager")
    seen(Play(model, 0, 1, 1.0), 0)
    model.zero_grad()

    def program(play: Play) -> Iterator[Any]:
        for i in range(2):
            play.backward(play.loss(i + 4))
            (seen if play.engine is not None else run)(play, i)
            yield STEP
            yield ZERO

    with engine_for(model, strategy, world) as engine:
        trained(model, program, engine)
        reference(twin, program, world.size, torch.optim.SGD(twin.parameters(), lr=0.1))
        far = distance(engine, model, twin)

        def whole(x: torch.Tensor) -> None:
            model(x).pow(2).mean().backward()

        try:
            torch.compile(whole, backend="aot_eager", fullgraph=True)(Play(model, world.rank, 2, 1.0).data(0))
        except RuntimeError as error:
            return far, str(error)
        return far, "nothing"


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_backward_never_becomes_part_of_a_graph(strategy: str) -> None:
    if not hasattr(torch._dynamo.config, "trace_autograd_ops"):
        pytest.skip("this torch traces no backwards")
    for far, told in plumb.spawn(backward_in_a_graph, 2, (strategy,), timeout=200):
        assert far < 1e-10
        assert "one that is part of a graph would not be reduced" in told, told


def unknown_backend(by_operation: str) -> tuple[str, float]:
    """Where it is asked for, or at the first forward; and then the model trains as ever."""
    world = plumb.World.join(backend="shm", timeout=30)
    model, twin = make(), make()
    with engine_for(model, "zero2", world) as engine:
        with pytest.raises(Exception) as told:
            if by_operation == "torch.compile":
                torch.compile(model, backend="nobody_knows")
            else:
                model.blocks[0].compile(backend="nobody_knows")
                Play(model, world.rank, 2, 1.0, engine).loss(0)
        model.blocks[0]._compiled_call_impl = None
        seen = torch.compile(model, backend=AOT_EAGER)
        trained(seen, one_step(1), engine)
        reference(twin, one_step(1), 2, torch.optim.SGD(twin.parameters(), lr=0.1))
        return str(told.value), distance(engine, model, twin)


@pytest.mark.parametrize("by_operation", ["torch.compile", "module.compile"])
def test_a_backend_that_nobody_knows_is_an_error_on_every_rank(by_operation: str) -> None:
    for told, far in plumb.spawn(unknown_backend, 2, (by_operation,), timeout=100):
        assert "nobody_knows" in told and far < 1e-10, told


def test_a_delivery_outside_of_a_compiled_backward_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="outside of the backward of a compiled graph"):
        torch.ops.plumb.deliver.output(torch.ones(2), 0)


class Grows(Net):
    """Its forward takes in a block that it was given after its engine was built."""

    late: torch.nn.Module | None = None

    def forward(self, x: torch.Tensor, around: Any = None) -> torch.Tensor:
        if self.late is not None:
            self.blocks.append(self.late)
        for block in self.blocks:
            x = block(x)
        return self.last(self.first(x))


def grows(whole_graph: bool) -> tuple[str, int]:
    world = plumb.World.join(backend="shm", timeout=30)
    model = Grows().double()
    with engine_for(model, "ddp", world) as engine:
        play = Play(torch.compile(model, backend=AOT_EAGER, fullgraph=whole_graph), world.rank, 2, 1.0, engine)
        play.backward(play.loss(0))
        engine.step()
        object.__setattr__(model, "late", Block().double())  # which is no module of it yet
        with pytest.raises((plumb.Error, RuntimeError)) as told:
            play.backward(play.loss(1))
            engine.step()
        return str(told.value), len(model.blocks)


@pytest.mark.parametrize("whole_graph", [False, True])
def test_a_module_that_a_compiled_forward_takes_in_is_noticed(whole_graph: bool) -> None:
    for rank, (told, blocks) in enumerate(plumb.spawn(grows, 2, (whole_graph,), timeout=100)):
        expected = "outside of compiled graphs" if whole_graph else f"rank {rank}: parameter 'blocks.3.norm.weight' came into the model"
        assert expected in told and blocks == (3 if whole_graph else 4), told
