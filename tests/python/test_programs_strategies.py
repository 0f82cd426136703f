"""What a strategy of Fabric or of the Trainer is given arrives where it belongs: at Lightning's own strategy, the engine, or the wrapper."""

from __future__ import annotations

import gc
import inspect
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import plumb
from together import by_ranks

lightning = pytest.importorskip("lightning")
import lightning.fabric.strategies  # noqa: E402
import lightning.pytorch.strategies  # noqa: E402

import plumb.fabric  # noqa: E402
import plumb.lightning  # noqa: E402

FACES: list[Any] = [plumb.fabric, plumb.lightning]
THEIRS = [lightning.fabric.strategies.DDPStrategy, lightning.pytorch.strategies.DDPStrategy]


class Told:
    """Stands where an engine or a wrapper is made, and keeps what it is told."""

    def __init__(self, *_: Any, **options: Any) -> None:
        self.options = options
        self.closed = False


def own_arguments(kind: type) -> dict[str, Any]:
    """One value of each, unlike its default."""
    values = {"process_group_backend": "gloo", "timeout": timedelta(seconds=77), "start_method": "fork", "model_averaging_period": 3}
    names = [name for name, one in inspect.signature(kind).parameters.items() if one.kind is not one.VAR_KEYWORD]
    return {name: values.get(name, object()) for name in names if name not in ("precision", "checkpoint_io", "precision_plugin", "accelerator")}


@pytest.mark.parametrize(("face", "theirs"), list(zip(FACES, THEIRS, strict=True)))
@pytest.mark.parametrize("row", ["ddp", "zero2"])
def test_every_argument_of_lightnings_own_strategy_arrives_there(face: Any, theirs: Any, row: str) -> None:
    given = own_arguments(theirs)
    made, wanted = face.PlumbStrategy(row, **given), theirs(**given)
    for name, value in vars(wanted).items():
        if any(value is one for one in given.values()):
            assert vars(made)[name] is value, name
    assert made._timeout == timedelta(seconds=77) and made._start_method == "fork" and made._process_group_backend == "gloo"
    assert made.options == {}


@pytest.mark.parametrize("face", FACES)
def test_every_other_option_arrives_at_the_engine(face: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(face, "Engine", Told)
    options = {"clip_norm": 0.5, "bucket_bytes": 1 << 12, "deterministic": True}
    strategy = face.PlumbStrategy("zero2", (module for module in [nn.Linear]), timeout=timedelta(seconds=7), **options)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):  # of each model that it sets up
        if face is plumb.fabric:
            strategy.setup_module_and_optimizers(model, [optimizer])
            told = strategy.engine_of(model)
        else:
            monkeypatch.setattr(lightning.pytorch.strategies.DDPStrategy, "setup_optimizers", lambda *_: None)
            monkeypatch.setattr(face.PlumbStrategy, "_module", model)
            strategy._optimizers = [optimizer]
            strategy.setup_optimizers(None)
            told = strategy.engine
        assert told.options == {"strategy": "zero2", "units": [nn.Linear], **options}


@pytest.mark.parametrize("face", FACES)
def test_under_ddp_it_arrives_at_the_wrapper(face: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(face, "DistributedDataParallel", Told)
    options = {"find_unused_parameters": True, "broadcast_buffers": False, "bucket_cap_mb": 3}
    strategy = face.PlumbStrategy(**options, timeout=timedelta(seconds=7))
    monkeypatch.setattr(face.PlumbStrategy, "root_device", torch.device("cpu"))
    setup = strategy.setup_module if face is plumb.fabric else strategy._setup_model
    assert setup(nn.Linear(2, 2)).options == {"device_ids": None, **options}


def trained(row: str) -> tuple[Any, Any, Any, torch.Tensor]:
    """Fabric with a model, its optimizer and a teacher that nobody trains."""
    fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=plumb.fabric.PlumbStrategy(row, units=[nn.Linear]))
    fabric.launch()
    torch.manual_seed(1)
    model, teacher = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2).requires_grad_(False)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return fabric, model, fabric.setup_module(teacher), optimizer


def whole_of(fabric: Any, model: Any) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = fabric.strategy.get_module_state_dict(model.module)
    return state


