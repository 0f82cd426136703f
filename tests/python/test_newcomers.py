"""Parameters that come into a model after its engine was built: each rank would train them alone, so they are an error on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import plumb
from stage import WIDTH, Block, make


def a_head_in_anothers_place(strategy: str, how: str) -> list[str]:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2) if how != "plumb's optimizer" else None
    engine = plumb.Engine(model, optimizer or plumb.AdamW(lr=1e-2), strategy=strategy, units=[Block])
    said = []

    def train() -> None:
        try:
            model(torch.ones(2, WIDTH, dtype=torch.float64)).pow(2).mean().backward()
            engine.step()
            said.append("")
        except plumb.Error as error:
            said.append(str(error))
        engine.zero_grad()

    train()
    model.blocks[0].note = nn.Identity()  # no parameters, no question
    train()
    if how == "a parameter":
        model.blocks[0].gain = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        new = [model.blocks[0].gain]
    else:
        model.last = nn.Linear(WIDTH, WIDTH).double()
        new = list(model.last.parameters())
    if optimizer is not None and how != "nobody steps it":
        optimizer.add_param_group({"params": new})
    train()
    for one in new:
        one.requires_grad_(False)
    if optimizer is not None and how != "nobody steps it":
        del optimizer.param_groups[1:]
    train()
    new[0].requires_grad_(True)
    train()
    return said


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize("how", ["a module", "a parameter", "nobody steps it", "plumb's optimizer"])
def test_what_came_after_the_engine_is_an_error_on_every_rank(strategy: str, how: str) -> None:
    name = "blocks.0.gain" if how == "a parameter" else "last.weight"
    for rank, said in enumerate(plumb.spawn(a_head_in_anothers_place, 2, (strategy, how))):
        assert [bool(one) for one in said] == [False, False, True, False, True], said
        for one in (said[2], said[4]):
            assert f"rank {rank}: parameter '{name}' came into the model after the engine was built" in one
