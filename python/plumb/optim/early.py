"""What an optimizer does in a step before it asks for its closure, where the closure ran before the step."""

from __future__ import annotations

import torch

from .. import _C
from .._C import Error


class Early:
    """Before a step's closure is asked for, of an optimizer that may do anything: it must not look at gradients, nor change parameters."""

    def __init__(self, optimizer: str) -> None:
        self._optimizer, self._version = optimizer, 0
        self._leaves: list[torch.Tensor] = []

    def begin(self, leaves: list[torch.Tensor]) -> None:
        self._leaves, self._version = leaves, _C.versions(leaves)
        for leaf in leaves:
            leaf.__class__ = _Watched
            leaf._early = self  # type: ignore[attr-defined]

    def end(self) -> None:
        changed = _C.versions(self._leaves) != self._version
        self.let_go()
        if changed:
            raise self.error("changed a parameter")

    def let_go(self) -> None:
        for leaf in self._leaves:
            leaf.__class__ = torch.nn.Parameter
        self._leaves, self._version = [], _C.versions([])

    def error(self, did: str) -> Error:
        self.let_go()
        return Error(
            f"{self._optimizer} {did} before it called its closure, and this strategy gives it what this rank owns of the parameters, which a"
            " backward in the middle of a step would not see: use 'ddp' without master_weights, or call the closure yourself and step() without it"
        )


class _Watched(torch.nn.Parameter):
    """A leaf whose optimizer has not yet asked for its closure, which ran before: what it would see here is of after that."""

    _early: "Early"

    @property
    def grad(self) -> torch.Tensor | None:
        raise self._early.error("looked at a gradient")

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        raise self._early.error("changed a gradient")
