"""Optimizers that are not known to be elementwise: each rank steps the parameters it owns, whole."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch

import plumb
import programs
from stage import Block, Play, distance, groups_of, make, reference, step_twin, trained


def only_matrices(model: torch.nn.Module) -> list[torch.Tensor]:
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 2)
    return [parameter for parameter in model.parameters() if parameter.dim() == 2]


def transformers_adafactor(parameters: Any) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=1e-2, relative_step=False, scale_parameter=True, beta1=0.9)


class Normed(torch.optim.SGD):
    """Nobody can tell from outside that it looks at a whole gradient: derived from one that does not."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    assert p.dim() > 0 and p.grad.shape == p.shape
                    p.grad.div_(p.grad.norm() + 1e-3)
        return super().step(closure)


WHOLE: dict[str, Any] = {
    "Adafactor": lambda model: torch.optim.Adafactor(groups_of(model), lr=1e-2),
    "Muon": lambda model: torch.optim.Muon(only_matrices(model), lr=1e-2),
    "transformers' Adafactor": lambda model: transformers_adafactor(model.parameters()),
    "somebody's": lambda model: Normed(model.parameters(), lr=1e-2, momentum=0.9),
}


def whole_parameters(strategy: str) -> dict[str, tuple[float, float, int]]:
    """By optimizer: how far from one process, how far from the start, and how many of the state's tensors are here."""
    result = {}
    for name, build in WHOLE.items():
        model, twin, fresh = make(), make(), make()
        optimizer, other = build(model), build(twin)
        engine = plumb.Engine(model, optimizer, strategy=strategy, units=[Block], bucket_bytes=4096)
        for number in range(3):
            Play(model, engine.world.rank, engine.world.size, 1.0).loss(number).backward()
            engine.step()
            engine.zero_grad()
            step_twin(twin, other, engine.world.size, number)
        result[name] = distance(engine, model, twin), distance(engine, model, fresh), len(optimizer.state)
        engine.close()
    return result


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), ("zero1", 2), ("zero2", 4), ("zero3", 2), ("zero3", 4), ("hsdp", 4)])
def test_an_optimizer_that_is_not_known_to_be_elementwise_steps_whole_parameters(strategy: str, ranks: int) -> None:
    pytest.importorskip("transformers.optimization")  # once, before ranks are forked
    results = plumb.spawn(whole_parameters, ranks, (strategy,))
    for by_name in results:
        assert {name: far for name, (far, _, _) in by_name.items() if far > 1e-9} == {}
        assert all(moved > 1e-4 for _, moved, _ in by_name.values())
    stepped = len([p for p in make().parameters() if p.dim() > 0]) - 2  # nobody uses `spare`
    for name in WHOLE:  # each parameter's state is on one rank of each replica
        here = [by_name[name][2] for by_name in results]
        expected = len(only_matrices(make())) - 1 if name == "Muon" else stepped
        copies = {"ddp": ranks, "hsdp": 2}.get(strategy, 1)
        assert sum(here) == copies * expected, (name, here)


def corpus_by_whole_parameters(strategy: str, tied: bool) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, program in vars(programs).items():
        if not inspect.isgeneratorfunction(program):
            continue
        model, twin = make(tied=tied), make(tied=tied)
        if name == "unfreeze_after_wrapping":
            programs.freeze(model)
            programs.freeze(twin)
        optimizer = Normed(model.parameters(), lr=0.05, momentum=0.9)
        with plumb.Engine(model, optimizer, strategy=strategy, units=[Block], bucket_bytes=2048) as engine:
            trained(model, program, engine)
            reference(twin, program, engine.world.size, Normed(twin.parameters(), lr=0.05, momentum=0.9))
            result[name] = distance(engine, model, twin)
    return result


@pytest.mark.parametrize(("strategy", "tied"), [("zero2", True), ("zero3", False)])
@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_every_pattern_steps_whole_parameters_as_one_process_would(strategy: str, tied: bool) -> None:
    for by_name in plumb.spawn(corpus_by_whole_parameters, 2, (strategy, tied)):
        assert len(by_name) > 20
        assert {name: far for name, far in by_name.items() if not far < 1e-9} == {}


def saves_whole(strategy: str) -> tuple[float, str]:
    """A rank's state is loaded by that rank; state of one process is given to the owners."""
    model, twin = make(), make()
    optimizer, other = (torch.optim.Adafactor(one.parameters(), lr=1e-2) for one in (model, twin))
    for number in range(2):
        step_twin(twin, other, 2, number)
        step_twin(model, optimizer, 2, number)
    engine = plumb.Engine(model, optimizer, strategy=strategy, units=[Block])
    for number in range(2, 5):
        Play(model, engine.world.rank, 2, 1.0).loss(number).backward()
        engine.step()
        engine.zero_grad()
        step_twin(twin, other, 2, number)
        if number == 2:
            saved = copy.deepcopy(optimizer.state_dict())
        if number == 3:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    saved["plumb"]["rank"] = 1 - engine.world.rank
    said = ""
    try:
        optimizer.load_state_dict(saved)
    except plumb.Error as error:
        said = str(error)
    return distance(engine, model, twin), said


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_state_of_whole_parameters_is_saved_and_loaded(strategy: str) -> None:
    for far, said in plumb.spawn(saves_whole, 2, (strategy,)):
        assert far < 1e-9
        assert "each rank loads what it saved" in said
