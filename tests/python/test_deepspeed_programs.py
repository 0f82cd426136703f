"""What programs over DeepSpeed do between its calls, beside one process that does the same with plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import plumb
import plumb.deepspeed as deepspeed
from deepspeeds import batch, config_of, make


def thaws_late(stage: int, given: bool) -> float:
    """A layer that is frozen when the engine is built, and trains from the second step on."""
    model, twin = make(), make()
    for one in (model, twin):
        one.linears[0].requires_grad_(False)
    config = config_of(stage=stage, gradient_clipping=0.0)
    parameters: Any = {"model_parameters": model.parameters()} if given else {}
    engine = deepspeed.initialize(model=model, config=config, **parameters)[0]
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, betas=(0.8, 0.99), weight_decay=0.1)
    for i in range(3):
        if i == 1:
            for one in (model, twin):
                one.linears[0].requires_grad_(True)
        engine.backward(engine(*batch(engine.global_rank, i)))
        engine.step()
        optimizer.zero_grad()
        for rank in range(engine.world_size):
            (twin(*batch(rank, i)) / engine.world_size).backward()
        optimizer.step()
    whole = [engine.engine.full_parameter(p) for p in model.parameters()]
    return max(float((a - b).abs().max()) for a, b in zip(whole, twin.parameters(), strict=True))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_unfrozen_later_trains_although_the_config_names_the_optimizer(stage: int) -> None:
    for given in (False, True):
        assert max(plumb.spawn(thaws_late, 2, (stage, given))) < 1e-6


def generates() -> tuple[int, int]:
    engine = deepspeed.initialize(model=make(), config=config_of(stage=3))[0]
    with deepspeed.zero.unwrap_model_for_generation(engine) as model, torch.no_grad():
        whole = engine.engine.gathered_bytes
        model(*batch(0, 0))
        assert engine.engine.gathered_bytes == whole
    engine.backward(engine(*batch(engine.global_rank, 0)))
    engine.step()
    return whole, engine.engine.gathered_bytes


def test_a_model_is_unwrapped_for_generation() -> None:
    for whole, after in plumb.spawn(generates, 2):
        assert whole > 0 and after == 0


def changed_before(stage: int) -> float:
    """Weights that another rank than the first sets before the model has an engine, as loaders of checkpoints do."""
    deepspeed.init_distributed(dist_backend="gloo")
    with deepspeed.zero.Init():
        model = make()
    with deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=1), torch.no_grad():
        if torch.distributed.get_rank() == 1:
            for i, parameter in enumerate(model.parameters()):
                parameter.fill_(i + 0.5)
    engine = deepspeed.initialize(model=model, config=config_of(stage=stage))[0]
    return max(float((engine.engine.full_parameter(p) - (i + 0.5)).abs().max()) for i, p in enumerate(model.parameters()))


@pytest.mark.parametrize("stage", [0, 3])
def test_what_the_modifier_rank_sets_before_there_is_an_engine_is_everybodys(stage: int) -> None:
    assert plumb.spawn(changed_before, 3, (stage,)) == [0.0] * 3
