"""What ranks compare of their optimizers: whatever would make them step differently, and nothing else; and who is told of a step."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import plumb
from plumb.optim.compared import settings
from plumb.optim.hooks import StandIn, closure_of

Optimizer = torch.optim.Optimizer


class Derived(torch.optim.AdamW):
    pass


def built(kind: type[torch.optim.AdamW] = torch.optim.AdamW, **how: Any) -> Optimizer:
    shapes = ((2, 3), (3,), (3, 2), (2,))
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    return kind([{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.5}], **{"lr": 0.1, **how})  # type: ignore[arg-type]


def changed(how: Callable[[list[dict[str, Any]]], Any]) -> Optimizer:
    made = built()
    settings(made)  # the second time counts, too
    how(made.param_groups)
    return made


def swapped(groups: list[dict[str, Any]]) -> None:
    groups[0]["params"], groups[1]["params"] = groups[1]["params"], groups[0]["params"]


OTHERS: dict[str, Callable[[], Optimizer]] = {
    "a class": lambda: built(Derived),
    "a rate": lambda: changed(lambda groups: groups[1].update(lr=0.2)),
    "a rate that is a tensor": lambda: changed(lambda groups: groups[1].update(lr=torch.tensor(0.2))),
    "the first of a tuple": lambda: changed(lambda groups: groups[0].update(betas=(0.8, 0.999))),
    "the last of a tuple": lambda: changed(lambda groups: groups[0].update(betas=(0.9, 0.99))),
    "one of a list": lambda: changed(lambda groups: groups[0].update(betas=[0.9, 0.99])),
    "a flag": lambda: changed(lambda groups: groups[0].update(amsgrad=True)),
    "a number that came": lambda: changed(lambda groups: groups[0].update(more=1)),
    "a word that came": lambda: changed(lambda groups: groups[0].update(more="x")),
    "a number that went": lambda: changed(lambda groups: groups[0].pop("eps")),
    "a parameter that moved": lambda: changed(lambda groups: groups[0]["params"].append(groups[1]["params"].pop())),
    "the order of parameters": lambda: changed(lambda groups: groups[0]["params"].reverse()),
    "the order of groups": lambda: changed(swapped),
    "a group that came": lambda: changed(lambda groups: groups.append({**groups[0], "params": []})),
    "a shape": lambda: changed(lambda groups: groups[0]["params"].__setitem__(0, nn.Parameter(torch.zeros(6)))),
}


@pytest.mark.parametrize("what", OTHERS)
def test_whatever_ranks_would_step_by_is_compared(what: str) -> None:
    assert settings(OTHERS[what]()) != settings(built()), what
    assert settings(built(), 1) != settings(built())


def test_what_ranks_may_have_of_their_own_is_not() -> None:
    alike = [
        built(),
        built(lr=torch.tensor(0.1, dtype=torch.float64)),
        changed(lambda groups: groups[0].update(betas=[0.9, 0.999])),
        changed(lambda groups: groups[0].update(zip(reversed(groups[0].keys()), reversed(groups[0].values()), strict=True))),
        changed(lambda groups: groups[0]["params"].__setitem__(0, nn.Parameter(torch.ones(2, 3).double()))),
    ]
    expected = settings(alike[0])
    for one in alike:
        assert settings(one) == expected
    words, others = (changed(lambda groups, n=n: groups[0].update(a=f"word {n}", b=None, c=1j * n, d=torch.ones(2) * n)) for n in (1, 2))
    assert settings(words) == settings(others)
    assert all(isinstance(name, str) and isinstance(value, float) and math.isfinite(value) for name, value in expected)
    assert [value for name, value in expected if name == "lr of the optimizer's group 1"] == [0.1]


def linear() -> nn.Linear:
    """The same everywhere: ranks that are threads share torch's generator."""
    model = nn.Linear(2, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-0.5, 0.75, p.numel()).view_as(p))
    return model


