"""A ``torch.optim`` object around its steps, where it steps something else than the parameters: masters, which one rank has, too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import plumb


def built(kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **how: Any) -> tuple[nn.Linear, Any, plumb.Engine]:
    torch.manual_seed(1)
    model = nn.Linear(3, 2).bfloat16()
    optimizer = kind(model.parameters(), **{"lr": 0.1, **how})  # type: ignore[call-arg]
    return model, optimizer, plumb.Engine(model, optimizer, master_weights=True)


def train(model: nn.Module, engine: plumb.Engine, until: int) -> None:
    while engine.steps < until:
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(engine.steps)).bfloat16()
        model(x).float().square().sum().backward()
        engine.step()
        engine.zero_grad()


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def kept(optimizer: torch.optim.Optimizer) -> list[Any]:
    state = optimizer.state_dict()["state"]
    return sorted((number, key, str(value)) for number, one in state.items() for key, value in one.items())


class Interrupted(torch.optim.SGD):
    """By the user, in the middle of its step."""

    once = True

    def step(self, closure: Any = None) -> Any:
        answer = super().step(closure)
        if self.once:
            self.once = False
            raise KeyboardInterrupt
        return answer


def test_an_interrupt_in_a_step_ends_it() -> None:
    model, optimizer, engine = built(Interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(model, engine, 1)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    other, _, twin = built(torch.optim.SGD)
    train(other, twin, 1)
    assert same(model, other) and engine.steps == 1  # what it had updated
    engine.zero_grad()
    for one, its in ((model, engine), (other, twin)):
        train(one, its, 3)
    assert same(model, other)


class Plain(torch.optim.Optimizer):
    """One that nobody knows, and steps whatever has a gradient."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
                p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize("kind", [Plain, torch.optim.SGD])
def test_what_is_frozen_after_a_step_is_stepped_by_no_gradient_of_before(kind: type[torch.optim.Optimizer]) -> None:
    model, _, engine = built(kind)
    train(model, engine, 1)
    model.bias.requires_grad_(False)
    before = model.bias.detach().clone(), model.weight.detach().clone()
    train(model, engine, 3)
    assert torch.equal(model.bias, before[0]) and not torch.equal(model.weight, before[1])


@pytest.mark.parametrize("masters", [True, False])
def test_a_closure_by_its_name_or_by_its_place(masters: bool) -> None:
    ends = []
    for how in ("name", "place", "engine"):
        torch.manual_seed(1)
        model = nn.Linear(3, 2).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = plumb.Engine(model, optimizer, master_weights=masters)
        calls: list[int] = []

        def closure() -> torch.Tensor:
            calls.append(1)
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3).bfloat16()).float().square().sum()
            loss.backward()
            return loss

        answer = {"name": lambda: optimizer.step(closure=closure), "place": lambda: optimizer.step(closure), "engine": lambda: engine.step(closure)}[how]()
        assert calls == [1] and (how == "engine" or torch.is_tensor(answer)), how
        ends.append(model)
    assert same(ends[0], ends[1]) and same(ends[0], ends[2])


def test_a_closure_has_a_graph_also_where_nothing_else_has() -> None:
    """As torch's optimizers see to."""
    for optimizer in (plumb.SGD(lr=0.1), None, torch.optim.SGD):
        model = nn.Linear(3, 2)
        made = optimizer(model.parameters(), lr=0.1) if optimizer is torch.optim.SGD else optimizer  # type: ignore[operator]
        engine = plumb.Engine(model, made)
        with torch.no_grad():
            engine.step(lambda: model(torch.ones(1, 3)).sum().backward())
        assert model.weight.grad is not None and model.weight.grad.eq(1).all()


def test_hooks_that_come_late_see_what_the_user_knows_and_can_come_when_the_engine_has_gone() -> None:
    model, optimizer, engine = built()
    seen: list[list[int]] = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        seen.append([id(p) for p in optimizer.param_groups[0]["params"]])

    handles = [optimizer.register_step_pre_hook(look) for _ in range(2)]
    train(model, engine, 1)
    assert seen == [[id(p) for p in model.parameters()]] * 2
    for handle in handles:
        handle.remove()
    train(model, engine, 2)
    assert len(seen) == 2

    model, optimizer, engine = built()
    engine.close()  # before it has made anything of the optimizer's
    optimizer.register_step_pre_hook(look)
    model(torch.ones(1, 3).bfloat16()).sum().backward()
    optimizer.step()
    assert len(seen) == 3


