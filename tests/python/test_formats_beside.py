"""What stands beside the weights in checkpoints of others: counters, steps, what is frozen, which of several is meant."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import plumb
import plumb.deepspeed as deepspeed
from plumb.deepspeed import checkpoint
from plumb.deepspeed.utils import zero_to_fp32
from plumb.formats import Contents, Entry, files, unpickle, zero
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


def test_numbers_of_a_parameter_have_no_dimensions_and_state_counts_as_stepped(tmp_path: Path) -> None:
    for value, expected in ((3, 3.0), (2.5, 2.5), (torch.tensor([4]), 4.0), (torch.tensor(5.0), 5.0), (torch.ones(1, 1), 1.0)):
        found = zero._as_step(value)
        assert found.shape == () and float(found) == expected
    assert zero._as_step(torch.ones(2)).shape == (2,)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    assert main(["--from", "dcp", "--to", "plumb", "--optimizer", "SGD", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    fresh = nn.Linear(2, 2)
    momentum = torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)
    with plumb.Engine(fresh, momentum) as engine:
        engine.load(tmp_path / "ours")  # SGD keeps no number of steps
        for mine, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
            assert torch.equal(momentum.state[mine]["momentum_buffer"], optimizer.state[theirs]["momentum_buffer"])


def test_only_what_deepspeed_kept_becomes_its_record(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with plumb.Engine(model, torch.optim.AdamW(model.parameters())) as engine:
        engine.save(tmp_path / "a")
    for words in ([], ["--bare"]):
        assert main(["--from", "plumb", "--to", "plumb", *words, str(tmp_path / "a"), str(tmp_path / "b")]) == 0
        assert checkpoint.record_of(plumb._C.SavedCheckpoint(str(tmp_path / "b"))) is None
    assert main(["--from", "deepspeed", "--to", "plumb", str(REAL / "stage2-bf16"), str(tmp_path / "c")]) == 0
    record = checkpoint.record_of(plumb._C.SavedCheckpoint(str(tmp_path / "c")))
    assert record is not None and record["counters"]["global_steps"] == 3
    kept = read("plumb", str(tmp_path / "c"))
    first = read("deepspeed", str(REAL / "stage2-bf16"))
    assert (kept.counters, kept.frozen, kept.aliases, kept.schedule, kept.user) == (first.counters, first.frozen, first.aliases, first.schedule, first.user)


def test_masters_become_the_weights_where_that_is_asked_for(tmp_path: Path) -> None:
    first = values(read("deepspeed", str(REAL / "stage2-bf16")))
    assert main(["--from", "deepspeed", "--to", "safetensors", "--masters", str(REAL / "stage2-bf16"), str(tmp_path / "wide")]) == 0
    assert main(["--from", "deepspeed", "--to", "safetensors", str(REAL / "stage2-bf16"), str(tmp_path / "as it is")]) == 0
    wide, plain = (safetensors.load_file(tmp_path / name / "model.safetensors") for name in ("wide", "as it is"))
    masters = {name: value for (kind, name, key), value in first.items() if key == "master"}
    assert masters
    for (kind, name, _), value in first.items():
        if kind == "weight":
            assert torch.equal(plain[name], value) and torch.equal(wide[name], masters.get(name, value)), name


def test_files_of_some_ranks_alone_are_told(tmp_path: Path) -> None:
    for folder in ("stage2-bf16", "stage3-bf16"):
        shutil.copytree(REAL / folder, tmp_path / folder)
        states = sorted((tmp_path / folder).rglob("*optim_states.pt"))
        assert len(states) > 1
        states[-1].unlink()
        with pytest.raises(plumb.Error, match=f"{len(states) - 1} files of optimizer states, and they are of {len(states)} ranks: some are missing"):
            read("deepspeed", str(tmp_path / folder))


def test_a_file_of_tensors_begins_where_memory_is_aligned_and_is_whole_or_not_there(tmp_path: Path) -> None:
    for names in ("a", "ab", "abcdefg"):
        entry = Entry("weight", names, "", torch.float32, (3,), lambda: torch.arange(3.0))
        files.write_tensors(str(tmp_path / "one.safetensors"), [entry])
        raw = (tmp_path / "one.safetensors").read_bytes()
        assert int.from_bytes(raw[:8], "little") % 8 == 0 and torch.equal(safetensors.load_file(tmp_path / "one.safetensors")[names], torch.arange(3.0))
    for wrong in (Entry("weight", "b", "", torch.float64, (3,), lambda: torch.arange(3.0)), Entry("weight", "b", "", torch.float32, (1, 3), lambda: torch.arange(3.0))):
        with pytest.raises(plumb.Error, match="it was announced as"):
            files.write_tensors(str(tmp_path / "two.safetensors"), [entry, wrong])
    assert [one.name for one in tmp_path.iterdir()] == ["one.safetensors"], "nothing unfinished is left"
