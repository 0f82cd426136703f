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
from plumb.formats import Contents, Entry, Optimizer, files, plain, unpickle, zero
from plumb.formats import dcp as folders
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
        with pytest.raises(plumb.Error, match="it was announced as"):
            files.write_tensors(str(tmp_path / "one.safetensors"), [wrong])
    assert [one.name for one in tmp_path.iterdir()] == ["one.safetensors"], "nothing unfinished is left"
    assert (tmp_path / "one.safetensors").read_bytes() == raw, "and what was there is"


def parted(values: list[torch.Tensor], stage: int, rank: int) -> torch.Tensor:
    """What one of two ranks has of a group: of each parameter in stage 3, of all of them before."""
    flats = [value.reshape(-1) for value in values] if stage == 3 else [torch.cat([value.reshape(-1) for value in values])]
    shares = [-(-flat.numel() // 2) for flat in flats]
    filled = [torch.cat([flat, torch.full((2 * share - flat.numel(),), 99.0)]) for flat, share in zip(flats, shares, strict=True)]
    return torch.cat([flat[rank * share : (rank + 1) * share] for flat, share in zip(filled, shares, strict=True)])


@pytest.mark.parametrize("stage", [1, 3])
def test_groups_of_several_parts_and_steps_that_are_plain_numbers(stage: int, tmp_path: Path) -> None:
    """Stage 3 cuts large groups of an optimizer into several; DeepSpeed's own optimizers count steps as Python does."""
    shapes = [{"a": (3, 2), "b": (5,)}, {"c": (4,), "s": ()}, {"d": (2, 1)}]
    draw = torch.Generator().manual_seed(3)
    weights, moments = ([{n: torch.randn(s, generator=draw) for n, s in group.items()} for group in shapes] for _ in range(2))
    groups = [{"params": [0, 1], "lr": 0.1}, {"params": [2], "lr": 0.2}] if stage == 3 else [{"params": [g], "lr": 0.1 * g} for g in range(3)]
    where = tmp_path / "global_step7"
    where.mkdir()
    model = {
        "module": {} if stage == 3 else {n: w for group in weights for n, w in group.items()}, "buffer_names": [], "global_steps": 7,
        "param_shapes": [{n: torch.Size(s) for n, s in group.items()} for group in shapes],
    }  # fmt: skip
    for rank in range(2):
        torch.save(model, where / (f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"))
        base = {"state": {g: {"step": 7, "exp_avg": parted(list(one.values()), stage, rank)} for g, one in enumerate(moments)}, "param_groups": groups}
        flats = [parted(list(one.values()), stage, rank) for one in weights]
        told = {"fp32_flat_groups": flats, "optimizer_state_dict": base} if stage == 3 else {"single_partition_of_fp32_groups": flats, "base_optimizer_state": base}
        torch.save({"optimizer_state_dict": {"zero_stage": stage, "partition_count": 2, **told}}, where / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    contents = read("deepspeed", str(where))
    found = values(contents)
    for group, other in zip(weights, moments, strict=True):
        for name, weight in group.items():
            assert torch.equal(found.pop(("weight", name, "")), weight) and torch.equal(found.pop(("state", name, "exp_avg")), other[name])
            assert float(found.pop(("value", name, "step"))) == 7.0
    assert not found, "no masters of what is f32"
    assert contents.optimizer is not None
    members = [["a", "b", "c", "s"], ["d"]] if stage == 3 else [["a", "b"], ["c", "s"], ["d"]]
    assert [one["params"] for one in contents.optimizer.groups] == members


def test_what_stage_0_does_not_name_is_taken_where_it_can_mean_one_thing() -> None:
    """A count beside a parameter that has no dimensions either; two groups say nothing of who is in which."""
    scale, moment = torch.tensor(1.5), torch.tensor(0.25)
    state = {0: {"step": torch.tensor(3.0), "exp_avg": moment}, 1: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}}
    module = {"scale": scale, "bias": torch.zeros(2)}
    for groups, taken in (([{"params": [0, 1], "lr": 0.1}], True), ([{"params": [0], "lr": 0.1}, {"params": [1], "lr": 0.2}], False)):
        contents = Contents()
        zero._read_stage0({"module": module, "optimizer": {"param_groups": groups, "state": state}}, contents, "Adam", set())
        kinds = {(entry.kind, entry.name, entry.key) for entry in contents.of("state", "value")}
        both = {(kind, name, key) for name in module for kind, key in (("value", "step"), ("state", "exp_avg"))}
        assert kinds == (both if taken else set()) and (contents.optimizer is not None) == taken
        assert bool(contents.notes) != taken


def test_of_two_tags_the_one_of_a_run_is_read_before_the_universal_one(tmp_path: Path) -> None:
    contents = read("deepspeed", str(REAL / "stage1-fp32"))
    shutil.copytree(REAL / "stage1-fp32", tmp_path / "run")
    contents.step, contents.counters["global_steps"] = 9, 9
    write("deepspeed", str(tmp_path / "run"), contents)
    assert read("deepspeed", str(tmp_path / "run")).step == 3
    (tmp_path / "run" / "latest").unlink()
    assert read("deepspeed", str(tmp_path / "run")).step == 9


def test_state_of_a_parameter_without_dimensions_is_told_from_its_count(tmp_path: Path) -> None:
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.Adam(model.parameters())
    (model.scale * 3).backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    found = {(entry.kind, entry.key) for entry in read("dcp", str(tmp_path / "theirs")).of("state", "value")}
    assert found == {("state", "exp_avg"), ("state", "exp_avg_sq"), ("value", "step")}
    dcp.save({"optim": state}, checkpoint_id=tmp_path / "alone", no_dist=True)
    with pytest.raises(plumb.Error, match="there is optimizer state '.*' of 'scale', and no such weight"):
        read("dcp", str(tmp_path / "alone"))
    for path, meaning in (
        (("run", "buffers", "state.mean"), ("buffer", "state.mean", "")), (("model", "state.mean"), ("weight", "state.mean", "")),
        (("buffers", "seen"), ("buffer", "seen", "")), (("optim", "state", "a.b", "exp_avg"), ("state", "a.b", "exp_avg")),
    ):  # fmt: skip
        assert folders._meaning(path) == meaning


class Running(torch.optim.SGD):
    """Calls what it keeps as Plumb's own optimizers call theirs."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("mean", torch.zeros_like(p)).add_(p.grad)


def test_words_of_the_users_optimizer_stay_and_what_has_no_place_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 2)
    with plumb.Engine(model, Running(model.parameters(), lr=0.1)) as engine:
        model(torch.ones(1, 2)).sum().backward()
        engine.step()
        engine.save(tmp_path / "a")
    assert {entry.key for entry in read("plumb", str(tmp_path / "a")).of("state")} == {"mean"}
    with plumb.Engine(model, plumb.AdamW(lr=0.1), loss_scale=True, groups=[{"match": "bias", "lr": 0.2}]) as engine:
        engine.save(tmp_path / "b")
    for target in ("plumb", "dcp"):
        assert main(["--from", "plumb", "--to", target, str(tmp_path / "b"), str(tmp_path / target)]) == 0
        said = capsys.readouterr().err
        for what in ("the loss scale", "groups with their own rates, which Plumb's optimizers get from the program", "the states of random generators"):
            assert f"  not taken along: {what}" in said
    assert main(["--from", "plumb", "--to", "dcp", "--alias", "head=nobody", str(tmp_path / "a"), str(tmp_path / "c")]) == 1
    assert "--alias head=nobody: there is no weight 'nobody'" in capsys.readouterr().err


def entry_of(kind: str, name: str, key: str, value: torch.Tensor) -> Entry:
    return Entry(kind, name, key, value.dtype, tuple(value.shape), lambda: value)


def test_what_no_folder_can_hold_is_refused(tmp_path: Path) -> None:
    weight = entry_of("weight", "w", "", torch.ones(2, 3))
    for other, has in ((torch.ones(3, 2), r"\[3, 2\], and the weight \[2, 3\]"), (torch.ones(6), r"\[6\], and the weight \[2, 3\]")):
        with pytest.raises(plumb.Error, match=f"'exp_avg' of 'w' has shape {has}"):
            write("plumb", str(tmp_path / "a"), Contents(entries=[weight, entry_of("state", "w", "exp_avg", other)]))
    with pytest.raises(plumb.Error, match="'exp_avg' of 'v' has shape .*, and the weight is not there"):
        write("plumb", str(tmp_path / "a"), Contents(entries=[weight, entry_of("state", "v", "exp_avg", torch.ones(2))]))
    named = Contents(entries=[entry_of("weight", "a//b", "", torch.ones(2))], optimizer=Optimizer("SGD", [{"params": ["a//b"], "lr": 0.1}]))
    with pytest.raises(plumb.Error, match="'a//b' cannot be the name of a folder"):
        write("deepspeed", str(tmp_path / "b"), named)


def test_every_dtype_of_safetensors_is_that_of_its_name_and_an_index_counts_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bits = torch.arange(16, dtype=torch.uint8)
    values = {str(dtype): (bits < 8 if dtype == torch.bool else bits.clone().view(dtype)) for dtype in files.DTYPES.values()}
    files.write_tensors(str(tmp_path / "ours.safetensors"), [entry_of("weight", name, "", value) for name, value in values.items()])
    safetensors.save_file(values, tmp_path / "theirs.safetensors")
    ours = safetensors.load_file(tmp_path / "ours.safetensors")
    theirs = {entry.name: entry.checked() for entry in read("safetensors", str(tmp_path / "theirs.safetensors")).entries}
    for name, value in values.items():
        for found in (ours[name], theirs[name]):
            assert found.dtype == value.dtype and torch.equal(found.view(torch.uint8), value.view(torch.uint8)), name
    monkeypatch.setattr(plain, "SHARD_BYTES", 100)
    plain.write(str(tmp_path / "cut"), Contents(entries=[entry_of("weight", f"w{i}", "", torch.ones(n)) for i, n in enumerate((20, 10, 1))]))
    index = json.loads((tmp_path / "cut" / plain.INDEX).read_text())
    assert index["metadata"]["total_size"] == 4 * 31 and sorted(index["weight_map"]) == ["w0", "w1", "w2"]
    assert len(set(index["weight_map"].values())) == 2