@pytest.mark.parametrize("when", ["before the engine", "before a step", "after a step"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor])
def test_state_of_half_precision_parameters_becomes_their_masters(kind: Any, when: str) -> None:
    """Of one process without masters: made by the optimizer itself, or loaded."""
    torch.manual_seed(1)
    model = nn.Linear(3, 2).bfloat16()
    optimizer = kind(model.parameters(), lr=0.1)
    model(torch.ones(1, 3).bfloat16()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    saved = copy.deepcopy(optimizer.state_dict())
    if when != "before the engine":
        optimizer = kind(model.parameters(), lr=0.1)
    engine = plumb.Engine(model, optimizer, master_weights=True)
    train(model, engine, 1 if when == "after a step" else 0)
    if when != "before the engine":
        optimizer.load_state_dict(saved)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, engine, engine.steps + 1)
    state = optimizer.state_dict()["state"]  # by parameter, and in one place
    assert sorted(state) == [0, 1] and [float(one["step"]) for one in state.values()] == [2.0, 2.0] and len(optimizer.state) == 2
    of_elements = [value for one in state.values() for value in one.values() if torch.is_tensor(value) and value.dim() > 0]
    assert of_elements and (kind is not torch.optim.AdamW or all(value.dtype == torch.float32 for value in of_elements))
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Plain])
def test_what_was_loaded_and_not_yet_stepped_is_saved_and_may_be_loaded_over(kind: type[torch.optim.Optimizer], tmp_path: Path) -> None:
    model, optimizer, engine = built(kind)
    engine.save(tmp_path / "fresh")
    train(model, engine, 2)
    engine.save(tmp_path / "two")
    train(model, engine, 5)

    other, _, middle = built(kind)
    middle.load(tmp_path / "two")
    middle.save(tmp_path / "again")  # before a step of its own
    last, state, goes_on = built(kind)
    goes_on.load(tmp_path / "again")
    train(last, goes_on, 5)
    assert same(last, model) and kept(state) == kept(optimizer)

    anew, state, again = built(kind)
    again.load(tmp_path / "two")
    again.load(tmp_path / "fresh")
    train(anew, again, 5)
    assert same(anew, model) and kept(state) == kept(optimizer)


class Keeps(torch.optim.SGD):
    """Something of no parameter in particular, and a record of each."""

    def step(self, closure: Any = None) -> Any:
        state: dict[Any, Any] = self.state
        state["steps"] = state.get("steps", 0) + 1
        for p in self.param_groups[0]["params"]:
            seen = self.state[p].setdefault("seen", {"count": 0, "last": None})
            seen["count"] += 1
            seen["last"] = None if p.grad is None else p.grad.norm()
        return super().step(closure)


