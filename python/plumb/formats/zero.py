"""DeepSpeed's folders: read as its stages 0 to 3 write them, and its universal ones; written as universal ones.

A universal folder is what DeepSpeed's own ``ds_to_universal`` makes: a file for each parameter and kind, which DeepSpeed loads
under any stage and on any number of ranks (``"checkpoint": {"load_universal": true}``).
"""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import save as _save
from .._C import Error
from ..deepspeed.checkpoint import latest_in
from ..save.durable import write_text
from . import files, unpickle
from .contents import Contents, Entry, Optimizer

#: Of a file of model states: DeepSpeed's own. The rest is the user's.
_OWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments",
    "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps", "global_steps",
    "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version", "universal_checkpoint_info", "num_experts",
    "ds_autoep_layers", "checkpoint_parallel_dimensions",
}  # fmt: skip
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
UNIVERSAL = "latest_universal"
Range = tuple[torch.Tensor, int, int]  # a flat tensor, and which of its elements


def read(path: str, kind: str = "AdamW") -> Contents:
    """A folder of a tag, or the one that ``latest`` in it names, or ``latest_universal``. ``kind``: the optimizer's class, which DeepSpeed does not save."""
    folder = _folder(path)
    models, optims = _files(folder, "model_states"), _files(folder, "optim_states")
    if not models:
        raise Error(f"there is no '*_model_states.pt' in '{folder}': it is no checkpoint of DeepSpeed's")
    states = [unpickle.load(file) for file in models]
    first = states[0]
    for needed in ("module", "buffer_names", "global_steps"):
        if needed not in first:
            raise Error(f"'{models[0]}' says nothing of '{needed}': it is no file of DeepSpeed's model states")
    contents = Contents(step=int(first["global_steps"]), samples=int(first.get("global_samples") or 0))
    contents.counters = {name: int(first[name]) for name in _COUNTERS if isinstance(first.get(name), int)}
    contents.aliases = dict(first.get("shared_params") or {})
    buffers = set(first["buffer_names"] or [])
    for name in buffers & set(first["module"]):
        _add(contents, "buffer", name, "", first["module"][name])
    _take_users(contents, first)
    half = _half(first)
    if os.path.isdir(os.path.join(folder, "zero")):
        _read_universal(folder, first, contents, kind, half)
    elif optims:
        _read_zero(optims, states, contents, kind, half)
    else:
        _read_stage0(first, contents, kind, buffers)
    contents.entries.sort(key=lambda entry: ("weight", "state", "value", "buffer").index(entry.kind))
    return contents


def _folder(path: str) -> str:
    tag = latest_in(path) or latest_in(path, UNIVERSAL) if os.path.isdir(path) else None
    folder = path if tag is None else os.path.join(path, tag)
    if not os.path.isdir(folder):
        raise Error(f"'{folder}' is no folder")
    return folder


def _files(folder: str, ending: str) -> list[str]:
    """Those of all ranks, in their order."""
    found = sorted(
        glob.glob(os.path.join(glob.escape(folder), f"*_{ending}.pt")),
        key=lambda name: [int(part) for part in re.findall(r"\d+", os.path.basename(name))],
    )
    for file in found:
        if not re.fullmatch(rf"((bf16_|fp16_)?zero_pp_rank_\d+_)?mp_rank_00_{ending}\.pt", os.path.basename(file)):
            raise Error(f"'{file}' is of a run with model, pipeline or expert parallelism, which is not supported")
    return found


def _plain(value: Any) -> Any:
    """The value of an enumeration that was not known."""
    return value.arguments[0] if isinstance(value, unpickle.Hollow) and len(value.arguments) == 1 else value


