"""What the other files show on the CPU, on a GPU: every strategy and face on one rank, and two ranks that share the device."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import plumb
from programs import ROWS, UNITS, plain
from stage import STEP, ZERO, Block, Net, Play, compare, make

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "hsdp"]


def on_gpu(tied: bool = False) -> Net:
    return make(torch.float64, tied).cuda()


def streams(play: Play) -> Iterator[Any]:
    """Two branches on two streams, one block used by both."""
    for i in range(4):
        sides = [torch.cuda.Stream(), torch.cuda.Stream()]
        x = play.model.first(play.data(i))
        outs = []
        for side, block in zip(sides, play.model.blocks, strict=False):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                outs.append(block(play.model.blocks[2](x)))
        for side in sides:
            torch.cuda.current_stream().wait_stream(side)
        play.backward((outs[0] * outs[1]).pow(2).mean())
        yield STEP
        yield ZERO


@pytest.mark.parametrize("name", [*ROWS, *UNITS, "streams"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_is_one_process(strategy: str, name: str) -> None:
    program = {**ROWS, **UNITS, "streams": streams}[name]
    assert compare(program, strategy=strategy, model=on_gpu) <= 1e-10


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tied_weights(strategy: str) -> None:
    assert compare(plain, strategy=strategy, model=lambda: on_gpu(tied=True)) <= 1e-10


# ---- two ranks on one device: NCCL refuses that, gloo does not


SHARED_ROWS = {**ROWS, "streams": streams}


def shared_device(strategy: str) -> list[float | str]:
    torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    result: list[float | str] = []
    a_unit = sum(parameter.nbytes for parameter in make(torch.float64).blocks[0].parameters())  # and what fills up its parts
    for program in SHARED_ROWS.values():
        try:
            result.append(compare(program, strategy=strategy, model=on_gpu, gather_ahead_bytes=0, kept=2 * a_unit - 1))
        except Exception:
            import traceback

            return [*result, traceback.format_exc()]
    return result


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_that_share_the_device(strategy: str) -> None:
    for rank, outcome in enumerate(plumb.spawn(shared_device, 2, (strategy,), method="spawn", timeout=300)):
        for name, value in zip(SHARED_ROWS, outcome, strict=False):
            assert isinstance(value, float), f"{name}, rank {rank}: {value}"
            assert value <= 1e-10, f"{name}, rank {rank} is {value:.1e} away"
        assert len(outcome) == len(SHARED_ROWS)


# ---- the faces


@pytest.fixture(scope="module")
def nccl() -> Iterator[None]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29613", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, autocast: bool = False, forward: Any = None) -> list[float]:
    losses = []
    forward = model if forward is None else forward  # a compiled model has no truth value
    for i in range(4):
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(i)).cuda()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = F.mse_loss(forward(x).float(), x)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def model_f32() -> Net:
    return make(torch.float32).cuda()


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": lambda model: plumb.DistributedDataParallel(model, device_ids=[0], find_unused_parameters=True),
    "fully_shard": lambda model: _sharded(model),
}


def _sharded(model: Any) -> nn.Module:
    for block in model.blocks:
        plumb.fully_shard(block)
    return plumb.fully_shard(model)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("compiled", ["eager", "inductor", "reduce-overhead"])
@pytest.mark.parametrize("face", [*WRAPPERS, "zero1", "zero3"])
def test_faces_are_plain_torch(nccl: None, face: str, compiled: str, autocast: bool) -> None:
    twin, mine = model_f32(), model_f32()
    expected = steps(twin, torch.optim.AdamW(twin.parameters(), lr=1e-2), autocast)
    if face in WRAPPERS:
        wrapped: Any = WRAPPERS[face](mine)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
        engine = None
    else:
        wrapped = mine
        optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-2)
        engine = plumb.Engine(mine, optimizer, strategy=face, units=[Block])
    forward = wrapped
    if compiled != "eager":
        forward = torch.compile(wrapped, **({"mode": compiled} if compiled != "inductor" else {}))
    got = steps(wrapped, optimizer, autocast, forward)
    torch._dynamo.reset()
    if engine is not None:
        engine.close()
    assert got == pytest.approx(expected, rel=2e-2 if autocast else 1e-4), (got, expected)


def test_fp16_with_torchs_scaler(nccl: None) -> None:
    def train(model: nn.Module) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        losses = []
        for i in range(4):
            x = torch.randn(8, 12, generator=torch.Generator().manual_seed(i)).cuda()
            with torch.autocast("cuda", torch.float16):
                loss = F.mse_loss(model(x).float(), x)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(float(loss))
        return losses

    expected = train(model_f32())
    assert train(WRAPPERS["ddp"](model_f32())) == pytest.approx(expected, rel=5e-3)
    assert train(WRAPPERS["fully_shard"](model_f32())) == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_goes_on_with_the_same_bits(strategy: str, tmp_path: Any) -> None:
    def batch(i: int) -> torch.Tensor:
        return torch.randn(8, 12, generator=torch.Generator().manual_seed(i)).cuda()

    def run(engine: plumb.Engine, model: nn.Module, several: range) -> None:
        for i in several:
            F.mse_loss(model(batch(i)), batch(i)).backward()
            engine.step()
            engine.zero_grad()

    model = model_f32()
    with plumb.Engine(model, plumb.AdamW(lr=1e-2), strategy=strategy, units=[Block]) as engine:
        run(engine, model, range(3))
        engine.save(str(tmp_path / "c"))
        run(engine, model, range(3, 6))
        expected = {name: engine.full_parameter(p).clone() for name, p in model.named_parameters()}
    other = copy.deepcopy(model_f32())
    with plumb.Engine(other, plumb.AdamW(lr=1e-2), strategy=strategy, units=[Block]) as engine:
        engine.load(str(tmp_path / "c"))
        run(engine, other, range(3, 6))
        for name, p in other.named_parameters():
            assert torch.equal(engine.full_parameter(p), expected[name]), name


@pytest.mark.parametrize("own", [True, False], ids=["plumb", "torch"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_background_save_holds_what_was_there_at_the_call(strategy: str, own: bool, tmp_path: Any) -> None:
    def make() -> tuple[nn.Module, plumb.Engine]:
        model = model_f32()
        optimizer = plumb.AdamW(lr=1e-2) if own else torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        return model, plumb.Engine(model, optimizer, strategy=strategy, units=[Block])

    def run(engine: plumb.Engine, model: nn.Module, several: range) -> None:
        for i in several:
            x = torch.randn(8, 12, generator=torch.Generator().manual_seed(i)).cuda()
            F.mse_loss(model(x), x).backward()
            engine.step()
            engine.zero_grad()

    def whole(engine: plumb.Engine, model: nn.Module) -> dict[str, torch.Tensor]:
        return {name: engine.full_parameter(p).clone() for name, p in model.named_parameters()}

    model, engine = make()
    then, after = [], []
    with engine:
        for times in range(3):  # the pinned memory of one serves the next
            run(engine, model, range(3 * times, 3 * times + 2))
            then.append(whole(engine, model))
            torch.cuda._sleep(50_000_000)  # what was launched before the call is not done yet
            engine.save(tmp_path / str(times), background=True)
            run(engine, model, range(3 * times + 2, 3 * times + 3))
            after.append(whole(engine, model))
        engine.finish_save()
    for times in range(3):
        other, reader = make()
        with reader:
            reader.load(tmp_path / str(times))
            found = whole(reader, other)
            assert all(torch.equal(found[name], then[times][name]) for name in found), times
            run(reader, other, range(3 * times + 2, 3 * times + 3))  # with the moments of the call
            found = whole(reader, other)
            assert all(torch.equal(found[name], after[times][name]) for name in found), times


@pytest.mark.parametrize("face", ["linear", "grouped"])
def test_fused_modules_on_the_device(face: str) -> None:
    torch.manual_seed(0)
    make_module = functools.partial(plumb.nn.Linear, 16, 16) if face == "linear" else functools.partial(plumb.nn.GroupedLinear, 2, 16, 16)
    module = make_module().cuda()
    with plumb.Engine(module, plumb.SGD(lr=0.1)) as engine:
        x = torch.randn(8, 16).cuda()
        counts = () if face == "linear" else (torch.tensor([3, 5]).cuda(),)
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        out = module(x, *counts)
        out.pow(2).mean().backward()
        engine.step()
        weight, bias = before["weight"], before.get("bias")
        weight.requires_grad_()
        if face == "linear":
            plainly = F.linear(x, weight, bias)
        else:
            parts = [F.linear(rows, w) for rows, w in zip(x.split([3, 5]), weight, strict=True)]
            if bias is not None:
                parts = [part + b for part, b in zip(parts, bias, strict=True)]
            plainly = torch.cat(parts)
        (gradient,) = torch.autograd.grad(plainly.pow(2).mean(), weight)
        torch.testing.assert_close(dict(module.named_parameters())["weight"].detach(), weight.detach() - 0.1 * gradient)
