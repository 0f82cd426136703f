"""Optimizers that are not known to be elementwise: each rank steps the parameters it owns, whole."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

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


class Turned(nn.Module):
    """Parameters whose elements lie in other orders than their shapes say, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(4)
        self.plain = nn.Parameter(torch.randn(5, 4, generator=draw).double())
        self.turned = nn.Parameter(torch.randn(4, 6, generator=draw).double().t())
        self.last = nn.Parameter(torch.randn(2, 3, 4, 4, generator=draw).double().to(memory_format=torch.channels_last))
        self.empty = nn.Parameter(torch.zeros(0).double())

    def loss(self, rank: int, number: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(100 * rank + number)
        return sum((p * torch.randn(p.shape, generator=draw).double()).sum() for p in self.parameters())  # type: ignore[return-value]


class Rows(torch.optim.Optimizer):
    """Nobody knows it: it steps each row by the row's norm, and keeps something of all elements, of each row, and of the whole."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            if not self.state[p]:
                self.state[p].update(mean=torch.zeros_like(p), lengths=torch.zeros(p.shape[0]).double(), step=0)
            state = self.state[p]
            state["step"] += 1
            state["mean"].mul_(0.9).add_(p.grad)
            rows = state["mean"].reshape(p.shape[0], p[:1].numel() or 1)
            state["lengths"].add_(rows.norm(dim=1))
            p.sub_((rows / (1 + state["lengths"])[:, None]).view(p.shape), alpha=self.param_groups[0]["lr"] / state["step"])


def turned(strategy: str, kind: str, folder: str) -> list[float]:
    """Goes on with state from before the engine; is saved; goes on in another engine: how far from one process at each of these ends."""

    def build() -> tuple[Turned, Any]:
        model = Turned()
        return model, Rows(model.parameters()) if kind == "Rows" else torch.optim.AdamW(model.parameters(), lr=0.1)

    (model, optimizer), (twin, other) = build(), build()
    rank, size = plumb.world().rank, plumb.world().size

    def alone(model: Turned, optimizer: Any, number: int) -> None:
        for r in range(size):
            (model.loss(r, number) / size).backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(2):
        alone(model, optimizer, number)
        alone(twin, other, number)
    engine = plumb.Engine(model, optimizer, strategy=strategy)
    far = []
    for number in range(2, 6):
        if number == 4:
            path = engine.save(folder)
            engine.close()
            model, optimizer = build()
            engine = plumb.Engine(model, optimizer, strategy=strategy)
            engine.load(path)
        model.loss(rank, number).backward()
        engine.step()
        engine.zero_grad()
        alone(twin, other, number)
        far.append(distance(engine, model, twin))
    return far


@pytest.mark.parametrize("kind", ["Rows", "AdamW"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_parameters_in_other_orders_and_without_elements_are_stepped_saved_and_loaded(strategy: str, kind: str, tmp_path: Path) -> None:
    for far in plumb.spawn(turned, 2, (strategy, kind, str(tmp_path))):
        assert max(far) < 1e-9, far


def loads_ones_state(strategy: str, kind: str) -> tuple[list[float], list[str]]:
    """State of one process, loaded before the engine's first step and after it; then what one rank alone had."""
    model, twin = Turned(), Turned()
    optimizer, other = (Rows(one.parameters()) if kind == "Rows" else torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, twin))
    rank, size = plumb.world().rank, plumb.world().size
    engine = plumb.Engine(model, optimizer, strategy=strategy)
    far, said = [], []
    for number in range(4):
        for r in range(size):
            (twin.loss(r, number) / size).backward()
        other.step()
        other.zero_grad()
        if number in (0, 2):
            with engine.gathered(model, write=True), torch.no_grad():
                for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
                    mine.copy_(its)
            state = copy.deepcopy(other.state_dict())
            for of_one in state["state"].values():
                for key in of_one.keys() & {"mean", "exp_avg", "lengths"}:
                    of_one[key].mul_(0.5)  # another than the engine's own
            other.load_state_dict(copy.deepcopy(state))
            optimizer.load_state_dict(state)
            continue
        model.loss(rank, number).backward()
        engine.step()
        engine.zero_grad()
        far.append(distance(engine, model, twin))
    pieces = copy.deepcopy(optimizer.state_dict())
    pieces["plumb"]["size"] += 1
    fresh = Turned()
    again = Rows(fresh.parameters()) if kind == "Rows" else torch.optim.AdamW(fresh.parameters(), lr=0.1)
    plumb.Engine(fresh, again, strategy=strategy)
    for one, loaded in ((optimizer, pieces), (again, optimizer.state_dict())):
        try:
            one.load_state_dict(loaded)
        except plumb.Error as error:
            said.append(str(error))
    return far, said


@pytest.mark.parametrize("kind", ["Rows", "AdamW"])
def test_state_of_one_process_is_loaded_at_any_time_and_that_of_a_rank_where_it_was(kind: str) -> None:
    for rank, (far, said) in enumerate(plumb.spawn(loads_ones_state, 2, ("zero1", kind))):
        assert max(far) < 1e-9, far
        assert f"is of rank {rank} of 3, and this is rank {rank} of 2: each rank loads what it saved" in said[0]
        assert "loaded before the engine's first step" in said[1]


HALF = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True, weight_decay=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
}


def half_steps(strategy: str, name: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    named = [(f"p{n}", nn.Parameter(torch.randn(n, generator=generator).bfloat16())) for n in (91, 5, 77)]
    size, rank = plumb.world().size, plumb.world().rank
    engine = plumb.Engine(named, HALF[name]([p for _, p in named]), strategy=strategy, deterministic=True, virtual_ranks=2)
    for _ in range(9):
        shares = [[torch.randn(p.shape, generator=generator).bfloat16() for _, p in named] for _ in range(2)]
        for share in shares if size == 1 else shares[rank : rank + 1]:
            loss = sum((p * each).sum() for (_, p), each in zip(named, share, strict=True))
            engine.backward(loss * engine.share_weight())
        engine.step()
        engine.zero_grad()
    return [engine.full_parameter(p) for _, p in named]


@pytest.mark.parametrize("name", HALF)
def test_half_precision_without_masters_has_the_same_bits_wherever_state_is_cut(name: str) -> None:
    (alone,) = plumb.spawn(half_steps, 1, ("ddp", name))
    for strategy in ("zero1", "zero2"):
        for found in plumb.spawn(half_steps, 2, (strategy, name)):
            for one, other in zip(alone, found, strict=True):
                assert torch.equal(one, other), f"{strategy}: {(one - other).abs().max()} off"