def moves_a_parameter() -> list[str]:
    """Between two steps, on one rank."""
    model = nn.Sequential(linear(), linear())
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[1].parameters()}], lr=0.1)
    said = []
    with plumb.Engine(model, optimizer) as engine:
        for i in range(2):
            model(torch.ones(1, 2)).sum().backward()
            if i == 1 and engine.world.rank == 1:
                optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop())
            try:
                engine.step()
                said.append("")
            except plumb.Error as error:
                said.append(str(error))
            engine.zero_grad()
    return said


def test_a_group_that_changed_since_the_last_step_is_compared_as_it_is_now() -> None:
    for said in plumb.spawn(moves_a_parameter, 2, method="thread"):
        assert said[0] == "" and "the optimizer's class, groups and parameters (as a digest)" in said[1], said


# ---- the stand-in, and closures


def test_what_a_step_notes_of_itself_is_the_users() -> None:
    optimizer: Any = built()
    optimizer.kept, optimizer.count, state = [], 1, optimizer.state
    groups = [list(group["params"]) for group in optimizer.param_groups]
    stand_in = StandIn(optimizer)
    pieces = [[torch.zeros(9)], [torch.zeros(8)]]
    stand_in.begin(pieces, {"other": 1})
    inside: Any = stand_in.object
    assert inside.state == {"other": 1} and [group["params"] for group in inside.param_groups] == pieces
    assert [group["lr"] for group in inside.param_groups] == [0.1, 0.1] and inside.kept is optimizer.kept
    inside.count, inside.late = 2, "new"
    assert optimizer.count == 1
    stand_in.end()
    assert (optimizer.count, optimizer.late) == (2, "new") and optimizer.state is state
    assert all(a is b for group, own in zip(optimizer.param_groups, groups, strict=True) for a, b in zip(group["params"], own, strict=True))
    optimizer.later = 3
    assert inside.later == 3 and inside.param_groups is optimizer.param_groups, "before and after it is the optimizer"
    stand_in.end()
    assert optimizer.later == 3


def test_a_closure_is_found_where_it_is_given() -> None:
    def closure() -> None: ...

    optimizer = built()
    assert closure_of((optimizer,), {}) == (None, (optimizer,), {})
    assert closure_of((optimizer, closure), {"more": 1}) == (closure, (optimizer,), {"more": 1})
    assert closure_of((optimizer, closure, 2), {}) == (closure, (optimizer, 2), {})
    assert closure_of((optimizer,), {"closure": closure, "more": 1}) == (closure, (optimizer,), {"more": 1})
    assert closure_of((optimizer, None), {"closure": None})[0] is None


@pytest.mark.parametrize("name", ["LBFGS", "Prodigy", "ProdigyPlus", "DAdaptAdam", "DAdaptLion"])
def test_optimizers_that_look_at_all_parameters_are_known_by_name(name: str) -> None:
    model = nn.Linear(2, 2)
    kind = type(name, (torch.optim.SGD,), {}) if name != "LBFGS" else torch.optim.LBFGS
    derived = type("Mine", (kind,), {})
    for one in (kind, derived):
        with pytest.raises(plumb.Error, match="looks at all parameters together, and strategy 'zero1'"):
            plumb.optim.check(one(model.parameters(), lr=0.1), list(model.named_parameters()), True, "zero1", one_by_one=True)
        plumb.optim.check(one(model.parameters(), lr=0.1), list(model.named_parameters()), False, "zero1")


# ---- steps that threw


class Throws(torch.optim.SGD):
    """Where it is told: before its update, or after."""

    when = ""

    def step(self, closure: Any = None) -> Any:
        answer = super().step(closure) if self.when != "before" else None
        if self.when:
            raise ArithmeticError
        return answer


