"""``fullgraph=True`` over sharded parameters: one graph for a whole model, which gathers a unit before its first use and frees it
behind its last; by what one process computes, and by counting the bytes that graphs had gathered."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import plumb
from plumb import _C, compiled
from plumb.compiled import units
from programs import ROWS
from stage import STEP, ZERO, Block, Net, Play, distance, make
from test_compiled import (
    AOT_EAGER, NO_KERNELS, chooses, compare, engine_for, shapes_that_change, two_producers, unused_outputs, used_inside_on_one_rank_only,
)  # fmt: skip

LAYERS = 3


class Deep(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))


class Checkpointed(Deep):
    def forward(self, x: torch.Tensor, around: Any = None) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.last(x)


class Again(Deep):
    """Every block twice, and one of them tied to another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight

    def forward(self, x: torch.Tensor, around: Any = None) -> torch.Tensor:
        return super().forward(super().forward(x))


class Regions(Deep):
    """Blocks that are traced once for all of them."""

    def forward(self, x: torch.Tensor, around: Any = None) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = region(block, x)
        return self.last(x)


class Sliced(Deep):
    """Units in a list that the graph makes for itself, as Llama does."""

    def forward(self, x: torch.Tensor, around: Any = None) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks[:2]:
            x = block(x)
        return self.last(x)


@torch.compiler.nested_compile_region
def region(block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return block(x)


class Halves(Deep):
    """Parameters are cast inside."""

    def double(self) -> Halves:  # which autocast leaves alone
        return self

    def forward(self, x: torch.Tensor, around: Any = None) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).to(x.dtype)


def of(kind: type[Net]) -> Callable[[], torch.nn.Module]:
    def build() -> torch.nn.Module:
        torch.manual_seed(3)
        return kind().double()

    return build


def looks_before(play: Play) -> Iterator[Any]:
    """Without gradients, and in inference mode, between steps."""
    for i in range(2):
        with torch.no_grad():
            once = play.model(play.data(i))
        with torch.inference_mode():
            again = play.model(play.data(i))
        assert torch.equal(once, again.clone())
        play.backward(play.loss(i))
        yield STEP
        yield ZERO


def whole(strategy: str) -> dict[str, float]:
    torch._functorch.config.donated_buffer = False  # or torch refuses to walk a graph twice
    world = plumb.World.join(backend="shm", timeout=200)
    one = functools.partial(torch.compile, backend=AOT_EAGER, fullgraph=True)
    dynamic = functools.partial(one, dynamic=True)
    cases: dict[str, Callable[[], float]] = {
        "checkpointed": lambda: compare(ROWS["plain"], strategy, world, one, of(Checkpointed)),
    }
    if strategy == "hsdp":
        inductor = functools.partial(torch.compile, fullgraph=True, options=NO_KERNELS)
        cases["by inductor"] = lambda: compare(ROWS["plain"], strategy, world, inductor)
    if strategy == "zero3":
        cases["plain"] = lambda: compare(ROWS["plain"], strategy, world, one)
        for name in ("two backwards, accumulating", "forward, forward, backward, backward"):
            cases[name] = functools.partial(compare, ROWS[name], strategy, world, one)
        cases["used inside on one rank only"] = lambda: compare(used_inside_on_one_rank_only, strategy, world, one, chooses)
        cases["without gradients"] = lambda: compare(looks_before, strategy, world, one)
        cases["shapes that change"] = lambda: compare(shapes_that_change, strategy, world, dynamic)
        cases["unused outputs"] = lambda: compare(unused_outputs, strategy, world, one)
        cases["two producers"] = lambda: compare(two_producers, strategy, world, one)
        cases["units in a slice"] = lambda: compare(ROWS["plain"], strategy, world, one, of(Sliced))
        cases["units run twice, and tied"] = lambda: compare(ROWS["plain"], strategy, world, one, of(Again))
    far = {name: case() for name, case in cases.items()}
    assert compiled.gathers().times > 0, "graphs gathered nothing"
    assert compiled.gathers().bytes == 0, "graphs still have gathered parameters"
    return far


@pytest.mark.parametrize("strategy,ranks", [("zero3", 2), ("hsdp", 4)])
def test_a_whole_graph_of_sharded_units_is_what_one_process_computes(strategy: str, ranks: int) -> None:
    for far in plumb.spawn(whole, ranks, (strategy,), timeout=400):
        assert max(far.values()) <= 1e-10, far


# ---- memory


Row = tuple[float, float, float, int, int]


