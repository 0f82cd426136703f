"""What an optimizer is set to, as ranks compare it."""

from __future__ import annotations

import weakref
import zlib
from typing import Any

import torch

from .._C import Error


def refuse_sparse(optimizer: torch.optim.Optimizer) -> None:
    """An Error if it steps sparse gradients alone, which it will not find."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise Error(
            f"{type(optimizer).__name__} steps sparse gradients alone, and the ranks' gradients are summed as dense ones, also those of"
            " nn.Embedding(sparse=True): use torch.optim.Adam or Adagrad"
        )


def settings(optimizer: torch.optim.Optimizer, left: int = 0) -> list[tuple[str, float]]:
    """What step() compares over the ranks: the optimizer's kind and layout as a digest, and every number of its groups.

    And how many steps it ``left`` by an exception: where one rank did and another did not, their parameters differ.
    """
    values = [
        ("the number of steps that the optimizer left by an exception", float(left)),
        ("the optimizer's class, groups and parameters (as a digest)", float(_layout_digest(optimizer))),
    ]
    for g, group in enumerate(optimizer.param_groups):
        values += numbers_of(group, f"the optimizer's group {g}")
    return values


_digests: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[Any, int]] = weakref.WeakKeyDictionary()


def _layout_digest(optimizer: torch.optim.Optimizer) -> int:
    """Of the optimizer's class, and its groups' keys and parameters; made again where those are others than at the last call."""
    key = [(sorted(name for name in group if name != "params"), list(map(id, group["params"]))) for group in optimizer.param_groups]
    known = _digests.get(optimizer)
    if known is None or known[0] != key:
        layout = [(names, [tuple(p.shape) for p in group["params"]]) for (names, _), group in zip(key, optimizer.param_groups, strict=True)]
        known = _digests[optimizer] = key, zlib.crc32(repr((type(optimizer).__name__, layout)).encode())
    return known[1]


def numbers_of(group: dict[str, Any], where: str) -> list[tuple[str, float]]:
    """Every number of a group, by name. A rate may be a tensor; one on a device is not waited for."""
    values = []
    for key in sorted(group):
        value = group[key]
        if key == "params":
            continue
        for number in value if isinstance(value, (tuple, list)) else [value]:
            is_tensor = torch.is_tensor(number) and number.numel() == 1 and number.device.type == "cpu" and not number.is_complex()
            if is_tensor or isinstance(number, (bool, int, float)):
                values.append((f"{key} of {where}", float(number)))
    return values
