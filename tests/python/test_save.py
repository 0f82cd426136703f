"""Checkpoints from Python: any torch.optim object, any world and strategy, extras, and the safetensors package."""

from __future__ import annotations

import argparse
import hashlib
import random
import shutil
from pathlib import Path

import numpy
import pytest
import torch

import plumb

safetensors = pytest.importorskip("safetensors.torch")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(5, 7)
        self.norm = torch.nn.BatchNorm1d(7)
        self.two = torch.nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.relu(self.norm(self.one(x))))


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "groups": lambda p: in_groups(list(p)),
}


def in_groups(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Two rates; one without momentum; a third group whose only parameter is frozen."""
    parameters[-1].requires_grad_(False)
    return torch.optim.SGD(
        [
            {"params": parameters[:2], "lr": 0.05, "momentum": 0.9},
            {"params": parameters[2:-1], "weight_decay": 0.1},
            {"params": parameters[-1:]},
        ],
        lr=0.02,
    )

def play(optimizer: str, strategy: str, folder: str, load: bool, until: int, save: str) -> tuple[str, float]:
    """One rank's program: goes on, trains until that step, saves; a digest of what it ends with."""
    torch.manual_seed(0)
    model = Net()
    built = OPTIMIZERS[optimizer](model.parameters())
    engine = plumb.Engine(model, built, strategy=strategy, units=[torch.nn.Linear])
    scheduler = torch.optim.lr_scheduler.StepLR(built, 2, 0.5)
    if load:
        info = engine.load(folder, extras={"scheduler": scheduler})
        assert info.samples == 8 * info.step and engine.steps == info.step
        engine.save(folder, samples=info.samples, extras={"scheduler": scheduler})  # as it came
        engine.load(folder, extras={"scheduler": scheduler})
    g = torch.Generator()
    for step in range(engine.steps, until):
        g.manual_seed(step)
        x = torch.randn(8, 5, generator=g)  # every rank the same samples: sums over two or four ranks are exact
        engine.backward(model(x).square().mean())
        engine.step()
        engine.zero_grad()
        scheduler.step()
    if save:
        engine.save(folder, samples=8 * engine.steps, extras={"scheduler": scheduler}, background=save == "background")
        engine.finish_save()
    digest = hashlib.sha1()
    for _, parameter in model.named_parameters():
        digest.update(engine.full_parameter(parameter).numpy().tobytes())
    engine.close()
    return digest.hexdigest(), built.param_groups[0]["lr"]


WAYS = [("zero3", 2, "ddp", 1), ("ddp", 1, "zero1", 2), ("zero1", 2, "zero3", 4), ("zero2", 4, "zero2", 2)]


@pytest.mark.parametrize(("first", "ranks", "second", "others"), WAYS)
@pytest.mark.parametrize("optimizer", ["adamw", "asgd"])
def test_another_world_goes_on_with_the_same_bits(
    optimizer: str, first: str, ranks: int, second: str, others: int, tmp_path: Path
) -> None:
    undisturbed = play(optimizer, "ddp", "", False, 6, "")
    folder = str(tmp_path / "all")
    how = "background" if optimizer == "adamw" else "now"
    plumb.spawn(play, ranks, (optimizer, first, folder, False, 3, how))
    found = plumb.spawn(play, others, (optimizer, second, folder, True, 6, ""))
    assert set(found) == {undisturbed}


def in_process(optimizer: str, strategy: str = "ddp") -> tuple[Net, torch.optim.Optimizer, plumb.Engine]:
    torch.manual_seed(0)
    model = Net()
    built = OPTIMIZERS[optimizer](model.parameters())
    return model, built, plumb.Engine(model, built, strategy=strategy)


def train(model: Net, engine: plumb.Engine, steps: int) -> None:
    g = torch.Generator()
    for _ in range(steps):
        g.manual_seed(engine.steps)
        engine.backward(model(torch.randn(8, 5, generator=g)).square().mean())
        engine.step()
        engine.zero_grad()


def bits(model: Net) -> bytes:
    return b"".join(t.detach().float().numpy().tobytes() for t in model.state_dict().values())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_goes_on_with_the_same_bits_under_any_torch_optimizer(optimizer: str, tmp_path: Path) -> None:
    model, _, engine = in_process(optimizer)
    train(model, engine, 3)
    path = engine.save(tmp_path / "all", samples=24)
    assert path.endswith("step-3")
    train(model, engine, 3)
    expected = bits(model)
    engine.close()
    torch.manual_seed(5)
    other = Net()
    built = OPTIMIZERS[optimizer](other.parameters())
    engine = plumb.Engine(other, built)
    info = engine.load(tmp_path / "all")
    assert (info.step, info.samples, engine.steps) == (3, 24, 3)
    train(other, engine, 3)
    assert bits(other) == expected
    engine.close()


def test_refuses_another_optimizer_and_changes_nothing(tmp_path: Path) -> None:
    model, _, engine = in_process("adamw")
    train(model, engine, 1)
    engine.save(tmp_path)
    engine.close()
    model, _, engine = in_process("sgd")
    before = bits(model)
    with pytest.raises(plumb.Error, match="AdamW"):
        engine.load(tmp_path)
    assert bits(model) == before and engine.steps == 0
    engine.close()


def frozen_since(folder: str, strategy: str) -> tuple[str, dict[str, torch.Tensor]]:
    """What load() says, and the state it gives to a parameter that is frozen now."""
    model = Net()
    model.one.weight.requires_grad_(False)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    said = ""
    with plumb.Engine(model, optimizer, strategy=strategy) as engine:
        try:
            engine.load(folder)
        except plumb.Error as error:
            said = str(error)
        train(model, engine, 1)
        engine.save(folder + " again")  # and it is saved with the rest
        optimizer.state.pop(model.one.weight)
        engine.load(folder + " again")
    return said, dict(optimizer.state.get(model.one.weight, {}))


def test_the_state_of_a_parameter_that_is_frozen_now_is_not_dropped_in_silence(tmp_path: Path) -> None:
    model, built, engine = in_process("adamw")
    train(model, engine, 2)
    engine.save(tmp_path)
    expected = built.state[model.one.weight]
    engine.close()
    # What is not trained is in no pieces: under every strategy its state is whole.
    for said, found in [frozen_since(str(tmp_path), "ddp"), *plumb.spawn(frozen_since, 2, (str(tmp_path), "zero1"))]:
        assert said == "" and found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


def test_groups_are_those_of_before_and_get_all_that_was_kept_in_them(tmp_path: Path) -> None:
    """A schedule that begins late finds its first rates; the same parameters in other groups are told."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    parameters = list(model.parameters())

    def optimizer(first: int) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": parameters[:first], "lr": 0.1}, {"params": parameters[first:], "lr": 0.2}], lr=0.3)

    before = optimizer(2)
    schedule = torch.optim.lr_scheduler.StepLR(before, 1, 0.5)
    with plumb.Engine(model, before) as engine:
        model(torch.ones(1, 2)).sum().backward()
        engine.step()
        schedule.step()
        engine.save(tmp_path)
    fresh = optimizer(2)
    with plumb.Engine(model, fresh) as engine:
        engine.load(tmp_path)
        late = torch.optim.lr_scheduler.StepLR(fresh, 1, 0.5, last_epoch=schedule.last_epoch)
        assert late.base_lrs == [0.1, 0.2] and [group["initial_lr"] for group in fresh.param_groups] == [0.1, 0.2]
    for first in (1, 3):
        with plumb.Engine(model, optimizer(first)) as engine, pytest.raises(plumb.Error, match=rf"groups hold \[{first}, {4 - first}\] parameters, and those of the checkpoint \[2, 2\]"):
            engine.load(tmp_path)


def test_names_the_parameters_that_differ(tmp_path: Path) -> None:
    model, _, engine = in_process("adamw")
    engine.save(tmp_path)
    engine.close()
    parameters = [(f"other.{name}", p) for name, p in model.named_parameters()]
    engine = plumb.Engine(parameters, torch.optim.AdamW(p for _, p in parameters))
    with pytest.raises(plumb.Error, match="'other.one.weight' here and 'one.weight' there: load_weights"):
        engine.load(tmp_path, strict=False)
    engine.close()


def test_files_are_read_by_the_safetensors_package_and_the_other_way_round(tmp_path: Path) -> None:
    model, _, engine = in_process("adamw")
    train(model, engine, 1)
    path = Path(engine.save(tmp_path / "all"))
    weights = safetensors.load_file(path / "weights-00000-of-00001.safetensors")
    assert weights.keys() == dict(model.named_parameters()).keys()
    for name, value in model.named_parameters():
        assert torch.equal(weights[name], value)
    for file in path.glob("*.safetensors"):
        safetensors.load_file(file)
    theirs = {name: torch.randn_like(value) if value.is_floating_point() else value for name, value in model.state_dict().items()}
    safetensors.save_file({name: value.to(torch.float64) if "one" in name else value for name, value in theirs.items()}, tmp_path / "model.safetensors")
    engine.load_weights(tmp_path / "model.safetensors")
    for name, value in model.state_dict().items():
        assert torch.equal(value, theirs[name].to(torch.float64).to(value.dtype)), name
    engine.close()


class Extra:
    def __init__(self) -> None:
        self.state: dict[object, object] = {}

    def state_dict(self) -> dict[object, object]:
        return self.state

    def load_state_dict(self, state: dict[object, object]) -> None:
        self.state = state


def test_extras_come_back_as_they_were(tmp_path: Path) -> None:
    model, _, engine = in_process("sgd")
    extra = Extra()
    extra.state = {"a": [1, 2.5, None, True, (3, "x")], 7: float("inf"), "t": torch.arange(4), "s": {1, 2}, "n": {},
        "b": b"\x00\xff", "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.99))}  # fmt: skip
    engine.save(tmp_path, extras={"mine": extra})
    again = Extra()
    engine.load(tmp_path, extras={"mine": again})
    t = again.state.pop("t")
    assert torch.equal(t, extra.state.pop("t")) and again.state == extra.state  # type: ignore[arg-type]
    with pytest.raises(plumb.Error, match="mine"):
        engine.load(tmp_path)
    extra.state = {"o": object()}
    with pytest.raises(plumb.SaveError, match="object"):
        engine.save(tmp_path, extras={"mine": extra})
    engine.close()


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(numpy.random.rand())


def drawn_after(folder: str, save: bool) -> list[tuple[float, float, float]]:
    """Of one rank: what each generator gives next."""
    _, _, engine = in_process("sgd")
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed((7 if save else 70) + engine.world.rank)
    draws(), random.gauss(0, 1), numpy.random.randn()  # in the middle of what each draws at once
    if save:
        engine.save(folder)
    else:
        engine.load(folder)
    engine.close()
    return [draws() for _ in range(3)]


def test_every_generator_of_every_rank_goes_on(tmp_path: Path) -> None:
    saved = plumb.spawn(drawn_after, 2, (str(tmp_path), True))
    assert plumb.spawn(drawn_after, 2, (str(tmp_path), False)) == saved
    assert plumb.spawn(drawn_after, 1, (str(tmp_path), False)) == saved[:1]
    # Ranks that were not there before draw numbers of their own, the same each time.
    four = plumb.spawn(drawn_after, 4, (str(tmp_path), False))
    assert four[:2] == saved and len({number for rank in four for draw in rank for number in draw}) == 36
    assert plumb.spawn(drawn_after, 3, (str(tmp_path), False)) == four[:3]


def refused_by_one(folder: str) -> tuple[str, bool, object]:
    """The other rank's optimizer is another one: nobody loads anything, and extras are not asked."""
    model, _, engine = in_process("adamw")
    train(model, engine, 1)
    extra = Extra()
    extra.state = {"a": 1}
    engine.save(folder, extras={"mine": extra})
    rank = engine.world.rank
    engine.close()
    model, _, engine = in_process("sgd" if rank == 1 else "adamw")
    before, extra.state, said = bits(model), {"a": 2}, ""
    try:
        engine.load(folder, extras={"mine": extra})
    except plumb.Error as error:
        said = str(error)
    same = bits(model) == before and engine.steps == 0
    engine.close()
    return said, same, extra.state


def test_what_one_ranks_optimizer_refuses_is_loaded_by_nobody(tmp_path: Path) -> None:
    for said, same, state in plumb.spawn(refused_by_one, 2, (str(tmp_path),)):
        assert "load() failed on rank 1: the checkpoint holds the state of AdamW, and this optimizer is SGD" in said
        assert same and state == {"a": 2}


def test_damaged_checkpoints_are_refused_and_change_nothing(tmp_path: Path) -> None:
    model, built, engine = in_process("adamw")
    train(model, engine, 2)
    extra = Extra()
    extra.state = {"a": 1, "t": torch.arange(4)}
    good = Path(engine.save(tmp_path / "all", extras={"mine": extra}))
    train(model, engine, 1)
    extra.state = {"a": 2}

    def everything() -> tuple[object, ...]:
        state = [(k, v.numpy().tobytes()) for s in built.state.values() for k, v in s.items()]
        return bits(model), state, engine.steps, dict(extra.state), random.getstate(), torch.get_rng_state().tolist()

    before = everything()
    outside = {path: path.read_bytes() for path in good.iterdir()}
    bad = tmp_path / "bad"
    chance = random.Random(3)
    for number in range(120):
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        file = chance.choice(sorted(bad.iterdir()))
        data = bytearray(file.read_bytes())
        kind = number % 4
        at = chance.randrange(len(data))
        if kind == 0:
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at:at] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 9)))
        else:
            data[:8] = chance.randrange(2**64).to_bytes(8, "little")
        file.write_bytes(bytes(data))
        with pytest.raises(plumb.Error, match="load\\(\\) failed"):
            engine.load(bad, extras={"mine": extra})
        assert everything() == before, (number, file.name)
    assert {path: path.read_bytes() for path in good.iterdir()} == outside
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all", "bad"]
    engine.load(good, extras={"mine": extra})
    assert engine.steps == 2 and extra.state["a"] == 1
    engine.close()


def test_a_step_with_a_gradient_that_is_not_finite(tmp_path: Path) -> None:
    for nonfinite in ("error", "skip"):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        engine = plumb.Engine(model, plumb.SGD(lr=0.1), nonfinite=nonfinite)
        before = model.weight.detach().clone()
        (model(torch.ones(1, 2)) * float("nan")).sum().backward()
        if nonfinite == "error":
            with pytest.raises(plumb.Error, match="step 0: the gradient of 'bias', 'weight' is not finite"):
                engine.step()
        else:
            assert engine.step().skipped
        assert torch.equal(model.weight, before)
        engine.close()
    with pytest.raises(plumb.Error, match="one of continue, skip, error"):
        plumb.Engine(torch.nn.Linear(2, 2), nonfinite="maybe")