def most_gathered(kind: type[Net], backend: Any, transport: str) -> tuple[list[Row], list[str], float]:
    """In units: the most that a graph had in its forward, between, and in its backward; how often it gathered, and how many of these
    were on their way when it asked. What it saved of weights, but for shards: a cast, a view. How far it is."""
    world = plumb.World.join(backend=transport, timeout=200)
    model, twin = of(kind)(), of(kind)()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    unit = sum(parameter.numel() * parameter.element_size() for parameter in model.blocks[0].parameters())
    rows, saved = [], []
    shards = list(model.blocks.parameters())
    shapes = {shape for weight in shards if weight.dim() == 2 for shape in (weight.shape, weight.t().shape)}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape in shapes and not any(tensor is one for one in shards):
            saved.append(f"{tuple(tensor.shape)} {tensor.dtype}")
        return tensor

    with engine_for(model, "zero3", world, gather_ahead_bytes=unit) as engine:
        if isinstance(backend, dict):
            seen = torch.compile(model, fullgraph=True, options=backend)
        else:
            seen = torch.compile(model, backend=backend, fullgraph=True)
        for i in range(3):
            before, _, _, ahead = _C.graph_gathers()
            _C.forget_most_gathered()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = Play(seen, world.rank, 2, 1.0, engine).loss(i)
            forward, between = _C.graph_gathers()[2], engine.gathered_bytes if transport == "shm" else _C.graph_gathers()[1]
            _C.forget_most_gathered()
            loss.backward()
            times, _, backward, came = _C.graph_gathers()
            rows.append((forward / unit, between / unit, backward / unit, times - before, came - ahead))
            engine.step()
            engine.zero_grad()
            assert engine.gathered_bytes == 0
            for rank in range(2):
                part = Play(twin, rank, 2, 0.5)
                part.backward(part.loss(i))
            optimizer.step()
            optimizer.zero_grad()
        return rows, saved, distance(engine, model, twin)


#: Inductor lays tensors of a graph into pools of its own, for as long as they live.
PLANNED = {"memory_planning": True}
CASES = [
    (Deep, AOT_EAGER, "shm"), (Deep, AOT_EAGER, "gloo"), (Deep, "aot_eager", "shm"), (Deep, "inductor", "shm"),
    (Deep, "inductor", "gloo"), (Checkpointed, AOT_EAGER, "shm"), (Checkpointed, NO_KERNELS, "shm"), (Halves, AOT_EAGER, "shm"), (Again, AOT_EAGER, "shm"),
    (Regions, AOT_EAGER, "shm"), (Regions, NO_KERNELS, "shm"), (Deep, PLANNED, "shm"), (Deep, PLANNED, "gloo"),
]  # fmt: skip


@pytest.mark.parametrize("kind,backend,transport", CASES)
def test_a_graph_has_a_unit_at_a_time(kind: type[Net], backend: Any, transport: str) -> None:
    env = {"PLUMB_SHM": "0"} if transport == "gloo" else None  # parameters travel, also on one machine
    most = 2 if kind is Again else 1.5  # where a block also gathers the one that it shares a weight with
    for rows, saved, far in plumb.spawn(most_gathered, 2, (kind, backend, transport), env=env, timeout=600):
        assert far < (1e-10 if kind is not Halves else 1e-2)
        assert not saved, f"the backward keeps weights: {saved}"
        # Where parameters travel, a unit is sent for while the graph computes with the one before it, once the order is known.
        ahead = [came for *_, came in rows]
        assert ahead[-1] >= LAYERS if transport == "gloo" else not any(ahead), ahead
        for forward, between, backward, gathers, _ in rows:
            assert 0.9 < forward < most, f"{forward} of {LAYERS} units at once in a forward"
            assert between == 0, f"{between} units were kept for the backward"
            assert 0.9 < backward < most, f"{backward} of {LAYERS} units at once in a backward"
            assert gathers == (4 if kind is Again else 2) * LAYERS, f"{LAYERS} units were gathered {gathers} times"


# ---- what cannot be


def refused(what: str) -> str:
    world = plumb.World.join(backend="shm", timeout=60)
    model = make()
    with engine_for(model, "zero3", world) as engine:
        if what == "another backend":
            seen: Any = torch.compile(model, backend="eager", fullgraph=True)
        else:
            weight = model.blocks[0].up.weight

            def changes(x: torch.Tensor) -> torch.Tensor:
                with torch.no_grad():
                    weight.mul_(0.5)
                return model(x)

            seen = torch.compile(changes, backend=AOT_EAGER, fullgraph=True)
        try:
            seen(Play(model, world.rank, 2, 1.0).data(0))
        except RuntimeError as error:
            play = Play(torch.compile(model, backend=AOT_EAGER), world.rank, 2, 1.0, engine)
            play.backward(play.loss(0))  # and nothing is broken
            engine.step()
            assert engine.gathered_bytes == 0
            return str(error)
        return "nothing"


