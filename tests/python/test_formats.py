"""Checkpoints of others: real folders of DeepSpeed's stages, torch.distributed.checkpoint, safetensors; both ways, every bit."""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import plumb
import plumb.deepspeed as deepspeed
from plumb.deepspeed import utils
from plumb.deepspeed.utils import zero_to_fp32
from plumb.formats import Contents, native, unpickle, zero
from plumb.formats import dcp as folders
from plumb.formats.command import main, read, write

sys.path.insert(0, str(Path(__file__).parent / "deepspeed_folders"))
from make import Net, groups  # noqa: E402

safetensors = pytest.importorskip("safetensors.torch")
REAL = Path(__file__).parent / "deepspeed_folders"
FOLDERS = ["stage1-fp32", "stage2-bf16", "stage3-bf16", "stage3-fp32"]


def values(contents: Contents) -> dict[tuple[str, str, str], torch.Tensor]:
    return {(entry.kind, entry.name, entry.key): entry.checked() for entry in contents.entries}


def same(ones: dict[Any, torch.Tensor], others: dict[Any, torch.Tensor]) -> bool:
    assert ones.keys() == others.keys()
    return all(value.dtype == others[key].dtype and torch.equal(value, others[key]) for key, value in ones.items())


# ---- DeepSpeed's


@pytest.mark.parametrize("folder", FOLDERS)
def test_reads_what_deepspeeds_own_tools_find(folder: str) -> None:
    expected = safetensors.load_file(REAL / folder / "expected.safetensors")
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(REAL / folder)
    state = values(zero.read(str(REAL / folder)))
    for name, value in expected.items():
        kind, _, parameter = name.partition("/")
        if kind == "weights":
            assert torch.equal(found[parameter].reshape(-1), value.reshape(-1)), name
        else:
            assert torch.equal(state["state", parameter, kind].reshape(-1), value), name
    assert sum(name.startswith("exp_avg/") for name in expected) in (0, 8)
    assert found.keys() == Net().state_dict().keys()  # with both names of the tied weight, and what is frozen


def converted(folder: str, target: Path) -> str:
    assert main(["--from", "deepspeed", "--to", "plumb", str(REAL / folder), str(target / "global_step3")]) == 0
    (target / "latest").write_text("global_step3")
    return str(target)


