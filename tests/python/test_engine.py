"""The native face: arguments, steps, gathered parameters, weights of losses, errors."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import plumb
from stage import Block, Play, distance, make, one_step, reference, trained

STRATEGIES = ["ddp", "zero1", "zero2", "zero3"]


# ---- options


def overflows(strategy: str) -> list[tuple[bool, float]]:
    """A gradient of rank 1 alone is infinite in the second step."""
    model = make(torch.float32)
    engine = plumb.Engine(model, plumb.SGD(lr=0.1), strategy=strategy, units=[Block], loss_scale=plumb.LossScale(8.0))
    play = Play(model, engine.world.rank, 2, 1.0)
    seen = []
    for step in range(3):
        factor = float("inf") if step == 1 and engine.world.rank == 1 else 1.0
        engine.scale(play.loss(step) * factor).backward()
        info = engine.step()
        engine.zero_grad()
        seen.append((info.skipped, info.loss_scale))
    return seen


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_rank_skips_a_step_that_overflows_on_one(strategy: str) -> None:
    for seen in plumb.spawn(overflows, 2, (strategy,)):
        assert seen == [(False, 8.0), (True, 8.0), (False, 4.0)]


def digest(strategy: str) -> bytes:
    model = make(torch.float32)
    engine = plumb.Engine(
        model, plumb.AdamW(lr=0.01), strategy=strategy, units=[Block], deterministic=True, virtual_ranks=4
    )
    for step in range(2):
        for share in range(4 // engine.world.size):
            number = engine.world.rank * (4 // engine.world.size) + share
            (Play(model, number, 4, 1.0).loss(step) * (engine.world.size / 4)).backward()
        engine.step()
        engine.zero_grad()
    return b"".join(engine.full_parameter(p).numpy().tobytes() for p in model.parameters())


def test_deterministic_runs_have_the_same_bits_on_every_number_of_ranks() -> None:
    runs = [plumb.spawn(digest, ranks, (strategy,))[0] for ranks, strategy in ((1, "ddp"), (2, "zero3"), (4, "zero2"))]
    assert runs[0] == runs[1] == runs[2]


def scheduled() -> None:
    model, twin = make(), make()
    engine = plumb.Engine(
        model,
        plumb.AdamW(lr=0.1, weight_decay=0.5),
        strategy="zero2",
        schedule=plumb.Schedule(warmup=2),
        groups=[{"match": r"bias|norm", "lr": 0.01, "weight_decay": 0.0}],
    )
    small = [p for name, p in twin.named_parameters() if "bias" in name or "norm" in name]
    large = [p for name, p in twin.named_parameters() if not ("bias" in name or "norm" in name)]
    optimizer = torch.optim.AdamW(
        [{"params": large, "lr": 0.1, "weight_decay": 0.5}, {"params": small, "lr": 0.01, "weight_decay": 0.0}]
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, (t + 1) / 2))
    for step in range(3):
        Play(model, engine.world.rank, 2, 1.0).loss(step).backward()
        info = engine.step()
        engine.zero_grad()
        assert info.lr == pytest.approx(optimizer.param_groups[0]["lr"])
        for rank in range(2):
            other = Play(twin, rank, 2, 0.5)
            other.backward(other.loss(step))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert distance(engine, model, twin) < 1e-10


def test_groups_and_schedules_are_those_of_torch() -> None:
    plumb.spawn(scheduled, 2)


# ---- parameters that are whole for a while


def gathers() -> None:
    model = make()
    engine = plumb.Engine(model, plumb.SGD(lr=0.1), strategy="zero3", units=[Block])
    weight = model.blocks[0].up.weight
    with pytest.raises(RuntimeError, match="blocks.0"):
        weight.sum()
    with engine.gathered(model):
        state = copy.deepcopy(model.state_dict())
        twin = copy.deepcopy(model)
    assert engine.gathered_bytes == 0
    assert all(torch.equal(state[name], value) for name, value in make().state_dict().items())
    twin.blocks[0](torch.ones(1, 12, dtype=torch.float64))  # a copy is no unit
    with engine.gathered([weight], write=True):
        if engine.world.rank == 0:
            with torch.no_grad():
                weight.fill_(7.0)
    assert torch.equal(engine.full_parameter(weight), torch.full_like(state["blocks.0.up.weight"], 7.0))
    told = r"'blocks.0.up.weight' was changed inside engine.gathered\(\[...\]\) and the change is lost; gather it with write=True, on"
    with pytest.raises(plumb.Error, match=told), engine.gathered([weight]):
        with torch.no_grad():
            weight.fill_(8.0)
    with pytest.raises(KeyError), engine.gathered([weight], write=True):  # on every rank: nothing is published
        with torch.no_grad():
            weight.fill_(9.0)
        raise KeyError
    assert torch.equal(engine.full_parameter(weight), torch.full_like(state["blocks.0.up.weight"], 7.0))


def test_gathered_parameters_are_whole_and_rank_0_writes() -> None:
    plumb.spawn(gathers, 2)


def test_errors_have_the_words_of_python() -> None:
    with pytest.raises(plumb.Error, match="there is no parameter group 5; groups has 0"):
        plumb.Engine(make(), plumb.SGD(lr=0.1)).lr(5)


UNITS: dict[str, Any] = {
    "classes": [Block],
    "names": ["blocks.0", "blocks.2"],
    "predicate": lambda name, module: name.endswith(".up"),
    "size": 600,
    "root": lambda name, module: name == "",
    "nested": [Block, nn.Linear],
}


def chosen(units: Any, tied: bool) -> float:
    model, twin = make(tied=tied), make(tied=tied)
    engine = plumb.Engine(model, plumb.SGD(lr=0.1), strategy="zero3", units=units)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(2):
        trained(model, one_step(step), engine)
        reference(twin, one_step(step), 2, optimizer)
    assert engine.gathered_bytes == 0
    far = distance(engine, model, twin)
    engine.close()
    return far


def all_choices() -> dict[tuple[str, bool], float]:
    return {(name, tied): chosen(units, tied) for name, units in UNITS.items() for tied in (False, True)}


def test_units_are_chosen_in_every_way_and_tied_weights_are_right_in_all() -> None:
    for by_choice in plumb.spawn(all_choices, 2):
        assert {key: far for key, far in by_choice.items() if far > 1e-10} == {}


def test_a_unit_is_marked_by_hand() -> None:
    model = make()
    plumb.unit(model.blocks[1])
    from plumb.units import choose, own_parameters

    assert choose(model, None) == [model.blocks[1]]
    assert {id(p) for p in own_parameters(model, [model.blocks[1]])[0][1]} == {
        id(p) for p in model.blocks[1].parameters()
    }


# ---- gradients from elsewhere


def delivers(strategy: str) -> dict[str, float]:
    """Gradients of no autograd: of a layer that stays whole, twice; of a unit's weight; in another dtype; none from rank 1."""
    model, twin = make(), make()
    engine = plumb.Engine(model, plumb.SGD(lr=1.0), strategy=strategy, units=[Block])
    optimizer = torch.optim.SGD(twin.parameters(), lr=1.0)
    rank, size = engine.world.rank, engine.world.size
    up = model.blocks[1].up.weight
    mine = torch.arange(float(up.numel()), dtype=torch.float64).view(up.shape)
    for step in range(2):
        engine.deliver(model.first.weight, torch.full((12, 12), float(rank), dtype=torch.float64))
        engine.deliver(up, mine * (rank + 1))
        engine.deliver(model.first.weight, torch.full((12, 12), 2.0))
        if rank == 0:
            engine.deliver(model.last.bias, torch.ones(12))
        engine.end_pass()
        if step == 1:  # beside a backward of the same step
            Play(model, rank, size, 1.0).loss(0).backward()
            for other in range(size):
                play = Play(twin, other, size, 1 / size)
                play.backward(play.loss(0))
        for parameter, gradient in (
            (twin.first.weight, torch.full((12, 12), 2.0 + (size - 1) / 2)),
            (twin.blocks[1].up.weight, mine * (size + 1) / 2),
            (twin.last.bias, torch.full((12,), 1 / size)),
        ):
            gradient = gradient.double()
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
        assert engine.full_gradient(model.spare.weight) is None
        engine.zero_grad()
    return {"after": distance(engine, model, twin), "whole": float(engine.gathered_bytes)}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_delivered_gradients_count_as_a_backward(strategy: str) -> None:
    for wrong in plumb.spawn(delivers, 2, (strategy,)):
        assert wrong["after"] < 1e-10 and wrong["whole"] == 0, wrong


