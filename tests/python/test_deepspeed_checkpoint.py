"""DeepSpeed's save_checkpoint and load_checkpoint: a run goes on bit for bit, under another stage, on another number of ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import plumb
import plumb.deepspeed as deepspeed
from plumb.deepspeed import utils
from plumb.deepspeed.utils import zero_to_fp32

WIDTH = 6
HALF = {"bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 4}}, "f32": {}}


class Net(nn.Module):
    """Layers, one of them frozen; a weight with two names; a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.layers[1].requires_grad_(False)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.layers[0].weight
        self.register_buffer("ratio", torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).float().square().mean()


def build(stage: int, half: str, **more: Any) -> Any:
    torch.manual_seed(1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-2, "warmup_num_steps": 4, "warmup_type": "linear"}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **HALF[half],
        **more,
    }
    return deepspeed.initialize(model=Net(), config=config)[0]


def train(engine: Any, until: int) -> None:
    dtype = engine.get_data_types()[0]
    while engine.global_steps < until:
        g = torch.Generator().manual_seed(engine.global_steps)  # every rank the same: means over 1, 2 and 4 ranks are exact
        loss = engine(torch.randn(2, WIDTH, generator=g).to(dtype))
        if engine.fp16_enabled() and engine.global_steps in (2, 4):
            loss = loss * float("inf")  # a step that is skipped, before and after the checkpoint
        engine.backward(loss)
        engine.step()


def ending(engine: Any) -> tuple[Any, ...]:
    """All that a run ends with, to the last bit."""
    numbers = [
        None if value is None else value.tolist()
        for p in engine.module.parameters()
        if p.requires_grad
        for value in (utils.safe_get_full_fp32_param(p), *(utils.safe_get_full_optimizer_state(p, k) for k in ("exp_avg", "exp_avg_sq")))
    ]
    whole = {name: value.float().tolist() for name, value in engine.module_state_dict().items()}
    scale = getattr(engine.optimizer, "cur_scale", 1.0)
    return numbers, whole, engine.global_steps, engine.skipped_steps, engine.get_lr(), scale


def play(stage: int, half: str, folder: str, load: bool, until: int, save: bool) -> tuple[Any, ...]:
    engine = build(stage, half)
    if load:
        path, client = engine.load_checkpoint(folder)
        assert path.startswith(os.path.join(folder, "global_step3")) and client == {"epoch": 7, "best": (0.5, "x")}
        before = engine.loaded_checkpoint_dp_world_size
        assert engine.global_samples == 3 * 2 * before and before in (1, 2, 4)
        assert engine.global_steps == 3 and engine.lr_scheduler.last_batch_iteration == 2 - engine.skipped_steps
    train(engine, until)
    if save:
        assert engine.save_checkpoint(folder, client_state={"epoch": 7, "best": (0.5, "x")}) is True
        assert Path(folder, "latest").read_text() == "global_step3"
    return ending(engine)


WAYS = [(3, 2, 0, 1), (0, 1, 3, 2), (2, 2, 3, 4), (1, 4, 2, 2)]


@pytest.mark.parametrize(("first", "ranks", "second", "others"), WAYS)
def test_goes_on_under_another_stage_on_other_ranks(first: int, ranks: int, second: int, others: int, tmp_path: Path) -> None:
    for half in ("bf16", "fp16") if first else ("f32", "fp16"):
        folder = str(tmp_path / half)
        undisturbed = plumb.spawn(play, others, (first, half, "", False, 6, False))[0]
        plumb.spawn(play, ranks, (first, half, folder, False, 3, True))
        for found in plumb.spawn(play, others, (second, half, folder, True, 6, False)):
            assert found == undisturbed


def saved(tmp_path: Path, **words: Any) -> Any:
    engine = build(2, "bf16")
    train(engine, 3)
    engine.save_checkpoint(tmp_path, **words)
    return engine


