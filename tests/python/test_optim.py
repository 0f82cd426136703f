"""The user's own torch.optim object: his in every respect, and right over pieces."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import plumb
from stage import Block, Play, distance, groups_of, make, step_twin

SHARDED = ["zero1", "zero2", "zero3", "hsdp"]
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "AdamW amsgrad": lambda groups: torch.optim.AdamW(groups, lr=1e-2, amsgrad=True, foreach=False),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=1e-2),
    "SGD momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-2, momentum=0.5),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "Adadelta": lambda groups: torch.optim.Adadelta(groups, lr=0.5),
    "Adamax": lambda groups: torch.optim.Adamax(groups, lr=1e-2),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
    "RAdam": lambda groups: torch.optim.RAdam(groups, lr=1e-2),
    "Rprop": lambda groups: torch.optim.Rprop(groups, lr=1e-2),
    "ASGD": lambda groups: torch.optim.ASGD(groups, lr=1e-2),
}


def numbers_in(optimizer: torch.optim.Optimizer) -> int:
    states = optimizer.state_dict()["state"].values()
    return sum(v.numel() for state in states for v in state.values() if torch.is_tensor(v) and v.dim() > 0)


def train(strategy: str, name: str, who_steps: str) -> tuple[float, float, bool]:
    model, twin = make(), make()
    optimizer, other = OPTIMIZERS[name](groups_of(model)), OPTIMIZERS[name](groups_of(twin))
    kept = [list(group["params"]) for group in optimizer.param_groups]
    engine = plumb.Engine(model, optimizer, strategy=strategy, units=[Block], bucket_bytes=4096)
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda t: 1 / (1 + t)) for one in (optimizer, other)]
    for number in range(4):
        Play(model, engine.world.rank, engine.world.size, 1.0).loss(number).backward()
        if who_steps == "engine":
            engine.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
        step_twin(twin, other, engine.world.size, number)
        for schedule in schedules:
            schedule.step()
    same = all(
        mine is his for group, before in zip(optimizer.param_groups, kept, strict=True)
        for mine, his in zip(group["params"], before, strict=True)
    )  # fmt: skip
    part = numbers_in(optimizer) / max(1, numbers_in(other))
    return distance(engine, model, twin), part, same and engine.optimizer is optimizer


def train_all(strategy: str, who_steps: str) -> dict[str, tuple[float, float, bool]]:
    return {name: train(strategy, name, who_steps) for name in OPTIMIZERS}


@pytest.mark.parametrize("who_steps", ["engine", "optimizer"])
@pytest.mark.parametrize("strategy", ["ddp", *SHARDED])
def test_every_elementwise_optimizer_steps_as_in_one_process(strategy: str, who_steps: str) -> None:
    results = plumb.spawn(train_all, 2, (strategy, who_steps))
    for by_name in results:
        assert {name: far for name, (far, _, _) in by_name.items() if far > 1e-9} == {}
        assert all(same for _, _, same in by_name.values())
    whole = 2.0 if strategy == "ddp" or (strategy == "hsdp") else 1.0
    for name in OPTIMIZERS:  # each rank has its part of the state, and no more
        parts = sum(by_name[name][1] for by_name in results)
        assert parts == pytest.approx(whole, abs=0.02) or strategy == "hsdp", (name, parts)


def saves_and_loads(strategy: str) -> float:
    """Two steps, saved, two more; then a new engine loads and takes the same two: the same parameters."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = plumb.Engine(model, optimizer, strategy=strategy, units=[Block])
    rank, size = engine.world.rank, engine.world.size

    def steps(numbers: range) -> None:
        for number in numbers:
            Play(model, rank, size, 1.0).loss(number).backward()
            engine.step()
            engine.zero_grad()

    steps(range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    weights = [engine.full_parameter(p) for p in model.parameters()]
    steps(range(2, 4))
    after = [engine.full_parameter(p) for p in model.parameters()]
    with engine.gathered(model, write=True), torch.no_grad():
        for parameter, value in zip(model.parameters(), weights, strict=True):
            parameter.copy_(value)
    optimizer.load_state_dict(saved)
    steps(range(2, 4))
    again = [engine.full_parameter(p) for p in model.parameters()]
    return max(float((a - b).abs().max()) for a, b in zip(after, again, strict=True))


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_state_that_was_saved_is_loaded(strategy: str) -> None:
    assert max(plumb.spawn(saves_and_loads, 2, (strategy,))) < 1e-12


def goes_on_from_one_process(strategy: str) -> float:
    """State of whole parameters, from before there was an engine, is cut: training goes on where one process was."""
    model, twin = make(), make()
    optimizer, other = (torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, twin))
    for number in range(2):
        step_twin(twin, other, 2, number)
        step_twin(model, optimizer, 2, number)
    engine = plumb.Engine(model, optimizer, strategy=strategy, units=[Block])
    for number in range(2, 4):
        Play(model, engine.world.rank, 2, 1.0).loss(number).backward()
        engine.step()
        engine.zero_grad()
        step_twin(twin, other, 2, number)
    return distance(engine, model, twin)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_goes_on_with_state_from_before_the_engine(strategy: str) -> None:
    assert max(plumb.spawn(goes_on_from_one_process, 2, (strategy,))) < 1e-10


