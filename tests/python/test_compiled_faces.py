"""``torch.compile`` under the faces of others: DistributedDataParallel, fully_shard, DeepSpeed's engine; and what they refuse."""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeeds
import plumb
from plumb import compiled
from stage import STEP, WIDTH, ZERO, Net, Play, make, reference
from test_compiled import AOT_EAGER, NO_KERNELS


@dataclasses.dataclass
class Face:
    """A model as a face shows it."""

    seen: Any
    step: Callable[[], Any]
    zero: Callable[[], Any]
    backward: Callable[[torch.Tensor], Any]
    whole: Callable[[torch.Tensor], torch.Tensor]
    close: Callable[[], None] = lambda: None


def ddp(model: nn.Module) -> Face:
    seen = plumb.DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.SGD(seen.parameters(), lr=0.1)
    return Face(seen, optimizer.step, optimizer.zero_grad, torch.Tensor.backward, torch.Tensor.detach, seen.engine.close)


def fully_shard(model: Any) -> Face:
    for block in model.blocks:
        plumb.fully_shard(block)
    plumb.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole: Any = lambda parameter: parameter.full_tensor()  # noqa: E731
    return Face(model, optimizer.step, optimizer.zero_grad, torch.Tensor.backward, whole)


def deepspeed(model: nn.Module) -> Face:
    import plumb.deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen, *_ = plumb.deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    inner = seen.engine
    return Face(seen, seen.step, lambda: None, seen.backward, inner.full_parameter, inner.close)


FACES = {"ddp": ddp, "fully_shard": fully_shard, "deepspeed": deepspeed}


# ---- ways to compile: before wrapping, and after


def nothing(face: Any) -> Any:
    return face


def whole(face: Any, **options: Any) -> Any:
    return torch.compile(face, backend=AOT_EAGER, **options)


def one_graph(face: Any) -> Any:
    return whole(face, fullgraph=True)


def by_inductor(face: Any) -> Any:
    return torch.compile(face, options=NO_KERNELS)


def in_place(face: Any) -> Any:
    face.compile(backend=AOT_EAGER)
    return face


def blocks(model: Any) -> Any:
    inner = model.module if hasattr(model, "module") else model
    for block in inner.blocks:
        block.compile(backend=AOT_EAGER, fullgraph=True)
    return model


WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "whole": (nothing, whole),
    "in one graph": (nothing, one_graph),
    "by inductor": (nothing, by_inductor),
    "in place": (nothing, in_place),
    "its blocks": (nothing, blocks),
    "its blocks, before": (blocks, nothing),
}


# ---- programs


class Again(Net):
    """A block that is used twice, and one that is computed again."""

    def forward(self, x: torch.Tensor, around: Any = None) -> torch.Tensor:
        x = self.blocks[1](self.blocks[0](self.blocks[1](self.first(x))))
        inside: Any = checkpoint(self.blocks[2], x, use_reentrant=False)
        return self.last(inside)


def again() -> nn.Module:
    torch.manual_seed(1)
    return Again(tied=True).double()


def program(play: Play) -> Iterator[Any]:
    """Two forwards before a backward, another number of rows, an evaluation in between."""
    for i in range(2):
        loss = play.model(play.data(i)).pow(2).mean() + play.model(play.data(i + 7)[: 3 - i]).pow(2).mean()
        with torch.no_grad():
            play.model(play.data(i + 20))
        play.backward(loss)
        yield STEP
        yield ZERO


class FacePlay(Play):
    def __init__(self, face: Face, model: nn.Module, rank: int) -> None:
        super().__init__(model, rank, 2, 1.0)
        self.face = face

    def data(self, i: int = 0) -> torch.Tensor:
        return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * self.rank + i)).double()

    def backward(self, loss: torch.Tensor, **how: Any) -> None:
        self.face.backward(loss)


