"""Parameters that come into a model after its engine was built: each rank would train them alone, so they are an error on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import plumb
from plumb.replaced import Replaced
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


def a_parameter_of_no_model(strategy: str) -> list[str]:
    """A temperature that the optimizer alone got to know, and the loss uses."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    engine = plumb.Engine(model, optimizer, strategy=strategy, units=[Block])
    temperature = nn.Parameter(torch.ones((), dtype=torch.float64))
    said = []

    def train() -> None:
        (model(torch.ones(2, WIDTH, dtype=torch.float64)).pow(2).mean() * temperature).backward()
        try:
            optimizer.step()
            said.append("")
        except plumb.Error as error:
            said.append(str(error))
        engine.zero_grad()
        temperature.grad = None

    train()
    optimizer.add_param_group({"params": [temperature]})
    train()
    temperature.requires_grad_(False)
    train()
    temperature.grad = torch.ones_like(temperature)  # which the optimizer would step by
    train()
    return said


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_what_came_into_the_optimizer_alone_is_an_error_on_every_rank(strategy: str) -> None:
    for rank, said in enumerate(plumb.spawn(a_parameter_of_no_model, 2, (strategy,), method="thread")):
        assert [bool(one) for one in said] == [False, True, False, True], said
        assert f"rank {rank}: parameter 0 of the optimizer's group 1, of shape [], came into the optimizer after the engine" in said[1]


def test_what_comes_into_a_newcomer_is_noticed_too() -> None:
    model = make()
    engine = plumb.Engine(model, plumb.SGD(lr=0.1))
    model.extra = nn.Sequential()
    engine.step()
    model.extra.append(nn.Linear(2, 2))
    with pytest.raises(plumb.Error, match="parameter 'extra.0.weight' came into the model"):
        engine.step()


def test_what_is_replaced_is_noticed_by_each_engine() -> None:
    models = [make(), make()]
    engines = [plumb.Engine(model, plumb.SGD(lr=0.1)) for model in models]
    for model, engine in zip(models, engines, strict=True):
        engine.step()
        old = model.last.weight
        for _ in range(5):  # there and back
            model.last.weight = nn.Parameter(old.detach().clone())
            model.last.weight = old
        engine.step()
        assert len(engine._replaced._places) == 1, "a place is one, however often something is put there"
        model.last.weight = nn.Parameter(old.detach().clone())
        with pytest.raises(plumb.Error, match="parameter 'last.weight' was replaced after the engine was built"):
            engine.step()


def test_what_comes_into_a_part_of_two_models_is_noticed_by_both_engines() -> None:
    """Which had no parameter until then: one of an engine is no other's."""
    part = nn.Tanh()
    models = [nn.Sequential(part, nn.Linear(2, 2)) for _ in range(2)]
    engines = [plumb.Engine(model, plumb.SGD(lr=0.1)) for model in models]
    part.gain = nn.Parameter(torch.ones(2))
    for engine in engines:
        with pytest.raises(plumb.Error, match="parameter '0.gain' came into the model"):
            engine.step()


def test_of_several_places_that_were_given_something_else_each_is_looked_at() -> None:
    model = make()
    engine = plumb.Engine(model, plumb.SGD(lr=0.1))
    engine.step()
    kept = model.last.weight
    model.last.bias = None  # gone
    model.last.weight = nn.Parameter(kept.detach().clone(), requires_grad=False)  # frozen
    model.first.weight = model.first.weight
    engine.step()
    model.last.weight = kept  # there again
    engine.step()
    model.last.gain = nn.Parameter(torch.ones(1))  # and who came beside is noticed
    with pytest.raises(plumb.Error, match="parameter 'last.gain' came into the model"):
        engine.step()
    del model.last.gain
    engine.step()
    model.first.weight = nn.Parameter(model.first.weight.detach().clone())
    with pytest.raises(plumb.Error, match="parameter 'first.weight' was replaced"):
        engine.step()


def test_where_an_optimizer_is_asked_only_what_it_updates_counts() -> None:
    """As under a wrapper, whose optimizer is the user's: what nobody steps, nobody trains apart."""
    model = make()
    replaced = Replaced(model.named_parameters(), 3)
    assert not replaced
    model.last.weight = nn.Parameter(model.last.weight.detach().clone())
    assert replaced
    replaced.check({id(model.last.bias)})
    for stepped in ({id(model.last.weight), id(model.last.bias)}, None):
        with pytest.raises(plumb.Error, match="rank 3: parameter 'last.weight' was replaced"):
            replaced.check(stepped)