def test_tags_and_latest(tmp_path: Path) -> None:
    engine = build(0, "f32")
    assert engine.load_checkpoint(tmp_path) == (None, None)  # as there: a warning
    train(engine, 1)
    engine.save_checkpoint(tmp_path, tag=5)
    engine.save_checkpoint(tmp_path, "other", save_latest=False)
    assert (tmp_path / "latest").read_text() == "5" and (tmp_path / "other").is_dir()
    train(engine, 2)
    engine.save_checkpoint(tmp_path, "other", {"n": 2}, save_latest=False)  # again: the new one, and it alone
    assert len(list((tmp_path / "other").glob("save-*"))) == 1
    path, client = engine.load_checkpoint(str(tmp_path))
    assert engine.global_steps == 1 and client == {} and os.path.dirname(path) == str(tmp_path / "5")
    assert engine.load_checkpoint(tmp_path, "other")[1] == {"n": 2} and engine.global_steps == 2
    for tag in ("../out", "/tmp/out", ""):
        with pytest.raises(plumb.Error, match="expected the name of a folder"):
            engine.save_checkpoint(tmp_path, tag)
    with pytest.raises(ValueError, match="save_dir"):
        engine.save_checkpoint("")
    with pytest.raises(plumb.Error, match="no complete checkpoint"):
        engine.load_checkpoint(tmp_path, "missing")
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(plumb.Error, match="expected the name of a folder"):
        engine.load_checkpoint(tmp_path)
    engine.destroy()


def two_tags(folder: str, validation: str) -> str:
    engine = build(1, "f32", checkpoint={"tag_validation": validation})
    rank = plumb.world().rank
    with pytest.raises(AssertionError) as error:
        engine.save_checkpoint(folder, tag=f"tag{rank}")
    engine.save_checkpoint(folder, tag="same")
    return str(error.value)


@pytest.mark.parametrize("validation", ["Fail", "WARN"])
def test_tags_that_differ_are_an_error_on_every_rank(tmp_path: Path, validation: str) -> None:
    for said in plumb.spawn(two_tags, 2, (str(tmp_path), validation)):
        assert "'tag0' on rank 0 and 'tag1' on rank 1" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "same"]


def micro(engine: Any, number: int) -> None:
    rank = plumb.world().rank
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))
    engine.backward(engine(x.to(engine.get_data_types()[0])))
    engine.step()


def in_the_middle(stage: int, half: str, folder: str) -> None:
    undisturbed, engine = (build(stage, half, gradient_accumulation_steps=3) for _ in range(2))
    for number in range(6):
        micro(undisturbed, number)
    for number in range(6):
        micro(engine, number)
        if number == 4:  # two backwards of the second step
            engine.save_checkpoint(folder)
            first = ending(engine)[:2]
    assert ending(engine) == ending(undisturbed)
    engine = build(stage, half, gradient_accumulation_steps=3)
    engine.load_checkpoint(folder)
    assert ending(engine)[:2] == first and engine.global_steps == 1 and engine.global_samples == 12
    for number in range(3, 6):
        micro(engine, number)
    assert ending(engine) == ending(undisturbed)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_checkpoint_in_the_middle_of_accumulation_is_of_the_step_before(tmp_path: Path, stage: int) -> None:
    plumb.spawn(in_the_middle, 2, (stage, ("f32", "bf16")[stage % 2], str(tmp_path)))