def goes_on(folder: str, half: bool, stage: int) -> tuple[Any, ...]:
    """Plumb goes on from it: what it found, and what a step later."""
    model = Net()
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(groups(model), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "bf16": {"enabled": half},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    engine = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)[0]
    path, client = engine.load_checkpoint(folder)
    assert client == {"epoch": 3, "best": 1.5} and engine.global_steps == 3 and schedule.last_epoch == 3
    assert engine.get_lr() == [0.005, 0.005] and [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    found = {name: utils.safe_get_full_fp32_param(p) for name, p in trained}
    moments = {name: utils.safe_get_full_optimizer_state(p, "exp_avg_sq") for name, p in trained}
    engine.backward(engine(torch.arange(4)))
    engine.step()
    after = {name: utils.safe_get_full_fp32_param(p).tolist() for name, p in trained}
    return {name: value.tolist() for name, value in found.items()}, {n: v.tolist() for n, v in moments.items()}, after


@pytest.mark.parametrize("folder", ["stage2-bf16", "stage3-fp32"])
def test_goes_on_from_a_folder_of_deepspeeds(folder: str, tmp_path: Path) -> None:
    target = converted(folder, tmp_path)
    expected = values(zero.read(str(REAL / folder)))
    half = folder.endswith("bf16")
    (one,) = plumb.spawn(goes_on, 1, (target, half, 0))
    for other in plumb.spawn(goes_on, 2, (target, half, 3)):
        assert other == one
    for name, value in one[0].items():
        key = ("state", name, "master") if half else ("weight", name, "")
        assert torch.tensor(value).equal(expected[key]) and torch.tensor(one[1][name]).equal(expected["state", name, "exp_avg_sq"])


def one_process(steps: int) -> tuple[Net, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.arange(step, step + 4)).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_way_round_keeps_every_bit(folder: str, tmp_path: Path) -> None:
    """deepspeed → plumb → dcp → plumb → deepspeed (universal) → plumb → safetensors."""
    first = read("deepspeed", str(REAL / folder))
    one = values(first)
    write("plumb", str(tmp_path / "a"), first, deepspeed=True)
    write("dcp", str(tmp_path / "b"), read("plumb", str(tmp_path / "a")))
    back = read("dcp", str(tmp_path / "b"))
    # A folder of DCP does not tell buffers from weights, and has every name of a shared one.
    plain = {(("weight", name, "") if kind == "buffer" else (kind, name, key)): value for (kind, name, key), value in one.items()}
    assert same(values(back), {**plain, ("weight", "back.weight", ""): one["weight", "emb.weight", ""]})
    write("deepspeed", str(tmp_path / "c"), read("plumb", str(tmp_path / "a")), ranks=2)
    universal = read("deepspeed", str(tmp_path / "c" / "global_step3"))
    assert (tmp_path / "c" / "latest_universal").read_text() == "global_step3"
    half = {entry.name for entry in first.of("state") if entry.key == "master"}
    if half:  # its weights are the masters: what is half precision follows from the run that loads it
        for name in half:
            one["weight", name, ""] = one.pop(("state", name, "master"))
    assert same(values(universal), one)
    assert universal.user == {"epoch": 3, "best": 1.5} and universal.schedule == first.schedule
    assert [group["params"] for group in universal.optimizer.groups] == [group["params"] for group in first.optimizer.groups]  # type: ignore[union-attr]
    assert main(["--from", "plumb", "--to", "safetensors", "--masters", str(tmp_path / "a"), str(tmp_path / "m.safetensors")]) == 0
    weights = safetensors.load_file(tmp_path / "m.safetensors")
    assert all(torch.equal(weights[name], value) for (kind, name, _), value in one.items() if kind in ("weight", "buffer"))


# ---- torch.distributed.checkpoint


def test_what_get_state_dict_saves_comes_here_and_goes_back(tmp_path: Path) -> None:
    model, optimizer = one_process(3)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    assert main(["--from", "dcp", "--to", "plumb", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    again, other = one_process(0)
    engine = plumb.Engine(again, other)
    info = engine.load(tmp_path / "ours", strict=False)  # buffers stand among the weights there
    assert {one.what for one in info.mismatches} <= {
        *(f"{kind} '{name}'" for kind in ("weight", "buffer") for name in ("seen", "ratio", "back.weight"))
    }
    assert engine.steps == 3 and other.param_groups[1]["weight_decay"] == 0.0
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
        if one.requires_grad:
            assert all(torch.equal(optimizer.state[one][key], other.state[two][key]) for key in ("exp_avg", "exp_avg_sq", "step"))
    engine.close()

    engine = plumb.Engine(*(built := one_process(3)))
    path = engine.save(tmp_path / "mine")
    engine.close()
    assert main(["--from", "plumb", "--to", "dcp", "--alias", "back.weight=emb.weight", path, str(tmp_path / "back")]) == 0
    fresh, other = one_process(0)
    weights, state = get_state_dict(fresh, other)
    dcp.load({"model": weights, "optim": state}, checkpoint_id=tmp_path / "back", no_dist=True)
    set_state_dict(fresh, other, model_state_dict=weights, optim_state_dict=state)
    for one, two in zip(built[0].parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one, two)
        if one.requires_grad:
            assert all(torch.equal(built[1].state[one][key], other.state[two][key]) for key in ("exp_avg", "exp_avg_sq", "step"))


class Recurrent(torch.nn.Module):
    """Has parts of the names that folders of optimizers use."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.model = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False)
        self.optim = torch.nn.ModuleDict({"state": torch.nn.Linear(2, 1)})


@pytest.mark.parametrize("flat", [False, True])
def test_a_part_of_a_model_may_be_called_as_a_part_of_a_folder(flat: bool, tmp_path: Path) -> None:
    model = Recurrent()
    optimizer = torch.optim.AdamW(model.parameters())
    sum(p.sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path, no_dist=True)
    found = values(read("dcp", str(tmp_path)))
    for name, parameter in model.named_parameters():
        assert torch.equal(found.pop(("weight", name, "")), parameter)
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(found.pop(("value" if key == "step" else "state", name, key)), value)
    assert not found


# ---- transformers


def test_transformers_loads_what_is_written_and_the_other_way_round(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=40, n_positions=8)
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(config)
    engine = plumb.Engine(model, plumb.AdamW(lr=1e-2))
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    engine.step()
    engine.save(tmp_path / "run")
    config.save_pretrained(tmp_path / "hub")
    assert main(["--from", "plumb", "--to", "safetensors", str(tmp_path / "run"), str(tmp_path / "hub")]) == 0
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hub")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())
    loaded.save_pretrained(tmp_path / "theirs")
    assert main(["--from", "safetensors", "--to", "plumb", str(tmp_path / "theirs"), str(tmp_path / "again")]) == 0
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.transformer.wte.weight.zero_()
    engine.load_weights(tmp_path / "again", strict=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    engine.close()


# ---- what is not to be trusted


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch evil",)


def test_nothing_of_a_pickle_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"module": {}, "it": Evil(), "shape": torch.Size([2]), "t": torch.ones(2)}, "a.pt")
    found = unpickle.load("a.pt")
    assert isinstance(found["it"], unpickle.Hollow) and found["shape"] == (2,) and found["t"].tolist() == [1.0, 1.0]
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(plumb.Error, match="no description of a folder"):
        folders.read("dcp")
    assert not (tmp_path / "evil").exists()


def test_damaged_folders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(change: Any, message: str) -> None:
        target = tmp_path / "bad"
        shutil.rmtree(target, ignore_errors=True)
        shutil.rmtree(tmp_path / "new", ignore_errors=True)
        shutil.copytree(REAL / "stage2-bf16", target)
        change(target / "global_step3")
        assert main(["--from", "deepspeed", "--to", "plumb", str(target), str(tmp_path / "new")]) == 1
        assert message in capsys.readouterr().err
        assert not list((tmp_path / "new").glob("save-*")) if (tmp_path / "new").exists() else True

    first, second = (f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
    model = "mp_rank_00_model_states.pt"
    broken(lambda f: (f / second).unlink(), "some are missing")
    broken(lambda f: (f / first).write_bytes((f / first).read_bytes()[:-500]), "no file of torch.save")
    broken(lambda f: (f / first).write_bytes(b"nothing"), "no file of torch.save")
    broken(lambda f: (f / model).unlink(), "no checkpoint of DeepSpeed's")
    broken(lambda f: (f / model).rename(f / "mp_rank_01_model_states.pt"), "parallelism")
    broken(lambda f: torch.save({"module": {}}, f / model), "says nothing of")
    broken(lambda f: (f.parent / "latest").write_text("../../.."), "expected the name of a folder")
    broken(lambda f: (f.parent / "latest").write_text("missing"), "is no folder")
    (tmp_path / "junk.safetensors").write_bytes(b"nothing")
    for source in ("plumb", "dcp", "safetensors", "deepspeed"):
        for path in ("nowhere", "junk.safetensors"):
            assert main(["--from", source, "--to", "plumb", str(tmp_path / path), str(tmp_path / "new")]) == 1
            said = capsys.readouterr().err
            assert said.startswith("plumb: ") and said.count("plumb: ") == 1 and said.count("\n") == 1
    for target in ("plumb", "dcp", "safetensors", "deepspeed"):
        words = ["--from", "deepspeed", "--to", target, str(REAL / "stage2-bf16"), str(tmp_path / "junk.safetensors" / "new")]
        assert main(words) == 1 and capsys.readouterr().err.count("\n") == 1


def test_reads_the_universal_folder_that_it_wrote(tmp_path: Path) -> None:
    new = str(tmp_path / "new")
    assert main(["--from", "deepspeed", "--to", "deepspeed", str(REAL / "stage2-bf16"), new]) == 0
    assert main(["--from", "deepspeed", "--to", "plumb", new, str(tmp_path / "ours")]) == 0


def test_reads_the_checkpoints_of_engines_with_plumbs_own_optimizers(tmp_path: Path) -> None:
    model = Net()
    engine = plumb.Engine(model, plumb.AdamW(lr=1e-2))
    for _ in range(2):
        model(torch.arange(4)).backward()
        engine.step()
        engine.zero_grad()
    engine.save(tmp_path)
    contents = native.read(str(tmp_path))
    found = values(contents)
    assert {key for kind, _, key in found if kind == "state"} == {"exp_avg", "exp_avg_sq"}
    assert float(found["value", "one.bias", "step"]) == 2.0 and contents.optimizer is not None and contents.optimizer.kind == "AdamW"
    engine.close()


class Counts:
    def state_dict(self) -> dict[str, Any]:
        return {"epoch": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == self.state_dict()


def test_what_has_no_place_in_the_other_format_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["warm"] = 7  # type: ignore[index,assignment]
    with plumb.Engine(model, optimizer) as engine:
        engine.save(tmp_path / "a", samples=12, extras={"loader": Counts()})
    warm = "what the optimizer keeps of no parameter: 'warm'"
    lost = {
        "dcp": [warm, "the extra 'loader'", "the cursor of the data, 12 samples"],
        "deepspeed": [warm, "the extra 'loader'"],
        "safetensors": ["the optimizer's state", "the extra 'loader'", "the cursor of the data, 12 samples"],
        "plumb": [warm],
    }
    for target, expected in lost.items():
        assert main(["--from", "plumb", "--to", target, str(tmp_path / "a"), str(tmp_path / target)]) == 0
        said = capsys.readouterr().err
        for what in expected:
            assert f"  not taken along: {what}" in said, (target, said)
        assert ("cursor" in said) == (target in ("dcp", "safetensors")), (target, said)


def test_a_conversion_that_is_refused_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    safetensors.save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    for _ in range(2):
        assert main(["--from", "safetensors", "--to", "deepspeed", str(tmp_path / "model.safetensors"), str(tmp_path / "new")]) == 1
        assert "there is no optimizer state, without which DeepSpeed loads no universal folder" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


# ---- how flat tensors of all ranks are cut, for any shapes and numbers of ranks


def test_parameters_are_found_in_flat_groups_however_they_are_cut() -> None:
    draw = torch.Generator().manual_seed(5)

    def number(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=draw))

    for round_ in range(60):
        ranks = number(1, 5)
        group = {f"p{i}": tuple(number(0 if i == 1 else 1, 4) for _ in range(number(0, 2))) for i in range(number(1, 5))}
        values = {name: torch.randn(shape, generator=draw) for name, shape in group.items()}
        paddings = [number(0, 3) for _ in group] if round_ % 2 else None
        # Stages 1 and 2: one behind the other, each with its filling; equal shares of all of it, filled up.
        pieces = [
            torch.cat([value.reshape(-1), torch.full((paddings[i] if paddings else 0,), 99.0)]) for i, value in enumerate(values.values())
        ]
        whole = torch.cat(pieces)
        share = -(-whole.numel() // ranks)
        flats = list(torch.cat([whole, torch.full((share * ranks - whole.numel(),), 77.0)]).split(share)) if share else [whole] * ranks
        by_group = zero._cut_by_group(group, {"param_alignment_paddings": [paddings] if paddings else None}, [[flat] for flat in flats], 0)
        # Stage 3: each cut by itself.
        parts: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
        for value in values.values():
            each = -(-value.numel() // ranks)
            filled = torch.cat([value.reshape(-1), torch.full((each * ranks - value.numel(),), 55.0)])
            for rank in range(ranks):
                parts[rank].append(filled[rank * each : (rank + 1) * each])
        by_parameter = zero._cut_by_parameter(group, ranks)
        for name, shape in group.items():
            for places, memory in ((by_group, flats), (by_parameter, [torch.cat(part) for part in parts])):
                found = zero._Joined(places[name](memory), shape, torch.float32).read()
                assert torch.equal(found, values[name]), (round_, name, shape)


def test_files_are_those_of_the_ranks_in_their_order(tmp_path: Path) -> None:
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(12)]
    for name in reversed(names):
        (tmp_path / name).touch()
    assert [os.path.basename(one) for one in zero._files(str(tmp_path), "optim_states")] == names


def test_frozen_parameters_of_stage_3_are_joined_whatever_their_length() -> None:
    for numel in range(1, 9):
        for ranks in (1, 2, 3, 4):
            value = torch.arange(float(numel))
            share = -(-numel // ranks)
            filled = torch.cat([value, torch.full((share * ranks - numel,), 9.0)])
            states: list[dict[str, Any]] = [
                {"frozen_param_shapes": {"f": (numel,)}, "frozen_param_fragments": {"f": filled[r * share : (r + 1) * share]}} for r in range(ranks)
            ]
            contents = Contents()
            zero._frozen(states, contents, 3)
            assert torch.equal(contents.entries[0].checked(), value) and contents.frozen == ["f"], (numel, ranks)


def test_folders_of_safetensors_are_cut_before_they_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from plumb.formats import plain

    monkeypatch.setattr(plain, "SHARD_BYTES", 100)
    contents = Contents()
    for i, numel in enumerate((10, 10, 5, 25, 30, 1)):  # 40, 40, 20 bytes: together just the limit; 120 bytes: alone
        value = torch.full((numel,), float(i))
        contents.entries.append(contents_entry("weight", f"w{i}", "", value))
    plain.write(str(tmp_path), contents)
    sizes = [sum(t.nbytes for t in safetensors.load_file(one).values()) for one in sorted(tmp_path.glob("*.safetensors"))]
    assert sizes == [100, 100, 120, 4]
    assert same(values(plain.read(str(tmp_path))), values(contents))


def contents_entry(kind: str, name: str, key: str, value: torch.Tensor) -> Any:
    from plumb.formats.contents import Entry

    return Entry(kind, name, key, value.dtype, tuple(value.shape), lambda: value)


def test_groups_and_counts_of_a_folder_are_those_of_the_optimizer(tmp_path: Path) -> None:
    """Numbers that torch wants as a pair, which such folders keep as lists; parameters that took unlike numbers of steps."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Rprop(model.parameters(), etas=(0.4, 1.3), step_sizes=(1e-7, 40.0))
    for used in (list(model.parameters()), [model.bias], [model.bias]):
        optimizer.zero_grad()
        sum(p.sum() for p in used).backward()  # type: ignore[union-attr]
        optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    found = read("dcp", str(tmp_path / "theirs"), "Rprop")
    assert found.step == 3 and found.optimizer is not None and found.optimizer.kind == "Rprop"
    assert [(group["etas"], group["step_sizes"]) for group in found.optimizer.groups] == [((0.4, 1.3), (1e-7, 40.0))]
    words = ["--from", "dcp", "--to", "plumb", "--optimizer", "Rprop", str(tmp_path / "theirs"), str(tmp_path / "ours")]
    assert main(words) == 0
    fresh = torch.nn.Linear(2, 2)
    with plumb.Engine(fresh, torch.optim.Rprop(fresh.parameters())) as engine:
        engine.load(tmp_path / "ours")
        assert torch.equal(fresh.weight, model.weight) and engine.steps == 3


def test_parameters_that_never_stepped_have_no_state_in_what_is_converted(tmp_path: Path) -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    with plumb.Engine(model, torch.optim.AdamW(model.parameters())) as engine:
        model[0](torch.ones(1, 2)).sum().backward()
        engine.step()
        dcp.save({"engine": engine}, checkpoint_id=tmp_path, no_dist=True)
    found = read("dcp", str(tmp_path))
    assert {entry.name for entry in found.of("state", "value")} == {"0.weight", "0.bias"}


def test_the_momentum_of_plumbs_sgd_is_torchs(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with plumb.Engine(model, plumb.SGD(lr=0.1, momentum=0.9)) as engine:
        model(torch.ones(1, 2)).sum().backward()
        engine.step()
        engine.save(tmp_path)
    found = {(entry.name, entry.key): entry.checked() for entry in native.read(str(tmp_path)).of("state")}
    assert found.keys() == {("weight", "momentum_buffer"), ("bias", "momentum_buffer")}
    assert found["weight", "momentum_buffer"].eq(1.0).all()


def test_the_record_of_deepspeeds_engine_stays_away_where_it_is_told(tmp_path: Path) -> None:
    for bare, extras in ((True, set()), (False, {"deepspeed"})):
        words = ["--from", "deepspeed", "--to", "plumb", *(["--bare"] if bare else []), str(REAL / FOLDERS[0]), str(tmp_path / str(bare))]
        assert main(words) == 0
        saved = plumb._C.SavedCheckpoint(str(tmp_path / str(bare)))
        assert {tensor.name for tensor in saved.tensors if tensor.kind == "extra"} == extras


def test_files_of_old_torches_are_read(tmp_path: Path) -> None:
    value = {"weight": torch.arange(3.0), "step": 3}
    torch.save(value, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    found = unpickle.load(str(tmp_path / "old.pt"))
    assert torch.equal(found["weight"], value["weight"]) and found["step"] == 3


def test_a_tensor_is_in_one_file_and_what_it_was_announced_as(tmp_path: Path) -> None:
    for name in ("a", "b"):
        safetensors.save_file({"weight": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(plumb.Error, match="'weight' stands in two files"):
        read("safetensors", str(tmp_path))
    entry = contents_entry("weight", "w", "", torch.ones(2))
    assert torch.equal(entry.checked(), torch.ones(2))
    for other in (torch.ones(3), torch.ones(2).double()):
        with pytest.raises(plumb.Error, match="was announced as torch.float32"):
            dataclasses.replace(entry, read=lambda other=other: other).checked()


def test_half_precision_is_told_by_either_name_and_other_names_of_parameters_are_not_counted() -> None:
    for word, dtype in ("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16):
        assert zero._half({"ds_config": {word: {"enabled": True}}}) == dtype
        assert zero._half({"ds_config": {word: {"enabled": False}}}) is None
    contents = Contents(aliases={"head": "embed"})
    shared, momentum = torch.ones(2), torch.full((2,), 0.5)
    optimizer = {"param_groups": [{"params": [0, 1], "lr": 0.1}], "state": {0: {"momentum_buffer": momentum}, 1: {}}}
    module = {"embed": shared, "last": torch.zeros(3), "head": shared}
    zero._read_stage0({"module": module, "optimizer": optimizer}, contents, "SGD", set())
    assert contents.optimizer is not None and contents.optimizer.groups == [{"params": ["embed", "last"], "lr": 0.1}]
    assert [(entry.name, entry.key) for entry in contents.of("state")] == [("embed", "momentum_buffer")]
