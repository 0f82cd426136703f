"""What happens between and around the passes of a compiled model: resets, steps, exceptions, engines that end, others beside it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import plumb
from stage import STEP, ZERO, Play, distance, reference, step_twin, trained
from test_compiled import AOT_EAGER, compare, engine_for
from test_compiled_modules import Checkpointed, Little, Small, by_operator, little, one_graph, plain

WAYS: dict[str, Callable[[Any], Any]] = {"with breaks": by_operator, "in one graph": one_graph}

# ---- programs


def resets(play: Play) -> Iterator[Any]:
    """What a backward needs is not the compiler's memory."""
    for i in range(2):
        loss = play.loss(i)
        if play.engine is not None:
            torch._dynamo.reset()
        play.backward(loss)
        yield STEP
        yield ZERO


def asks_for_some(play: Play) -> Iterator[Any]:
    for i in range(2):
        play.backward(play.loss(i), inputs=[play.model.first.weight, play.model.blocks[1].up.weight])
        play.backward(play.loss(i + 4))
        yield STEP
        yield ZERO


def looks_for_nans(play: Play) -> Iterator[Any]:
    with torch.autograd.detect_anomaly(check_nan=True):
        play.backward(play.loss(0))
    yield STEP


def retains(play: Play) -> Iterator[Any]:
    out = play.model(play.data())
    play.backward(out.pow(2).mean(), retain_graph=True)
    play.backward(out.pow(3).mean())
    yield STEP


def offloads(play: Play) -> Iterator[Any]:
    for i in range(2):
        with torch.autograd.graph.save_on_cpu():
            loss = play.loss(i)
        play.backward(loss)
        yield STEP
        yield ZERO


def skips(play: Play) -> Iterator[Any]:
    """Ranks trace different graphs: one of them leaves a unit out, twice."""
    model = getattr(play.model, "_orig_mod", play.model)
    for i in range(3):
        model.skips = play.rank == 1 and i != 1
        play.backward(play.loss(i))
        yield STEP
        yield ZERO


class Skips(Little):
    skips = False

    def forward(self, x: Any, around: Any = None) -> Any:
        x = self.first(x)
        if not self.skips:
            x = self.blocks[0](x)
        return self.last(self.blocks[1](x))


class Reentrant(Little):
    def forward(self, x: Any, around: Any = None) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.last(x)


def blocks_in_place(model: Any) -> Any:
    for block in model.blocks:
        block.compile(backend=AOT_EAGER)
    return model


def blocks_replaced(model: Any) -> Any:
    """After the engine was built."""
    for i, block in enumerate(model.blocks):
        model.blocks[i] = by_operator(block)
    return model


def backends_mixed(model: Any) -> Any:
    model.blocks[0].compile(backend="eager")
    model.blocks[1].compile(backend="aot_eager")
    model.last.compile(backend=AOT_EAGER)
    return model


class Encodes(Little):
    def encode(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Any, around: Any = None) -> Any:
        return self.last(self.encode(self.first(x)))


def method_alone(model: Any) -> Any:
    model.encode = one_graph(model.encode)
    return model


# ---- cases of their own


def stale(strategy: str, world: plumb.World, compiles: Callable[[Any], Any]) -> float:
    """A graph that is walked after a step is torch's error, as in one process: its parameters are no longer what they were."""
    model = little()()
    with engine_for(model, strategy, world) as engine:
        play = Play(compiles(model), world.rank, 2, 1.0, engine)
        one, other = play.loss(0), play.loss(1)
        one.backward()
        engine.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation|failed on rank"):
            other.backward()
        engine.zero_grad()
        play.backward(play.loss(2))  # and nothing is broken
        engine.step()
        return 0.0


@torch.library.custom_op("plumb_tests::fails_where_told", mutates_args=())
def fails(x: torch.Tensor) -> torch.Tensor:
    if fails_now[0]:
        raise ValueError("boom")
    return x.clone()


fails_now = [False]
fails.register_fake(torch.empty_like)
fails.register_autograd(lambda ctx, gradient: gradient)


class Fails(Small):
    def forward(self, x: Any, **_: Any) -> Any:
        return x + torch.tanh(torch.ops.plumb_tests.fails_where_told(self.up(x)))


