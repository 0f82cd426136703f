"""Checkpoints from Python: state of odd shapes and kinds, of optimizers, extras and buffers, that must not be lost or refused."""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import plumb
from saved import Gives, seeded


class Few(torch.nn.Module):
    """A parameter without dimensions, and one that nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(4, 6)
        self.two = torch.nn.Linear(6, 5)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.frozen = torch.nn.Parameter(torch.ones(3, 3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.relu(self.one(x))) * self.scale


class Counting(torch.optim.Optimizer):
    """As many are written: its count is no tensor, and it is stepped whole, each parameter on one rank."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state.setdefault("seen", [])
                state["seen"] = [*state["seen"], parameter.grad.abs().sum()][-2:]
                parameter.add_(parameter.grad, alpha=-group["lr"] / state["count"] / (1 + sum(state["seen"])))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05, t0=1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),  # has state of what is frozen, too
    "counting": Counting,
    "lbfgs": lambda p: torch.optim.LBFGS([x for x in p if x.requires_grad], lr=0.05, max_iter=3),
}
def play(optimizer: str, strategy: str, folder: str, load: bool, until: int, save: bool) -> list[list[float]]:
    with seeded:
        torch.manual_seed(5 if load else 0)
        model = Few()
    built = OPTIMIZERS[optimizer](model.parameters())
    with plumb.Engine(model, built, strategy=strategy) as engine:
        if load:
            engine.load(folder)
        x = torch.linspace(-1, 1, 32).view(8, 4)

        def closure() -> torch.Tensor:
            engine.zero_grad()
            loss = model(x).square().mean()
            engine.backward(loss)
            return loss

        while engine.steps < until:
            if optimizer == "lbfgs":
                built.step(closure)
            else:
                closure()
                engine.step()
        if save:
            engine.save(folder)
        return [engine.full_parameter(p).flatten().tolist() for p in model.parameters()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_goes_on_with_the_same_bits_whatever_the_optimizer_keeps(optimizer: str, tmp_path: Path) -> None:
    middle = 6 if optimizer == "lbfgs" else 3
    expected = play(optimizer, "ddp", "", False, 2 * middle, False)
    ways = [("ddp", 2), ("ddp", 1)] if optimizer == "lbfgs" else [("ddp", 1), ("zero1", 2), ("zero3", 2), ("ddp", 1)]
    for number, ((first, ranks), (second, others)) in enumerate(zip(ways, ways[1:], strict=False)):
        folder = str(tmp_path / str(number))
        plumb.spawn(play, ranks, (optimizer, first, folder, False, middle, True), method="thread")
        for found in plumb.spawn(play, others, (optimizer, second, folder, True, 2 * middle, False), method="thread"):
            assert found == expected, (first, ranks, second, others)


class General(torch.optim.SGD):
    """Keeps a number of no parameter in particular."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.state["taken"] = (self.state.get("taken") or 0) + 1  # type: ignore[index]
        return super().step(closure)


class Beside(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "mine": 3}


def test_state_beside_that_of_parameters_is_saved_or_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = General(model.parameters(), lr=0.1)
    with plumb.Engine(model, optimizer) as engine:
        for _ in range(2):
            engine.backward(model(torch.ones(1, 2)).sum())
            engine.step()
            engine.zero_grad()
        engine.save(tmp_path)
        optimizer.state["taken"] = 7  # type: ignore[index]
        engine.load(tmp_path)
        assert optimizer.state["taken"] == 2  # type: ignore[index]
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
        with pytest.raises(plumb.SaveError, match="parameter 0 of the optimizer's group 1, of shape \\[2\\], is none of the engine's"):
            engine.save(tmp_path)
    with plumb.Engine(model, Beside(model.parameters(), lr=0.1)) as engine:
        with pytest.raises(plumb.SaveError, match="Beside.state_dict\\(\\) has 'mine' beside its state and groups"):
            engine.save(tmp_path)


def masters(folder: str) -> list[float]:
    """An optimizer of whole parameters with masters, under ddp: every rank owns everything, and one of them says so."""
    with seeded:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4).bfloat16()
    with plumb.Engine(model, torch.optim.Adafactor(model.parameters()), master_weights=True) as engine:
        for _ in range(2):
            engine.backward(model(torch.ones(1, 4).bfloat16()).square().sum())
            engine.step()
            engine.zero_grad()
        engine.save(folder)
        engine.load(folder)
        return model.weight.flatten().tolist()


def test_masters_of_an_optimizer_of_whole_parameters(tmp_path: Path) -> None:
    first, second = plumb.spawn(masters, 2, (str(tmp_path),), method="thread")
    assert first == second


def test_rates_that_are_tensors_keep_their_shape_and_value(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rates = [torch.tensor([0.25]), torch.tensor(float("inf")), torch.tensor(0.1, dtype=torch.float64)]
    with plumb.Engine(model, optimizer) as engine:
        for rate in rates:
            optimizer.param_groups[0]["mine"] = rate
            engine.save(tmp_path)
            optimizer.param_groups[0]["mine"] = None
            engine.load(tmp_path)
            found = optimizer.param_groups[0]["mine"]
            assert torch.equal(found, rate) and (found.shape, found.dtype) == (rate.shape, rate.dtype)
        optimizer.param_groups[0]["mine"] = torch.tensor(1j)
        with pytest.raises(plumb.SaveError, match="'mine' of a group is a torch.complex64 tensor"):
            engine.save(tmp_path)


def refuse_alone(folder: str) -> str:
    """One rank's optimizer cannot be saved: every rank hears of it at once."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with plumb.Engine(model, optimizer) as engine:
        if engine.world.rank == 1:
            optimizer.param_groups[0]["mine"] = print
        try:
            engine.save(folder)
        except plumb.SaveError as error:
            return str(error)
    return ""


def test_what_one_ranks_optimizer_cannot_give_every_rank_hears(tmp_path: Path) -> None:
    for said in plumb.spawn(refuse_alone, 2, (str(tmp_path),), method="thread"):
        assert "save() failed on rank 1: 'mine' of a group is a builtin_function_or_method" in said


class Holds:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


ARRAYS = [
    numpy.zeros((0, 3), numpy.float32),
    numpy.array(3.5),
    numpy.array([1 + 2j, numpy.nan]),
    numpy.longdouble(1) / 3,
    numpy.array([1, 2], ">i4"),
    numpy.array([[True, False]]),
    numpy.array(["a", "bc"]),
    numpy.datetime64("2026-01-02"),
    numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
    numpy.float16(0.1),
]


def test_arrays_of_numpy_come_back_to_the_bit(tmp_path: Path) -> None:
    with plumb.Engine(torch.nn.Linear(2, 2), plumb.SGD()) as engine:
        engine.save(tmp_path, extras={"mine": Holds({"all": ARRAYS, "mixed": {1, "a"}})})
        found = Holds({})
        engine.load(tmp_path, extras={"mine": found})
        for there, here in zip(ARRAYS, found.state["all"], strict=True):
            assert type(here) is type(there) and here.dtype == there.dtype and here.shape == there.shape
            assert here.tobytes() == there.tobytes()
        assert found.state["mixed"] == {1, "a"}
        for bad in (numpy.array([1, None], dtype=object), numpy.zeros(1, dtype=[("a", "i4")])):
            with pytest.raises(plumb.SaveError, match="a checkpoint holds tensors"):
                engine.save(tmp_path, extras={"mine": Holds(bad)})
        with pytest.raises(plumb.SaveError, match="extra 'mine' is a int, which has no state_dict"):
            engine.save(tmp_path, extras={"mine": 3})  # type: ignore[dict-item]


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conjugated": torch.conj,
    "transposed": lambda t: t.mH,
    "negated": lambda t: torch._neg_view(t.real.contiguous()),
    "imaginary": lambda t: t.conj().imag,
}


