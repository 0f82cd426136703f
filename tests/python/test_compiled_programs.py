"""Programs as people write them around ``torch.compile``: against one process that runs the same in eager."""

from __future__ import annotations

import collections
import copy
import functools
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import plumb
from plumb import compiled
from programs import ROWS
from stage import STEP, WIDTH, ZERO, Block, Net, Play, distance, make, one_step, reference, trained
from test_compiled import AOT_EAGER, compare, engine_for

by_operator = functools.partial(torch.compile, backend=AOT_EAGER)
one_graph = functools.partial(by_operator, fullgraph=True)


def of(kind: Callable[[], torch.nn.Module]) -> Callable[[], torch.nn.Module]:
    def build() -> torch.nn.Module:
        torch.manual_seed(3)
        return kind().double()

    return build


class Lora(Block):
    """A frozen block beside which a small product learns."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.a, self.b = (torch.nn.Parameter(torch.randn(shape) / WIDTH) for shape in ((4, WIDTH), (WIDTH, 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x @ self.a.t() @ self.b.t()


def lora() -> torch.nn.Module:
    model = Net().requires_grad_(False)
    model.blocks = torch.nn.ModuleList(Lora() for _ in range(3))
    return model


class Both(Net):
    """Both checkpoints inside of one compiled model, and a region that is not compiled."""

    def forward(self, x: torch.Tensor, around: Any = None) -> torch.Tensor:
        x = checkpoint(self.blocks[0], self.first(x), use_reentrant=True)
        x = checkpoint(self.blocks[1], x, use_reentrant=False)
        return self.last(torch.compiler.disable(self.blocks[2])(x))


class Views(Block):
    """A weight in parts, a weight that is normalised, and one that is used without its layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.up.weight.chunk(2, 0)
        scaled = self.down.weight / self.down.weight.norm(dim=1, keepdim=True)
        h = torch.tanh(x @ one.t()) * (x @ other.t()).sigmoid()
        return x + h @ scaled[:, :WIDTH].t() + self.norm(x) + self.up.bias.mean()


def views() -> torch.nn.Module:
    model = Net()
    model.blocks = torch.nn.ModuleList(Views() for _ in range(3))
    return model


def one_rank_recompiles(play: Play) -> Iterator[Any]:
    """Rank 1 sees another shape each time, and compiles other graphs than rank 0."""
    for i in range(4):
        rows = 4 if play.rank == 0 else 3 + i
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(100 * play.rank + i)).double()
        play.backward(play.model(x).pow(2).mean())
        yield STEP
        yield ZERO


def accumulates(play: Play) -> Iterator[Any]:
    """What changes between passes is burnt into no graph: communication put off, evaluation, another stance, a reset."""
    for i in range(3):
        with play.no_sync():
            play.backward(play.loss(4 * i))
        with torch.no_grad():
            play.model(play.data(i))
        play.backward(play.loss(4 * i + 1))
        if play.engine is not None:
            torch.compiler.set_stance("force_eager" if i == 0 else "default")
        play.backward(play.loss(4 * i + 2))
        if play.engine is not None:
            torch.compiler.set_stance("default")
            if i == 1:
                torch._dynamo.reset()
        yield STEP
        yield ZERO


def thaws(play: Play) -> Iterator[Any]:
    """Parameters that are frozen at first."""
    for i in range(4):
        if play.rank == 0 or play.engine is not None:
            for parameter in play.model.blocks[0].parameters():
                parameter.requires_grad_(i >= 2)
        play.backward(play.loss(i))
        yield STEP
        yield ZERO


def step_by_step(play: Play, compiles: bool) -> Iterator[Any]:
    """A function that runs the forward, puts communication off, and runs backwards."""

    def train(x: torch.Tensor) -> torch.Tensor:
        with play.no_sync():
            play.backward(play.model(x).pow(2).mean())
        loss = play.model(x + 1).pow(2).mean()
        play.backward(loss)
        return loss.detach()

    run = by_operator(train) if compiles and play.engine is not None else train
    for i in range(3):
        run(play.data(i))
        yield STEP
        yield ZERO


def as_it_is(model: torch.nn.Module) -> torch.nn.Module:
    return model


def on_one_rank(world: plumb.World) -> Callable[[torch.nn.Module], torch.nn.Module]:
    """One rank has one graph, the other breaks at units."""
    return one_graph if world.rank == 0 else by_operator


def twice(model: torch.nn.Module) -> torch.nn.Module:
    for block in model.blocks:
        block.compile(backend=AOT_EAGER)
    return by_operator(model)