class Counting(torch.optim.Optimizer):
    """Of the user's own: beside a sum by element, a number and a tensor of one element that are of the parameter as a whole."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                state.setdefault("number", 0)
                state.setdefault("count", torch.zeros(1))
                state.setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                state["number"] += 1
                state["count"] += 1
                p.sub_(state["sum"] * 0.1 / (state["count"] + state["number"]))


def counting(stage: int, half: str, folder: str) -> None:
    def make() -> Any:
        torch.manual_seed(1)
        model = Net()
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
        return deepspeed.initialize(model=model, optimizer=Counting(model.parameters()), config={**config, **HALF[half]})[0]

    engine = make()
    train(engine, 3)
    engine.save_checkpoint(folder)
    train(engine, 5)
    other = make()
    other.load_checkpoint(folder)
    train(other, 5)
    assert ending(other)[1] == ending(engine)[1]


@pytest.mark.parametrize(("stage", "half"), [(1, "bf16"), (2, "f32"), (3, "bf16"), (0, "bf16"), (0, "f32")])
def test_an_optimizer_that_counts_in_tensors_of_one_element_goes_on(tmp_path: Path, stage: int, half: str) -> None:
    plumb.spawn(counting, 2, (stage, half, str(tmp_path)))


def test_parts_of_a_checkpoint(tmp_path: Path) -> None:
    first = ending(saved(tmp_path, client_state={"a": 1}))
    engine = build(2, "bf16")
    fresh_lr = engine.get_lr()
    engine.load_checkpoint(tmp_path, load_module_only=True)
    weights = engine.module_state_dict()
    assert {name: value.float().tolist() for name, value in weights.items()} == first[1]
    assert engine.global_steps == 0 and engine.lr_scheduler.last_batch_iteration == -1 and engine.get_lr() == fresh_lr
    engine = build(1, "bf16")
    assert engine.load_checkpoint(tmp_path, load_optimizer_states=False)[1] == {"a": 1}
    assert engine.global_steps == 3 and engine.lr_scheduler.last_batch_iteration == 2
    assert utils.safe_get_full_optimizer_state(engine.module.head.weight, "exp_avg") is None
    engine = build(2, "bf16")
    engine.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert engine.lr_scheduler.last_batch_iteration == -1 and ending(engine)[0] == first[0]
    seen: dict[str, Any] = {}
    engine.load_checkpoint(tmp_path, load_module_only=True, custom_load_fn=lambda src, dst: seen.update(src))
    assert torch.equal(seen["layers.2.weight"], weights["layers.2.weight"])
    with pytest.raises(plumb.Error, match="custom_load_fn"):
        engine.load_checkpoint(tmp_path, custom_load_fn=lambda src, dst: None)


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    saved(tmp_path)
    engine = build(2, "bf16", optimizer={"type": "SGD", "params": {"lr": 0.1}})
    before = ending(engine)
    with pytest.raises(plumb.Error, match="SGD"):
        engine.load_checkpoint(tmp_path)
    assert ending(engine) == before and engine.lr_scheduler.last_batch_iteration == -1
    engine = build(2, "f32")
    before = ending(engine)
    for strict in (True, False):
        with pytest.raises(plumb.Error, match="nothing was loaded"):
            engine.load_checkpoint(tmp_path, load_module_strict=strict)
    assert ending(engine) == before
    engine.module.layers[0].bias.data = torch.zeros(2)  # as a model of another size
    with pytest.raises(plumb.Error, match="size mismatch for 'layers.0.bias'"):
        engine.load_checkpoint(tmp_path, load_module_only=True, load_module_strict=False)
    engine = build(2, "f32")
    engine.module.layers[2].weight.register_hook(lambda gradient: engine.save_checkpoint(tmp_path))
    with pytest.raises(plumb.Error, match="inside of a backward"):
        engine.backward(engine(torch.ones(2, WIDTH)))
    engine = build(2, "f32")
    with pytest.raises(plumb.SaveError, match="object"):
        engine.save_checkpoint(tmp_path, client_state={"it": object()})
    assert (tmp_path / "latest").read_text() == "global_step3"  # the last one that is complete
    engine.destroy()
    with pytest.raises(plumb.Error, match="destroyed"):
        engine.save_checkpoint(tmp_path)


def test_a_schedule_or_a_shape_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    engine = build(1, "f32", scheduler={})
    train(engine, 1)
    engine.save_checkpoint(tmp_path)
    scheduled = build(1, "f32")
    train(scheduled, 3)
    before = ending(scheduled)
    with pytest.raises(plumb.Error, match="the checkpoint has no schedule, and this engine has one"):
        scheduled.load_checkpoint(tmp_path)
    assert ending(scheduled) == before and scheduled.lr_scheduler.last_batch_iteration == 2
    scheduled.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert ending(scheduled)[:3] == ending(engine)[:3] and scheduled.lr_scheduler.last_batch_iteration == 2

    other = build(1, "f32", scheduler={})
    other.module.ratio.data = torch.zeros(4)  # as a model of another size
    before = ending(other)
    with pytest.raises(plumb.Error, match="(?s)does not fit this engine, and nothing was loaded.*ratio"):
        other.load_checkpoint(tmp_path, load_module_strict=False)
    assert ending(other) == before


def test_without_frozen_parameters(tmp_path: Path) -> None:
    engine = saved(tmp_path, exclude_frozen_parameters=True)
    first = ending(engine)
    engine = build(2, "bf16")
    with torch.no_grad():
        engine.module.layers[1].weight.fill_(2.0)
    with pytest.raises(plumb.Error, match="missing +weight 'layers.1.weight'"):
        engine.load_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path, load_module_strict=False)
    assert float(engine.module.layers[1].weight.mean()) == 2.0 and ending(engine)[0] == first[0]
    assert "layers.1.weight" not in zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)


def test_whole_models_in_f32(tmp_path: Path) -> None:
    engine = saved(tmp_path)
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert state.keys() == engine.module.state_dict().keys() and state["head.weight"] is state["layers.0.weight"]
    for name, p in engine.module.named_parameters():
        expected = utils.safe_get_full_fp32_param(p) if p.requires_grad else p.float()
        assert state[name].dtype == torch.float32 and torch.equal(state[name], expected), name
    assert not any(n.startswith("layers.1") for n in zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, "global_step3", True))
    lazy = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, lazy_mode=True)
    assert torch.equal(lazy["layers.2.bias"].contiguous(), state["layers.2.bias"])
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out", safe_serialization=True)
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "bin")
    model = Net()
    assert zero_to_fp32.load_state_dict_from_zero_checkpoint(model, tmp_path) is model
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    loaded = torch.load(tmp_path / "bin" / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(loaded[name], value) for name, value in state.items())
    assert loaded["head.weight"] is loaded["layers.0.weight"]  # written once
    with pytest.raises(ValueError, match="latest"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "out")


def test_nothing_of_before_a_load_counts_after_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Values that were set and not yet stepped; how often a loss scale may still stay."""
    undisturbed = saved(tmp_path / "a")
    engine = build(2, "bf16")
    for p in engine.module.parameters():
        if p.requires_grad:  # as in the checkpoint, but for the last bits
            utils.safe_set_full_fp32_param(p, utils.safe_get_full_fp32_param(undisturbed.module.get_parameter(name_of(engine, p))) * (1 + 2**-12))
    engine.load_checkpoint(tmp_path / "a")
    for one in (engine, undisturbed):
        train(one, 5)
    assert ending(engine) == ending(undisturbed)

    engine = build(0, "f32", gradient_accumulation_steps=3, managed_gradient_accumulation=False)
    engine.save_checkpoint(tmp_path / "b")
    assert not caplog.records
    engine.backward(engine(torch.ones(2, WIDTH)))
    engine.save_checkpoint(tmp_path / "b")
    assert "after 1 backwards of a step that has not ended" in caplog.text
    engine.destroy()

    engine = build(1, "fp16")
    engine.backward(engine(torch.ones(2, WIDTH, dtype=torch.float16)) * float("inf"))
    engine.step()
    engine.save_checkpoint(tmp_path / "c")
    fresh = build(1, "fp16")
    fresh.load_checkpoint(tmp_path / "c")
    scaling = fresh.optimizer.loss_scale_config
    assert (scaling.cur_iter, scaling.last_overflow_iter, scaling.cur_hysteresis) == (1, 0, 1)