def saves_and_loads(folder: str) -> None:
    fabric, model, teacher, optimizer = trained("zero3")
    saved = whole_of(fabric, model)
    fabric.save(f"{folder}/all", {"model": model, "optimizer": optimizer, "teacher": teacher, "step": 5})
    kept = {name: value.clone() for name, value in teacher.module.state_dict().items()}
    engine = fabric.strategy.engine_of(model)

    def spoil() -> None:
        with torch.no_grad(), engine.gathered(model.module, write=True):
            for parameter in (*model.module.parameters(), *teacher.module.parameters()):
                parameter.fill_(9.0)

    # A model alone out of a checkpoint of everything; without strict also into one that has more.
    spoil()
    fabric.load_raw(f"{folder}/all", model)
    assert all(torch.equal(value, saved[name]) for name, value in whole_of(fabric, model).items())
    # Everything, and what stands beside it.
    spoil()
    state = {"model": model, "optimizer": optimizer, "teacher": teacher, "step": 0}
    assert fabric.load(f"{folder}/all", state) == {} and state["step"] == 5
    assert all(torch.equal(value, saved[name]) for name, value in whole_of(fabric, model).items())
    assert all(torch.equal(value, kept[name]) for name, value in teacher.module.state_dict().items())
    # Weights alone are a plain file, of whole parameters, which goes into another model where strict is off.
    fabric.save(f"{folder}/weights", {"model": model})
    plain = torch.load(f"{folder}/weights")["model"]
    assert plain.keys() == saved.keys() and all(torch.equal(plain[name], saved[name]) for name in saved)
    del plain["1.bias"]
    torch.save({"model": plain}, f"{folder}/less")
    spoil()
    with pytest.raises(RuntimeError, match="Missing key"):
        fabric.load(f"{folder}/less", {"model": model})
    fabric.load(f"{folder}/less", {"model": model}, strict=False)
    found = whole_of(fabric, model)
    assert torch.equal(found["0.weight"], saved["0.weight"]) and found["1.bias"].eq(9.0).all()


def test_what_fabric_saves_comes_back_whole_or_in_parts(tmp_path: Path) -> None:
    by_ranks(saves_and_loads, str(tmp_path), ranks=1)


def beside(folder: str) -> None:
    """An optimizer of something that no engine trains; a model without its optimizer, as one begins from what another run has learnt."""
    fabric, model, _, optimizer = trained("zero2")
    scale = nn.Parameter(torch.zeros(2))
    other = torch.optim.Adam([scale], lr=0.5)
    scale.grad = torch.ones(2)
    other.step()
    everything = {"model": model, "optimizer": optimizer, "other": other, "scale": scale.detach().clone(), "epoch": 4}
    fabric.save(f"{folder}/all", everything)
    fabric.save(f"{folder}/other", {"other": other})
    fabric.save(f"{folder}/weights", {"model": model, "other": other})
    saved = whole_of(fabric, model)
    assert Path(folder, "weights").is_file() and Path(folder, "all").is_dir()
    for path, more in (("all", {"optimizer": optimizer}), ("other", {}), ("weights", {})):
        fresh = torch.optim.Adam([scale], lr=0.1)
        wanted = {**({} if path == "other" else {"model": model}), **more, "other": fresh}
        left = fabric.load(f"{folder}/{path}", wanted)
        assert fresh.param_groups[0]["lr"] == 0.5 and torch.equal(fresh.state[scale]["exp_avg"], other.state[scale]["exp_avg"]), path
        assert left.keys() == ({"scale", "epoch"} if path == "all" else set())
    # Whoever names no optimizer keeps his own, and his steps.
    fabric, model, _, optimizer = trained("zero2")
    optimizer.param_groups[0]["lr"] = 0.003
    engine = fabric.strategy.engine_of(model)
    moments = [one.clone() for one in _moments(optimizer)]
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.fill_(9.0)
    state = {"model": model, "epoch": 0}
    left = fabric.load(f"{folder}/all", state)
    assert state["epoch"] == 4 and left.keys() == {"other", "scale"} and torch.equal(left["scale"], everything["scale"])
    assert all(torch.equal(value, saved[name]) for name, value in whole_of(fabric, model).items())
    assert optimizer.param_groups[0]["lr"] == 0.003 and engine.steps == 1
    assert all(torch.equal(one, two) for one, two in zip(_moments(optimizer), moments, strict=True))
    with torch.no_grad():
        model.module[0].weight.fill_(9.0)
    with pytest.raises(plumb.Error, match="the checkpoint has no nothing; it has epoch, other, scale"):
        fabric.load(f"{folder}/all", {"model": model, "nothing": 0})
    assert model.module[0].weight.eq(9.0).all(), "and nothing was loaded"
    fabric.load(f"{folder}/all", {"model": model, "nothing": 0}, strict=False)
    assert torch.equal(model.module[0].weight, saved["0.weight"])


