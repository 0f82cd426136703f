"""DeepSpeed's checkpoints: the tags of several ranks, parts that are asked for, and what an engine counts after a load."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import plumb
import plumb.deepspeed as deepspeed
from plumb.deepspeed import checkpoint, utils
from deepspeeds import batch, config_of, engine_of, make


def trained(engine: Any, steps: int = 1) -> Any:
    dtype = engine.get_data_types()[0]
    for i in range(steps * engine.gradient_accumulation_steps()):
        engine.backward(engine(*batch(engine.global_rank, i, dtype)))
        engine.step()
    return engine


@pytest.mark.parametrize("tag", ["..", "../a", "a/../../b", "a/..", "/a", ""])
def test_a_tag_stays_inside_of_its_folder(tag: str, tmp_path: Path) -> None:
    engine = engine_of()
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(plumb.Error, match="expected the name of a folder"):
            call(tmp_path / "all", tag)
    assert not list(tmp_path.iterdir())
    assert checkpoint._checked("a/b..c") == "a/b..c"


@pytest.mark.parametrize("weights_alone", [False, True])
def test_a_load_begins_a_step_anew(weights_alone: bool, tmp_path: Path) -> None:
    engine = trained(engine_of(gas=2, gradient_clipping=0.0))
    engine.save_checkpoint(tmp_path)
    for i in (5, 6):
        with engine.no_sync():
            engine.backward(engine(*batch(0, i)))
        engine.step()
    assert engine.was_step_applied() and engine._held
    engine.load_checkpoint(tmp_path, load_module_only=weights_alone)
    assert not engine.was_step_applied() and (engine._held, engine._backwards) == (False, 0)
    known = None if weights_alone else 1
    assert engine.loaded_checkpoint_mp_world_size == engine.loaded_checkpoint_dp_world_size == known
    if not weights_alone:
        engine.backward(engine(*batch(0, 7)))
        engine.step()
        engine.zero_grad()  # of a step that is given up in its middle
        engine.load_checkpoint(tmp_path)
        assert not engine.is_gradient_accumulation_boundary() and engine.micro_steps > 0


@pytest.mark.parametrize("how", [{"load_module_only": True}, {"load_optimizer_states": False}])
def test_weights_that_are_missing_or_extra_are_an_error_unless_they_may_be(how: dict[str, Any], tmp_path: Path) -> None:
    trained(engine_of()).save_checkpoint(tmp_path)
    model = make()
    model.register_parameter("late", torch.nn.Parameter(torch.full((3,), 7.0)))
    engine = deepspeed.initialize(model=model, config=config_of())[0]
    before = model.head.weight.detach().clone()
    with pytest.raises(plumb.Error, match="'late'"):
        engine.load_checkpoint(tmp_path, **how)
    assert torch.equal(model.head.weight, before)
    engine.load_checkpoint(tmp_path, load_module_strict=False, **how)
    assert not torch.equal(model.head.weight, before) and float(model.late[0]) == 7.0  # type: ignore[index]


def test_the_counters_of_skipped_steps_and_samples_come_back(tmp_path: Path) -> None:
    engine = engine_of(stage=1, fp16={"enabled": True, "initial_scale_power": 8})
    for value in (float("inf"), 0.5, 0.5):
        for p in engine.module.parameters():
            p.grad = torch.full_like(p, value)
        engine.step()
    engine.save_checkpoint(tmp_path)
    fresh = engine_of(stage=1, fp16={"enabled": True})
    fresh.load_checkpoint(tmp_path)
    for name in ("global_steps", "skipped_steps", "global_samples"):
        assert getattr(fresh, name) == getattr(engine, name) > 0
    assert fresh.optimizer.cur_scale == engine.optimizer.cur_scale == 256 and fresh.steps_taken()


def ranks_agree(folder: str) -> dict[str, Any]:
    rank = plumb.world().rank
    engine = trained(engine_of(stage=1, optimizer={"type": "Lamb", "params": {"lr": 0.01}}, bf16={"enabled": True}))
    states = [utils.safe_get_full_optimizer_state(p, "exp_avg") for p in engine.module.parameters()]
    engine.save_checkpoint(folder, "first")
    engine.save_checkpoint(folder, "second", save_latest=False)
    said: dict[str, Any] = {}
    path, _ = engine.load_checkpoint(folder, ["second", "first"][rank])
    said["rank 0's tag"] = os.path.basename(os.path.dirname(path))
    original = checkpoint.write_text
    if rank == 0:

        def full(*_: Any) -> None:
            raise OSError("no room")

        checkpoint.write_text = full
    try:
        engine.save_checkpoint(folder, "third")
    except plumb.SaveError as error:
        said["no room"] = str(error)
    checkpoint.write_text = original
    said["latest"] = Path(folder, "latest").read_text()
    plumb.world().barrier()
    if rank == 0:
        Path(folder, "latest").write_text("../elsewhere")
    try:
        engine.load_checkpoint(folder)
    except plumb.Error as error:
        said["elsewhere"] = str(error)
    fresh = engine_of(stage=1, optimizer={"type": "Lamb", "params": {"lr": 0.01}}, bf16={"enabled": True})
    fresh.load_checkpoint(folder, "first")
    for p, expected in zip(fresh.module.parameters(), states, strict=True):  # before its first step: what was loaded
        found = utils.safe_get_full_optimizer_state(p, "exp_avg")
        assert (found is None) == (expected is None) and (found is None or (found.dtype == torch.float32 and torch.equal(found, expected)))
    return said


def test_ranks_agree_on_tags_and_on_what_could_not_be_written(tmp_path: Path) -> None:
    for said in plumb.spawn(ranks_agree, 2, (str(tmp_path),)):
        assert said["rank 0's tag"] == "second" and said["latest"] == "first"
        assert "is complete, and 'latest' beside it could not be written: no room" in said["no room"]
        assert "expected the name of a folder" in said["elsewhere"]
