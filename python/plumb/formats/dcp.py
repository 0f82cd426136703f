"""Folders of ``torch.distributed.checkpoint``: as ``get_state_dict`` names what is in them, and as ``plumb.Engine`` does.

``…model.NAME`` are weights and buffers, ``…optim.state.NAME.KEY`` is the optimizer's, ``…optim.param_groups`` its groups.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from .._C import Error
from . import unpickle
from .contents import Contents, Entry, Optimizer

MODEL = ("model", "module", "state_dict")


class _Folder:
    """One tensor or value of a folder at a time."""

    def __init__(self, path: str) -> None:
        self.reader = FileSystemReader(path)
        self.metadata = _metadata(path)
        self.reader.set_up_storage_reader(self.metadata, is_coordinator=True)

    def tensor(self, key: str) -> torch.Tensor:
        known = self.metadata.state_dict_metadata[key]
        assert isinstance(known, TensorStorageMetadata)
        value = torch.empty(known.size, dtype=known.properties.dtype)
        self._filled(DefaultLoadPlanner(flatten_state_dict=False), key, value)
        return value

    def value(self, key: str) -> Any:
        return self._filled(_Values(flatten_state_dict=False), key, io.BytesIO())

    def _filled(self, planner: DefaultLoadPlanner, key: str, into: Any) -> Any:
        state = {key: into}
        planner.set_up_planner(state, self.metadata, is_coordinator=True)
        plan = self.reader.prepare_local_plan(planner.create_local_plan())
        self.reader.read_data(plan, planner).wait()
        return planner.state_dict[key]


class _Values(DefaultLoadPlanner):
    """Values that are no tensors are files of ``torch.save``."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = unpickle.load(value)


def _metadata(path: str) -> Metadata:
    """What the folder says of itself, which is a pickle: only the words of its format are known."""
    file = os.path.join(path, ".metadata")
    try:
        with open(file, "rb") as opened:
            found = unpickle.Words(opened, unpickle.DCP).load()
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
        raise Error(f"'{path}' is no folder of torch.distributed.checkpoint: {error}") from error
    if not isinstance(found, Metadata):
        raise Error(f"'{file}' is no description of a folder of torch.distributed.checkpoint")
    return found


def read(path: str, kind: str = "AdamW") -> Contents:
    """``kind``: the optimizer's class, where the folder does not name it."""
    folder = _Folder(path)
    contents = Contents()
    root: dict[str, Any] = {}
    run: dict[str, Any] = {}
    for key, known in folder.metadata.state_dict_metadata.items():
        where = tuple((folder.metadata.planner_data or {}).get(key, (key,)))
        if isinstance(known, BytesStorageMetadata):
            if where[-1] == "run" and where[:-1]:
                run = json.loads(folder.value(key))
            elif "param_groups" in where:
                set_element(root, where[where.index("param_groups") :], folder.value(key))
            else:
                contents.notes.append(f"'{key}', which is no tensor")
            continue
        if not isinstance(known, TensorStorageMetadata):
            raise Error(f"'{key}' of '{path}' is neither a tensor nor a value")
        what, name, of = _meaning(where)
        # A number for the whole parameter, as "step"; that of a parameter without dimensions is told by its name.
        if what == "state" and len(known.size) == 0 and of == "step":
            what = "value"

        def value(key: str = key) -> torch.Tensor:
            return folder.tensor(key)

        contents.entries.append(Entry(what, name, of, known.properties.dtype, tuple(known.size), value))
    _settle(contents, run, root.get("param_groups"), kind)
    return contents


