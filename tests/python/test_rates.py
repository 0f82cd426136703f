"""What a run is steered by and read from: learning rates, what a share of a deterministic run counts, the gradients' norm."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import plumb
from stage import Block, Play, distance, groups_of, make, step_twin

SMALL = r"bias|norm"


def rates_of_groups(strategy: str) -> float:
    """Plumb's optimizer: two groups, one of which has no rate of its own until it is set."""
    model, twin = make(), make()
    groups: list[dict[str, Any]] = [{"match": SMALL, "lr": 0.2}, {"match": r"last|spare"}]
    engine = plumb.Engine(model, plumb.SGD(lr=0.1), strategy=strategy, units=[Block], groups=groups)
    by_rate = [
        [p for name, p in twin.named_parameters() if not any(one in name for one in ("bias", "norm", "last", "spare"))],
        [p for name, p in twin.named_parameters() if "bias" in name or "norm" in name],
        [twin.last.weight, twin.spare.weight],
    ]
    optimizer = torch.optim.SGD([{"params": parameters} for parameters in by_rate], lr=0.1)
    seen = []
    changes: list[tuple[Any, ...]] = [(0.1,), (0.03,), (0.7, 1), (0.01, 0)]
    for step, change in enumerate(changes):
        engine.set_lr(*change)
        rates = engine.lr(), engine.lr(0), engine.lr(1)
        seen.append(rates)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        Play(model, engine.world.rank, engine.world.size, 1.0).loss(step).backward()
        info = engine.step()
        engine.zero_grad()
        assert (info.lr, *info.group_lrs) == rates
        step_twin(twin, optimizer, engine.world.size, step)
    assert seen == [(0.1, 0.2, 0.1), (0.03, 0.2, 0.03), (0.03, 0.2, 0.7), (0.03, 0.01, 0.7)]
    for group in (-1, 2):
        with pytest.raises(plumb.Error, match="no parameter group"):
            engine.lr(group)
        with pytest.raises(plumb.Error, match="no parameter group"):
            engine.set_lr(1.0, group)
    return distance(engine, model, twin)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_rates_of_groups_are_what_was_set(strategy: str) -> None:
    assert max(plumb.spawn(rates_of_groups, 2, (strategy,))) < 1e-10


def rates_of_torchs(strategy: str) -> float:
    model, twin = make(), make()
    mine, others = torch.optim.AdamW(groups_of(model), lr=0.1), torch.optim.AdamW(groups_of(twin), lr=0.1)
    engine = plumb.Engine(model, mine, strategy=strategy, units=[Block])
    assert (engine.lr(), engine.lr(1)) == (0.1, 0.1)
    engine.set_lr(0.02, 1)
    assert (engine.lr(), engine.lr(0), engine.lr(1)) == (0.1, 0.1, 0.02)
    others.param_groups[1]["lr"] = 0.02
    Play(model, engine.world.rank, engine.world.size, 1.0).loss(0).backward()
    engine.step()
    step_twin(twin, others, engine.world.size, 0)
    far = distance(engine, model, twin)
    engine.set_lr(0.5)
    assert [group["lr"] for group in mine.param_groups] == [0.5, 0.5] and engine.lr(1) == 0.5
    with pytest.raises(plumb.Error, match="no parameter group 2; this optimizer has 2"):
        engine.set_lr(0.5, 2)
    return far


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_rates_of_a_torch_optimizer_are_those_of_its_groups(strategy: str) -> None:
    assert max(plumb.spawn(rates_of_torchs, 2, (strategy,))) < 1e-10


def shares(strategy: str) -> tuple[float, bytes, float]:
    """Four shares of the batch; one process takes the mean over them."""
    model, twin = make(), make()
    engine = plumb.Engine(model, plumb.AdamW(lr=0.01), strategy=strategy, units=[Block], deterministic=True, virtual_ranks=4)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.01)
    each = 4 // engine.world.size
    for step in range(2):
        for share in range(each):
            mine = Play(model, engine.world.rank * each + share, 4, 1.0)
            engine.backward(mine.loss(step) * engine.share_weight())
        engine.step()
        engine.zero_grad()
        step_twin(twin, optimizer, 4, step)
    bits = b"".join(engine.full_parameter(p).numpy().tobytes() for p in model.parameters())
    return distance(engine, model, twin), bits, engine.share_weight()


def test_a_share_counts_so_much_that_a_deterministic_run_is_that_of_one_process() -> None:
    runs = [plumb.spawn(shares, ranks, (strategy,))[0] for ranks, strategy in ((1, "ddp"), (2, "zero3"))]
    assert max(far for far, _, _ in runs) < 1e-7
    assert runs[0][1] == runs[1][1]
    assert [weight for _, _, weight in runs] == [0.25, 0.5]
    assert plumb.Engine(make(), plumb.SGD()).share_weight() == 1.0


def norms(strategy: str) -> list[float]:
    """Before a step that clips, with a loss scale, after a micro-batch more."""
    model, twin = make(), make()
    engine = plumb.Engine(model, plumb.SGD(lr=0.1), strategy=strategy, units=[Block], clip_norm=1e-3, loss_scale=1024.0)
    size, wrong = engine.world.size, []
    for i in range(2):
        engine.backward(Play(model, engine.world.rank, size, 1.0).loss(i))
        for rank in range(size):
            other = Play(twin, rank, size, 1 / size)
            other.backward(other.loss(i))
        expected = nn.utils.get_total_norm([p.grad for p in twin.parameters() if p.grad is not None])
        assert expected > 1e-2, "nothing is clipped"
        wrong.append(float((engine.grad_norm() - expected).abs() / expected))
    before = copy.deepcopy(engine.grad_norm())
    info = engine.step()
    assert info.grad_norm is not None
    wrong.append(float((info.grad_norm - before).abs()))
    return wrong


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 2), ("hsdp", 4)])
def test_the_norm_of_all_gradients_is_that_of_one_process(strategy: str, ranks: int) -> None:
    for wrong in plumb.spawn(norms, ranks, (strategy,)):
        assert max(wrong) < 1e-6, wrong