def name_of(engine: Any, parameter: torch.Tensor) -> str:
    return next(name for name, p in engine.module.named_parameters() if p is parameter)


def test_a_checkpoint_does_not_know_that_its_model_was_compiled(tmp_path: Path) -> None:
    """Names of frozen parameters and of weights with two names are those of the plain model."""
    torch.manual_seed(1)
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 1}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    compiled: Any = torch.compile(Net(), backend="eager")
    engine = deepspeed.initialize(model=compiled, config=config)[0]
    for words in ({}, {"exclude_frozen_parameters": True}):
        engine.save_checkpoint(tmp_path, **words)
        state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)
        assert state.keys() == {name for name in Net().state_dict() if not name.startswith("layers.1")}
        assert state["head.weight"] is state["layers.0.weight"]
    engine.module._orig_mod.layers[2].bias.data = torch.zeros(2)
    with pytest.raises(plumb.Error, match="size mismatch for 'layers.2.bias'"):
        engine.load_checkpoint(tmp_path, load_module_only=True, load_module_strict=False)


def consolidated(folder: str) -> Any:
    engine = build(3, "bf16", zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True})
    state = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    return None if state is None else sorted(state)


def test_a_whole_model_on_rank_0() -> None:
    first, second = plumb.spawn(consolidated, 2, ("",))
    assert second is None and "layers.0.weight" in first and "layers.1.weight" not in first
