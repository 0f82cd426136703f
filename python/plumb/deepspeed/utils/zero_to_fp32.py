"""The whole model in f32 from a checkpoint, without ranks: one that ``save_checkpoint`` wrote, or a folder of DeepSpeed's own."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from ...formats import Contents, Entry, native, plain, zero
from ..checkpoint import latest_in
from ..config import ConfigError

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict", "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]  # fmt: skip


class LazyTensor:
    """Read by ``contiguous()``."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self.shape = torch.Size(entry.shape)
        self.dtype = torch.float32 if entry.dtype.is_floating_point else entry.dtype

    def contiguous(self) -> torch.Tensor:
        return self._entry.checked().to(self.dtype).contiguous()


def _read(folder: str) -> Contents:
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"Directory '{folder}' doesn't exist")
    theirs = any(name.endswith("_model_states.pt") for name in os.listdir(folder))
    return zero.read(folder) if theirs else native.read(folder)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """A ``state_dict`` on the CPU: masters where there are any, every name of a shared parameter.

    ``lazy_mode``: of objects whose ``contiguous()`` reads them.
    """
    folder = os.fspath(checkpoint_dir)
    tag = latest_in(folder) if tag is None else tag
    if tag is None:
        raise ConfigError(f"Unable to find 'latest' file at {os.path.join(folder, 'latest')}")
    contents = _read(os.path.join(folder, tag))
    masters = {entry.name: entry for entry in contents.of("state") if entry.key == "master"}
    left_out = set(contents.frozen) if exclude_frozen_parameters else set()
    lazy = {
        entry.name: LazyTensor(masters.get(entry.name, entry))
        for entry in contents.of("weight", "buffer")
        if entry.name not in left_out
    }
    lazy.update({alias: lazy[name] for alias, name in contents.aliases.items() if name in lazy})
    if lazy_mode:
        return dict(lazy)
    read: dict[int, torch.Tensor] = {}  # what is shared stays shared
    return {name: read.setdefault(id(one), one.contiguous()) if id(one) not in read else read[id(one)] for name, one in lazy.items()}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """``output_dir/pytorch_model.bin``, or ``model.safetensors``, which is cut into files of 5 GB and never whole in memory."""
    if max_shard_size not in (None, "5GB"):
        raise ConfigError(f"max_shard_size is {max_shard_size!r}; expected '5GB' or None")
    os.makedirs(output_dir, exist_ok=True)
    if not safe_serialization:
        whole = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
        torch.save(whole, os.path.join(output_dir, "pytorch_model.bin"))  # what is shared, once
        return
    lazy = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters, lazy_mode=True)
    once = {id(one): (name, one) for name, one in reversed(lazy.items())}
    entries = [Entry("weight", name, "", one.dtype, tuple(one.shape), one.contiguous) for name, one in once.values()]
    plain.write(os.fspath(output_dir), Contents(entries=entries))


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Into ``model``, on the CPU."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model
