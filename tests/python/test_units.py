"""Which modules are units, and which parameters are theirs: by every kind of choice, against a plain re-computation."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch
from torch import nn

import plumb
from plumb.units import choose, own_parameters


def drawn(seed: int) -> nn.Module:
    """A tree of modules, each with some parameters of its own."""
    draw = random.Random(seed)

    def make(depth: int) -> nn.Module:
        module = nn.Module()
        for i in range(draw.randrange(3)):
            module.register_parameter(f"p{i}", nn.Parameter(torch.zeros(draw.randrange(1, 6))))
        for i in range(draw.randrange(3) if depth else 0):
            module.add_module(f"m{i}", make(depth - 1))
        return module

    return make(3)


def by_size(module: nn.Module, size: int) -> list[str]:
    """The names of units, from the definition: as many parameters as ``size`` that are of no unit inside."""
    found: list[str] = []
    for name, one in sorted(module.named_modules(), key=lambda pair: -pair[0].count(".") - (1 if pair[0] else 0)):
        inside = [other for other in found if other.startswith(f"{name}." if name else "")]
        own = [p for inner, p in one.named_parameters() if not any(f"{name}.{inner}".lstrip(".").startswith(f"{unit}.") for unit in inside)]
        if sum(p.numel() for p in own) >= size:
            found.append(name)
    return found


def test_a_number_makes_units_of_that_many_parameters_from_the_inside() -> None:
    for seed in range(40):
        root = drawn(seed)
        names = {id(module): name for name, module in root.named_modules()}
        for size in range(1, 2 + sum(p.numel() for p in root.parameters())):
            found = sorted(names[id(one)] for one in choose(root, size))
            assert found == sorted(by_size(root, size)), (seed, size)


@pytest.mark.parametrize("wanted", [True, False, 0, -1, "m0", nn.Linear, nn.Linear(1, 1)], ids=repr)
def test_what_is_no_choice_is_refused(wanted: Any) -> None:
    with pytest.raises(plumb.Error, match="units="):
        choose(drawn(1), wanted)


def test_every_parameter_is_the_innermost_units_or_stays_whole_where_it_is_used_outside() -> None:
    for seed in range(40):
        root = drawn(seed)
        draw = random.Random(seed)
        modules = [module for _, module in root.named_modules()]
        units = [module for module in modules if draw.random() < 0.4]
        everything = [(module, name) for module in modules for name in module._parameters]
        for _ in range(2 if len(everything) > 1 else 0):  # ties
            (one, name), (other, another) = draw.sample(everything, 2)
            other._parameters[another] = one._parameters[name]
        chosen = {id(unit) for unit in units}
        users: dict[int, set[int | None]] = {}

        def walk(module: nn.Module, around: int | None, chosen: set[int] = chosen, users: dict[int, set[int | None]] = users) -> None:
            around = id(module) if id(module) in chosen else around
            for parameter in module.parameters(recurse=False):
                users.setdefault(id(parameter), set()).add(around)
            for child in module.children():
                walk(child, around)

        walk(root, None)
        expected = {(unit, key) for key, by in users.items() if None not in by for unit in by}
        found = [(id(unit), id(parameter)) for unit, parameters in own_parameters(root, units) for parameter in parameters]
        assert sorted(found) == sorted(expected), seed  # type: ignore[type-var]


def fails_inside(strategy: str) -> list[Any]:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.fails:
                raise ValueError("planned")
            made: torch.Tensor = self.inner(x)
            return made

    torch.manual_seed(1)
    model = nn.Sequential(Fails(), Fails())
    hooks = [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]
    said: list[Any] = []
    with plumb.Engine(model, plumb.SGD(lr=0.1), strategy=strategy, units=[Fails]) as engine:
        for fails in (True, False):
            model[1].fails = fails
            try:
                model(torch.ones(2, 3)).sum().backward()
                engine.step()
            except ValueError as error:
                said.append(str(error))
                said.append(engine._engine.gathered_bytes)
        said.append(float(sum(engine.full_parameter(p).sum() for p in model.parameters())))
    assert hooks == [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()], "a closed engine leaves none"
    return said


def test_a_unit_is_closed_also_where_its_forward_failed() -> None:
    (one,) = plumb.spawn(fails_inside, 1, ("ddp",))
    for found in plumb.spawn(fails_inside, 2, ("zero3",)):
        assert found[:2] == ["planned", 0] and found[2] == pytest.approx(one[2], abs=1e-5)


class Wider(nn.Linear):
    """Of a class derived from one that may be named."""


def copied_and_derived() -> list[Any]:
    model = nn.Sequential(Wider(4, 4), nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2)))
    plumb.unit(model[2])
    seen: list[tuple[int, ...]] = []
    model[0].register_forward_pre_hook(lambda module, args: seen.append(tuple(module.weight.detach().sum(1).shape)))
    with plumb.Engine(model, plumb.SGD(lr=0.1), strategy="zero3", units=[nn.Linear]) as engine:
        model(torch.ones(1, 4)).sum().backward()
        units = choose(model, [nn.Linear]), choose(model, ["0"]), choose(model, lambda name, _: name == "1")
        model[0]._forward_pre_hooks.popitem()  # which no pickle holds
        with engine.gathered(model):
            twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
            expected = model(torch.ones(1, 4))
        for twin in twins:
            assert torch.equal(twin(torch.ones(1, 4)), expected)
            twin(torch.ones(1, 4)).sum().backward()
        assert engine.gathered_bytes == 0
        numbers = {id(module): name for name, module in model.named_modules()}
        return [seen, *([numbers[id(one)] for one in chosen] for chosen in units)]


def test_units_of_derived_classes_marked_ones_and_what_a_copy_is() -> None:
    for seen, classes, names, predicate in plumb.spawn(copied_and_derived, 2):
        assert seen == [(4,)], "a hook of the user's before a forward finds whole parameters"
        assert classes == ["0", "1", "2", "2.0"] and names == ["0", "2"] and predicate == ["1", "2"], "marked ones are units in any case"


@pytest.mark.parametrize("choice", ["generator", "names of a dict", "set"])
def test_units_may_be_anything_that_is_gone_through_once(choice: str) -> None:
    for meta in (False, True):  # of the meta device, units are asked for before parameters have values, too
        for number in plumb.spawn(cut_units, 2, (choice, meta)):
            assert number == [True, True], "not gathered one by one"


def cut_units(choice: str, meta: bool) -> list[bool]:
    with torch.device("meta" if meta else "cpu"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    chosen: Any = {"generator": (m for m in model), "names of a dict": {"0": 1, "1": 2}.keys(), "set": set(model)}[choice]
    seen: list[bool] = []
    with plumb.Engine(model, plumb.SGD(lr=0.1), strategy="zero3", units=chosen) as engine, torch.no_grad():
        for module in model:
            module.register_forward_pre_hook(lambda *_: seen.append(engine.gathered_bytes > 0))
        model(torch.ones(1, 4))
    return seen


def names(model: nn.Module, wanted: Any) -> list[str]:
    known = {id(module): name for name, module in model.named_modules()}
    return [known[id(one)] for one in choose(model, wanted)]


def test_names_are_those_of_the_model_that_was_written_and_the_outer_comes_before_the_inner() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    model[0] = torch.compile(model[0])
    for wanted in (["0.0"], ["0._orig_mod.0"], lambda name, _: name == "0.0"):
        assert names(model, wanted) == ["0._orig_mod.0"]
    plain = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    for wanted in (["1", "0.0", "0", ""], lambda *_: True, [nn.Module], [plain[1], plain[0][0], plain[0], plain]):  # type: ignore[index]
        assert names(plain, wanted) == ["", "0", "0.0", "1"]
