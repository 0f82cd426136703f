"""``torch.compile`` under an engine: the corpus through compiled models, with gradients delivered inside of their backwards,
against one process in eager; and what only a compiled model does."""

from __future__ import annotations

import copy
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import plumb
from plumb import compiled
from programs import ROWS, UNITS
from stage import STEP, WIDTH, ZERO, Block, Net, Play, distance, make, reference, trained

import torch._dynamo.backends.common  # noqa: E402  (once, before ranks are forked)
import torch._functorch.aot_autograd  # noqa: E402
import torch._inductor.compile_fx  # noqa: E402

os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp(prefix="plumb-compiled-"))  # the ranks' own, together
torch._inductor.config.compile_threads = 1
torch._dynamo.config.recompile_limit = 64
torch._dynamo.config.fail_on_recompile_limit_hit = True

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "hsdp"]
PATTERNS = {**ROWS, **UNITS}
REFUSED = {"double backward": "double backward"}  # by torch.compile itself, wherever the whole model is one graph
AOT_EAGER = compiled.aot_eager_backend
#: Inductor with torch's kernels instead of its own, which take most of the time: its passes, its order, its memory and its cache are the same.
NO_KERNELS = {"fallback_by_default": True} if hasattr(torch._inductor.config, "fallback_by_default") else {}
#: Of the corpus; PLUMB_WHOLE_CORPUS=1 adds what takes longer than a test run should (docs/compiled.md).
RANKS = [2, 4] if os.environ.get("PLUMB_WHOLE_CORPUS") else [2]


def engine_for(model: torch.nn.Module, strategy: str, world: plumb.World, **options: Any) -> plumb.Engine:
    return plumb.Engine(
        model, plumb.SGD(lr=0.1), strategy=strategy, units=[Block], world=world, bucket_bytes=4096,
        first_bucket_bytes=1024, **options,
    )


def compare(
    program: Callable[[Play], Iterator[Any]],
    strategy: str,
    world: plumb.World,
    compiles: Callable[[torch.nn.Module], torch.nn.Module],
    model: Callable[[], torch.nn.Module] = make,
    before: bool = False,
) -> float:
    """How far a compiled model is from one process in eager. ``before``: compiled before its engine is built."""
    mine, twin = model(), model()
    seen = compiles(mine) if before else None
    with engine_for(mine, strategy, world) as engine:
        trained(seen if seen is not None else compiles(mine), program, engine)
        reference(twin, program, world.size, torch.optim.SGD(twin.parameters(), lr=0.1))
        assert engine.gathered_bytes == 0, "parameters are still gathered"
        assert distance(engine, mine, copy.deepcopy(model())) > 1e-6, "the program trained nothing"
        return distance(engine, mine, twin)


# ---- the corpus


def breaks_at_units(strategy: str, ranks: int) -> bool:
    """hsdp shards over half of the ranks: over one, of two."""
    return strategy == "zero3" or (strategy == "hsdp" and ranks > 2)


def corpus(strategy: str) -> dict[str, float | str]:
    torch._functorch.config.donated_buffer = False  # or torch refuses to walk a graph twice
    world = plumb.World.join(backend="shm", timeout=60)
    outcome: dict[str, float | str] = {}
    whole = functools.partial(torch.compile, backend=AOT_EAGER)
    for number, (name, program) in enumerate(PATTERNS.items()):
        try:
            outcome[name] = compare(program, strategy, world, whole, before=number % 2 == 0)
        except RuntimeError as error:
            outcome[name] = str(error)
            if name not in REFUSED:
                break  # the ranks may be out of step from here on
    outcome["deliveries"] = float(compiled.counts().delivered)
    return outcome


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_corpus_compiled_is_what_one_process_computes_in_eager(strategy: str, ranks: int) -> None:
    for rank, by_name in enumerate(plumb.spawn(corpus, ranks, (strategy,), timeout=1000 * ranks)):
        for name in PATTERNS:
            result = by_name.get(name, "an earlier one failed")
            if isinstance(result, str) and name in REFUSED and not breaks_at_units(strategy, ranks):
                assert REFUSED[name] in result
            else:
                assert isinstance(result, float) and result <= 1e-10, f"rank {rank}, {name}: {result}"
        assert by_name["deliveries"] >= 6, "gradients were not delivered inside of compiled backwards"