@pytest.mark.parametrize("view", VIEWS)
def test_buffers_that_are_views_of_other_numbers(view: str, tmp_path: Path) -> None:
    def built(seed: int, plain: bool) -> torch.nn.Module:
        model = torch.nn.Linear(2, 2)
        generator = torch.Generator().manual_seed(seed)
        buffer = VIEWS[view](torch.randn(2, 3, dtype=torch.complex64, generator=generator))
        model.register_buffer("seen", buffer.clone().contiguous() if plain else buffer)
        return model

    expected = built(0, False).seen.tolist()
    for background in (False, True):
        folder = tmp_path / str(background)
        with plumb.Engine(built(0, False), plumb.SGD()) as engine:
            engine.save(folder, background=background)
            engine.finish_save()
        for plain in (False, True):
            for take in ("load", "load_weights"):
                model = built(1, plain)
                with plumb.Engine(model, plumb.SGD()) as engine:
                    getattr(engine, take)(folder)
                    assert model.seen.tolist() == expected, (background, plain, take)
                    assert model.seen.is_conj() == built(1, plain).seen.is_conj()


def own_buffers(folder: str) -> None:
    """A forward after the step leaves each rank with statistics of its own; the next step would give all of them rank 0's."""
    model = torch.nn.BatchNorm1d(6)
    with plumb.Engine(model, plumb.SGD()) as engine:
        engine.backward(model(torch.randn(4, 6)).sum())
        engine.step()
        model.running_mean.fill_(engine.world.rank)
        model.num_batches_tracked.fill_(10 + engine.world.rank)
        engine.save(folder)