@pytest.mark.parametrize("what,said", [("another backend", "does not gather"), ("changed", "parameter")])
def test_what_a_whole_graph_cannot_do_is_an_error(what: str, said: str) -> None:
    for told in plumb.spawn(refused, 2, (what,), timeout=100):
        assert said in told, told


def held_by_others() -> float:
    """Whoever holds a unit keeps it while a graph uses it, and after."""
    world = plumb.World.join(backend="shm", timeout=60)
    model, twin = make(), make()
    with engine_for(model, "zero3", world) as engine:
        seen = torch.compile(model, backend=AOT_EAGER, fullgraph=True)
        x = Play(twin, 0, 1, 1.0).data(0)
        with engine.gathered(model.blocks[0]), torch.no_grad():
            far = float((seen(x) - twin(x)).abs().max())
            pairs = zip(model.blocks[0].parameters(), twin.blocks[0].parameters(), strict=True)
            far = max(far, *(float((mine - other).abs().max()) for mine, other in pairs))
        assert engine.gathered_bytes == 0
        return far


def test_a_graph_leaves_a_unit_to_those_who_hold_it() -> None:
    assert max(plumb.spawn(held_by_others, 2)) < 1e-12


def beside_another(whole_graph: bool) -> float:
    """A model of the same kind without units, compiled first: its graph is not for a sharded one."""
    world = plumb.World.join(backend="shm", timeout=60)
    model, other, twin = make(), make(), make()
    with engine_for(model, "zero3", world) as engine:
        for one in (other, model):
            seen = torch.compile(one, backend=AOT_EAGER, fullgraph=whole_graph)
            far = float((seen(Play(twin, 0, 1, 1.0).data(0)) - twin(Play(twin, 0, 1, 1.0).data(0))).abs().max())
        assert engine.gathered_bytes == 0
        return far


@pytest.mark.parametrize("whole_graph", [False, True])
def test_a_graph_of_a_model_without_units_is_not_for_one_with_them(whole_graph: bool) -> None:
    assert max(plumb.spawn(beside_another, 2, (whole_graph,), timeout=100)) < 1e-12


def serves_others() -> tuple[float, float]:
    """A graph with gathers serves a model of the same kind that nobody shards."""
    world = plumb.World.join(backend="shm", timeout=60)
    model, alone, twin = make(), make(), make()
    with engine_for(model, "zero3", world) as engine:
        seen = torch.compile(model, backend=AOT_EAGER, fullgraph=True)
        Play(seen, world.rank, 2, 1.0, engine).loss(0).backward()
        engine.zero_grad()
        before = [parameter.detach().clone() for parameter in alone.parameters()]
        Play(torch.compile(alone, backend=AOT_EAGER, fullgraph=True), 0, 1, 1.0).loss(0).backward()
        Play(twin, 0, 1, 1.0).loss(0).backward()
    kept = max(float((p - q).abs().max()) for p, q in zip(alone.parameters(), before, strict=True))
    pairs = [(p.grad, q.grad) for p, q in zip(alone.parameters(), twin.parameters(), strict=True) if q.grad is not None]
    return kept, max(float((p - q).abs().max()) for p, q in pairs)


def test_a_graph_with_gathers_serves_models_without_an_engine() -> None:
    for kept, far in plumb.spawn(serves_others, 2):
        assert kept == 0 and far < 1e-12


def test_a_graph_never_gets_the_memory_of_a_parameter() -> None:
    """It may use the memory of what a gather returns again."""
    parameter = torch.ones(3)
    (whole,) = torch.ops.plumb.gather([parameter], 0)
    assert torch.equal(whole, parameter) and whole.data_ptr() != parameter.data_ptr()


def holds_one() -> tuple[list[bool], bool]:
    world = plumb.World.join(backend="shm", timeout=60)
    model, twin = make(), make()
    mine, other = list(model.blocks[1].parameters()), list(twin.blocks[1].parameters())
    with engine_for(model, "zero3", world) as engine:
        whole = torch.ops.plumb.gather(mine, 0)
        there = [engine.gathered_bytes > 0]
        last = whole[2]
        del whole
        others = torch.ops.plumb.gather(list(model.blocks[2].parameters()), 1)  # which would take what was freed
        there.append(engine.gathered_bytes > sum(one.numel() * one.element_size() for one in others))
        same = torch.equal(last, other[2])
        del last, others
        return [*there, engine.gathered_bytes == 0], same


def test_a_unit_lives_as_long_as_the_last_tensor_that_a_graph_has_of_it() -> None:
    for there, same in plumb.spawn(holds_one, 2):
        assert all(there) and same, there


def test_a_graph_without_units_is_left_alone() -> None:
    graph = torch.fx.Graph()
    graph.output(graph.placeholder("x"))
    assert units.insert_gathers(graph) == 0 and len(graph.nodes) == 2