# ---- what only compiled models do


def shapes_that_change(play: Play) -> Iterator[Any]:
    for i, rows in enumerate((4, 6, 9, 5)):
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(100 * play.rank + i)).double()
        play.backward(play.model(x).pow(2).mean())
        yield STEP
        yield ZERO


def unused_outputs(play: Play) -> Iterator[Any]:
    for i in range(2):
        out = play.model(play.data(i))
        play.backward(out[:, : WIDTH // 2].pow(2).mean())
        play.model(play.data(i + 1))  # whose graph nobody walks
        yield STEP
        yield ZERO


def two_producers(play: Play) -> Iterator[Any]:
    """One weight's gradient comes from two compiled graphs and an eager operation."""
    for i in range(3):
        once, twice = play.model(play.data(i)), play.model(play.data(i + 7))
        play.backward(once.pow(2).mean() + twice.pow(3).mean() + play.model.last.weight.pow(2).sum())
        yield STEP
        yield ZERO


class Chooses(Net):
    """Its block in the middle is used where the caller says so."""

    def forward(self, x: torch.Tensor, around: Any = None, middle: bool = True) -> torch.Tensor:
        x = self.blocks[0](self.first(x))
        if middle:
            x = self.blocks[1](x)
        return self.last(x)


def chooses() -> torch.nn.Module:
    torch.manual_seed(5)
    return Chooses().double()


def used_inside_on_one_rank_only(play: Play) -> Iterator[Any]:
    """By the compiled forward; then by the other rank's, by everybody's and by nobody's."""
    for i, used in enumerate([play.rank == 0, play.rank == 1, True, False]):
        before = compiled.counts().delivered
        play.backward(play.loss(i, middle=used))
        here = compiled.counts().delivered - before
        assert play.engine is None or here >= 6 * (1 + used), f"{here} gradients were delivered, the middle one {'' if used else 'not '}used"
        yield STEP
        yield ZERO


def differentiated_by_hand(play: Play) -> Iterator[Any]:
    """autograd.grad gets the gradients, and leaves .grad alone; a backward after it is a backward."""
    wanted = [play.model.last.weight, play.model.first.bias]
    gradients = torch.autograd.grad(play.loss(0), wanted)
    assert play.engine is None or all(one.grad is None for one in wanted)
    play.backward(play.loss(1) * sum(float(one.abs().mean()) for one in gradients))
    yield STEP


def hooks_of_the_user(play: Play) -> Iterator[Any]:
    """A hook sees the sum of what a backward brings, once, and what it returns counts."""
    seen: list[int] = []
    limit = 1e-2 * play.share
    for i in range(2):
        handle = play.model.last.weight.register_hook(lambda g: (seen.append(1), g.clamp(-limit, limit))[1])
        play.backward(play.model(play.data(i)).pow(2).mean() + play.model(play.data(i + 3)).pow(2).mean())
        handle.remove()
        yield STEP
        yield ZERO
    assert len(seen) == 2, seen
    late = play.model.first.weight.register_post_accumulate_grad_hook(lambda p: seen.append(2))
    play.backward(play.loss(5))
    late.remove()
    assert seen == [1, 1, 2], seen
    yield STEP


def kept_graph_of_gradients(play: Play) -> Iterator[Any]:
    """create_graph is legal as long as nobody differentiates again; then it is torch's own refusal."""
    play.backward(play.loss(0), create_graph=True)
    if play.engine is not None:
        with pytest.raises(RuntimeError, match="double backward"):
            play.model.last.weight.grad.sum().backward()
    yield ZERO
    play.backward(play.loss(1))
    yield STEP


class Branches(Net):
    """A graph break, a compiled part, an eager one, a checkpoint inside of a compiled region, and tied weights."""

    def __init__(self) -> None:
        super().__init__(tied=True)

    def forward(self, x: torch.Tensor, around: Any = None) -> torch.Tensor:
        x = self.first(x)
        x = torch.utils.checkpoint.checkpoint(self.blocks[0], x, use_reentrant=False)
        torch._dynamo.graph_break()
        x = self.blocks[1](x)
        x = eagerly(self.blocks[2], x)
        return self.last(x)


@torch._dynamo.disable
def eagerly(block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return block(x)


def branches() -> torch.nn.Module:
    torch.manual_seed(3)
    return Branches().double()


class Single(Block):
    """Its weight is used once more after its gradient was made: the graph needs it until its end."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


def single() -> torch.nn.Module:
    torch.manual_seed(4)
    model = Net()
    model.blocks = torch.nn.ModuleList(Single() for _ in range(3))
    return model.double()


def each_block(model: torch.nn.Module) -> torch.nn.Module:
    for block in model.blocks:
        block.compile(backend=AOT_EAGER)
    return model


def ran_before(model: torch.nn.Module) -> torch.nn.Module:
    """Compiled and run before there is an engine: what was compiled then knows nothing of units."""
    torch._dynamo.reset()  # nor do graphs of other models of its kind serve it
    seen = torch.compile(model, backend=AOT_EAGER)
    Play(seen, 0, 1, 1.0).loss(0).backward()
    model.zero_grad()
    return seen


def special(strategy: str) -> dict[str, float | str]:
    torch._functorch.config.donated_buffer = False  # or torch refuses to walk a graph twice
    world = plumb.World.join(backend="shm", timeout=60)
    whole = functools.partial(torch.compile, backend=AOT_EAGER)
    dynamic = functools.partial(torch.compile, backend=AOT_EAGER, dynamic=True)
    plain = ROWS["plain"]
    cases: dict[str, Callable[[], float]] = {
        # First: once there is a model with units in a process, graphs are guarded by hooks.
        "ran before its engine": lambda: compare(plain, strategy, world, ran_before, before=True),
        "shapes that change": lambda: compare(shapes_that_change, strategy, world, whole),
        "dynamic shapes": lambda: compare(shapes_that_change, strategy, world, dynamic),
        "unused outputs": lambda: compare(unused_outputs, strategy, world, whole),
        "two producers": lambda: compare(two_producers, strategy, world, whole),
        "used inside on one rank only": lambda: compare(used_inside_on_one_rank_only, strategy, world, whole, chooses),
        "autograd.grad": lambda: compare(differentiated_by_hand, strategy, world, whole),
        "branches": lambda: compare(plain, strategy, world, whole, branches),
        "used after its gradient": lambda: compare(plain, strategy, world, whole, single),
        "each block": lambda: compare(plain, strategy, world, each_block),
        "each block, accumulating": lambda: compare(ROWS["two backwards, accumulating"], strategy, world, each_block),
    }
    if strategy in ("ddp", "zero1"):
        cases["hooks of the user"] = lambda: compare(hooks_of_the_user, strategy, world, whole)
        cases["create_graph"] = lambda: compare(kept_graph_of_gradients, strategy, world, whole)
    outcome: dict[str, float | str] = {}
    for name, case in cases.items():
        try:
            outcome[name] = case()
        except Exception:
            import traceback

            outcome[name] = traceback.format_exc()
            break
    return outcome


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_only_compiled_models_do_is_what_one_process_computes(strategy: str) -> None:
    for rank, by_name in enumerate(plumb.spawn(special, 2, (strategy,), timeout=300)):
        for name, far in by_name.items():
            assert isinstance(far, float) and far <= 1e-10, f"rank {rank}, {name}: {far}"


# ---- inductor


def core(strategy: str) -> tuple[dict[str, float], int]:
    world = plumb.World.join(backend="shm", timeout=200)
    names = ["plain", "two backwards, accumulating", "forward, forward, backward, backward"]
    far = {name: compare(ROWS[name], strategy, world, torch.compile) for name in names}
    no_kernels = functools.partial(torch.compile, options=NO_KERNELS)
    far["used inside on one rank only"] = compare(used_inside_on_one_rank_only, strategy, world, no_kernels, chooses)
    return far, compiled.counts().delivered


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_default_backend_delivers_and_is_right(strategy: str) -> None:
    for far, deliveries in plumb.spawn(core, 2, (strategy,), timeout=500):
        assert max(far.values()) < 1e-10, far
        assert deliveries >= 6


# ---- one compiled graph, other parameters


def one_graph_for_two_engines() -> tuple[float, float, int]:
    """A compiled graph knows no parameters: another model of the same kind, another engine, one that has ended."""
    torch._dynamo.reset()
    world = plumb.World.join(backend="shm", timeout=60)
    graphs = []

    def counts(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return AOT_EAGER(graph, inputs)

    far = []
    first = make()
    for strategy in ("ddp", "zero2"):
        model, twin = (first if strategy == "ddp" else make()), make()
        with engine_for(model, strategy, world) as engine:
            trained(torch.compile(model, backend=counts), ROWS["plain"], engine)
            reference(twin, ROWS["plain"], 2, torch.optim.SGD(twin.parameters(), lr=0.1))
            far.append(distance(engine, model, twin))
    alone, twin = copy.deepcopy(first), copy.deepcopy(first)  # no engine has these
    Play(torch.compile(alone, backend=counts), 0, 1, 1.0).loss(0).backward()
    Play(twin, 0, 1, 1.0).loss(0).backward()
    for mine, other in zip(alone.parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        assert mine.grad is None or torch.allclose(mine.grad, other.grad, atol=1e-14)
    return far[0], far[1], len(graphs)


def test_a_graph_serves_other_engines_and_none() -> None:
    for one, other, graphs in plumb.spawn(one_graph_for_two_engines, 2):
        assert one < 1e-10 and other < 1e-10
        assert graphs == 1, "every model was compiled anew: the test does not test what it should"


def replaced_parameter(strategy: str, torchs: bool) -> list[str]:
    """A parameter that is replaced after compiling: for a while, by another of the engine's, by one that nobody trains, for good."""
    world = plumb.World.join(backend="shm", timeout=30)
    model = make()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1) if torchs else plumb.SGD(lr=0.1)
    told = []
    with plumb.Engine(model, optimizer, strategy=strategy, units=[Block], world=world) as engine:
        seen = torch.compile(model, backend=AOT_EAGER)
        play = Play(seen, world.rank, 2, 1.0, engine)
        old, module = model.last.bias, model.last
        fresh = torch.nn.Parameter(torch.zeros_like(old))
        frozen = torch.nn.Parameter(torch.zeros_like(old), requires_grad=False)
        for i, places in enumerate([(fresh, old), (model.first.bias,), (frozen,), (fresh,)]):
            for one in places:
                module.bias = one
            play.backward(play.loss(i))
            try:
                engine.step()
                told.append("")
            except plumb.Error as error:
                told.append(str(error))
            engine.zero_grad()
        module.bias = old
        play.backward(play.loss(9))  # and nothing is broken
        engine.step()
    return told


@pytest.mark.parametrize("strategy,torchs", [("ddp", False), ("zero2", True), ("zero3", False)])
def test_a_parameter_that_was_replaced_after_compiling_is_an_error(strategy: str, torchs: bool) -> None:
    for rank, told in enumerate(plumb.spawn(replaced_parameter, 2, (strategy, torchs))):
        assert told[:3] == ["", "", ""], told
        assert f"rank {rank}: parameter 'last.bias' was replaced" in told[3], told


def with_padding() -> tuple[float, int]:
    """Inductor pads tensors on GPUs by default, and looks at a graph's outputs for it."""
    import torch._inductor.config as config

    before = compiled.counts().delivered
    with config.patch(disable_padding_cpu=False, fx_graph_cache=False):
        mine, twin = single(), single()
        with plumb.Engine(mine, plumb.SGD(lr=0.1)) as engine:
            x = torch.ones(4, WIDTH, dtype=torch.float64)
            torch.compile(mine)(x).pow(2).sum().backward()
            engine.step()
            twin(x).pow(2).sum().backward()
            torch.optim.SGD(twin.parameters(), lr=0.1).step()
            return distance(engine, mine, twin), compiled.counts().delivered - before


def test_gradients_are_delivered_where_inductor_pads() -> None:
    ((away, delivered),) = plumb.spawn(with_padding, 1)
    assert away < 1e-10 and delivered > 0
