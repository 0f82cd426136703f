"""f32 values of half-precision parameters, set before the first step has made their masters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import plumb
import plumb.deepspeed as deepspeed
from plumb.deepspeed import utils

WIDTH = 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.later = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first.weight = nn.Parameter(self.first.weight.detach().clone().t())  # whose memory is in another order than its shape

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.first(x)
        return (self.later(x) if both else x).float().square().mean()


def values(seed: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.rand(p.shape, generator=g) for p in Net().parameters()]


def built(stage: int, kind: str) -> Any:
    torch.manual_seed(1)
    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "gradient_clipping": 0,
        "optimizer": {"type": kind, "params": {"lr": 2.0**-12}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    return deepspeed.initialize(model=Net(), config=config)[0]


def told(stage: int) -> None:
    """An optimizer that is stepped over pieces."""
    engine, dtype = built(stage, "SGD"), torch.bfloat16
    x = torch.ones(1, WIDTH, dtype=dtype)
    engine.backward(engine(x, False))  # `later` has no gradient yet
    given = values(3)
    parameters = list(engine.module.parameters())
    for parameter, value in zip(parameters, given):
        utils.safe_set_full_fp32_param(parameter, value)
        assert torch.equal(utils.safe_get_full_fp32_param(parameter), value)
    with torch.no_grad(), engine.engine.gathered([parameters[1]], write=True):
        parameters[1].fill_(0.5)  # the parameter has the last word
    assert torch.equal(utils.safe_get_full_fp32_param(parameters[1]), torch.full((WIDTH,), 0.5))
    for parameter in parameters[:2]:
        utils.safe_set_full_grad(parameter, torch.ones(parameter.shape, dtype=dtype))
    given[1] = torch.full((WIDTH,), 0.5)
    engine.step()
    assert engine.skipped_steps == 0
    for number, (parameter, value) in enumerate(zip(parameters, given)):
        found = utils.safe_get_full_fp32_param(parameter)
        moved = 0.0 if number > 1 else 2.0**-12
        torch.testing.assert_close(found, value - moved, rtol=0, atol=1e-6)  # bf16 alone would be 2e-3 away
    engine.backward(engine(x, True))
    for parameter in parameters:
        utils.safe_set_full_grad(parameter, torch.zeros(parameter.shape, dtype=dtype))
    engine.step()
    for parameter, value in zip(parameters[2:], given[2:]):
        torch.testing.assert_close(utils.safe_get_full_fp32_param(parameter), value, rtol=0, atol=1e-6)


def kept(stage: int) -> None:
    """One that owns whole parameters."""
    engine = built(stage, "Lamb")
    engine.backward(engine(torch.ones(1, WIDTH, dtype=torch.bfloat16), True))
    for parameter, value in zip(engine.module.parameters(), values(3)):
        utils.safe_set_full_fp32_param(parameter, value)
    engine.set_lr(0.0)
    engine.step()
    for parameter, value in zip(engine.module.parameters(), values(3)):
        assert torch.equal(utils.safe_get_full_fp32_param(parameter), value)


@pytest.mark.parametrize("program", [told, kept])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_f32_values_that_are_set_before_the_first_step_are_kept(stage: int, program: Callable[[int], None]) -> None:
    plumb.spawn(program, 2, (stage,))
