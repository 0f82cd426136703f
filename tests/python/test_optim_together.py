"""Optimizers of somebody's own that do more in a step than update each parameter: look again, or look at all parameters."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

import plumb
from plumb.optim.trial import looks_at_others
from stage import Block, Play, distance, make
from test_optim import step_twin


class Sharpness(torch.optim.Optimizer):
    """As sharpness-aware ones are written: up along the gradient that is there, another look from there, back, and a step by that."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "rho": 0.05})
        self.inner = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.inner.param_groups

    def _trained(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        norm = torch.stack([p.grad.norm() for p in self._trained()]).norm()  # type: ignore[union-attr]
        for p in self._trained():
            assert p.grad is not None
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad * (0.05 / norm).to(p))
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p in self._trained():
            p.data = self.state[p]["old"]
        self.inner.step()
        self.zero_grad()


def looks_twice(optimizer: torch.optim.Optimizer, backward: Callable[[int], None]) -> None:
    for number in range(3):
        backward(number)
        optimizer.step(lambda number=number: backward(number))  # type: ignore[misc]


def of_one(size: int) -> torch.nn.Module:
    twin = make()

    def backward(number: int) -> None:
        for rank in range(size):
            one = Play(twin, rank, size, 1 / size)
            one.backward(one.loss(number))

    looks_twice(Sharpness(twin.parameters()), backward)
    return twin


def engine_looks_twice(strategy: str) -> float | str:
    model = make()
    optimizer = Sharpness(model.parameters())
    engine = plumb.Engine(model, optimizer, strategy=strategy, units=[Block])
    try:
        looks_twice(optimizer, lambda number: Play(model, engine.world.rank, 2, 1.0).loss(number).backward())
    except plumb.Error as error:
        return str(error)
    return distance(engine, model, of_one(2))


def test_an_optimizer_that_looks_again_from_other_parameters_is_right_under_ddp() -> None:
    for far in plumb.spawn(engine_looks_twice, 2, ("ddp",)):
        assert isinstance(far, float) and far < 1e-10, far


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_an_optimizer_that_looks_again_from_other_parameters_is_refused_where_state_is_sharded(strategy: str) -> None:
    for said in plumb.spawn(engine_looks_twice, 2, (strategy,)):
        assert "Sharpness looked at a gradient before it called its closure" in str(said) and "'ddp'" in str(said), said


class Writes(torch.optim.SGD):
    """Changes parameters before it asks for its closure."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.9)
        return super().step(closure)


class Clears(torch.optim.SGD):
    """Takes gradients away before it asks for its closure."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None
        return super().step(closure)