def left_by_its_exception(strategy: str, masters: bool) -> list[list[float]]:
    """The optimizer's own step threw, and nobody told the engine: what comes next begins anew."""
    ends = []
    for then in ("a step", "a closure", "a save"):
        model = linear().bfloat16() if masters else linear()
        optimizer = Throws(model.parameters(), lr=0.1)
        own = [id(p) for p in model.parameters()]
        with plumb.Engine(model, optimizer, strategy=strategy, master_weights=masters) as engine:
            for when in ("before", "after", ""):
                optimizer.when = when
                x = torch.ones(1, 2, dtype=model.weight.dtype)

                def closure() -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = model(x).float().pow(2).sum()
                    loss.backward()
                    return loss

                closure()
                try:
                    optimizer.step(closure) if then == "a closure" else optimizer.step()
                except ArithmeticError:
                    pass
                if then == "a save":
                    plumb.optim.check_outside(engine._steps, "it")
                optimizer.zero_grad()
            assert [id(p) for group in optimizer.param_groups for p in group["params"]] == own
            ends.append(torch.cat([engine.full_parameter(p).float().flatten() for p in model.parameters()]).tolist())
    return ends


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
@pytest.mark.parametrize("masters", [False, True])
def test_a_step_that_threw_out_of_the_optimizer_itself_has_ended_when_the_next_begins(strategy: str, masters: bool) -> None:
    for ends in plumb.spawn(left_by_its_exception, 2, (strategy, masters), method="thread"):
        assert ends[0] == ends[1] == ends[2]


def interrupted_before(strategy: str, where: str) -> list[float]:
    """On one rank, before its step has begun: it takes that step at its second call."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with plumb.Engine(model, optimizer, strategy=strategy) as engine:
        pending = [engine.world.rank == 1]

        def throws(*_: Any) -> None:
            if pending.pop():
                pending.append(False)
                raise ArithmeticError
            pending.append(False)

        if where == "a hook":
            optimizer.register_step_pre_hook(throws)
        for _ in range(2):
            model(torch.ones(1, 2)).pow(2).sum().backward()
            for _ in range(2):
                try:
                    engine.step(throws if where == "a closure" else None)
                    break
                except ArithmeticError:
                    assert engine.world.rank == 1
            engine.zero_grad()
        return torch.cat([engine.full_parameter(p).flatten() for p in model.parameters()]).tolist()


@pytest.mark.parametrize(("strategy", "where"), [("zero2", "a hook"), ("zero2", "a closure"), ("ddp", "a closure")])
def test_what_threw_before_a_step_began_has_left_none(strategy: str, where: str) -> None:
    twin = linear()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(2):
        twin.zero_grad()
        twin(torch.ones(1, 2)).pow(2).sum().backward()
        optimizer.step()
    for found in plumb.spawn(interrupted_before, 2, (strategy, where), method="thread"):
        assert found == pytest.approx(torch.cat([p.detach().flatten() for p in twin.parameters()]).tolist())


@pytest.mark.parametrize("first", ["engine", "scheduler"])
def test_schedulers_and_copies_find_the_optimizer_they_know(first: str) -> None:
    model = nn.Linear(2, 2).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def scheduled() -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    schedulers = [scheduled()] if first == "scheduler" else []
    engine = plumb.Engine(model, optimizer, master_weights=True)
    schedulers += [scheduled()]
    for i in range(3):
        model(torch.ones(1, 2).bfloat16()).float().sum().backward()
        optimizer.step()
        assert engine.steps == i + 1
        for one in schedulers:
            one.step()
    assert optimizer.param_groups[0]["lr"] == 0.5 ** (3 * len(schedulers))
    twin = copy.deepcopy(optimizer)
    assert "step" not in vars(twin) and pickle.loads(pickle.dumps(optimizer)).param_groups[0]["lr"] == twin.param_groups[0]["lr"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduled()  # is known to come after a step
    engine.close()
    parameter = nn.Parameter(torch.ones(2).bfloat16())
    alone = torch.optim.SGD([parameter], lr=1.0)
    plumb.Engine([("p", parameter)], alone, master_weights=True).close()
    assert "step" not in vars(alone), "nothing is left"
