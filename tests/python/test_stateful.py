"""torch.distributed.checkpoint saves and loads engines: any world, any strategy, the same bits, nothing gathered."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import plumb
from plumb.formats.command import main
from plumb.save.stateful import Shards, boxes


class Net(torch.nn.Module):
    """Odd sizes, memory in another order than its shape, a scalar, a parameter that is never used, a frozen one, buffers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.one = torch.nn.Linear(5, 7)
        self.conv = torch.nn.Conv2d(3, 2, 3).to(memory_format=torch.channels_last)
        self.two = torch.nn.Linear(7, 3)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.unused = torch.nn.Parameter(torch.ones(4))
        self.frozen = torch.nn.Parameter(torch.rand(3), requires_grad=False)
        self.to(dtype)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        weight = self.conv.weight.sum(dim=(1, 2, 3))
        return (self.two(torch.tanh(self.one(x))) * self.scale + weight.sum() + self.frozen).float().square().mean()


MAKES: dict[str, Any] = {
    "plumb.AdamW": lambda p: plumb.AdamW(lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),  # keeps two numbers of each parameter, of one without dimensions too
}


def build(optimizer: str, strategy: str, half: bool, dtype: torch.dtype = torch.float32) -> tuple[Net, plumb.Engine]:
    torch.manual_seed(0)
    model = Net(torch.bfloat16 if half else dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = plumb.Engine(
        model, MAKES[optimizer](trained), strategy=strategy, units=[torch.nn.Linear],
        master_weights=half or None, accumulate_dtype=torch.float32 if half else None, loss_scale=half,
    )  # fmt: skip
    return model, engine


def train(model: Net, engine: plumb.Engine, until: int) -> None:
    dtype = model.one.weight.dtype
    while engine.steps < until:
        g = torch.Generator().manual_seed(engine.steps)  # every rank the same: means over 1, 2 and 4 ranks are exact
        engine.backward(model(torch.randn(8, 5, generator=g).to(dtype)))
        engine.step()
        engine.zero_grad()


def ending(model: Net, engine: plumb.Engine) -> dict[str, Any]:
    whole = {name: engine.full_parameter(p).double().tolist() for name, p in model.named_parameters()}
    return {**whole, "seen": model.seen.item(), "steps": engine.steps, "scale": engine.loss_scale}


def play(optimizer: str, strategy: str, half: bool, folder: str, what: str, until: int) -> dict[str, Any]:
    dist.init_process_group("gloo")
    model, engine = build(optimizer, strategy, half)
    if what == "load":
        dcp.load({"engine": engine}, checkpoint_id=folder)
        assert engine.steps == 3
    train(model, engine, until)
    if what == "save":
        torch.manual_seed(7)
        dcp.save({"engine": engine}, checkpoint_id=folder)
    if what == "async":
        future = dcp.async_save({"engine": engine}, checkpoint_id=folder)
        train(model, engine, until + 2)  # what is saved is what it was at the call
        future.result()  # type: ignore[union-attr]
    found = ending(model, engine)
    engine.close()
    dist.barrier()
    return found


WAYS = [
    ("AdamW", "zero3", 2, "ddp", 1, True),
    ("AdamW", "ddp", 1, "zero1", 2, False),
    ("plumb.AdamW", "zero2", 4, "zero3", 2, True),
    ("plumb.AdamW", "zero1", 2, "zero2", 4, False),
    ("SGD", "zero3", 4, "zero2", 2, False),
    ("NAdam", "ddp", 1, "zero1", 2, False),
]


@pytest.mark.parametrize(("optimizer", "first", "ranks", "second", "others", "half"), WAYS)
def test_another_world_goes_on_with_the_same_bits(
    optimizer: str, first: str, ranks: int, second: str, others: int, half: bool, tmp_path: Path
) -> None:
    folder = str(tmp_path / "all")
    undisturbed = plumb.spawn(play, others, (optimizer, second, half, "", "", 6))[0]
    plumb.spawn(play, ranks, (optimizer, first, half, folder, "async" if optimizer == "AdamW" else "save", 3))
    for found in plumb.spawn(play, others, (optimizer, second, half, folder, "load", 6)):
        assert found == undisturbed


def wide(folder: str) -> bool:
    """An engine of f64 that has taken no step yet has room for state of f64."""
    dist.init_process_group("gloo")
    model, engine = build("AdamW", "ddp", False, torch.float64)
    train(model, engine, 2)
    dcp.save({"engine": engine}, checkpoint_id=folder)
    train(model, engine, 4)
    expected = ending(model, engine)
    engine.close()
    model, engine = build("AdamW", "ddp", False, torch.float64)
    dcp.load({"engine": engine}, checkpoint_id=folder)
    train(model, engine, 4)
    same = ending(model, engine) == expected
    engine.close()
    return same


def test_parameters_of_f64(tmp_path: Path) -> None:
    assert plumb.spawn(wide, 1, (str(tmp_path / "all"),)) == [True]


def refuses(folder: str) -> list[str]:
    """What an engine says that the checkpoint does not fit; nothing of it changes."""
    dist.init_process_group("gloo")
    said = []
    others = (("plumb.AdamW", torch.float32), ("SGD", torch.float32), ("AdamW", torch.bfloat16), ("AdamW", torch.float64))
    for optimizer, dtype in others:
        model, engine = build(optimizer, "zero3", dtype == torch.bfloat16, dtype)
        before = ending(model, engine)
        try:
            dcp.load({"engine": engine}, checkpoint_id=folder)
            said.append("")
        except BaseException as error:  # noqa: BLE001  (torch's own is no Exception)
            said.append(str(error))
        assert ending(model, engine) == before
        engine.close()
    model, engine = build("AdamW", "zero2", False)
    engine.backward(model(torch.ones(2, 5)))
    try:
        dcp.save({"engine": engine}, checkpoint_id=folder + "-other")
    except plumb.Error as error:
        said.append(str(error))
    engine.close()
    return said


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = str(tmp_path / "all")
    plumb.spawn(play, 2, ("AdamW", "zero2", False, folder, "save", 3))
    for said in plumb.spawn(refuses, 2, (folder,)):
        own, other, half, double, between = said
        assert "Missing key" in own and "Missing key" in other and "Missing key" in half and "state_dict()" in between
        assert "nothing was loaded" in double and "float32" in double and "float64" in double


def one_rank(folder: str, optimizer: str, steps: int, dtype: torch.dtype) -> tuple[Any, Any]:
    model, engine = build(optimizer, "ddp", False, dtype)
    train(model, engine, steps)
    dcp.save({"engine": engine}, checkpoint_id=folder, no_dist=True)
    train(model, engine, 5)
    expected = ending(model, engine)
    engine.close()
    model, engine = build(optimizer, "ddp", False, dtype)
    dcp.load({"engine": engine}, checkpoint_id=folder, no_dist=True)
    assert engine.steps == steps
    train(model, engine, 5)
    return ending(model, engine), expected


SINGLE = [("SGD", torch.float32), ("Adagrad", torch.float32), ("plumb.AdamW", torch.float32), ("AdamW", torch.float64)]


@pytest.mark.parametrize(("optimizer", "dtype"), SINGLE)
@pytest.mark.parametrize("steps", [0, 2])
def test_one_process_needs_no_group(optimizer: str, dtype: torch.dtype, steps: int, tmp_path: Path) -> None:
    found, expected = plumb.spawn(one_rank, 1, (str(tmp_path), optimizer, steps, dtype))[0]
    assert found == expected


def test_the_converter_reads_what_an_engine_saved(tmp_path: Path) -> None:
    plumb.spawn(play, 2, ("AdamW", "zero3", True, str(tmp_path / "dcp"), "save", 3))
    assert main(["--from", "dcp", "--to", "plumb", str(tmp_path / "dcp"), str(tmp_path / "ours")]) == 0
    model, engine = build("AdamW", "ddp", True)
    info = engine.load(tmp_path / "ours", strict=False)
    assert {one.what for one in info.mismatches} <= {"the loss scale"} and engine.steps == 3
    engine.close()


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (2, 1, 3, 2), (0, 3)])
def test_boxes_are_the_elements_and_no_others(shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    whole = torch.arange(numel).view(shape)
    for begin in range(numel + 1):
        for end in range(begin, numel + 1):
            seen: list[int] = []
            count = 0
            for offsets, sizes, first, last in boxes(shape, begin, end):
                part = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] if shape else whole
                assert part.reshape(-1).tolist() == list(range(first, last))
                seen += range(first, last)
                count += 1
            assert seen == list(range(begin, end)) and count <= max(1, 2 * len(shape) - 1)