class EveryOther(torch.optim.SGD):
    """Does nothing at every other step, and does not ask for its closure then."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return None if self.calls % 2 else super().step(closure)


class AsksFirst(torch.optim.SGD):
    """Of no class that is known, but like any other."""


def steps_with_a_closure(kind: type[torch.optim.Optimizer]) -> float | str:
    model, twin = make(), make()
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    engine = plumb.Engine(model, optimizer, strategy="zero2")

    def closure(number: int) -> torch.Tensor:
        loss = Play(model, engine.world.rank, 2, 1.0).loss(number)
        loss.backward()
        return loss

    other = kind(twin.parameters(), lr=0.1)  # type: ignore[call-arg]
    try:
        for number in range(3):
            words = {"closure": lambda number=number: closure(number)}
            optimizer.step(**words) if number == 1 else optimizer.step(words["closure"])  # type: ignore[arg-type]
            engine.zero_grad()
            step_twin(twin, other, 2, number)
    except plumb.Error as error:
        return str(error)
    return distance(engine, model, twin)


def test_a_closure_that_is_asked_for_first_is_right_whatever_the_class() -> None:
    for kind in (AsksFirst, EveryOther, torch.optim.Adafactor):
        for far in plumb.spawn(steps_with_a_closure, 2, (kind,)):
            assert isinstance(far, float) and far < 1e-9, far


def test_parameters_that_change_before_the_closure_is_asked_for_are_an_error() -> None:
    for said in plumb.spawn(steps_with_a_closure, 2, (Writes,)):
        assert "Writes changed a parameter before it called its closure" in str(said), said
    for said in plumb.spawn(steps_with_a_closure, 2, (Clears,)):
        assert "Clears changed a gradient before it called its closure" in str(said), said


def sharded_looks_twice(kind: str) -> float:
    dist.init_process_group("gloo")
    model = make()
    for block in model.blocks:
        plumb.fully_shard(block)
    plumb.fully_shard(model)
    optimizer: Any = Sharpness(model.parameters()) if kind == "Sharpness" else torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def backward(number: int) -> torch.Tensor:
        if kind != "Sharpness":
            optimizer.zero_grad()
        Play(model, dist.get_rank(), 2, 1.0).loss(number).backward()
        with torch.no_grad():
            mean: torch.Tensor = sum(Play(model, r, 2, 1.0).loss(number) for r in range(2)) / 2  # type: ignore[assignment]
        return mean

    if kind == "Sharpness":
        looks_twice(optimizer, lambda number: (backward(number), None)[1])
        twin = of_one(2)
    else:
        twin = make()
        other = torch.optim.LBFGS(twin.parameters(), lr=0.1, max_iter=3)

        def twins() -> torch.Tensor:
            other.zero_grad()
            loss: torch.Tensor = sum(Play(twin, r, 2, 1.0).loss(0) for r in range(2)) / 2  # type: ignore[assignment]
            loss.backward()
            return loss.detach()

        for _ in range(2):
            optimizer.step(lambda: backward(0))
            other.step(twins)
    wholes = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
    return max(float((a - b).abs().max()) for a, b in zip(wholes, twin.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["Sharpness", "LBFGS"])
def test_a_closure_may_be_asked_for_again_in_a_step_under_fully_shard(kind: str) -> None:
    assert max(plumb.spawn(sharded_looks_twice, 2, (kind,))) < 1e-10


class Twice(torch.optim.SGD):
    """Asks for its closure twice, and steps by the second answer."""

    def step(self, closure: Any = None) -> Any:
        closure()
        super().step()
        return closure()


@pytest.mark.parametrize("kind", ["LBFGS", "LBFGS with a line search", "Twice"])
@pytest.mark.parametrize("bad", [[True, True, True], [False, True, True]])
def test_a_step_that_is_skipped_changes_nothing_although_its_closure_is_asked_for_again(kind: str, bad: list[bool]) -> None:
    """``bad``: which calls of the closure find gradients that are not finite. What was stepped before them stays stepped."""
    model, twin = make(), make()
    search = {"line_search_fn": "strong_wolfe"} if "search" in kind else {}
    optimizers = [
        Twice(one.parameters(), lr=0.1) if kind == "Twice" else torch.optim.LBFGS(one.parameters(), lr=0.1, max_iter=3, **search) for one in (model, twin)
    ]
    engine = plumb.Engine(model, optimizers[0], nonfinite="skip")
    calls: list[bool] = []

    def closure_of(one: Any, optimizer: torch.optim.Optimizer, spoils: list[bool]) -> Callable[[], torch.Tensor]:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            spoilt = len(calls) < len(spoils) and spoils[len(calls)]
            calls.append(spoilt)
            loss = Play(one, 0, 1, 1.0).loss(0)
            (loss * (float("nan") if spoilt else 1.0)).backward()
            return loss

        return closure

    before = [p.detach().clone() for p in model.parameters()]
    optimizers[0].step(closure_of(model, optimizers[0], bad))
    assert engine.last_step is not None and engine.last_step.skipped and calls[: len(bad)] == bad[: len(calls)]
    assert [len(group["params"]) for group in optimizers[0].param_groups] == [len(before)]
    assert torch.isnan(model.first.weight.grad).any()  # as ever: what is not finite is the user's to look at
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert bad[0] == all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    if bad[0]:  # and nothing of it is in the steps after
        for one, optimizer in zip((model, twin), optimizers, strict=True):
            for _ in range(2):
                optimizer.step(closure_of(one, optimizer, []))
        assert distance(engine, model, twin) < 1e-12 and not torch.equal(before[0], twin.first.weight)


def test_masters_are_stepped_by_no_optimizer_with_a_list_of_its_own() -> None:
    model = make(torch.bfloat16)
    with pytest.raises(plumb.Error, match="LBFGS keeps a list of its parameters.*leave master_weights out"):
        plumb.Engine(model, torch.optim.LBFGS(model.parameters()), master_weights=True)
    plumb.Engine(model, torch.optim.LBFGS(model.parameters())).close()
    model = make(torch.float32)  # which have none
    plumb.Engine(model, torch.optim.LBFGS(model.parameters()), master_weights=True).close()


# ---- all parameters together


class Clips(torch.optim.SGD):
    """By the norm of all gradients: of those that it is given."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1e-2)
        return super().step(closure)