def _moments(optimizer: Any) -> list[torch.Tensor]:
    return [state["exp_avg"] for state in optimizer.optimizer.state.values()]


def forgets(folder: str) -> None:
    """Models of before and their engines go, as those of a search over many."""
    fabric, model, _, optimizer = trained("zero3")
    engine, module = weakref.ref(fabric.strategy.engine_of(model)), weakref.ref(model.module)
    del model, optimizer
    gc.collect()
    assert engine() is None and module() is None
    teacher = nn.Linear(2, 2).requires_grad_(False)
    assert fabric.strategy.engine_of(fabric.setup_module(teacher)) is None


def test_fabric_saves_and_loads_what_it_is_given_and_keeps_nothing_else(tmp_path: Path) -> None:
    by_ranks(in_turn, str(tmp_path), ranks=1)


def refuses(folder: str) -> None:
    fabric, model, _, optimizer = trained("zero2")
    strategy, plain = fabric.strategy, nn.Linear(2, 2)
    with pytest.raises(plumb.Error, match="shards the optimizer too: fabric.setup"):
        fabric.setup_module(plain)
    with pytest.raises(plumb.Error, match="takes one optimizer per module, with groups; 2 were given"):
        fabric.setup(plain, *(torch.optim.SGD([p], lr=0.1) for p in plain.parameters()))
    with pytest.raises(plumb.Error, match="takes no storage_options and no filter"):
        fabric.save(f"{folder}/filtered", {"model": model, "optimizer": optimizer}, filter={"model": lambda name, value: True})
    with pytest.raises(plumb.Error, match="a module that fabric.setup\\(\\) has not seen with its optimizer"):
        strategy._backward_sync_control.no_backward_sync(plain, True)
    other, more = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    with pytest.raises(plumb.Error, match="2 modules of one checkpoint are sharded; save each"):
        fabric.save(f"{folder}/both", {"model": model, "optimizer": optimizer, "other": other})
    for state in (None, {"epoch": 0}):
        with pytest.raises(plumb.Error, match="a checkpoint of sharded state: .* needs the module that it goes into"):
            fabric.load(f"{folder}/all", state)
    for _ in range(2):
        fabric.save(f"{folder}/twice", {"other": other, "more": more})
    assert len(list(Path(folder, "twice").glob("save-*"))) == 1, "the new one in the place of the old one"
    assert not Path(folder, "filtered").exists() and not Path(folder, "both").exists()


def in_turn(folder: str) -> None:
    beside(folder)
    forgets(folder)
    refuses(folder)


def strictly(folder: str) -> list[str]:
    """Into a model with a frozen layer more than the one that was saved."""
    fabric, model, _, optimizer = trained("zero2")
    fabric.save(f"{folder}/all", {"model": model, "optimizer": optimizer})
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    other, more = fabric.setup(other, torch.optim.AdamW(other[:2].parameters(), lr=0.1))
    said = []
    for strict in (True, False):
        for load in (fabric.load_raw, fabric.load):
            try:
                if load == fabric.load_raw:
                    load(f"{folder}/all", other, strict=strict)
                else:
                    load(f"{folder}/all", {"model": other, "optimizer": more}, strict=strict)
                said.append("")
            except plumb.Error as error:
                said.append(str(error))
    return said


def test_strict_is_asked_of_the_engine_too(tmp_path: Path) -> None:
    (said,) = by_ranks(strictly, str(tmp_path), ranks=1)
    assert [bool(one) for one in said] == [True, True, False, False], said