def test_shards_are_for_checkpoints_alone() -> None:
    value = Shards.of_whole(torch.ones(3))
    with pytest.raises(plumb.Error, match=r"torch.distributed.checkpoint alone"):
        value + 1
    assert json.dumps([list(value.shape)]) == "[[3]]" and "Shards" in repr(value)


def saves_again(folder: str, again: str) -> None:
    """What was loaded is saved before anything has stepped: each piece still lies where it did."""
    dist.init_process_group("gloo")
    model, engine = build("AdamW", "zero2", True)
    dcp.load({"engine": engine}, checkpoint_id=folder)
    dcp.save({"engine": engine}, checkpoint_id=again)
    engine.close()
    dist.barrier()


def test_what_was_loaded_may_be_saved_before_a_step(tmp_path: Path) -> None:
    first, again = str(tmp_path / "first"), str(tmp_path / "again")
    undisturbed = plumb.spawn(play, 1, ("AdamW", "ddp", True, first, "save", 3))[0]
    plumb.spawn(saves_again, 2, (first, again))
    found, expected = (plumb.spawn(play, 1, ("AdamW", "ddp", True, one, "load", 6))[0] for one in (again, first))
    assert found == expected != undisturbed


def test_a_state_that_is_asked_for_before_the_first_step_is_no_step() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    with plumb.Engine(model, optimizer, strategy="zero2") as engine:
        assert engine.state_dict()["optim"]["state"]["weight"].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert not seen and engine.steps == 0 and not optimizer.state
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert seen == ["before", "after"]