def clips(strategy: str, how: dict[str, Any]) -> float | str:
    model, twin = make(), make()
    torch.manual_seed(5)
    try:
        engine = plumb.Engine(model, Clips(model.parameters(), lr=0.1), strategy=strategy, units=[Block], **how)
    except plumb.Error as error:
        return str(error)
    other = Clips(twin.parameters(), lr=0.1)
    for number in range(2):
        Play(model, engine.world.rank, 2, 1.0).loss(number).backward()
        engine.step()
        engine.zero_grad()
        step_twin(twin, other, 2, number)
    return distance(engine, model, twin)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_an_optimizer_that_looks_at_all_parameters_is_refused_where_each_rank_steps_some(strategy: str) -> None:
    for said in plumb.spawn(clips, 2, (strategy, {})):
        assert "Clips updates a parameter by other parameters' gradients" in str(said) and "'ddp'" in str(said), said


def test_an_optimizer_that_looks_at_all_parameters_is_right_under_ddp() -> None:
    for far in plumb.spawn(clips, 2, ("ddp", {})):
        assert isinstance(far, float) and far < 1e-10, far


def test_two_parameters_are_enough_to_look_at_one_another() -> None:
    assert looks_at_others(Clips(torch.nn.Linear(2, 2).parameters(), lr=0.1))
    assert not looks_at_others(Clips(torch.nn.Linear(2, 2, bias=False).parameters(), lr=0.1))


def a_trial_leaves_no_trace() -> bool:
    """Neither in the optimizer, nor in what it keeps of its own, nor in the generator."""

    class Counts(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.steps.append(torch.rand(()))
            return super().step(closure)

    model = make()
    optimizer = Counts(model.parameters(), lr=0.1)
    optimizer.steps = []  # type: ignore[attr-defined]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0)
    before = [p.detach().clone() for p in model.parameters()]
    generator = torch.random.get_rng_state()
    plumb.Engine(model, optimizer, strategy="zero1")
    kept = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    fresh = optimizer.steps == [] and not optimizer.state and schedule.last_epoch == 0  # type: ignore[attr-defined]
    return kept and fresh and torch.equal(generator, torch.random.get_rng_state())


def test_a_trial_of_an_optimizer_leaves_no_trace() -> None:
    assert plumb.spawn(a_trial_leaves_no_trace, 2) == [True, True]


class Noisy(torch.optim.SGD):
    """Draws numbers, from the generator that all threads of a process share."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(1 + 0.1 * torch.rand(p.shape))
        return super().step(closure)


@pytest.mark.parametrize("kind", [type("Own", (torch.optim.SGD,), {}), Noisy])
def test_trials_of_ranks_that_are_threads_do_not_disturb_each_other(kind: type[torch.optim.SGD]) -> None:
    with ThreadPoolExecutor(4) as pool:
        looks = pool.map(lambda number: torch.rand(5).numel() == 0 or looks_at_others(kind(make().parameters(), lr=0.1)), range(60))
        assert not any(looks)
