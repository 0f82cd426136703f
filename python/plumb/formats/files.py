"""Pickles, and the safetensors format as it is written, one tensor in memory at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import torch

from ..save.durable import whole
from .contents import Entry

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "U16": torch.uint16,
    "U32": torch.uint32, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}  # fmt: skip
_SPELLED = {dtype: name for name, dtype in DTYPES.items()}


def write_pickle(path: str | os.PathLike[str], value: Any) -> None:
    with whole(path) as file:
        torch.save(value, file)


def write_tensors(path: str, entries: Sequence[Entry]) -> None:
    """One safetensors file of these."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": _SPELLED[entry.dtype], "shape": list(entry.shape), "data_offsets": [at, at + entry.bytes],
        }  # fmt: skip
        at += entry.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with whole(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for entry in entries:
            flat = entry.checked().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