def away(name: str, way: str, kind: Callable[[], nn.Module]) -> float:
    before, after = WAYS[way]
    model, twin = kind(), kind()
    face = FACES[name](before(model))
    for yielded in program(FacePlay(face, after(face.seen), dist.get_rank())):
        face.step() if yielded == STEP else face.zero()
    reference(twin, program, 2, torch.optim.SGD(twin.parameters(), lr=0.1))
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    far = max(float((face.whole(one) - other.detach()).abs().max()) for one, other in pairs)
    face.close()
    return far


def ways(name: str) -> dict[str, float | str]:
    dist.init_process_group("gloo")
    torch._dynamo.config.recompile_limit = 64
    outcome: dict[str, float | str] = {}
    for way in WAYS:
        torch._dynamo.reset()  # or a graph with breaks would serve where there may be none
        try:
            outcome[way] = away(name, way, again if way in ("in one graph", "its blocks") else make)
        except torch._dynamo.exc.Unsupported as error:
            outcome[way] = str(error)
    outcome["delivered"] = float(compiled.counts().delivered)
    return outcome


@pytest.mark.parametrize("name", FACES)
def test_a_compiled_face_is_what_one_process_computes(name: str) -> None:
    for outcome in plumb.spawn(ways, 2, (name,), timeout=600):
        assert outcome.pop("delivered") > 0
        for way, far in outcome.items():
            if name == "fully_shard" and way == "in one graph":
                assert isinstance(far, str) and "plumb.fully_shard" in far and "compile without fullgraph=True" in far, far
            else:
                assert isinstance(far, float) and far < 1e-10, (way, far)


# ---- what a compiled wrapper refuses


def x() -> torch.Tensor:
    return torch.ones(4, WIDTH).double()


def replaces(face: Face, model: Any, compiles: Callable[[Any], Any]) -> Iterator[str]:
    """A parameter in another's place, past the first steps, which are looked at more closely: used only, then trained."""
    seen = compiles(face.seen)
    for _ in range(4):
        face.backward(seen(x()).pow(2).mean())
        face.step()
        face.zero()
    model.last.bias = new = nn.Parameter(torch.zeros(WIDTH).double())
    yield from told(lambda: face.backward(seen(x()).pow(2).mean()))
    yield from told(torch.optim.SGD([new], lr=0.1).step)
    face.close()


def adds(face: Face, model: Any) -> Iterator[str]:
    seen = whole(face.seen)
    model.extra = nn.Parameter(torch.zeros(WIDTH).double())
    (seen(x()) + model.extra).pow(2).mean().backward()
    yield from told(torch.optim.SGD(model.parameters(), lr=0.1).step)
    face.close()


def told(call: Callable[[], Any]) -> Iterator[str]:
    try:
        call()
        yield ""
    except (plumb.Error, torch._dynamo.exc.Unsupported) as error:
        yield str(error)


def refused_by_ddp() -> tuple[list[int], list[str]]:
    dist.init_process_group("gloo")
    model = make()
    face = ddp(model)
    whole(face.seen)(x()).pow(2).mean().backward()
    graphs = [len(made.deliveries) for made in compiled.explain()]
    face.close()
    model = make()
    said = [*replaces(ddp(model), model, whole)]
    model = make()
    said += adds(ddp(model), model)
    sends = plumb.DistributedDataParallel(make())
    said += told(lambda: one_graph(sends)(x()))
    sends.engine.close()
    return graphs, said


def compiles_of(name: str) -> list[int]:
    """How many graphs there were after each of ten steps."""
    dist.init_process_group("gloo")
    graphs = 0

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    face = FACES[name](make(torch.float32))
    seen = torch.compile(face.seen, backend=backend)
    counts = []
    for _ in range(10):
        face.backward(seen(torch.randn(4, WIDTH)).square().mean())
        face.step()
        face.zero()
        counts.append(graphs)
    face.close()
    return counts


# What a wrapper counts at every forward must not become a guard: the graph would be compiled again for each step, until torch gives up
# and runs it in eager, silently.
@pytest.mark.parametrize("name", FACES)
def test_a_face_is_compiled_once(name: str) -> None:
    for counts in plumb.spawn(compiles_of, 2, (name,)):
        assert counts[0] > 0 and counts[-1] == counts[1], counts


