"""Reads ``torch.save``'s files of others without running anything of theirs: names that are not known are hollow objects."""

from __future__ import annotations

import collections
import pathlib
import pickle
import types
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import filesystem, metadata

from .._C import Error

#: What may be called while a file is read: it makes tensors, shapes, plain containers, and nothing else.
_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "slice"): slice,
    ("builtins", "complex"): complex,
    ("builtins", "dict"): dict,
    ("builtins", "list"): list,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): lambda data, *_: data,
    ("torch._tensor", "_rebuild_from_type_v2"): lambda make, kind, arguments, state: make(*arguments),
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
}


class Hollow:
    """In the place of an object of a class that is not known."""

    arguments: tuple[Any, ...] = ()

    def __init__(self, *arguments: Any, **_: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({key: value for key, value in state.items() if isinstance(key, str)})

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None: ...

    def extend(self, values: Any) -> None: ...


class Words(pickle.Unpickler):
    """Knows the words it is given, and those that make tensors."""

    def __init__(self, file: Any, known: dict[tuple[str, str], Any] | None = None, **words: Any) -> None:
        super().__init__(file, **words)
        self.known = {**_KNOWN, **(known or {})}

    def find_class(self, module: str, name: str) -> Any:
        known = self.known.get((module, name))
        if known is not None:
            return known
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == "torch" and name.endswith("Storage") and hasattr(torch, name):
            return getattr(torch, name)
        return type(name, (Hollow,), {})


_Module = types.ModuleType("plumb.formats.unpickle.pickles")
_Module.Unpickler = Words  # type: ignore[attr-defined]
_Module.load = lambda file, **words: Words(file, **words).load()  # type: ignore[attr-defined]

#: Those of the description of a folder of torch.distributed.checkpoint.
DCP: dict[tuple[str, str], Any] = {
    (one.__module__, one.__name__): one
    for one in (
        metadata.Metadata, metadata.TensorStorageMetadata, metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata,
        metadata.MetadataIndex, metadata.TensorProperties, metadata.StorageMeta, filesystem._StorageInfo, pathlib.PosixPath,
        pathlib.PurePosixPath, metadata._MEM_FORMAT_ENCODING,
    )
} | {("torch.serialization", "_get_layout"): torch.serialization._get_layout}  # fmt: skip


def load(file: str | BinaryIO) -> Any:
    """The contents of a file of ``torch.save``. Tensors stay in the file until they are used, where its format allows it."""
    words: dict[str, Any] = {"map_location": "cpu", "weights_only": False, "pickle_module": _Module}
    try:
        try:
            return torch.load(file, mmap=isinstance(file, str), **words)
        except RuntimeError as error:  # of before torch 1.6: no zip file
            if "mmap can only be used" not in str(error):
                raise
            return torch.load(file, **words)
    except (
        OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, AttributeError, IndexError,
    ) as error:  # fmt: skip
        raise Error(f"'{file}' is no file of torch.save that can be read: {error}") from error