def programs(strategy: str) -> dict[str, float]:
    world = plumb.World.join(backend="shm", timeout=200)
    plain = ROWS["plain"]
    cases: dict[str, Callable[[], float]] = {
        "a step is compiled": lambda: compare(functools.partial(step_by_step, compiles=True), strategy, world, as_it_is),
        "one rank recompiles": lambda: compare(one_rank_recompiles, strategy, world, by_operator),
        "accumulates": lambda: compare(accumulates, strategy, world, by_operator),
        "thaws": lambda: compare(thaws, strategy, world, by_operator),
        "lora": lambda: compare(plain, strategy, world, one_graph, of(lora)),
    }
    if strategy == "zero3":
        cases["one rank recompiles one graph"] = lambda: compare(one_rank_recompiles, strategy, world, one_graph)
        cases["one graph on one rank"] = lambda: compare(plain, strategy, world, on_one_rank(world))
        cases["compiled twice"] = lambda: compare(plain, strategy, world, twice)
        cases["both checkpoints"] = lambda: compare(plain, strategy, world, by_operator, of(Both))
        cases["views"] = lambda: compare(plain, strategy, world, one_graph, of(views))
    return {name: case() for name, case in cases.items()}


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_programs_around_compiled_models_are_what_one_process_computes(strategy: str) -> None:
    for far in plumb.spawn(programs, 2, (strategy,), timeout=400):
        assert max(far.values()) <= 1e-10, far


# ---- models that others compiled, copied, saved


def saved(strategy: str, folder: str, first: str, second: str) -> float:
    """A checkpoint of a model as ``first`` has it, loaded by one as ``second`` has it."""
    world = plumb.World.join(backend="shm", timeout=60)

    def built(how: str) -> tuple[torch.nn.Module, torch.nn.Module]:
        model = make()
        if how == "blocks":
            for i, block in enumerate(model.blocks):
                model.blocks[i] = by_operator(block)
        return model, by_operator(model) if how == "whole" else model

    one, seen = built(first)
    with engine_for(seen, strategy, world) as engine:
        Play(seen, world.rank, 2, 1.0, engine).loss(0).backward()
        engine.step()
        engine.save(folder)
        kept = [engine.full_parameter(parameter).clone() for parameter in one.parameters()]
    other, seen = built(second)
    with engine_for(seen, strategy, world) as engine:
        engine.load(folder)
        return max(float((engine.full_parameter(p) - q).abs().max()) for p, q in zip(other.parameters(), kept, strict=True))


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("first,second", [("whole", "plain"), ("plain", "blocks"), ("blocks", "whole")])
def test_a_checkpoint_does_not_know_what_was_compiled(tmp_path: pathlib.Path, strategy: str, first: str, second: str) -> None:
    assert max(plumb.spawn(saved, 2, (strategy, str(tmp_path / "saved"), first, second), timeout=100)) == 0


def averaged(strategy: str) -> tuple[float, float]:
    """A copy of a compiled model is a model of nobody's: it averages, evaluates, and has gradients of its own."""
    world = plumb.World.join(backend="shm", timeout=60)
    model, twin = make(), make()
    average, other = None, None
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    with engine_for(model, strategy, world) as engine:
        seen = by_operator(model)
        for i in range(3):
            trained(seen, one_step(i), engine)
            reference(twin, one_step(i), 2, optimizer)
            with engine.gathered(model), torch.no_grad():
                average = average if average is not None else copy.deepcopy(seen)
                other = other if other is not None else copy.deepcopy(twin)
                for mine, theirs in ((average, seen), (other, twin)):
                    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
                        p.lerp_(q, 0.5)
        assert average is not None and other is not None
        x = Play(twin, 0, 1, 1.0).data(9)
        out, expected = average(x), other(x)
        out.sum().backward()
        expected.sum().backward()
        pairs = [(p.grad, q.grad) for p, q in zip(average.parameters(), other.parameters(), strict=True) if q.grad is not None]
        far = max(float((p - q).abs().max()) for p, q in pairs)
        return max(far, float((out - expected).detach().abs().max())), distance(engine, model, twin)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_copy_of_a_compiled_model_is_nobodys(strategy: str) -> None:
    for average, trained in plumb.spawn(averaged, 2, (strategy,), timeout=100):
        assert average < 1e-12 and trained < 1e-10


def engine_after_engine() -> list[float]:
    """One compiled model under one engine after another, and then under none."""
    world = plumb.World.join(backend="shm", timeout=60)
    model, twin = make(), make()
    seen = one_graph(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    far = []
    for i, strategy in enumerate(["zero3", "ddp", "zero3", "zero2"]):
        with engine_for(model, strategy, world) as engine:
            trained(seen, one_step(i), engine)
            reference(twin, one_step(i), 2, optimizer)
            far.append(distance(engine, model, twin))
    for one in (seen, twin):
        Play(one, 0, 1, 1.0).loss(0).backward()
    pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True) if q.grad is not None]
    return [*far, max(float((p - q).abs().max()) for p, q in pairs)]


def test_a_compiled_model_goes_from_engine_to_engine() -> None:
    for far in plumb.spawn(engine_after_engine, 2, timeout=100):
        assert max(far) < 1e-10, far


