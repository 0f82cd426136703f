"""Which backwards are announced, and when they end; what stays as torch made it."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import plumb
from programs import Boom
from stage import Block, Play, distance, make, one_step, reference, trained


def passes(run: Any) -> int:
    """How many backwards of a step the engine counts."""
    model = make()
    engine = plumb.Engine(model, plumb.SGD(lr=0.0))
    engine.backward(None, weight=1)  # whose weight makes step() say how many backwards there were
    run(model)
    try:
        engine.step()
        return 0
    except plumb.Error as error:
        said = error
    return int(str(said).split(" of its ")[1].split()[0]) - 1


def x() -> torch.Tensor:
    return torch.ones(2, 12, dtype=torch.float64, requires_grad=True)


def nested(model: Any) -> None:
    block = model.blocks[0]
    checkpoint(lambda y: checkpoint(block, y, use_reentrant=True), x(), use_reentrant=True).sum().backward()


def two_in_one(model: Any) -> None:
    block = model.blocks[0]
    one, two = (checkpoint(block, x(), use_reentrant=True) for _ in range(2))
    (one + two).sum().backward()


def retained(model: Any) -> None:
    loss = model(x()).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def in_a_hook(model: Any) -> None:
    inner = model.blocks[1](x()).sum()
    out = model.first(x())
    out.register_hook(lambda grad: inner.backward())
    out.sum().backward()


def from_threads(model: Any) -> None:
    for _ in range(3):
        thread = threading.Thread(target=lambda: model(x()).sum().backward())
        thread.start()
        thread.join()


CASES = {
    "plain": (lambda model: model(x()).sum().backward(), 1),
    "nested checkpoints": (nested, 1),
    "two checkpoints of one weight": (two_in_one, 1),
    "retained, twice": (retained, 2),
    "a backward inside a hook": (in_a_hook, 1),
    "autograd.grad": (lambda model: torch.autograd.grad(model(x()).sum(), model.first.weight), 0),
    "inputs without parameters": (lambda model: (lambda y: model(y).sum().backward(inputs=[y]))(x()), 0),
    "three threads": (from_threads, 3),
}


@pytest.mark.parametrize("name", CASES)
def test_a_backward_is_a_pass_and_what_runs_inside_belongs_to_it(name: str) -> None:
    run, expected = CASES[name]
    assert passes(run) == expected


def test_python_hooks_on_saved_tensors_still_work() -> None:
    make()
    packed, runs = [], []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t):
        loss = x().sin().sum()
    loss.backward()
    checkpoint(lambda y: (runs.append(1), y.sin())[1], x(), use_reentrant=False).sum().backward()
    assert packed and len(runs) == 2


def test_callbacks_and_other_wrappers_of_torchs_engine_still_work() -> None:
    plumb.Engine(make(), plumb.SGD()).close()
    engine = torch.autograd.Variable._execution_engine
    assert isinstance(engine, torch._C._ImperativeEngine)
    order = []
    one = x()
    one.register_hook(lambda grad: engine.queue_callback(lambda: order.append("callback")))
    one.sum().backward()
    assert order == ["callback"]
    assert engine.is_checkpoint_valid()

    class Other(type(engine)):  # type: ignore[misc]
        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            order.append("other")
            return engine.run_backward(*args, **kwargs)

    torch.autograd.Variable._execution_engine = Other()
    try:
        assert passes(CASES["plain"][0]) == 1
    finally:
        torch.autograd.Variable._execution_engine = engine
    assert "other" in order


def test_a_forked_process_runs_backwards() -> None:
    model = make()
    plumb.Engine(model, plumb.SGD()).close()
    model(x()).sum().backward()

    def child() -> float:
        fresh = make()
        engine = plumb.Engine(fresh, plumb.SGD(lr=0.1))
        Play(fresh, 0, 1, 1.0).loss(0).backward()
        engine.step()
        return float(fresh.first.weight.detach().sum())

    assert plumb.spawn(child, 1) == [pytest.approx(child())]


def interrupt(gradient: torch.Tensor) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):  # so that Python looks before it leaves the hook
        pass


def interrupted(strategy: str) -> tuple[str, float, float]:
    """What the backward said; how far the model is from one process's after two steps more, and from where it began."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    model, twin = make(), make()
    engine = plumb.Engine(model, plumb.SGD(lr=0.1), strategy=strategy, units=[Block])
    rank = engine.world.rank
    loss = Play(model, rank, 2, 1.0).loss(0)
    handle = model.blocks[1].up.weight.register_hook(interrupt) if rank == 0 else None
    try:
        loss.backward()
        said = "nothing"
    except KeyboardInterrupt:
        said = "interrupted"
    except plumb.Error as error:
        said = str(error)
    if handle is not None:
        handle.remove()
    engine.zero_grad()
    for i in (1, 2):
        trained(model, one_step(i), engine)
        reference(twin, one_step(i), 2, torch.optim.SGD(twin.parameters(), lr=0.1))
    return said, distance(engine, model, twin), distance(engine, model, make())


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_an_interrupt_inside_a_backward_reaches_every_rank_and_training_can_go_on(strategy: str) -> None:
    (zero, *away), (one, *others) = plumb.spawn(interrupted, 2, (strategy,), timeout=60)
    assert zero == "interrupted"
    assert "failed on rank 0" in one, one
    for far, moved in (away, others):
        assert far < 1e-12 and moved > 1e-4