def _meaning(where: Sequence[Any]) -> tuple[str, str, str]:
    """Kind, name and key of the tensor at this path."""
    words = [str(word) for word in where]
    if "state" in words[:-2]:
        at = words.index("state")
        return "state", ".".join(words[at + 1 : -1]), words[-1]
    in_model = words[-2:-1] and words[-2] in (*MODEL, "buffers")  # one of its parts may be called "state"
    if words[-1].startswith("state.") and not in_model:  # flatten_optimizer_state_dict
        name, _, key = words[-1].removeprefix("state.").rpartition(".")
        return "state", name, key
    for i, word in enumerate(words[:-1]):
        if word in (*MODEL, "buffers"):
            return "buffer" if word == "buffers" else "weight", ".".join(words[i + 1 :]), ""
    return "weight", ".".join(words), ""


def _settle(contents: Contents, run: dict[str, Any], groups: Any, kind: str) -> None:
    weights = {entry.name for entry in contents.of("weight")}
    nothing = set(run.get("without", []))  # parameters whose state only kept the place
    contents.entries = [
        entry for entry in contents.entries if entry.kind not in ("state", "value") or entry.name not in nothing
    ]
    buffers = set(run.get("buffers", []))
    contents.entries = [
        dataclasses.replace(entry, kind="buffer") if entry.kind == "weight" and entry.name in buffers else entry
        for entry in contents.entries
    ]
    for entry in contents.of("state", "value"):
        if entry.name not in weights:
            raise Error(f"there is optimizer state '{entry.key}' of '{entry.name}', and no such weight")
    if run:
        contents.step, contents.samples = run["step"], run["samples"]
        outer = run["optimizer"]
        if outer is not None:
            from .. import save as _save

            contents.optimizer = Optimizer(
                outer["class"],
                [{"params": g["params"], **{k: _save._value(v) for k, v in g["settings"].items()}} for g in outer["groups"]],
                _save.names_of_general(outer),
            )
        return
    if isinstance(groups, list) and all(isinstance(group, dict) and "params" in group for group in groups):
        # Tuples come as lists.
        pairs = ("betas", "etas", "step_sizes")
        contents.optimizer = Optimizer(
            kind, [{key: tuple(value) if key in pairs else value for key, value in group.items()} for group in groups]
        )
    elif next(contents.of("state"), None) is not None:
        names = list(dict.fromkeys(entry.name for entry in contents.of("state")))
        contents.optimizer = Optimizer(kind, [{"params": names}])
        contents.notes.append("the settings of the optimizer's groups, which the folder does not have as a list")
    steps = [entry for entry in contents.of("value") if entry.key == "step"]
    if steps:
        contents.step = max(int(entry.read()) for entry in steps)


class _Lazily(DefaultSavePlanner):
    """Writes tensors that are read when their turn comes."""

    def __init__(self, entries: dict[str, Entry]) -> None:
        super().__init__()
        self.entries = entries

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        return self.entries[write_item.index.fqn].checked().contiguous()


def write(path: str, contents: Contents) -> str:
    """As ``dcp.save({"model": …, "optim": …})`` of ``get_state_dict`` writes it."""
    if os.path.exists(os.path.join(path, ".metadata")):
        raise Error(f"there is a checkpoint in '{path}' already")
    os.makedirs(path, exist_ok=True)  # says why it cannot, in one line
    entries: dict[str, Entry] = {}

    def hollow(key: str, entry: Entry) -> torch.Tensor:
        entries[key] = entry
        return torch.empty(entry.shape, dtype=entry.dtype, device="meta")

    weights = {entry.name: entry for entry in contents.of("weight", "buffer")}
    weights.update({alias: weights[name] for alias, name in contents.aliases.items() if name in weights})
    state: dict[str, Any] = {"model": {name: hollow(f"model.{name}", entry) for name, entry in weights.items()}}
    if contents.optimizer is not None:
        by_name = contents.by_parameter()
        state["optim"] = {
            "state": {
                name: {key: hollow(f"optim.state.{name}.{key}", entry) for key, entry in of.items()} for name, of in by_name.items()
            },
            "param_groups": contents.optimizer.groups,
        }
    state_dict_saver.save(state, checkpoint_id=path, planner=_Lazily(entries), no_dist=True)
    return path
