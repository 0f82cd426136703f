"""What stands beside the weights in checkpoints of others: counters, steps, what is frozen, which of several is meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import plumb
import plumb.deepspeed as deepspeed
from plumb.deepspeed.utils import zero_to_fp32
from plumb.formats import Contents, unpickle
from plumb.formats.command import main, read, write

safetensors = pytest.importorskip("safetensors.torch")
REAL = Path(__file__).parent / "deepspeed_folders"


def values(contents: Contents) -> dict[tuple[str, str, str], torch.Tensor]:
    return {(entry.kind, entry.name, entry.key): entry.checked() for entry in contents.entries}


def test_universal_folders_of_deepspeeds_own_tool(tmp_path: Path) -> None:
    """It writes what is frozen as all the rest, in f32, and the number of steps once; which half the run has, its config says."""
    first = read("deepspeed", str(REAL / "stage2-bf16"))
    before = values(first)
    write("deepspeed", str(tmp_path), first)
    folder = tmp_path / "global_step3"
    steps = list(folder.glob("zero/*/step.pt"))
    assert steps and first.frozen
    for file in steps:
        file.unlink()
    for name in first.frozen:
        (folder / "zero" / name).mkdir()
        torch.save({"param": before["weight", name, ""].float()}, folder / "zero" / name / "fp32.pt")
    states = folder / "mp_rank_00_model_states.pt"
    torch.save({**unpickle.load(str(states)), "ds_config": {"bf16": {"enabled": True}}}, tmp_path / "new")  # not over what is being read
    (tmp_path / "new").rename(states)
    found = read("deepspeed", str(tmp_path))
    assert sorted(found.frozen) == sorted(first.frozen)
    after = values(found)
    assert after.keys() == before.keys()
    for what, value in before.items():
        assert after[what].dtype == value.dtype and torch.equal(after[what], value), what


@pytest.mark.parametrize("target", ["deepspeed", "plumb"])
def test_steps_that_were_skipped_are_still_counted(target: str, tmp_path: Path) -> None:
    contents = read("deepspeed", str(REAL / "stage2-bf16"))
    contents.counters["skipped_steps"] = 2
    write(target, str(tmp_path), contents, deepspeed=True)
    again = read(target, str(tmp_path))
    assert again.counters["skipped_steps"] == 2 and again.counters == {**again.counters, "global_steps": 3, "skipped_steps": 2}
    assert again.samples == contents.samples > 0


def test_a_run_of_stage_3_finds_a_file_for_each_rank(tmp_path: Path) -> None:
    assert main(["--from", "deepspeed", "--to", "deepspeed", "--ranks", "3", str(REAL / "stage3-bf16"), str(tmp_path)]) == 0
    found = sorted(one.name for one in (tmp_path / "global_step3").glob("zero_pp_rank_*"))
    assert found == [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(3)]


def test_an_index_names_files_of_its_own_folder_alone(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    safetensors.save_file({"weight": torch.ones(2)}, tmp_path / "other.safetensors")
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": "../other.safetensors"}}))
    with pytest.raises(plumb.Error, match="names files outside of its folder"):
        read("safetensors", str(tmp_path / "model"))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 2**24 + 1  # which f32 does not hold
        return self.layer(x).float().sum()


def test_the_tag_that_is_asked_for_is_the_one_that_becomes_a_model(tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = {"train_batch_size": 2, "bf16": {"enabled": True}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = deepspeed.initialize(model=Counting(), config=config)[0]
    ends: list[dict[str, Any]] = []
    for step in (1, 2):
        engine.backward(engine(torch.ones(2, 2, dtype=torch.bfloat16)))
        engine.step()
        engine.save_checkpoint(tmp_path, tag=step)
        ends.append({name: value.clone() for name, value in engine.module.state_dict().items()})
    for tag, end in ((1, ends[0]), (2, ends[1]), (None, ends[1])):
        words: dict[str, Any] = {} if tag is None else {"tag": str(tag)}
        found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, **words)
        model = zero_to_fp32.load_state_dict_from_zero_checkpoint(Counting(), tmp_path, **words)
        written = []
        for safe, name in ((True, "model.safetensors"), (False, "pytorch_model.bin")):
            zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out", safe_serialization=safe, **words)
            written.append(safetensors.load_file(tmp_path / "out" / name) if safe else torch.load(tmp_path / "out" / name))
        for state in (found, model.state_dict(), *written):
            assert state["seen"].dtype == torch.int64 and state["layer.weight"].dtype == torch.float32
            assert all(torch.equal(state[name].to(value.dtype), value) for name, value in end.items()), tag