def test_what_a_backward_throws_is_what_the_user_gets() -> None:
    model = make()
    engine = plumb.Engine(model, plumb.SGD(lr=0.1))
    with pytest.raises(ValueError, match="boom"):
        Boom.apply(model(x())).sum().backward()
    with pytest.raises(ValueError, match="boom"):
        engine.backward(model.last(Boom.apply(model.first(x()))).sum())
    engine.zero_grad()
    Play(model, 0, 1, 1.0).loss(0).backward()
    twin = make()
    Play(twin, 0, 1, 1.0).loss(0).backward()
    engine.step()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert distance(engine, model, twin) < 1e-12


@pytest.mark.parametrize("when", ["before", "after", "both"])
def test_hooks_on_parameters_are_called_whenever_they_were_registered(when: str) -> None:
    def doubled(model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: 2 * grad)

    model, twin = make(), make()
    if when != "after":
        doubled(model)
        doubled(twin)
    engine = plumb.Engine(model, plumb.SGD(lr=0.1))
    if when != "before":
        doubled(model)
        doubled(twin)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for i in range(3):
        Play(model, 0, 1, 1.0).loss(i).backward()
        Play(twin, 0, 1, 1.0).loss(i).backward()
        engine.step()
        optimizer.step()
        engine.zero_grad()
        optimizer.zero_grad()
        # Another dtype for a while makes new accumulators, which the engine hears of.
        for one in (model, twin):
            one.float()
            one.double()
    assert distance(engine, model, twin) < 1e-6
    assert distance(engine, model, make()) > 1e-3


# ---- a unit whose gathering failed


def gathers_again() -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    engine = plumb.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="zero3", units=[torch.nn.Linear])
    inputs = torch.ones(1, 3)
    if engine.world.rank == 1:
        with pytest.raises(plumb.Error, match="PLUMB_FAULT"):
            model(inputs)
    model(inputs).sum().backward()
    engine.step()
    return [float(engine.full_parameter(parameter).sum()) for parameter in model.parameters()]


def test_a_unit_whose_gathering_failed_is_not_taken_for_whole() -> None:
    """Where ranks read each other's memory, so that one can try again alone."""
    told = plumb.spawn(gathers_again, 2, env={"PLUMB_FAULT": "rank=1,point=gather:1,kind=throw"})
    alone = plumb.spawn(gathers_again, 1)[0]
    for said in told:
        assert said == pytest.approx(alone)
