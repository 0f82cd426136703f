"""The rows of the README's table through ``plumb.deepspeed``, in every stage, against one process."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import plumb
import plumb.deepspeed as deepspeed
from programs import ROWS, UNITS, freeze, plain, unfreeze_after_wrapping
from stage import STEP, ZERO, Play, Program, make, reference

#: How people drive the engine. ``managed``: step() after each backward, the accumulation steps are counted. ``own``: the
#: caller's step() is the boundary. ``loss.backward()``: a backward of torch's.
WAYS = ("managed", "own", "loss.backward()")
TWO_BACKWARDS = {
    "two backwards, accumulating", "retained graph, two losses", "retained, zero_grad between", "forward, forward, backward, backward",
}  # fmt: skip
LEFT_OUT = {
    # backward(inputs=) is torch's alone; inside of no_sync no step() may be called
    "managed": {"backward(inputs=[p])", *(name for name in ROWS if "no_sync" in name)},
    # Backwards before the boundary are each rank's own: that one failed is heard at the step.
    "own": {"backward(inputs=[p])", "exception in backward, then a normal step"},
    "loss.backward()": set[str](),
}
PATTERNS: dict[str, Program] = {**ROWS, **UNITS, "tied weights": plain, "unfreeze after wrapping": unfreeze_after_wrapping}


class Driven(Play):
    """A play whose model is DeepSpeed's engine."""

    def __init__(self, engine: Any, way: str) -> None:
        super().__init__(engine, engine.global_rank, engine.world_size, 1.0, engine.engine)
        self.way, self.steps = way, 0

    def backward(self, loss: torch.Tensor, **how: Any) -> None:
        if self.way == "loss.backward()":
            loss.backward(**how)
            return
        self.model.backward(loss * self.model.gradient_accumulation_steps(), **how)
        if self.way == "managed":
            self.model.step()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        held = self.model.no_sync if self.model.zero_optimization_stage() < 2 else self.model.coalesce_grad_reduction
        return held()  # type: ignore[no-any-return]

    def step(self) -> None:
        if self.way != "managed":
            self.model.step()
        self.steps += 1
        assert self.model.global_steps == self.steps and self.model.was_step_applied()


def compare(name: str, way: str, stage: int) -> float:
    model, twin, fresh = (make(tied=name == "tied weights") for _ in range(3))
    if name == "unfreeze after wrapping":
        freeze(model)
        freeze(twin)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2 if way == "managed" and name in TWO_BACKWARDS else 1,
        "managed_gradient_accumulation": way != "own",
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1000},
        "gradient_clipping": 0.0,
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    play = Driven(engine, way)
    before = None
    for yielded in PATTERNS[name](play):
        if yielded == STEP:
            play.step()
        elif yielded != ZERO:
            yielded(model)
        elif before != STEP:  # which clears by itself
            engine.zero_grad()
        before = yielded
    reference(twin, PATTERNS[name], engine.world_size, torch.optim.SGD(twin.parameters(), lr=0.1))

    def away(other: nn.Module) -> float:
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        return max(float((engine.engine.full_parameter(a) - b.detach()).abs().max() / b.detach().abs().max()) for a, b in pairs)

    assert away(fresh) > 1e-4, "the program trained nothing"
    far = away(twin)
    assert engine.engine.gathered_bytes == 0
    engine.destroy()
    return far


# What units compose with does not depend on who counts.
CASES = [(way, name) for way in WAYS for name in PATTERNS if name not in LEFT_OUT[way] and (way == "managed" or name not in UNITS)]


def everything(stage: int) -> dict[tuple[str, str], float | str]:
    outcome: dict[tuple[str, str], float | str] = {}
    for way, name in CASES:
        try:
            outcome[way, name] = compare(name, way, stage)
        except Exception:  # the ranks may be out of step from here on
            outcome[way, name] = traceback.format_exc()
            break
    return outcome


@functools.cache
def outcome(stage: int) -> list[dict[tuple[str, str], float | str]]:
    run: Callable[[int], dict[tuple[str, str], float | str]] = everything
    return plumb.spawn(run, 2, (stage,), timeout=200)


@pytest.mark.parametrize(("way", "name"), CASES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_is_what_one_process_computes(stage: int, way: str, name: str) -> None:
    for rank, by_case in enumerate(outcome(stage)):
        result = by_case.get((way, name), "an earlier case failed")
        assert isinstance(result, float), f"rank {rank}: {result}"
        assert result <= 1e-10, f"rank {rank} is {result:.1e} away"
