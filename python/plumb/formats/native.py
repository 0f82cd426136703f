"""Plumb's own checkpoints."""

from __future__ import annotations

import json
from typing import Any

import torch

from .. import save as _save
from .._C import Error, NewCheckpoint, SavedCheckpoint, SavedTensor
from ..deepspeed import checkpoint as _deepspeed
from .contents import Contents, Entry, Optimizer

#: The memory of Plumb's own optimizers, in the words of torch.optim.
_WORDS = {"mean": "exp_avg", "square": "exp_avg_sq", "momentum": "momentum_buffer"}
_KINDS = {"weight": "weight", "buffer": "buffer", "optimizer": "state", "optimizer value": "value"}


def read(path: str) -> Contents:
    """A checkpoint, or the newest complete one of a folder of them."""
    saved = SavedCheckpoint(path)
    engine = json.loads(saved.engine)
    contents = Contents(step=saved.step, samples=saved.samples)
    own = engine["outer"] is None and engine["optimizer"] not in ("none", "the user's")
    for tensor in saved.tensors:
        if tensor.kind == "extra":
            contents.extras.setdefault(tensor.name, []).append((tensor.key, saved.read(tensor)))
        if tensor.kind not in _KINDS:
            continue
        key = _WORDS.get(tensor.key, tensor.key) if own else tensor.key

        def value(tensor: SavedTensor = tensor) -> torch.Tensor:
            return saved.read(tensor)

        contents.entries.append(Entry(_KINDS[tensor.kind], tensor.name, key, tensor.dtype, tuple(tensor.shape), value))
    if own:
        names = list(engine["updates"])
        contents.optimizer = Optimizer(engine["optimizer"], [{"params": names, "lr": engine["lr"]}])
        contents.entries += [_scalar(name, "step", float(count)) for name, count in engine["updates"].items()]
        if engine["group_lrs"]:
            contents.notes.append("groups with their own rates, which Plumb's optimizers get from the program")
    elif engine["outer"] is not None:
        outer = engine["outer"]
        groups = [
            {"params": group["params"], **{key: _save._value(text) for key, text in group["settings"].items()}}
            for group in outer["groups"]
        ]
        contents.optimizer = Optimizer(outer["class"], groups, _save.names_of_general(outer))
        for name, values in outer["values"].items():
            contents.entries += [_scalar(name, key, _save._value(text)) for key, text in values.items()]
    if any(tensor.kind == "generator" for tensor in saved.tensors):
        contents.notes.append("the states of random generators")
    if engine["loss_scale"] is not None:
        contents.notes.append("the loss scale")
    record = _deepspeed.record_of(saved)
    if record is not None:
        del contents.extras[_deepspeed.EXTRA]
        contents.user, contents.schedule, contents.counters = record["client_state"], record["lr_scheduler"], record["counters"]
        contents.frozen, contents.aliases = record["frozen"], record["shared"]
    return contents


def _scalar(name: str, key: str, value: Any) -> Entry:
    tensor = value if torch.is_tensor(value) else torch.tensor(value)
    return Entry("value", name, key, tensor.dtype, tuple(tensor.shape), lambda: tensor)


def write(path: str, contents: Contents, deepspeed: bool) -> str:
    """A new checkpoint in the folder ``path``, as one rank writes it. With ``deepspeed``, one for ``load_checkpoint``."""
    made = NewCheckpoint(path)
    kinds = {ours: theirs for theirs, ours in _KINDS.items()}
    shapes = {entry.name: entry.shape for entry in contents.of("weight")}
    for kind, file in (("weight",), "weights"), (("state", "value"), "optimizer"), (("buffer",), "rest"):
        entries = list(contents.of(*kind))
        for entry in entries:
            if entry.kind == "state" and shapes.get(entry.name) != entry.shape:
                raise Error(
                    f"'{entry.key}' of '{entry.name}' has shape {list(entry.shape)}, and the weight"
                    f" {list(shapes[entry.name]) if entry.name in shapes else 'is not there'}"
                )
        if entries:
            tensors = [SavedTensor(kinds[entry.kind], entry.name, entry.key, entry.dtype, entry.shape) for entry in entries]

            def value(i: int, entries: list[Entry] = entries) -> torch.Tensor:
                return entries[i].checked()

            made.add_file(f"{file}-00000-of-00001.safetensors", tensors, value)
    extras = dict(contents.extras)
    if deepspeed:
        extras[_deepspeed.EXTRA] = _save.pack(_record(contents), "the state of DeepSpeed's engine")
    if extras:
        packed = [(name, key, value) for name, pairs in extras.items() for key, value in pairs]
        tensors = [SavedTensor("extra", name, key, value.dtype, value.shape) for name, key, value in packed]
        made.add_file("extras-00000-of-00001.safetensors", tensors, lambda i: packed[i][2])
    trained = {entry.name for entry in contents.of("state")}
    engine = {
        "optimizer": "none" if contents.optimizer is None else "the user's",
        "lr": 0.0,
        "group_lrs": [],
        "loss_scale": None,
        "deterministic": False,
        "virtual_ranks": 1,
        "updates": {name: max(1, contents.step) for name in sorted(trained)},
        "order": [],
        "extras": sorted(extras),
        "outer": None if contents.optimizer is None else _outer(contents.optimizer, contents),
    }
    return made.commit(contents.step, contents.samples, 1, json.dumps(engine), json.dumps({"strategy": "converted"}))


def _outer(optimizer: Optimizer, contents: Contents) -> dict[str, Any]:
    groups = []
    for group in optimizer.groups:
        settings = {}
        for key, value in group.items():
            if key in ("params", "param_names"):
                continue
            try:
                settings[key] = _save._text(value, f"'{key}' of a group")
            except Error as error:
                contents.notes.append(str(error))
        groups.append({"params": list(group["params"]), "settings": settings})
    return {"class": optimizer.kind, "groups": groups, "values": {}}


def _record(contents: Contents) -> dict[str, Any]:
    steps = contents.counters.get("global_steps", contents.step)
    return {
        "client_state": contents.user,
        "counters": {"global_steps": steps, "global_samples": contents.samples, "skipped_steps": 0, **contents.counters},
        "lr_scheduler": contents.schedule,
        "scaling": None,
        "frozen": contents.frozen,
        "shared": contents.aliases,
        "dp_world_size": 1,
    }