def throws(strategy: str, world: plumb.World, compiles: Callable[[Any], Any]) -> float:
    """On one rank, in the middle of a graph's forward; the others' pass nobody walks."""
    model, twin = little(Fails)(), little(Fails)()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    with engine_for(model, strategy, world) as engine:
        play = Play(compiles(model), world.rank, 2, 1.0, engine)
        for i in range(2):
            play.backward(play.loss(i))
            engine.step()
            engine.zero_grad()
            step_twin(twin, optimizer, 2, i)
            fails_now[0] = world.rank == 1
            if fails_now[0]:
                with pytest.raises(ValueError, match="boom"):
                    play.loss(7)
            else:
                play.loss(7)
            fails_now[0] = False
        assert engine.gathered_bytes == 0
        return distance(engine, model, twin)


def ends_between(strategy: str, world: plumb.World, compiles: Callable[[Any], Any]) -> float:
    """An engine is closed between a forward and its backward: the gradients are this rank's, as of a model that nobody has."""
    model, twin = little()(), little()()
    engine = engine_for(model, strategy, world)
    loss = Play(compiles(model), world.rank, 2, 1.0, engine).loss(0)
    engine.close()
    loss.backward()
    Play(twin, world.rank, 2, 1.0).loss(0).backward()
    return max(float((p.grad - q.grad).abs().max()) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def two_engines(strategy: str, world: plumb.World, other: str) -> float:
    """One graph through the models of two."""
    one, two, other_one, other_two = (little()() for _ in range(4))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (other_one, other_two)]
    with engine_for(one, strategy, world) as first, engine_for(two, other, world) as second:

        def loss(inner: nn.Module, outer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return outer(inner(x)).pow(2).mean()

        seen = one_graph(lambda x: loss(one, two, x))
        for i in range(2):
            seen(Play(one, world.rank, 2, 1.0).data(i)).backward()
            for engine in (first, second):
                engine.step()
                engine.zero_grad()
            for rank in range(2):
                (loss(other_one, other_two, Play(other_one, rank, 2, 1.0).data(i)) / 2).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert first.gathered_bytes == second.gathered_bytes == 0
        return max(distance(first, one, other_one), distance(second, two, other_two))


def reads_what_is_released(strategy: str, world: plumb.World) -> float:
    """A graph that enters no unit, and reads a parameter of one: the error of eager."""
    model, twin = little()(), little()()
    with engine_for(model, strategy, world):
        squares = torch.compile(lambda: model.blocks[0].up.weight.pow(2).sum(), backend=AOT_EAGER, fullgraph=True)
        if strategy == "zero3":
            with pytest.raises(RuntimeError, match="used while its unit is released"):
                squares()
            return 0.0
        return abs(float(squares()) - float(twin.blocks[0].up.weight.pow(2).sum()))


def only_inputs_want_gradients(strategy: str, world: plumb.World) -> float:
    model, twin = little()(), little()()
    model.requires_grad_(False).last.requires_grad_()
    with engine_for(model, strategy, world) as engine:
        model.last.requires_grad_(False)
        x, y = (Play(twin, world.rank, 2, 1.0).data(0).requires_grad_() for _ in range(2))
        one_graph(model)(x).pow(2).mean().backward()
        twin(y).pow(2).mean().backward()
        assert engine.gathered_bytes == 0
        return float((x.grad - y.grad).abs().max())


def clips_and_scales(strategy: str, world: plumb.World) -> float:
    """bf16 with masters, summed in f32, scaled and clipped: compiled is what the same engine does in eager."""
    found = []
    for compiles in (by_operator, one_graph, lambda model: model):
        model = little(dtype=torch.bfloat16)()
        with engine_for(model, strategy, world, clip_norm=0.05, loss_scale=8.0, accumulate_dtype=torch.float32) as engine:
            seen = compiles(model)
            for i in range(2):
                engine.backward(Play(seen, world.rank, 2, 1.0, engine).loss(i))
                engine.step()
                engine.zero_grad()
            found.append([engine.full_parameter(parameter).float().clone() for parameter in model.parameters()])
    return max(float((p - q).abs().max()) for one in found[:2] for p, q in zip(one, found[2], strict=True)) * 1e-9  # to the last bits


def shares(strategy: str, world: plumb.World, compiles: Callable[[Any], Any]) -> float:
    """Deterministic mode, whose gradients are collected whole until the step."""
    model, twin = little()(), little()()
    with engine_for(model, strategy, world, deterministic=True, virtual_ranks=2) as engine:
        trained(compiles(model), plain, engine)
        reference(twin, plain, 2, torch.optim.SGD(twin.parameters(), lr=0.1))
        return distance(engine, model, twin)


def autograd_is_compiled(strategy: str, world: plumb.World) -> float:
    model = little()()
    with engine_for(model, strategy, world) as engine, torch._dynamo.config.patch(compiled_autograd=True):
        loss = Play(by_operator(model), world.rank, 2, 1.0, engine).loss(0)
        with pytest.raises(RuntimeError, match="compiled autograd cannot run the hooks"):
            by_operator(lambda: loss.backward())()
    return 0.0


def cases_of(strategy: str, world: plumb.World) -> dict[str, Callable[[], float]]:
    run = functools.partial(compare, strategy=strategy, world=world)
    cases: dict[str, Callable[[], float]] = {
        "blocks that were replaced": lambda: run(plain, compiles=blocks_replaced, model=little()),
        "backends side by side": lambda: run(plain, compiles=backends_mixed, model=little()),
        "checkpoints around": lambda: run(plain, compiles=blocks_in_place, model=little(net=Checkpointed)),
        "reentrant checkpoints around": lambda: run(plain, compiles=blocks_in_place, model=little(net=Reentrant)),
        "a method": lambda: run(plain, compiles=method_alone, model=little(net=Encodes)),
        "two engines": lambda: two_engines(strategy, world, "ddp"),
        "two engines that shard": lambda: two_engines(strategy, world, "zero3"),
        "reads what is released": lambda: reads_what_is_released(strategy, world),
        "only inputs want gradients": lambda: only_inputs_want_gradients(strategy, world),
        "clips and scales": lambda: clips_and_scales(strategy, world),
        "autograd is compiled": lambda: autograd_is_compiled(strategy, world),
    }
    for way, compiles in WAYS.items():
        if way == "in one graph" and strategy != "zero3":
            continue
        for program in (resets, asks_for_some, looks_for_nans, retains, offloads):
            cases[f"{program.__name__}, {way}"] = functools.partial(run, program, compiles=compiles, model=little())
        cases[f"skips, {way}"] = functools.partial(run, skips, compiles=compiles, model=little(net=Skips))
        for case in (stale, throws, ends_between, shares):
            cases[f"{case.__name__}, {way}"] = functools.partial(case, strategy, world, compiles)
    return cases


def moments(strategy: str) -> dict[str, float]:
    torch._functorch.config.donated_buffer = False  # or torch refuses to walk a graph twice
    world = plumb.World.join(backend="shm", timeout=60)
    return {name: case() for name, case in cases_of(strategy, world).items()}


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_whatever_happens_around_a_compiled_model_is_what_happens_in_one_process(strategy: str) -> None:
    for far in plumb.spawn(moments, 2, (strategy,), timeout=400):
        assert all(distance <= 1e-10 for distance in far.values()), far


# ---- ranks that compiled different graphs, and cannot read each other's memory


def differ(which: str) -> float | str:
    """The same gathers in the same order are right, whatever the graphs; others are an error on every rank, and no hang. (A whole graph
    gathers its last unit again for the backward, which is kept where units are gathered outside of graphs.)"""
    world = plumb.World.join(backend="gloo", timeout=60)
    compiles: Callable[[Any], Any] = by_operator if which == "compiled on one rank" else one_graph
    if world.rank == 1 and which.endswith("on one rank"):
        compiles = lambda model: model  # noqa: E731
    try:
        if which == "another unit":
            return compare(skips, "zero3", world, compiles, little(net=Skips))
        return compare(rows_of_its_own if which == "other shapes" else plain, "zero3", world, compiles, little())
    except RuntimeError as error:
        return str(error)


def rows_of_its_own(play: Play) -> Iterator[Any]:
    """Rank 1 compiles anew for each number of rows, and for any number of them from the second on."""
    for i in range(3):
        x = play.data(i) if play.rank == 0 else torch.cat([play.data(i)] * (i + 1))
        play.backward(play.model(x).pow(2).mean())
        yield STEP
        yield ZERO


@pytest.mark.parametrize("which", ["one graph on one rank", "compiled on one rank", "other shapes", "another unit"])
def test_ranks_that_compiled_different_graphs_are_right_or_told(which: str) -> None:
    for far in plumb.spawn(differ, 2, (which,), env={"PLUMB_SHM": "0"}, timeout=200):
        if which in ("another unit", "one graph on one rank"):
            assert isinstance(far, str) and "gather what every rank uses, in the same order" in far, far
        else:
            assert isinstance(far, float) and far <= 1e-10, far