def _half(state: dict[str, Any]) -> torch.dtype | None:
    config = state.get("ds_config")
    for word, dtype in ("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16):
        section = config.get(word) if isinstance(config, dict) else None
        if isinstance(section, dict) and section.get("enabled") is True:
            return dtype
    return None


def _add(contents: Contents, kind: str, name: str, key: str, tensor: torch.Tensor) -> None:
    contents.entries.append(Entry(kind, name, key, tensor.dtype, tuple(tensor.shape), lambda: tensor))


def _take_users(contents: Contents, state: dict[str, Any]) -> None:
    for key in state:
        if key in _OWN:
            continue
        try:
            _save.pack(state[key], f"'{key}' of the client_state")
        except (Error, TypeError) as error:
            contents.notes.append(str(error))
        else:
            contents.user[key] = state[key]
    try:
        _save.pack(state.get("lr_scheduler"), "the schedule")
        contents.schedule = state.get("lr_scheduler")
    except (Error, TypeError) as error:
        contents.notes.append(str(error))


# ---- stages 1, 2 and 3


class _Joined:
    """Elements of all ranks' flat tensors, one range behind the other."""

    def __init__(self, ranges: Sequence[Range], shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.ranges, self.shape, self.dtype = list(ranges), shape, dtype

    def read(self) -> torch.Tensor:
        parts = [flat[begin:end] for flat, begin, end in self.ranges]
        whole = torch.cat(parts) if len(parts) != 1 else parts[0].clone()
        return whole.reshape(self.shape)

    def entry(self, kind: str, name: str, key: str) -> Entry:
        return Entry(kind, name, key, self.dtype, self.shape, self.read)


Place = Callable[[Sequence[torch.Tensor]], list[Range]]  # of a parameter in the flat tensors of all ranks


def _numel(shape: Any) -> int:
    return math.prod(tuple(shape))


def _read_zero(
    optims: list[str], states: list[dict[str, Any]], contents: Contents, kind: str, half: torch.dtype | None
) -> None:
    ranks = [unpickle.load(file)["optimizer_state_dict"] for file in optims]
    stage = int(_plain(ranks[0].get("zero_stage", 1)))
    count = ranks[0].get("partition_count", len(ranks))
    wanted = max(count if isinstance(count, list) else [count])
    if wanted != len(ranks):
        raise Error(f"{len(ranks)} files of optimizer states, and they are of {wanted} ranks: some are missing")
    if any("optimizer_state_dict" not in unpickle_state and stage == 3 for unpickle_state in ranks):
        raise Error("the files of stage 3 have no optimizer states")
    groups: list[dict[str, tuple[int, ...]]] = [
        {name: tuple(shape) for name, shape in group.items()} for group in states[0]["param_shapes"]
    ]
    base = [rank["optimizer_state_dict"] if stage == 3 else rank["base_optimizer_state"] for rank in ranks]
    if not all(isinstance(one, dict) for one in base):
        raise Error("an elastic checkpoint of DeepSpeed's ('elastic_checkpoint': true) is not supported")
    flats = [rank["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"] for rank in ranks]
    for g, group in enumerate(groups):
        places = _cut_by_parameter(group, len(ranks)) if stage == 3 else _cut_by_group(group, ranks[0], flats, g)
        state = [one["state"].get(g, {}) for one in base]
        keys = [key for key, value in state[0].items() if torch.is_tensor(value) and value.dim() == 1]
        for name, shape in group.items():
            fp32 = _Joined(places[name]([rank[g] for rank in flats]), shape, torch.float32)
            _add_weight(contents, states[0], name, fp32, half, stage)
            for key in keys:
                flat = [one[key] for one in state]
                joined = _Joined(places[name](flat), shape, flat[0].dtype)
                contents.entries.append(joined.entry("state", name, key))
            for key, value in state[0].items():
                if key not in keys and (torch.is_tensor(value) or isinstance(value, (int, float))):
                    _add(contents, "value", name, key, _as_step(value))
    _frozen(states, contents, stage)
    if stage == 3:
        members: list[list[str]] = [[] for _ in base[0]["param_groups"]]
        for g, group in enumerate(base[0]["param_groups"]):
            for sub in group["params"]:  # the numbers of its sub-groups
                members[g] += list(groups[sub])
    else:
        members = [list(group) for group in groups]
    contents.optimizer = Optimizer(kind, [_settings(g, m) for g, m in zip(base[0]["param_groups"], members, strict=True)])


def _settings(group: dict[str, Any], names: list[str]) -> dict[str, Any]:
    return {"params": names, **{key: value for key, value in group.items() if key != "params"}}


def _as_step(value: Any) -> torch.Tensor:
    """As torch.optim keeps numbers of a parameter: an f32 of no dimensions."""
    tensor = value if torch.is_tensor(value) else torch.tensor(float(value))
    return tensor.reshape(()) if tensor.numel() == 1 else tensor


def _cut_by_group(group: dict[str, tuple[int, ...]], rank: dict[str, Any], flats: list[Any], g: int) -> dict[str, Place]:
    """Stages 1 and 2: the parameters of a group lie one behind the other, and the ranks have equal shares of all of it."""
    paddings = rank.get("param_alignment_paddings")
    length = flats[0][g].numel()
    places: dict[str, Place] = {}
    at = 0
    for i, (name, shape) in enumerate(group.items()):
        begin, end = at, at + _numel(shape)

        def place(all_ranks: Sequence[torch.Tensor], begin: int = begin, end: int = end) -> list[Range]:
            return [
                (flat, max(begin - r * length, 0), min(end - r * length, length))
                for r, flat in enumerate(all_ranks)
                if begin < (r + 1) * length and end > r * length
            ] or [(all_ranks[0], 0, 0)]

        places[name] = place
        at = end + (paddings[g][i] if paddings is not None else 0)
    if at > length * len(flats):
        raise Error(f"group {g} has {at} elements, and the files {length * len(flats)}")
    return places


def _cut_by_parameter(group: dict[str, tuple[int, ...]], ranks: int) -> dict[str, Place]:
    """Stage 3: each parameter is cut into equal shares, the last of them filled up."""
    places: dict[str, Place] = {}
    at = 0
    for name, shape in group.items():
        numel, begin = _numel(shape), at
        share = -(-numel // ranks)

        def place(
            all_ranks: Sequence[torch.Tensor], begin: int = begin, share: int = share, numel: int = numel
        ) -> list[Range]:
            return [
                (flat, begin, begin + max(0, min(share, numel - r * share))) for r, flat in enumerate(all_ranks)
            ]

        places[name] = place
        at += share
    return places


def _add_weight(
    contents: Contents, state: dict[str, Any], name: str, fp32: _Joined, half: torch.dtype | None, stage: int
) -> None:
    """The weight as forwards use it, and its master where that is something else."""
    known = state["module"].get(name)
    if stage < 3 and torch.is_tensor(known) and tuple(known.shape) == fp32.shape:
        _add(contents, "weight", name, "", known)
        half = known.dtype if known.dtype != torch.float32 else None
    elif half is None:
        contents.entries.append(fp32.entry("weight", name, ""))
    else:
        rounded = Entry("weight", name, "", half, fp32.shape, lambda: fp32.read().to(half))
        contents.entries.append(rounded)
    if half is not None:
        contents.entries.append(fp32.entry("state", name, "master"))


def _frozen(states: list[dict[str, Any]], contents: Contents, stage: int) -> None:
    shapes = states[0].get("frozen_param_shapes") or {}
    for name, shape in shapes.items():
        if name in contents.frozen:
            continue
        fragments = [state["frozen_param_fragments"][name] for state in states]
        if stage < 3:
            _add(contents, "weight", name, "", fragments[0])
        else:
            flat = [fragment.reshape(-1) for fragment in fragments]
            share = -(-_numel(shape) // len(flat))
            ranges = [(one, 0, max(0, min(share, _numel(shape) - r * share))) for r, one in enumerate(flat)]
            contents.entries.append(_Joined(ranges, tuple(shape), flat[0].dtype).entry("weight", name, ""))
        contents.frozen.append(name)
    if stage < 3:  # of stage 1, which does not list them
        known = {entry.name for entry in contents.of("weight", "buffer")} | set(contents.aliases)
        for name, value in states[0]["module"].items():
            if name not in known and torch.is_tensor(value):
                _add(contents, "weight", name, "", value)
                contents.frozen.append(name)


def _read_stage0(state: dict[str, Any], contents: Contents, kind: str, buffers: set[str]) -> None:
    names = [name for name, value in state["module"].items() if name not in buffers and torch.is_tensor(value)]
    for name in names:
        _add(contents, "weight", name, "", state["module"][name])
    saved: dict[str, Any] = state["optimizer"] if isinstance(state.get("optimizer"), dict) else {}
    groups = saved.get("param_groups")
    if not groups:
        contents.notes.append("the optimizer's state, which stage 0 keeps in another form for half precision")
        return
    # Stage 0 numbers parameters and does not name them: taken only where the numbers can mean nothing else.
    numbers = [number for group in groups for number in group["params"]]
    trained = [name for name in names if name not in contents.aliases]
    fits = len(groups) == 1 and len(numbers) == len(trained) and all(
        not torch.is_tensor(value) or value.dim() == 0 or value.shape == state["module"][name].shape
        for number, name in zip(numbers, trained, strict=True)
        for value in saved["state"].get(number, {}).values()
    )
    if not fits:
        contents.notes.append("the optimizer's state, whose parameters stage 0 does not name")
        return
    for number, name in zip(numbers, trained, strict=True):
        for key, value in saved["state"].get(number, {}).items():
            if torch.is_tensor(value) and value.shape == state["module"][name].shape and key != "step":
                _add(contents, "state", name, key, value)
            elif torch.is_tensor(value) or isinstance(value, (int, float)):
                _add(contents, "value", name, key, _as_step(value))
    contents.optimizer = Optimizer(kind, [_settings(groups[0], trained)])


# ---- universal folders


def _read_universal(
    folder: str, state: dict[str, Any], contents: Contents, kind: str, half: torch.dtype | None
) -> None:
    zero = os.path.join(folder, "zero")
    saved = unpickle.load(os.path.join(zero, "optimizer_state.pt"))
    step = saved["optimizer_state_dict"]["state"].get(0, {}).get("step") if "optimizer_state_dict" in saved else None
    names: list[str] = []
    frozen = set(state.get("frozen_param_shapes") or {})
    trained = {name for group in state.get("param_shapes") or [] for name in group}
    for where, _, found in sorted(os.walk(zero)):
        if "fp32.pt" not in found:
            continue
        name = os.path.relpath(where, zero)
        if trained and name not in trained and name not in frozen:
            continue  # a buffer, or another name of a parameter
        if name in frozen:
            tensor = unpickle.load(os.path.join(where, "fp32.pt"))["param"].to(half or torch.float32)
            _add(contents, "weight", name, "", tensor)
            contents.frozen.append(name)
            continue
        names.append(name)
        for file in sorted(found):
            key, value = file.removesuffix(".pt"), unpickle.load(os.path.join(where, file))
            tensor = value["param"] if isinstance(value, dict) and "param" in value else value
            if key == "fp32":
                ranges = [(tensor.reshape(-1), 0, tensor.numel())]
                _add_weight(contents, state, name, _Joined(ranges, tuple(tensor.shape), torch.float32), half, stage=2)
            elif torch.is_tensor(tensor) and tensor.dim() > 0:
                _add(contents, "state", name, key, tensor)
            else:
                _add(contents, "value", name, key, _as_step(tensor))
        if "step.pt" not in found and step is not None:
            _add(contents, "value", name, "step", _as_step(step))
    _frozen([state], contents, stage=2)
    shapes = state.get("param_shapes") or [dict.fromkeys(names)]
    members = [list(group) for group in shapes]
    groups = saved["param_groups"]
    if len(members) != len(groups):
        members = [names] + [[] for _ in groups[1:]]
    contents.optimizer = Optimizer(kind, [_settings(g, m) for g, m in zip(groups, members, strict=True)])


def write(path: str, contents: Contents, ranks: int) -> str:
    """A universal folder ``path/global_stepN``, and ``latest_universal``. ``ranks``: those of a run of stage 3 that will load it."""
    tag = f"global_step{contents.counters.get('global_steps', contents.step)}"
    folder = os.path.join(path, tag)
    zero = os.path.join(folder, "zero")
    if os.path.exists(folder):
        raise Error(f"'{folder}' is there already")
    if contents.optimizer is None:
        raise Error("there is no optimizer state, without which DeepSpeed loads no universal folder")
    state = contents.by_parameter()
    shapes: list[dict[str, torch.Size]] = []
    weights = {entry.name: entry for entry in contents.of("weight")}
    for name in (name for group in contents.optimizer.groups for name in group["params"]):
        if name not in weights:
            raise Error(f"the optimizer has a parameter '{name}', and there is no such weight")
        if os.path.relpath(os.path.join(zero, name), zero) != name:
            raise Error(f"parameter '{name}' cannot be the name of a folder")
    os.makedirs(zero)
    step: torch.Tensor | None = None
    for group in contents.optimizer.groups:
        shapes.append({name: torch.Size(weights[name].shape) for name in group["params"]})
        for name in group["params"]:
            where = os.path.join(zero, name)
            os.makedirs(where)
            own = state.get(name, {})
            master = own.get("master", weights[name])
            files.write_pickle(os.path.join(where, "fp32.pt"), {"param": master.checked().float()})
            for key, entry in own.items():
                if key == "step":
                    step = entry.checked()
                    files.write_pickle(os.path.join(where, "step.pt"), step)
                elif key != "master":
                    files.write_pickle(os.path.join(where, f"{key}.pt"), {"param": entry.checked()})
    groups = [{**group, "params": [g]} for g, group in enumerate(contents.optimizer.groups)]
    base = {"state": {0: {} if step is None else {"step": step}}, "param_groups": groups}
    files.write_pickle(
        os.path.join(zero, "optimizer_state.pt"),
        {"param_groups": groups, "optimizer_state_dict": base, "ds_version": "0.16.0", "overflow": False, "dynamic_loss_scale": False},
    )
    common = {
        "buffer_names": [entry.name for entry in contents.of("buffer")], "optimizer": None, "param_shapes": shapes,
        "shared_params": contents.aliases, "lr_scheduler": contents.schedule, "data_sampler": None, "random_ltd": None,
        "skipped_steps": contents.counters.get("skipped_steps", 0),
        "global_steps": contents.counters.get("global_steps", contents.step), "global_samples": contents.samples,
        "dp_world_size": ranks, "mp_world_size": 1, "ds_config": {}, "ds_version": "0.16.0",
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2}, **contents.user,
    }  # fmt: skip
    module = {entry.name: entry for entry in contents.of("weight", "buffer")}
    trained = {name for group in contents.optimizer.groups for name in group["params"]}
    # What stands in zero/ is not written again: only what DeepSpeed keeps beside it.
    beside = {name: entry.checked() for name, entry in module.items() if name not in trained}
    frozen = {name: beside[name] for name in beside if module[name].kind == "weight"}
    words = {**common, "module": beside, "frozen_param_shapes": {n: t.shape for n, t in frozen.items()}, "frozen_param_fragments": frozen}
    files.write_pickle(os.path.join(folder, "mp_rank_00_model_states.pt"), words)
    for rank in range(ranks):
        files.write_pickle(os.path.join(folder, f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"), words)
    write_text(os.path.join(path, UNIVERSAL), tag)
    return folder