def test_what_an_optimizer_keeps_beside_and_in_records_is_what_was_saved(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    optimizer = Keeps(model.parameters(), lr=0.1)
    engine = plumb.Engine(model, optimizer)
    engine.save(tmp_path / "fresh")
    train_plain(model, engine, 2)
    engine.save(tmp_path / "two")
    last = optimizer.state[model.weight]["seen"]["last"].clone()
    train_plain(model, engine, 3)
    engine.load(tmp_path / "two")
    state: dict[Any, Any] = optimizer.state
    seen = state[model.weight]["seen"]
    assert state["steps"] == 2 and seen["count"] == 2 and torch.equal(seen["last"], last)
    engine.load(tmp_path / "fresh")
    assert not state, "nothing had been kept then"


def train_plain(model: nn.Module, engine: plumb.Engine, until: int) -> None:
    while engine.steps < until:
        model(torch.full((1, 3), float(engine.steps))).sum().backward()
        engine.step()
        engine.zero_grad()


def test_groups_have_the_members_that_were_saved(tmp_path: Path) -> None:
    """As many in each is not enough: their rates would be exchanged."""
    for names, fits in ((("weight", "bias"), True), (("bias", "weight"), False)):
        model = nn.Linear(3, 2)
        groups = [{"params": [model.get_parameter(name)], "lr": 0.1 * (i + 1)} for i, name in enumerate(names)]
        engine = plumb.Engine(model, torch.optim.SGD(groups, lr=0.1))
        if fits:
            engine.save(tmp_path)
            assert engine.load(tmp_path).mismatches == []
        else:
            with pytest.raises(plumb.Error, match="the first that differ are 'bias' here and 'weight' there"):
                engine.load(tmp_path)


# ---- between a load of the engine's and its first step


def cut(kind: type[torch.optim.Optimizer], strategy: str) -> tuple[nn.Module, Any, plumb.Engine]:
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    return model, optimizer, plumb.Engine(model, optimizer, strategy=strategy)


def walked(model: nn.Module, step: Any, times: int) -> nn.Module:
    for _ in range(times):
        model(torch.ones(2, 3)).square().sum().backward()
        step()
        for parameter in model.parameters():
            parameter.grad = None
    return model


def loads_before_a_step(kind: type[torch.optim.Optimizer], strategy: str, folder: str) -> None:
    model, optimizer, engine = cut(kind, strategy)
    walked(model, engine.step, 3)
    engine.save(folder)
    saved = optimizer.state_dict()
    before = kept(optimizer)
    engine.close()

    model, optimizer, engine = cut(kind, strategy)
    engine.load(folder)
    shown = copy.deepcopy(optimizer.state_dict())
    assert kept(optimizer) == before and shown[plumb.optim.MARK] == saved[plumb.optim.MARK], "what was loaded is shown"
    assert not optimizer.state, "and nothing is left of showing it"
    walked(model, engine.step, 1)
    fourth = kept(optimizer)
    optimizer.load_state_dict(shown)  # back to the third
    assert kept(optimizer) == before
    engine.load(folder)
    walked(model, engine.step, 1)
    assert kept(optimizer) == fourth
    for elsewhere in ({"rank": engine.world.rank, "size": 3}, {"rank": 1 - engine.world.rank, "size": 2}):
        with pytest.raises(plumb.Error, match=f"of rank {elsewhere['rank']} of {elsewhere['size']}, and this is rank {engine.world.rank} of 2"):
            optimizer.load_state_dict({**shown, plumb.optim.MARK: elsewhere})
    assert kept(optimizer) == fourth
    engine.close()

    alone = nn.Linear(3, 2)
    plain = kind(alone.parameters(), lr=0.1)  # type: ignore[call-arg]
    walked(alone, plain.step, 5)
    ends = []
    for load in (lambda: engine.load(folder), lambda: engine.load_weights(folder)):
        model, optimizer, engine = cut(kind, strategy)
        load()
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))  # of the two, the later one
        walked(model, engine.step, 1)
        ends.append([engine.full_parameter(p) for p in model.parameters()])
        assert all(float(one["step"]) == 6 for one in optimizer.state.values() if "step" in one)
        assert len(optimizer.state) <= 2, "state of what nobody steps"
        engine.close()
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def fails_to_load(kind: type[torch.optim.Optimizer], strategy: str) -> None:
    model, optimizer, engine = cut(kind, strategy)
    parameters = list(model.parameters())
    alone = nn.Linear(3, 2)
    for mine, own in zip(parameters, alone.parameters(), strict=True):
        own.data.copy_(engine.full_parameter(mine))
    walked(alone, kind(alone.parameters(), lr=0.1).step, 3)  # type: ignore[call-arg]
    walked(model, engine.step, 2)
    good = copy.deepcopy(optimizer.state_dict())

    def refuses(*_: Any) -> None:
        raise ValueError("on purpose")

    for call in (
        lambda: optimizer.load_state_dict({**good, "param_groups": 2 * good["param_groups"]}),
        lambda: optimizer.load_state_dict({**good, "param_groups": [{**good["param_groups"][0], "params": [0]}]}),
        optimizer.state_dict,
        lambda: optimizer.load_state_dict(good),
    ):
        handles = [optimizer.register_state_dict_post_hook(refuses, prepend=True), optimizer.register_load_state_dict_post_hook(refuses, prepend=True)]
        model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(ValueError):
            call()
        assert all(one is mine for one, mine in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in parameters)
        for handle in handles:
            handle.remove()
    optimizer.load_state_dict(good)
    walked(model, engine.step, 1)
    for mine, own in zip(parameters, alone.parameters(), strict=True):
        torch.testing.assert_close(engine.full_parameter(mine), own.detach())
    engine.close()
    assert not {"step", "state_dict", "load_state_dict"} & vars(optimizer).keys()


class Unknown(torch.optim.AdamW):
    """Steps whole parameters, each on its owner."""


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, Unknown])
def test_what_was_loaded_and_not_yet_stepped_is_shown_and_what_is_loaded_later_counts(kind: type[torch.optim.Optimizer], strategy: str, tmp_path: Path) -> None:
    plumb.spawn(loads_before_a_step, 2, (kind, strategy, str(tmp_path)), method="thread")


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Unknown])
def test_an_optimizer_whose_state_was_not_loaded_or_saved_has_its_parameters_as_ever(kind: type[torch.optim.Optimizer]) -> None:
    plumb.spawn(fails_to_load, 2, (kind, "zero2"), method="thread")
