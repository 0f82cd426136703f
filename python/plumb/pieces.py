"""Pieces of sharded gradients in Python: what would take their numbers past torch's operations is refused, as any other operation is."""

from __future__ import annotations

import functools
from typing import Any

import torch

from . import _C

# Of torch's own, which look at memory, and ask no operation that a piece could answer.
_WAYS_OUT = ("__deepcopy__", "__reduce_ex__", "__dlpack__", "numpy")
_closed = False


def close_ways_out() -> None:
    """From now on, for all tensors that are pieces; others are as ever."""
    global _closed
    if _closed:
        return
    _closed = True
    for name in _WAYS_OUT:
        setattr(torch.Tensor, name, _refused(getattr(torch.Tensor, name)))


def _refused(way: Any) -> Any:
    @functools.wraps(way)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(self) is torch.Tensor and _C.is_piece(self):
            _C.refuse_piece(self, way.__name__)
        return way(self, *args, **kwargs)

    return method
