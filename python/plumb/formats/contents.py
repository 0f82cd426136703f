"""What a checkpoint holds, whoever wrote it: named tensors that are read when they are asked for, and a few words beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .._C import Error

#: A weight; a buffer; a value for each element of a parameter (moments, "master": the weight in f32); a value of the whole.
KINDS = ("weight", "buffer", "state", "value")


@dataclass(frozen=True)
class Entry:
    """One tensor. ``key`` says which of a parameter's, in the words of ``torch.optim``."""

    kind: str
    name: str
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def checked(self) -> torch.Tensor:
        """Its value, on the CPU, of the shape and dtype that were announced."""
        value = self.read().detach()
        if tuple(value.shape) != self.shape or value.dtype != self.dtype:
            raise Error(
                f"{self.kind} '{self.name}' {self.key} is {value.dtype} {list(value.shape)}; it was announced as {self.dtype}"
                f" {list(self.shape)}"
            )
        return value.cpu()


@dataclass
class Optimizer:
    """A ``torch.optim`` class by its name, and its groups: ``params`` are names, the rest is settings."""

    kind: str
    groups: list[dict[str, Any]]
    general: list[str] = field(default_factory=list)  # names of what it keeps of no parameter


@dataclass
class Contents:
    entries: list[Entry] = field(default_factory=list)
    step: int = 0
    samples: int = 0
    optimizer: Optimizer | None = None
    aliases: dict[str, str] = field(default_factory=dict)  # other names of parameters
    frozen: list[str] = field(default_factory=list)
    user: dict[str, Any] = field(default_factory=dict)  # the user's own state
    schedule: dict[str, Any] | None = None
    counters: dict[str, int] = field(default_factory=dict)
    extras: dict[str, list[tuple[str, torch.Tensor]]] = field(default_factory=dict)  # of Plumb's, as they are
    notes: list[str] = field(default_factory=list)  # what is not taken along, for people

    def of(self, *kinds: str) -> Iterator[Entry]:
        return (entry for entry in self.entries if entry.kind in kinds)

    def by_parameter(self) -> dict[str, dict[str, Entry]]:
        """State and values, by parameter and key."""
        found: dict[str, dict[str, Entry]] = {}
        for entry in self.of("state", "value"):
            found.setdefault(entry.name, {})[entry.key] = entry
        return found