def test_buffers_are_those_of_rank_0(tmp_path: Path) -> None:
    plumb.spawn(own_buffers, 2, (str(tmp_path),), method="thread")
    model = torch.nn.BatchNorm1d(6)
    with plumb.Engine(model, plumb.SGD()) as engine:
        engine.load(tmp_path)
    assert model.running_mean.tolist() == [0.0] * 6 and model.num_batches_tracked.item() == 10


def test_state_of_weights_of_another_dtype_is_left_out_with_them(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with plumb.Engine(model, torch.optim.AdamW(model.parameters())) as engine:
        engine.backward(model(torch.ones(1, 2)).sum())
        engine.step()
        engine.save(tmp_path)
    other = torch.nn.Linear(2, 2).double()
    optimizer = torch.optim.AdamW(other.parameters())
    with plumb.Engine(other, optimizer) as engine:
        table = engine.load(tmp_path, strict=False).table()
        assert "reshaped  weight 'bias'" in table and "reshaped  optimizer 'bias' (exp_avg)" in table
        assert not optimizer.state


def test_files_of_a_model_need_not_have_what_is_not_persistent(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")

    def built() -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        model[0].register_buffer("rotation", torch.ones(2), persistent=False)
        model.register_buffer("kept", torch.ones(2))
        return model

    model = built()
    safetensors.save_file({"0.weight": torch.zeros(2, 2), "0.bias": torch.ones(2), "kept": torch.zeros(2)}, tmp_path / "all.safetensors")
    safetensors.save_file({"0.weight": torch.zeros(2, 2), "0.bias": torch.ones(2)}, tmp_path / "few.safetensors")
    with plumb.Engine(model, plumb.SGD()) as engine:
        assert not engine.load_weights(tmp_path / "all.safetensors").mismatches
        assert model.kept.tolist() == [0, 0] and model[0].rotation.tolist() == [1, 1]
        with pytest.raises(plumb.Error, match="missing   buffer 'kept'"):
            engine.load_weights(tmp_path / "few.safetensors")
        model[0].rotation.fill_(5)
        engine.save(tmp_path / "saved")  # where it is there, it is taken
        model[0].rotation.fill_(6)
        engine.load_weights(tmp_path / "saved")
        assert model[0].rotation.tolist() == [5, 5]


def test_extras_keep_the_kinds_of_what_they_hold(tmp_path: Path) -> None:
    values = [
        collections.Counter("aab"), collections.OrderedDict(b=1, a=[2]), collections.deque([1, (2, 3)], maxlen=5), collections.deque(),
        torch.Size([2, 3]), 1 + 2j, complex("nan"), {"counter": 1, "size": [2], "deque": 3}, {1: {(2, 3): None}}, {},
    ]  # fmt: skip
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 4])
    with plumb.Engine(torch.nn.Linear(2, 2), plumb.SGD()) as engine:
        given = Gives(values)
        engine.save(tmp_path, extras={"all": given, "schedule": schedule})
        given.value = schedule.milestones = None  # type: ignore[assignment]
        engine.load(tmp_path, extras={"all": given, "schedule": schedule})
        assert [type(one) for one in given.value] == [type(one) for one in values]
        assert repr(given.value) == repr(values)
        assert sorted(schedule.milestones.elements()) == [2, 2, 4]
        hollow = {"engine": engine.state_dict(), "of the meta device": torch.ones(2, device="meta")}
        for what, value in hollow.items():
            with pytest.raises(plumb.SaveError, match=r"extra 'it'.* is a (Shards|tensor of the meta device); a checkpoint holds tensors with numbers"):
                engine.save(tmp_path, extras={"it": Gives(value)})


@pytest.mark.parametrize("name", ["__metadata__", "\u00fc\u6f22 \"quo\\te\nline\x01", "x" * 3000])
def test_names_are_anything(name: str, tmp_path: Path) -> None:
    def built(value: float) -> torch.nn.Module:
        model = torch.nn.Module()
        model.register_parameter(name, torch.nn.Parameter(torch.full((3,), value)))
        model.inside = torch.nn.Module()
        model.inside.register_buffer(name, torch.full((2,), value))
        model.register_buffer("b" + name, torch.full((2,), value))
        return model

    model = built(1.0)
    with plumb.Engine(model, torch.optim.Adam(model.parameters(), lr=0.5)) as engine:
        getattr(model, name).sum().backward()
        engine.step()
        engine.zero_grad()
        engine.save(tmp_path, extras={name: Gives(name)})
    expected = {key: value.tolist() for key, value in model.state_dict().items()}
    for call in ("load", "load_weights"):
        other, extra = built(7.0), Gives("")
        with plumb.Engine(other, torch.optim.Adam(other.parameters(), lr=0.5)) as engine:
            getattr(engine, call)(tmp_path, **({"extras": {name: extra}} if call == "load" else {}))
            assert {key: value.tolist() for key, value in other.state_dict().items()} == expected
            assert extra.value == (name if call == "load" else "")