class Mine(torch.optim.Optimizer):
    """An optimizer nobody knows: plain descent."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])


def refusals() -> list[str]:
    said = []
    for build in (lambda p: torch.optim.LBFGS(p), lambda p: type("MyLBFGS", (torch.optim.LBFGS,), {})(p)):
        model = make()
        try:
            plumb.Engine(model, build(model.parameters()), strategy="zero2")
            said.append("nothing")
        except plumb.Error as error:
            said.append(str(error))
    return said


def test_an_optimizer_that_looks_at_all_parameters_together_is_refused_where_state_is_sharded() -> None:
    for said in plumb.spawn(refusals, 2):
        assert all("all parameters together" in one and "ddp" in one for one in said), said


class Twice(torch.optim.SGD):
    """Looks again in the middle of its step, as sharpness-aware ones do."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


def calls_twice() -> str:
    model = make()
    optimizer = Twice(model.parameters(), lr=0.1)
    engine = plumb.Engine(model, optimizer, strategy="zero1")

    def closure() -> torch.Tensor:
        loss = Play(model, engine.world.rank, 2, 1.0).loss(0)
        loss.backward()
        return loss

    try:
        optimizer.step(closure)
    except plumb.Error as error:
        return str(error)
    return "nothing"


def test_a_closure_that_would_be_called_in_the_middle_of_a_sharded_step_is_refused() -> None:
    for said in plumb.spawn(calls_twice, 2):
        assert "more than once" in said and "ddp" in said, said