def test_what_a_compiled_ddp_would_train_apart_is_an_error() -> None:
    for rank, (graphs, said) in enumerate(plumb.spawn(refused_by_ddp, 2, timeout=600)):
        assert graphs == [22], "torch cut the graph, or nothing was delivered"
        used, trained, added, sends = said
        assert used == "", "one process would use it, and train it no more than we do"
        assert f"rank {rank}: parameter 'last.bias' was replaced" in trained
        assert "parameter 'extra' came into the model after it was wrapped" in added
        assert "broadcast_buffers=False" in sends


def refused_by_fully_shard() -> list[str]:
    dist.init_process_group("gloo")
    model = make()
    return list(replaces(fully_shard(model), model, nothing))


def test_fully_shard_does_not_go_on_with_a_parameter_that_was_replaced() -> None:
    for used, _ in plumb.spawn(refused_by_fully_shard, 2, timeout=600):
        assert "a parameter of a sharded module became a Parameter" in used


# ---- accumulation, which the outputs of DeepSpeed's engine know of


def divided() -> list[float]:
    """By one process's gradients, those of the first of four micro-batches, whoever calls backward()."""
    factors = []
    for stage, by_hand, fullgraph in ((0, False, False), (0, True, False), (0, False, True), (0, True, True), (3, True, True)):
        torch._dynamo.reset()  # or a graph with breaks would serve where there may be none
        engine, twin = deepspeeds.engine_of(stage=stage, gas=4, gradient_clipping=0.0), deepspeeds.make()
        seen = whole(engine, fullgraph=fullgraph)
        for i in range(2):
            loss = seen(*deepspeeds.batch(0, i))
            loss.backward() if by_hand else engine.backward(loss)
            (twin(*deepspeeds.batch(0, i)) / 4).backward()
        found = engine.engine.full_gradient(engine.module.head.weight)
        factors.append(float((found / twin.head.weight.grad).mean()))
        engine.destroy()
    engine, twin, (x, y) = deepspeeds.engine_of(gas=4), deepspeeds.make(), deepspeeds.batch(0, 2)
    mine, theirs = (torch.compile(torch.func.grad(lambda x, one=one: one(x, y)), backend="aot_eager")(x) for one in (engine, twin))
    torch.testing.assert_close(mine, theirs)  # the caller's own
    return factors


def test_a_compiled_engine_of_deepspeed_divides_by_the_steps_of_accumulation_once() -> None:
    (factors,) = plumb.spawn(divided, 1)
    assert factors == pytest.approx([1.0] * 5, rel=1e-5)


# ---- an unchanged program


PROGRAM = """
import sys, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6)).double()
twin = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6)).double()
twin.load_state_dict(model.state_dict())
wrapped = DistributedDataParallel(model) if sys.argv[1] == "ddp" else fully_shard(model)
assert type(wrapped).__mro__[1].__module__.startswith("plumb") or type(wrapped).__module__.startswith("plumb")
seen = torch.compile(wrapped, backend="aot_eager")
optimizer, other = (torch.optim.AdamW(one.parameters(), lr=0.1) for one in (wrapped, twin))
for i in range(3):
    inputs = [torch.full((2, 6), float(i - rank)).double() for rank in range(2)]
    seen(inputs[dist.get_rank()]).pow(2).mean().backward()
    sum(twin(x).pow(2).mean() / 2 for x in inputs).backward()
    for one in (optimizer, other):
        one.step()
        one.zero_grad()
pairs = zip(model.parameters(), twin.parameters())
whole = [(one.full_tensor() if hasattr(one, "full_tensor") else one, two) for one, two in pairs]
assert max(float((one - two).abs().max()) for one, two in whole) < 1e-12
sys.stdout.write(f"rank {dist.get_rank()} is right\\n")
"""


@pytest.mark.parametrize("face", ["ddp", "fully_shard"])
def test_an_unchanged_program_compiles_under_plumb(face: str, tmp_path: pathlib.Path) -> None:
    place = tmp_path / "train.py"
    place.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "plumb", str(place), face]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "rank 0 is right" in ended.stdout and "rank 1 is right" in ended.stdout, ended.stdout
