"""Every row of the README's table and every pattern of units, from Python, in every strategy, against one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import plumb
from programs import ROWS, UNITS, freeze, plain, unfreeze_after_wrapping
from stage import STEP, Net, Play, Program, compare, make

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "hsdp"]
PLACES = [(2, "shm"), (2, "gloo"), (4, "shm"), (4, "gloo"), (2, "tcp")]
PATTERNS = {**ROWS, **UNITS}


def bf16_micro_batches(play: Play) -> Any:
    for i in range(64):
        play.backward(play.loss(i) / 64)
    yield STEP


def asks_for_f32_gradients(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32


class InF32(torch.autograd.Function):
    """An operation on a bf16 weight that hands over its gradient in f32, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return (weight.float() * gradient).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * ctx.gradient, None


def f32_of_bf16(strategy: str, world: plumb.World) -> float:
    """Gradients of bf16 parameters keep f32: the reduced gradient is the mean of what the ranks had, not rounded."""
    model = make(torch.bfloat16)
    asks_for_f32_gradients(model)
    with plumb.Engine(model, plumb.SGD(lr=0.1), strategy=strategy, units=[], world=world) as engine:
        weight = model.last.weight
        part = torch.full(weight.shape, 1.0 + 2.0**-20 * (world.rank + 1))
        InF32.apply(weight, part).backward()
        mean = 1.0 + 2.0**-20 * (world.size + 1) / 2
        got = engine.full_gradient(weight)
        assert got is not None and got.dtype == torch.float32, got
        return float((got.double() - mean).abs().max())


def bf16_accumulation(strategy: str, world: plumb.World) -> float:
    """64 bf16 micro-batches summed in f32: as near to the f32 sum as f32 is, where bf16 sums are percents away."""
    model = make(torch.bfloat16)
    with plumb.Engine(
        model, plumb.SGD(lr=0.1), strategy=strategy, units=[], world=world, accumulate_dtype=torch.float32
    ) as engine:
        weight = model.last.weight
        for i in range(64):
            (weight * (1.0 + i / 64 + world.rank)).sum().backward()
        got = engine.full_gradient(weight)
        rounded = torch.tensor([[1.0 + i / 64 + r for i in range(64)] for r in range(world.size)], dtype=torch.bfloat16)
        expected = rounded.double().sum(1).mean()
        return float(((got.double() - expected) / expected).abs().max())


def everything(strategy: str, backend: str) -> dict[str, float | str]:
    world = plumb.World.join(backend=backend, timeout=30)
    outcome: dict[str, float | str] = {}
    blocks = make(torch.float64).blocks
    unit = sum(parameter.nbytes for parameter in blocks[0].parameters())
    ways: list[dict[str, Any]] = [{}]
    if backend == "tcp":  # As on two machines: ranks that use different units ask each other, for one unit ahead or for all of them.
        ways = [
            {"ask_before_gathers": True, "gather_ahead_bytes": 0, "kept": 2 * unit - 1},
            {"ask_before_gathers": True, "kept": 2 * unit * len(blocks) - 1},
        ]

    def played(program: Program, **words: Any) -> float:
        return max(compare(program, strategy=strategy, world=world, **words, **way) for way in ways)

    cases: dict[str, Any] = {name: functools.partial(played, program) for name, program in PATTERNS.items()}
    cases["tied weights"] = lambda: played(plain, tied=True)
    cases["unfreeze after wrapping"] = lambda: played(unfreeze_after_wrapping, prepare=freeze)
    cases["64 bf16 micro-batches, f32 accumulation"] = lambda: bf16_accumulation(strategy, world)
    cases["f32 gradient of a bf16 parameter"] = lambda: f32_of_bf16(strategy, world)
    for name, case in cases.items():
        try:
            outcome[name] = case()
        except Exception as error:  # the ranks may be out of step from here on
            import traceback

            outcome[name] = traceback.format_exc()
            break
    return outcome


@functools.cache
def outcome(strategy: str, ranks: int, backend: str) -> list[dict[str, float | str]]:
    alone = {"PLUMB_SHM": "0"} if backend == "tcp" else {}
    return plumb.spawn(everything, ranks, (strategy, backend), timeout=200, env=alone)


LIMITS = {"64 bf16 micro-batches, f32 accumulation": 1e-6, "f32 gradient of a bf16 parameter": 1e-7}
NAMES = [*PATTERNS, "tied weights", "unfreeze after wrapping", *LIMITS]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks,backend", PLACES, ids=[f"{ranks}-{backend}" for ranks, backend in PLACES])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_is_what_one_process_computes(strategy: str, ranks: int, backend: str, name: str) -> None:
    for rank, by_name in enumerate(outcome(strategy, ranks, backend)):
        result = by_name.get(name, "an earlier case failed")
        assert isinstance(result, float), f"rank {rank}: {result}"
        assert result <= LIMITS.get(name, 1e-10), f"rank {rank} is {result:.1e} away"


# ---- rows that end in an error


def different_models(kind: str) -> str:
    world = plumb.world(timeout=30)
    if kind == "swapped":

        class Swapped(Net):
            def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
                pairs = dict(super().named_parameters(*args, **kwargs))
                if world.rank == 1:
                    pairs = {
                        {"first.weight": "last.weight", "last.weight": "first.weight"}.get(name, name): parameter
                        for name, parameter in pairs.items()
                    }
                return iter(pairs.items())

        model: torch.nn.Module = Swapped()
    else:
        model = make(torch.float16 if world.rank == 0 else torch.bfloat16)
    try:
        plumb.Engine(model, plumb.SGD())
    except plumb.Error as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("kind", ["swapped", "halves"])
def test_models_that_differ_are_refused_on_every_rank(kind: str) -> None:
    for said in plumb.spawn(different_models, 2, (kind,)):
        assert "different models" in said and "weight" in said, said
