"""torch's elementwise optimizers under an engine step a few long tensors; what users see of their state is by parameter, as ever."""

from __future__ import annotations

import copy
import unittest.mock
from typing import Any

import pytest
import torch

import plumb
from stage import Block, Play, distance, make
from test_optim import groups_of, step_twin


def adamw(groups: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr=1e-2, fused=True)


def few(strategy: str) -> list[int]:
    """How many tensors each step updates."""
    model = make()
    optimizer = adamw(model.parameters())
    engine = plumb.Engine(model, optimizer, strategy=strategy, units=[Block])
    counts: list[int] = []
    kernel = torch._fused_adamw_

    def counted(parameters: list[torch.Tensor], *rest: Any, **named: Any) -> None:
        counts.append(len(parameters))
        kernel(parameters, *rest, **named)

    for number in range(3):
        Play(model, engine.world.rank, 2, 1.0).loss(number).backward()
        with unittest.mock.patch.object(torch, "_fused_adamw_", counted):
            engine.step()
        engine.zero_grad()
    return counts


@pytest.mark.parametrize(("strategy", "most"), [("zero1", 1), ("zero2", 1), ("zero3", 4)])
def test_a_step_is_of_a_stretch_of_each_bucket(strategy: str, most: int) -> None:
    for counts in plumb.spawn(few, 2, (strategy,)):
        assert 0 < max(counts) <= most, counts


def clipped_by_a_hook(strategy: str, early: bool) -> float:
    model, twin = make(), make()
    optimizer, other = adamw(model.parameters()), adamw(twin.parameters())

    def clip(its: torch.optim.Optimizer, *_: object) -> None:
        torch.nn.utils.clip_grad_norm_(its.param_groups[0]["params"], 0.05)

    other.register_step_pre_hook(clip)
    if early:
        optimizer.register_step_pre_hook(clip)
    engine = plumb.Engine(model, optimizer, strategy=strategy, units=[Block])
    if not early:
        optimizer.register_step_pre_hook(clip)
    after: list[list[int]] = []
    optimizer.register_step_post_hook(lambda its, *_: after.append(list(map(id, its.param_groups[0]["params"]))))
    for number in range(4):
        Play(model, engine.world.rank, 2, 1.0).loss(number).backward()
        engine.step()
        engine.zero_grad()
        step_twin(twin, other, 2, number)
    assert after == [list(map(id, model.parameters()))] * 4
    return distance(engine, model, twin)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("early", [True, False])
def test_a_hook_of_the_users_clips_by_the_norm_of_all_gradients(strategy: str, early: bool) -> None:
    assert max(plumb.spawn(clipped_by_a_hook, 2, (strategy, early))) < 1e-6


def reach(optimizer: torch.optim.Optimizer, steps: Any, parameter: torch.Tensor) -> dict[str, Any]:
    """The state that the user finds for a parameter, or for this rank's piece of it."""
    key = parameter if steps is None else steps.leaf_of[id(parameter)]
    found: dict[str, Any] = optimizer.state[key]
    return found


def touched(strategy: str, what: str) -> float:
    """State that the user changes between steps, in both ways of training alike."""
    model, twin = make(), make()
    optimizer, other = adamw(groups_of(model)), adamw(groups_of(twin))
    engine = plumb.Engine(model, optimizer, strategy=strategy, units=[Block])
    for number in range(5):
        Play(model, engine.world.rank, 2, 1.0).loss(number).backward()
        engine.step()
        engine.zero_grad()
        step_twin(twin, other, 2, number)
        if number not in (1, 2):
            continue
        for one, its, steps in ((optimizer, model, engine._steps), (other, twin, None)):
            for parameter in list(its.blocks[1].parameters())[:2]:  # type: ignore[union-attr,operator]
                state = reach(one, steps, parameter)
                if what == "moment":
                    state["exp_avg"].mul_(3)
                elif what == "count":
                    state["step"].add_(5)
                elif what == "count untold":
                    state["step"].data.add_(5)
                elif what == "other memory":
                    state["exp_avg"].data = state["exp_avg"].data * 2
                elif what == "replaced":
                    state["exp_avg_sq"] = state["exp_avg_sq"] * 2
                elif what == "forgotten":
                    state.clear()
            if what == "loaded":
                one.load_state_dict(copy.deepcopy(one.state_dict()))
    return distance(engine, model, twin)


@pytest.mark.parametrize("what", ["moment", "count", "count untold", "other memory", "replaced", "forgotten", "loaded"])
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_what_the_user_does_to_the_state_is_what_the_next_step_goes_on_from(strategy: str, what: str) -> None:
    assert max(plumb.spawn(touched, 2, (strategy, what))) < 1e-9


def wandering(strategy: str, steps: int) -> tuple[float, int]:
    """Other parameters are without a gradient at every step; how often flat state was made from what is shown."""
    model, twin = make(), make()
    optimizer, other = adamw(groups_of(model)), adamw(groups_of(twin))
    engine = plumb.Engine(model, optimizer, strategy=strategy, units=[Block])
    assert isinstance(engine._steps, plumb.optim.Pieces) and engine._steps.flat is not None
    formed, form = [0], engine._steps.flat._form

    def count(stretches: Any) -> None:
        formed[0] += 1
        form(stretches)

    engine._steps.flat._form = count  # type: ignore[method-assign]
    names = [name for name, _ in model.named_parameters()]
    for number in range(steps):
        left_out = {name for i, name in enumerate(names) if (i + number) % 3 == 0}
        for one in (model, twin):
            for name, parameter in one.named_parameters():
                parameter.requires_grad_(name not in left_out)
        Play(model, engine.world.rank, 2, 1.0).loss(number).backward()
        engine.step()
        engine.zero_grad()
        step_twin(twin, other, 2, number)
    return distance(engine, model, twin), formed[0]


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_gradients_that_come_for_others_at_every_step_are_stepped_one_by_one_after_a_while(strategy: str) -> None:
    for far, formed in plumb.spawn(wandering, 2, (strategy, 8)):
        assert far < 1e-9
        assert 1 <= formed < 6


def held_at_first(strategy: str) -> float:
    """The first step's backwards are all held, so that gradients, masters and state move after it."""
    model, twin = make(torch.bfloat16), make(torch.bfloat16)
    held = [p.detach().float().requires_grad_() for p in twin.parameters()]
    optimizer, other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.optim.SGD(held, lr=0.1, momentum=0.9)
    engine = plumb.Engine(model, optimizer, strategy=strategy, units=[Block], master_weights=True, accumulate_dtype=torch.float32, bucket_bytes=1024)
    for number in range(4):
        play = Play(model, engine.world.rank, 2, 1.0, engine)
        if number == 0:
            with engine.no_sync():
                play.loss(number).backward()
        else:
            play.loss(number).backward()
        engine.step()
        engine.zero_grad()
        sums: list[torch.Tensor | None] = [None for _ in held]
        for rank in range(2):
            twin.zero_grad()
            Play(twin, rank, 2, 1.0).loss(number).backward()
            for i, p in enumerate(twin.parameters()):
                if p.grad is not None:
                    sums[i] = p.grad.float() / 2 + (0 if sums[i] is None else sums[i])  # type: ignore[operator]
        for p, total in zip(held, sums, strict=True):
            p.grad = total
        other.step()
        with torch.no_grad():
            for p, master in zip(twin.parameters(), held, strict=True):
                p.copy_(master)
    return distance(engine, model, twin)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_masters_that_moved_since_the_last_step_are_the_ones_that_are_stepped(strategy: str) -> None:
    assert max(plumb.spawn(held_at_first, 2, (strategy,))) < 1e-6