class Warm(torch.optim.SGD):
    """Keeps something of no parameter in particular."""

    def step(self, closure: Any = None) -> Any:
        state: dict[Any, Any] = self.state
        state["warm"] = state.get("warm", 0) + 1
        return super().step(closure)


class Beside(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "beside": 5}


def keep_and_draw(folder: str, save: bool) -> tuple[Any, list[list[float]], str]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Linear(3, 2)
    optimizer = Warm(model.parameters(), lr=0.1)
    engine = plumb.Engine(model, optimizer)
    other = torch.nn.Linear(3, 2)
    refused = ""
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(10 * rank + (1 if save else 2))
    if save:
        for _ in range(3):
            model(torch.ones(1, 3)).sum().backward()
            engine.step()
            engine.zero_grad()
        dcp.save({"engine": engine}, checkpoint_id=folder)
        loses = plumb.Engine(other, Beside(other.parameters(), lr=0.1))
        with pytest.raises(plumb.Error) as caught:
            loses.state_dict()
        refused = str(caught.value)
        loses.close()
    else:
        dcp.load({"engine": engine}, checkpoint_id=folder)
    drawn = [[torch.rand(()).item(), random.random(), float(numpy.random.rand())] for _ in range(2)]
    warm = optimizer.state["warm"]  # type: ignore[index]
    engine.close()
    dist.barrier()
    return warm, drawn, refused


def test_state_of_no_parameter_and_every_generator_come_along(tmp_path: Path) -> None:
    saved = plumb.spawn(keep_and_draw, 2, (str(tmp_path / "all"), True))
    loaded = plumb.spawn(keep_and_draw, 3, (str(tmp_path / "all"), False))
    again = plumb.spawn(keep_and_draw, 3, (str(tmp_path / "all"), False))
    assert [one[0] for one in loaded] == [3, 3, 3]
    assert [one[1] for one in loaded[:2]] == [one[1] for one in saved]
    assert loaded[2][1] == again[2][1]  # a rank that was not there before: numbers of its own, the same each time
    assert all(loaded[2][1][0][i] != saved[rank][1][0][i] for rank in range(2) for i in range(3))
    assert "has 'beside' beside its state and groups" in saved[0][2]


def test_a_state_that_nobody_loaded_and_one_without_an_optimizer_are_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with plumb.Engine(model, None) as engine:
        dcp.save({"engine": engine}, checkpoint_id=tmp_path, no_dist=True)
        with pytest.raises(plumb.Error, match="was not loaded by torch.distributed.checkpoint"):
            engine.load_state_dict(engine.state_dict())
        dcp.load({"engine": engine}, checkpoint_id=tmp_path, no_dist=True)
    with plumb.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1)) as engine:
        with pytest.raises(Exception, match="has a torch.optim optimizer, and the other has none"):
            dcp.load({"engine": engine}, checkpoint_id=tmp_path, no_dist=True)


def state_from_before(folder: str) -> None:
    """An engine that has not stepped, over an optimizer that has: what lies in another order than its shape says, and nothing at all."""
    dist.init_process_group("gloo")
    model, optimizer = stepped_alone()
    engine = plumb.Engine(model, optimizer, strategy="zero2")
    dcp.save({"engine": engine}, checkpoint_id=folder)


def stepped_alone() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3).to(memory_format=torch.channels_last))
    model.nothing = torch.nn.Parameter(torch.zeros(0, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=draw).to(memory_format=torch.preserve_format)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def test_state_from_before_the_engine_comes_along(tmp_path: Path) -> None:
    plumb.spawn(state_from_before, 2, (str(tmp_path),))
    model, optimizer = stepped_alone()
    expected = {key: value.clone() for key, value in optimizer.state[model[0].weight].items()}  # type: ignore[index]
    with torch.no_grad():
        for value in (*model.parameters(), *(one for state in optimizer.state.values() for one in state.values())):
            value.zero_()
    with plumb.Engine(model, optimizer) as engine:
        dcp.load({"engine": engine}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(model[0].weight, stepped_alone()[0][0].weight)  # type: ignore[index]
    for key, value in optimizer.state[model[0].weight].items():  # type: ignore[index]
        assert torch.equal(value, expected[key]), key


def left_out(strategy: str) -> list[str]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    engine = plumb.Engine(model, torch.optim.Adam(model.parameters(), lr=0.1), strategy=strategy)
    model(torch.ones(1, 3)).sum().backward()
    engine.step()
    engine.zero_grad()
    assert set(engine.state_dict()["optim"]["state"]) == {"weight", "bias"}
    model.bias.requires_grad_(False)
    with pytest.warns(UserWarning, match="'bias' is frozen, and what Adam keeps of it is left out .* engine.save\\(\\) has it"):
        return list(engine.state_dict()["optim"]["state"])


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_state_of_what_was_frozen_since_is_not_left_out_in_silence(strategy: str) -> None:
    assert plumb.spawn(left_out, 2, (strategy,)) == [["weight"]] * 2