def masters(strategy: str) -> float:
    """Half-precision parameters with f32 masters under torch's own optimizer, against masters kept by hand."""
    model, twin = make(torch.bfloat16), make(torch.bfloat16)
    held = [p.detach().float().requires_grad_() for p in twin.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    other = torch.optim.AdamW(held, lr=3e-4)
    engine = plumb.Engine(
        model, optimizer, strategy=strategy, units=[Block], master_weights=True, accumulate_dtype=torch.float32
    )
    for number in range(6):
        Play(model, engine.world.rank, 2, 1.0).loss(number).backward()
        engine.step()
        engine.zero_grad()
        sums = [torch.zeros_like(p) for p in held]
        for rank in range(2):
            twin.zero_grad()
            Play(twin, rank, 2, 1.0).loss(number).backward()
            for total, p in zip(sums, twin.parameters(), strict=True):
                total += 0 if p.grad is None else p.grad.float() / 2
        for p, total, used in zip(held, sums, twin.parameters(), strict=True):
            p.grad = total if used.grad is not None else None
        other.step()
        with torch.no_grad():
            for p, master in zip(twin.parameters(), held, strict=True):
                p.copy_(master)
    return distance(engine, model, twin)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_masters_of_half_precision_parameters_are_what_a_torch_optimizer_steps(strategy: str) -> None:
    assert max(plumb.spawn(masters, 2, (strategy,))) < 1e-6


def whole_ones(kind: str) -> float:
    model, twin = make(), make()
    build: Any = {
        "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
        "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
        "Mine": Mine,
    }[kind]
    optimizer, other = build(model.parameters()), build(twin.parameters())
    engine = plumb.Engine(model, optimizer, strategy="ddp")
    rank = engine.world.rank
    for number in range(2):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = Play(model, rank, 2, 1.0).loss(number)
            loss.backward()
            mean = sum(Play(model, r, 2, 1.0).loss(number).detach() for r in range(2)) / 2  # what LBFGS compares
            return torch.as_tensor(mean)

        def twins() -> torch.Tensor:
            other.zero_grad()
            loss = sum(Play(twin, r, 2, 1.0).loss(number) for r in range(2)) / 2
            loss.backward()
            return loss.detach()

        if kind == "LBFGS":
            optimizer.step(closure)
            other.step(twins)
        else:
            closure()
            engine.step()
            twins()
            other.step()
    return distance(engine, model, twin)


@pytest.mark.parametrize("kind", ["Adafactor", "LBFGS", "Mine"])
def test_any_optimizer_works_where_state_is_whole(kind: str) -> None:
    assert max(plumb.spawn(whole_ones, 2, (kind,))) < 1e-9


def declared() -> float:
    plumb.elementwise(Mine)
    model, twin = make(), make()
    engine = plumb.Engine(model, Mine(model.parameters()), strategy="zero3", units=[Block])
    Play(model, engine.world.rank, 2, 1.0).loss(0).backward()
    engine.step()
    step_twin(twin, Mine(twin.parameters()), 2, 0)
    return distance(engine, model, twin)


def test_an_optimizer_declared_elementwise_is_taken() -> None:
    assert max(plumb.spawn(declared, 2)) < 1e-10


def with_closure(strategy: str) -> float:
    model, twin = make(), make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = plumb.Engine(model, optimizer, strategy=strategy)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = Play(model, engine.world.rank, 2, 1.0).loss(0)
        loss.backward()
        return loss

    optimizer.step(closure)
    step_twin(twin, torch.optim.AdamW(twin.parameters(), lr=1e-2), 2, 0)
    return distance(engine, model, twin)


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_closure_is_run_before_gradients_are_settled(strategy: str) -> None:
    assert max(plumb.spawn(with_closure, 2, (strategy,))) < 1e-10


def skips(strategy: str) -> tuple[list[bool], float]:
    """With a loss scale, a step that overflows changes nothing, although the optimizer is called."""
    model, twin = make(torch.float32), make(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = plumb.Engine(model, optimizer, strategy=strategy, loss_scale=8.0)
    skipped = []
    for number in range(3):
        bad = float("inf") if number == 1 and engine.world.rank == 1 else 1.0
        engine.backward(Play(model, engine.world.rank, 2, 1.0).loss(number) * bad)
        optimizer.step()
        assert engine.last_step is not None
        skipped.append(engine.last_step.skipped)
        optimizer.zero_grad()
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for number in (0, 2):
        step_twin(twin, other, 2, number)
    return skipped, distance(engine, model, twin)


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_skipped_step_leaves_parameters_and_state_alone(strategy: str) -> None:
    for skipped, far in plumb.spawn(skips, 2, (strategy,)):
        assert skipped == [False, True, False]
        assert far < 1e-4


class Scalars(torch.nn.Module):
    """A parameter without dimensions beside another."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.weight = torch.nn.Parameter(torch.arange(5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.gain * (self.weight * x)).square().sum()


def with_scalars(rank_lr: bool, strategy: str, kind: Any = float) -> Any:
    model, twin = Scalars(), Scalars()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=kind(0.1))
    engine = plumb.Engine(model, optimizer, strategy=strategy)
    rank, size = engine.world.rank, engine.world.size
    if rank_lr:
        optimizer.param_groups[0]["lr"] = kind(0.1 * (rank + 1))
    other = torch.optim.Adagrad(twin.parameters(), lr=0.1)
    try:
        for number in range(3):
            model(torch.ones(5, dtype=torch.float64) * (rank + number + 1)).backward()
            engine.step()
            engine.zero_grad()
            for r in range(size):
                (twin(torch.ones(5, dtype=torch.float64) * (r + number + 1)) / size).backward()
            other.step()
            other.zero_grad()
    except plumb.Error as error:
        return str(error)
    return max(float((a - b).detach().abs().max()) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_parameters_without_dimensions_are_stepped(strategy: str) -> None:
    assert max(plumb.spawn(with_scalars, 2, (False, strategy))) < 1e-12


@pytest.mark.parametrize("kind", [float, torch.tensor])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_settings_that_differ_between_ranks_are_an_error_on_both(strategy: str, kind: Any) -> None:
    for said in plumb.spawn(with_scalars, 2, (True, strategy, kind)):
        assert "lr of the optimizer's group 0" in said and "0.1" in said and "0.2" in said, said


class Throws(torch.optim.SGD):
    """Once, before it has changed anything."""

    once = True

    def step(self, closure: Any = None) -> Any:
        if Throws.once:
            Throws.once = False
            raise ValueError("planned")
        return super().step(closure)


def throws(strategy: str) -> float:
    Throws.once = True
    plumb.elementwise(Throws)
    model, twin = Scalars(), Scalars()
    optimizer = Throws(model.parameters(), lr=0.01)
    engine = plumb.Engine(model, optimizer, strategy=strategy)
    rank, size = engine.world.rank, engine.world.size
    model(torch.ones(5, dtype=torch.float64) * (rank + 1)).backward()
    with pytest.raises(ValueError, match="planned"):
        engine.step()
    assert optimizer.param_groups[0]["params"][0] is model.gain
    engine.step()
    other = torch.optim.SGD(twin.parameters(), lr=0.01)
    for r in range(size):
        (twin(torch.ones(5, dtype=torch.float64) * (r + 1)) / size).backward()
    other.step()
    return max(
        float((engine.full_parameter(a) - b).detach().abs().max())
        for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_an_optimizer_that_threw_can_step_again(strategy: str) -> None:
    assert max(plumb.spawn(throws, 2, (strategy,))) < 1e-12


def closes(strategy: str) -> list[str]:
    model = Scalars()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    engine = plumb.Engine(model, optimizer, strategy=strategy)
    model(torch.ones(5, dtype=torch.float64)).backward()
    engine.step()
    engine.close()
    said = []
    for use in (optimizer.step, optimizer.state_dict, lambda: plumb.Engine(model, optimizer, strategy=strategy)):
        try:
            use()
            said.append("nothing")
        except plumb.Error as error:
            said.append(str(error))
    return said


def test_an_optimizer_whose_pieces_went_with_their_engine_refuses_to_go_on() -> None:
    for said in plumb.spawn(closes, 2, ("zero1",)):
        assert all("close" in one for one in said), said


class Around(torch.optim.Optimizer):
    """Steps another optimizer inside of its own step."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([torch.zeros(1)], {})
        self.inner, self.calls = inner, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        self.inner.step()


def steps_inside(strategy: str) -> float:
    model, twin = make(), make()
    optimizer, other = (torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, twin))
    engine = plumb.Engine(model, optimizer, strategy=strategy, units=[Block])
    around = Around(optimizer)
    for number in range(3):
        Play(model, engine.world.rank, 2, 1.0, engine).loss(number).backward()
        around.step()
        engine.zero_grad()
        step_twin(twin, other, 2, number)
    assert engine.steps == around.calls == 3
    return distance(engine, model, twin)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_step_inside_of_another_optimizers_is_a_step(strategy: str) -> None:
    assert max(plumb.spawn(steps_inside, 2, (strategy,))) < 1e-9