def runs_out_of_batches(strategy: str, asks: bool = False) -> float:
    """Rank 1 has one batch less, and each rank after it one less than the one before."""
    model, twin = make(), make()
    engine = plumb.Engine(model, plumb.SGD(lr=0.1), strategy=strategy, units=[Block], ask_before_gathers=asks)
    size = engine.world.size
    play = Play(model, engine.world.rank, size, 1.0)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(size):
        left = range(size - step)  # ranks that have a batch
        engine.backward(play.loss(step) if engine.world.rank in left else None)
        engine.step()
        engine.zero_grad()
        for rank in left:
            other = Play(twin, rank, size, 1 / size)
            other.backward(other.loss(step))
        optimizer.step()
        optimizer.zero_grad()
    return distance(engine, model, twin)


@pytest.mark.parametrize(("strategy", "ranks"), [*((strategy, 2) for strategy in STRATEGIES), ("hsdp", 4)])
def test_a_rank_without_a_batch_takes_part_with_nothing(strategy: str, ranks: int) -> None:
    assert max(plumb.spawn(runs_out_of_batches, ranks, (strategy,))) < 1e-10


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_so_it_does_where_ranks_share_no_memory(strategy: str) -> None:
    assert max(plumb.spawn(runs_out_of_batches, 2, (strategy, True), env={"PLUMB_SHM": "0"})) < 1e-10


