"""A model as safetensors files, as ``transformers`` loads and saves it: one file, or several and an index."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from .._C import Error
from ..save.durable import write_text
from . import files
from .contents import Contents, Entry

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000  # as transformers cuts them


def read(path: str) -> Contents:
    """A file, or a folder of them. Weights and buffers cannot be told apart: all are weights."""
    from safetensors import SafetensorError, safe_open

    if os.path.isdir(path):
        index = os.path.join(path, INDEX)
        names = sorted(set(json.loads(Path(index).read_text())["weight_map"].values())) if os.path.exists(index) else []
        if any(os.path.basename(name) != name for name in names):
            raise Error(f"'{index}' names files outside of its folder")
        sources = [os.path.join(path, name) for name in names] or sorted(str(one) for one in Path(path).glob("*.safetensors"))
    else:
        sources = [path]
    if not sources or not all(os.path.isfile(source) for source in sources):
        raise Error(f"there are no safetensors files at '{path}', or not all that its index names")
    contents = Contents()
    known: set[str] = set()
    for source in sources:
        try:
            opened: Any = safe_open(source, framework="pt")
        except SafetensorError as error:
            raise Error(f"'{source}' is no safetensors file: {error}") from None
        for name in opened.keys():
            part = opened.get_slice(name)
            if name in known:
                raise Error(f"tensor '{name}' stands in two files of '{path}'")
            known.add(name)
            dtype = files.DTYPES.get(part.get_dtype())
            if dtype is None:
                raise Error(f"tensor '{name}' of '{source}' is {part.get_dtype()}, which this torch has not")

            def value(opened: Any = opened, name: str = name) -> torch.Tensor:
                found: torch.Tensor = opened.get_tensor(name)
                return found

            contents.entries.append(Entry("weight", name, "", dtype, tuple(part.get_shape()), value))
    return contents


def write(path: str, contents: Contents) -> None:
    """``path`` is a file, if it says so by its name, or a folder that gets ``model.safetensors`` (cut at 5 GB, with an index).

    Weights and buffers alone. Where a parameter has several names, one of them is written, as transformers does.
    """
    entries = sorted(contents.of("weight", "buffer"), key=lambda entry: entry.name)
    if path.endswith(".safetensors"):
        return files.write_tensors(path, entries)
    os.makedirs(path, exist_ok=True)
    shards: list[list[Entry]] = [[]]
    for entry in entries:
        if shards[-1] and sum(one.bytes for one in shards[-1]) + entry.bytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append(entry)
    if len(shards) == 1:
        return files.write_tensors(os.path.join(path, ONE), entries)
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        files.write_tensors(os.path.join(path, name), shard)
        where.update({entry.name: name for entry in shard})
    total = sum(entry.bytes for entry in entries)
    write_text(os.path.join(path, INDEX), json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2))
    return None