# ---- optimizers


def compiled_optimizer(strategy: str) -> float:
    """``torch.compile(optimizer.step)``: what an engine does around a step is done; the rest is what torch makes of it."""
    world = plumb.World.join(backend="shm", timeout=60)
    model, twin = make(), make()
    mine, theirs = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, twin))
    with plumb.Engine(model, mine, strategy=strategy, units=[Block], world=world) as engine:
        step, other = (torch.compile(one.step, backend="aot_eager") for one in (mine, theirs))
        for i in range(3):
            Play(model, world.rank, 2, 1.0, engine).loss(i).backward()
            step()
            mine.zero_grad()
            for rank in range(2):
                part = Play(twin, rank, 2, 0.5)
                part.backward(part.loss(i))
            other()
            theirs.zero_grad()
        return distance(engine, model, twin)


def test_a_compiled_step_of_an_optimizer_is_a_step() -> None:
    assert max(plumb.spawn(compiled_optimizer, 2, ("zero3",), timeout=200)) < 1e-10


def compiled_beside_eager() -> tuple[float, list[str]]:
    """Rows that forwards gather in another dtype, and not all ranks have as many of; the functions of ours that were compiled again and again."""
    plumb.world()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models: list[Any] = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(plumb.fully_shard(torch.nn.Linear(5, 7), mp_policy=policy, reshard_after_forward=False))
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    steps = [optimizers[0].step, torch.compile(optimizers[1].step, backend="aot_eager")]
    for i in range(3):
        x = torch.full((2, 5), 0.5 + i + dist.get_rank(), dtype=torch.bfloat16)
        for model, optimizer, step in zip(models, optimizers, steps, strict=True):
            model(x).square().sum().backward()
            step()
            optimizer.zero_grad()
    a, b = models
    far = max((p.full_tensor() - q.full_tensor()).abs().max().item() for p, q in zip(a.parameters(), b.parameters(), strict=True))
    return far, compiled_again()


def compiled_again() -> list[str]:
    from torch._dynamo.utils import get_compilation_metrics

    place = os.path.dirname(plumb.__file__)
    ours = collections.Counter(one.co_name for one in get_compilation_metrics() if (one.co_filename or "").startswith(place))
    return [f"{name}: {times} times" for name, times in ours.items() if times > 1]


def test_a_compiled_step_over_sharded_rows_is_the_eager_one() -> None:
    for far, again in plumb.spawn(compiled_beside_eager, 2, timeout=200):
        assert far < 1e-6 and again == []  # f32, in the order of a decomposed update


def compiled_replicated() -> list[str]:
    world = plumb.World.join(backend="shm", timeout=60)
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with plumb.Engine(model, optimizer, world=world) as engine:
        step = torch.compile(optimizer.step, backend="aot_eager")
        for i in range(3):
            Play(model, world.rank, 2, 1.0, engine).loss(i).backward()
            step()
            optimizer.zero_grad()
    return compiled_again()


def test_what_an_engine_does_around_a_compiled_step_is_not_compiled() -> None:
    assert plumb.spawn(compiled_replicated, 2, timeout=200) == [[]] * 2


# ---- modes


def in_mode(mode: str, strategy: str, fullgraph: bool) -> tuple[float, int, int]:
    world = plumb.World.join(backend="shm", timeout=200)
    far = compare(ROWS["plain"], strategy, world, functools.partial(torch.compile, mode=mode, fullgraph=fullgraph))
    return far, compiled.counts().delivered, compiled.gathers().times


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("strategy,fullgraph", [("ddp", False), ("zero2", False), ("zero3", True)])
def test_a_mode_that_asks_for_cuda_graphs_delivers_where_there_is_no_gpu(strategy: str, fullgraph: bool, mode: str) -> None:
    for far, delivered, gathers in plumb.spawn(in_mode, 2, (mode, strategy, fullgraph), timeout=500):
        assert far < 1e-10 and delivered == 3 * 22
        assert gathers == (3 * 2 * 3 if strategy == "zero3" else 0)  # steps, forward and backward, units


def test_a_backward_that_may_become_a_cuda_graph_returns_its_gradients() -> None:
    import torch._inductor.config as config
    from torch._subclasses.fake_tensor import FakeTensorMode

    graph = torch.fx.Graph()
    tangent = graph.placeholder("tangents_1")
    with FakeTensorMode():
        tangent.meta["val"] = torch.empty(2, device="cuda")
    graph.output((tangent,))
    with config.patch({"triton.cudagraphs": True}):
        compiled.insert_deliveries(graph)
    assert len(graph.nodes) == 2 and "CUDA graph" in compiled.explain()[-1].why_none
    with config.patch({"triton.cudagraphs": False}):
        compiled.insert_deliveries(graph)
    assert "CUDA graph" not in compiled.explain()[-1].why_none