def test_where_ranks_do_not_ask_that_ends_in_an_error_that_says_what_to_do() -> None:
    with pytest.raises(plumb.Error, match="ask_before_gathers"):
        plumb.spawn(runs_out_of_batches, 2, ("zero3", False), env={"PLUMB_SHM": "0"})


# ---- reading gradients


def test_a_gradient_that_was_merely_read_stays_where_it_is() -> None:
    model = make()
    engine = plumb.Engine(model, plumb.SGD(lr=0.1))
    places = set()
    for step in range(6):
        Play(model, 0, 1, 1.0).loss(step).backward()
        engine.step()
        if step > 0:  # the first one moves them into their final order
            places.add(model.first.weight.grad.data_ptr())
        engine.zero_grad()
    assert len(places) == 1


def test_a_gradient_that_is_kept_is_not_overwritten() -> None:
    model = make()
    engine = plumb.Engine(model, plumb.SGD(lr=0.1))
    Play(model, 0, 1, 1.0).loss(0).backward()
    engine.step()
    engine.zero_grad()
    Play(model, 0, 1, 1.0).loss(0).backward()
    kept = model.first.weight.grad
    values = kept.clone()
    engine.step()
    engine.zero_grad()
    Play(model, 0, 1, 1.0).loss(1).backward()
    assert torch.equal(kept, values)


# ---- threads, collection, leaks


def test_threads_run_their_own_backwards() -> None:
    models = [make() for _ in range(4)]
    engines = [plumb.Engine(model, plumb.SGD(lr=0.1)) for model in models]

    def train(i: int) -> None:
        for step in range(5):
            Play(models[i], 0, 1, 1.0).loss(step).backward()
            engines[i].step()
            engines[i].zero_grad()

    threads = [threading.Thread(target=train, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    train_alone = make()
    optimizer = torch.optim.SGD(train_alone.parameters(), lr=0.1)
    for step in range(5):
        Play(train_alone, 0, 1, 1.0).loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    for engine, model in zip(engines, models, strict=True):
        assert distance(engine, model, train_alone) < 1e-12


def collects_at_every_allocation(strategy: str) -> None:
    """Hooks in Python see every gradient, threads ask the engine meanwhile, and garbage is collected all the time."""
    model = make()
    engine = plumb.Engine(model, plumb.SGD(lr=0.1), strategy=strategy, units=[Block])
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: (p.grad, [[]])[1] and None)
    stop = threading.Event()

    def asks() -> None:
        while not stop.is_set():
            with engine.no_sync():
                pass
            engine.gathered_bytes
            [torch.ones(1)]

    thread = threading.Thread(target=asks)
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for step in range(5):
            play = Play(model, engine.world.rank, 2, 1.0)
            loss = play.loss(step)
            loss.backward()
            engine.step()
            engine.zero_grad()
            if step == 0:
                thread.start()
    finally:
        stop.set()
        thread.join()
        gc.set_threshold(*before)


@pytest.mark.parametrize("strategy", ["ddp"])
def test_nobody_waits_for_the_interpreter_with_a_lock_of_ours(strategy: str) -> None:
    plumb.spawn(collects_at_every_allocation, 1, (strategy,), timeout=60)


def test_engines_leave_nothing_behind() -> None:
    def build_and_drop() -> weakref.ref[Any]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        engine = plumb.Engine(model, torch.optim.AdamW(model.parameters()), strategy="zero2")
        model(torch.ones(2, 4)).sum().backward()
        engine.step()
        return weakref.ref(model[0].weight)

    def alive() -> int:
        gc.collect()
        # By their types: to ask an object for its class makes others' lazy modules import all they have.
        kinds = (torch.Tensor, plumb.Engine, plumb._C.Engine)
        return sum(1 for one in gc.get_objects() if issubclass(type(one), kinds))

    build_and_drop()
    before = alive()
    refs = [build_and_drop() for _ in range(200)]
    assert alive() <= before
    assert all(ref() is None for ref in refs)
