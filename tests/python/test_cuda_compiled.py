"""Compiled backwards on a GPU: inside of CUDA graphs that inductor records, and of ones that a program captures itself. One rank
shards nothing, so what is sharded is shown by two that share the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist

import plumb
from plumb import _C, compiled
from programs import ROWS
from stage import STEP, WIDTH, ZERO, Block, Net, Play, distance, make, reference, trained

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    """No graph of another test serves, also none of a file."""
    with torch._inductor.config.patch(force_disable_caches=True), torch._functorch.config.patch(donated_buffer=False):
        yield
    torch._dynamo.reset()


def on_gpu() -> Net:
    return make(torch.float64).cuda()


def far(program: Any, strategy: str, **how: Any) -> float:
    """How far a compiled model is from one process in eager."""
    mine, twin = on_gpu(), on_gpu()
    with plumb.Engine(mine, plumb.SGD(lr=0.1), strategy=strategy, units=[Block], bucket_bytes=4096, first_bucket_bytes=1024) as engine:
        trained(torch.compile(mine, **how), program, engine)
        reference(twin, program, engine.world.size, torch.optim.SGD(twin.parameters(), lr=0.1))
        return distance(engine, mine, twin)


def accumulates(play: Play) -> Iterator[Any]:
    """What a replay returned before is kept while the next one writes: summed, and seen again after a step."""
    for i in range(6):
        for micro in range(3):
            play.backward(play.loss(3 * i + micro))
        yield STEP
        if i % 2:
            yield ZERO


def holds(play: Play) -> Iterator[Any]:
    """The same, put off. Where gradients are whole, .grad is then what the graph returned, as in plain torch, which says that the
    next replay has overwritten it."""
    for i in range(6):
        with play.no_sync():
            play.backward(play.loss(3 * i))
            play.backward(play.loss(3 * i + 1))
        play.backward(play.loss(3 * i + 2))
        yield STEP
        yield ZERO


# ---- CUDA graphs of inductor


def recorded() -> int:
    """How many graphs inductor has recorded and still holds."""
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(0, create_if_none_exists=False)
    return 0 if manager is None else sum(len(nodes) for nodes in manager.roots.values())


def test_gradients_of_recorded_backwards_are_right() -> None:
    before = compiled.counts().delivered
    assert far(accumulates, "ddp", mode="reduce-overhead") <= 1e-10
    assert recorded() > 0, "inductor recorded nothing: the test does not test what it should"
    assert "CUDA graph" in compiled.explain()[-1].why_none
    assert compiled.counts().delivered == before, "a delivery inside of a recorded graph happens once, and not when it is replayed"


def test_gradients_of_recorded_backwards_that_are_put_off_are_refused_by_torch() -> None:
    with pytest.raises(RuntimeError, match="overwritten by a subsequent run"):
        far(holds, "ddp", mode="reduce-overhead")


def test_a_delivery_that_meets_cuda_graphs_stays_outside_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator's tag keeps it out of what is recorded, should a pass put it there."""
    monkeypatch.setattr(compiled, "_on_a_gpu", lambda graph: False)
    before = compiled.counts().delivered
    assert far(holds, "ddp", mode="reduce-overhead") <= 1e-10
    assert compiled.counts().delivered > before


@pytest.mark.parametrize("name", ["plain", "two backwards, accumulating", "forward, forward, backward, backward", "retained graph, two losses"])
def test_the_default_mode_delivers_and_is_right(name: str) -> None:
    before = compiled.counts().delivered
    assert far(ROWS[name], "ddp") <= 1e-10
    assert compiled.counts().delivered > before


# ---- two ranks: NCCL refuses to share a device, gloo does not


def shared_device(strategy: str) -> dict[str, float]:
    torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    outcome = {
        "recorded": far(accumulates, strategy, mode="reduce-overhead"),
        "by default": far(ROWS["plain"], strategy),
    }
    assert compiled.counts().delivered > 0, "nothing was delivered in the default mode"
    if strategy in ("zero2", "zero3"):
        outcome["recorded and held"] = far(holds, strategy, mode="reduce-overhead")
    if strategy == "zero3":
        outcome["whole"] = far(ROWS["plain"], strategy, fullgraph=True)
        assert compiled.gathers().times > 0 and compiled.gathers().bytes == 0
    return outcome


def most_gathered() -> list[tuple[float, float, float]]:
    """By step, in units: the most that a whole graph had in its forward, what was whole between, and the most in its backward."""
    torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    model = on_gpu()
    unit = sum(parameter.numel() * parameter.element_size() for parameter in model.blocks[0].parameters())
    rows = []
    with plumb.Engine(model, plumb.SGD(lr=0.1), strategy="zero3", units=[Block]) as engine:
        seen = torch.compile(model, backend=compiled.aot_eager_backend, fullgraph=True)
        for i in range(3):
            _C.forget_most_gathered()
            loss = Play(seen, dist.get_rank(), 2, 1.0, engine).loss(i)
            forward, between = _C.graph_gathers()[2], engine.gathered_bytes
            _C.forget_most_gathered()
            loss.backward()
            rows.append((forward / unit, between / unit, _C.graph_gathers()[2] / unit))
            engine.step()
            engine.zero_grad()
            assert engine.gathered_bytes == 0
    return rows


def test_a_whole_graph_on_a_gpu_has_a_unit_at_a_time() -> None:
    for rows in plumb.spawn(most_gathered, 2, method="spawn", timeout=500):
        for forward, between, backward in rows:
            assert 0.9 < forward < 1.5 and 0.9 < backward < 1.5, (forward, backward)
            assert between < 1.5, f"{between} units were kept for the backward; of three, the next one may be on its way"


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_two_ranks_that_share_the_device(strategy: str) -> None:
    for outcome in plumb.spawn(shared_device, 2, (strategy,), method="spawn", timeout=500):
        assert max(outcome.values()) <= 1e-10, outcome


# ---- CUDA graphs of a program


WARM, REPLAYS = 3, 5


def batch(i: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(i)).double()


def steps(compiles: bool, captures: str) -> list[torch.Tensor]:
    """The parameters after a few steps: run one by one, or with the last of them replayed, with their ``step()`` or without."""
    model = on_gpu()
    x = torch.zeros(4, WIDTH, dtype=torch.float64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), plumb.Engine(model, plumb.AdamW(lr=1e-2), strategy="ddp") as engine:
        seen = torch.compile(model) if compiles else model
        graph = torch.cuda.CUDAGraph()

        def backward() -> None:
            seen(x).pow(2).mean().backward()

        def step() -> None:
            backward()
            engine.step()
            engine.zero_grad()

        for i in range(WARM + REPLAYS):
            if i == WARM and captures != "nothing":
                torch.cuda.synchronize()
                with torch.cuda.graph(graph, stream=stream):
                    step() if captures == "steps" else backward()
            x.copy_(batch(i))
            if i < WARM or captures == "nothing":
                step()
            else:
                graph.replay()
                if captures == "backwards":
                    engine.step()
        return [engine.full_parameter(parameter).cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("captures", ["steps", "backwards"])
def test_a_compiled_backward_that_a_program_captures_is_replayed(captures: str) -> None:
    expected = steps(compiles=False, captures="nothing")
    before = compiled.counts().delivered
    got = steps(compiles=True, captures=captures)
    assert compiled.counts().delivered > before, "nothing was delivered: the test does not test what it should"
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)
