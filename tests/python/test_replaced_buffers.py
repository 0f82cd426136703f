"""Buffers that a forward puts in the places of others: they follow rank 0's, and are saved, as those that are written into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import plumb


class Mean(nn.Module):
    """Keeps a mean of its inputs, in a new tensor each time, and whatever came last."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("last", torch.zeros(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + x.mean(0)
        self.last = x
        return self.layer(x - self.mean).square().mean()  # type: ignore[no-any-return]


def inputs(rank: int, number: int) -> torch.Tensor:
    return torch.randn(2 + rank, 4, generator=torch.Generator().manual_seed(10 * number + rank))


def alone(steps: int) -> Mean:
    """Each step begins with rank 0's mean."""
    model = Mean()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(steps):
        before = model.mean
        (model(inputs(1, number)) / 2).backward()
        model.mean = before
        (model(inputs(0, number)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def train(strategy: str, how: str) -> dict[str, Any]:
    model = Mean()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ours = plumb.AdamW(lr=1e-2, weight_decay=1e-2)
    engine = plumb.Engine(model, ours if how == "plumb's" else optimizer, strategy=strategy, units=[nn.Linear])
    for number in range(3):

        def closure() -> torch.Tensor:
            loss = model(inputs(engine.world.rank, number))  # noqa: B023  (called at once)
            loss.backward()
            return loss

        if how == "closure":
            engine.step(closure)
        else:
            closure()
            engine.step()
        engine.zero_grad()
    with engine.gathered(model):
        return {"mean": model.mean.tolist(), "weight": model.layer.weight.detach().clone(), "last": len(model.last)}


@pytest.mark.parametrize("how", ["torch's", "plumb's", "closure"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_a_buffer_in_anothers_place_follows_rank_0(strategy: str, how: str) -> None:
    expected = alone(3)
    for rank, got in enumerate(plumb.spawn(train, 2, (strategy, how))):
        assert got["mean"] == pytest.approx(expected.mean.tolist(), abs=1e-6)
        torch.testing.assert_close(got["weight"], expected.layer.weight.detach(), atol=1e-5, rtol=1e-5)
        assert got["last"] == 2 + rank  # of another shape, which other ranks may not have: its own


def saved(folder: str) -> list[float]:
    model = Mean()
    model.last = torch.zeros(2, 4)
    engine = plumb.Engine(model, plumb.SGD(lr=0.1))
    x = inputs(0, engine.world.rank)
    model(x).backward()
    engine.step()
    assert torch.equal(x, inputs(0, engine.world.rank))  # which the model kept: nobody writes into it
    assert torch.equal(model.last, inputs(0, 0))
    assert (model.last is x) == (engine.world.rank == 0), "rank 0's is what its forward put there"
    model.mean = model.mean + engine.world.rank
    engine.save(folder)
    return model.mean.tolist()


def test_a_buffer_in_anothers_place_is_the_one_that_is_saved_and_loaded_into(tmp_path: Path) -> None:
    first = plumb.spawn(saved, 2, (str(tmp_path),))[0]
    model = Mean()
    model.last = torch.zeros(2, 4)
    engine = plumb.Engine(model, plumb.SGD(lr=0.1))
    model.mean = torch.ones(4)
    engine.load(tmp_path)
    assert model.mean.tolist() == first


@pytest.mark.parametrize("way", ["dcp", "by hand", "weights"])
def test_so_it_is_by_every_other_way_of_saving_and_loading(tmp_path: Path, way: str) -> None:
    model, fresh = Mean(), Mean()
    engine, other = plumb.Engine(model, plumb.SGD(lr=0.1)), plumb.Engine(fresh, plumb.SGD(lr=0.1))
    model.mean, fresh.mean = torch.full((4,), 3.0), torch.ones(4)
    if way == "dcp":
        dcp.save({"engine": engine}, checkpoint_id=tmp_path, no_dist=True)
        fresh.mean = torch.full((4,), 2.0)
        dcp.load({"engine": other}, checkpoint_id=tmp_path, no_dist=True)
    elif way == "by hand":
        dcp.save({"engine": engine.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
        state = {"engine": other.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
        fresh.mean = torch.full((4,), 2.0)
        other.load_state_dict(state["engine"])
    else:
        other.load_weights(engine.save(tmp_path))
    assert fresh.mean.tolist() == [3.0] * 4


def of_another_kind() -> list[Any]:
    """Of another dtype or layout than the one before, or with a graph: each rank's own, and no error."""
    model = Mean()
    engine = plumb.Engine(model, plumb.SGD(lr=0.1))
    rank = engine.world.rank
    seen = []
    for made in torch.full((4,), 1.0 + rank, dtype=torch.float64), model.layer.weight[0] * (1.0 + rank), torch.full((4,), 1.0 + rank).to_sparse():
        model.layer(inputs(rank, 0)).sum().backward()
        model.mean = made
        engine.step()
        engine.zero_grad()
        seen.append((model.mean is made, made.requires_grad))
    return seen


def test_a_buffer_of_another_dtype_or_with_a_graph_is_each_ranks_own() -> None:
    assert plumb.spawn(of_another_kind, 2) == [[(True, False), (True, True), (True, False)]] * 2
