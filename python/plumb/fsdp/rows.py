"""An optimizer over the DTensors of ``plumb.fully_shard``, stepping this rank's rows as plain tensors.

The update of an elementwise optimizer needs no other rank, so DTensor's dispatch has nothing to add to it, and for small
parameters costs many times the update. During ``step()``, and only then, the optimizer's groups and state hold flat views of the
same memory; before and after they are DTensors, as torch's checkpoints expect.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .. import _C, optim
from ..optim import hooks as optim_hooks
from .sharded import Sharded

State = dict[Any, dict[str, Any]]


class Rows:
    """One optimizer's."""

    def __init__(self) -> None:
        self._leaves: dict[int, tuple[Sharded, torch.Tensor, nn.Parameter]] = {}  # by parameter; the rows that a leaf is a view of
        self._stepped: list[tuple[Sharded, nn.Parameter]] = []
        self._groups: list[list[torch.Tensor]] | None = None  # the user's, during a step
        self._shown: State = {}
        self._flat: State = defaultdict(dict)
        self._known: tuple[list[int], list[int]] = ([], [])  # what of both states stands for the other

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        self.end(optimizer)
        self._stepped = []
        groups = [[self._leaf(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
        gradients = _C.flat_gradients([one.leaf for one, _ in self._stepped if one.leaf is not None])
        for (one, leaf), gradient in zip(self._stepped, gradients, strict=True):
            leaf.grad = gradient if gradient is None or gradient.dtype == one.dtype else gradient.to(one.dtype)
        if optimizer.state is not self._shown or _fingerprint(self._shown) != self._known[0]:
            self._flatten(optimizer)
        self._groups = optim_hooks.swap(optimizer, groups)
        optimizer.state = self._flat  # type: ignore[assignment]

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """After the step, whether it came to its end or not."""
        if self._groups is None:
            return
        optim_hooks.swap(optimizer, self._groups)
        self._groups = None
        for _, leaf in self._stepped:
            leaf.grad = None
        if _fingerprint(self._flat) != self._known[1]:
            self._show()
        optimizer.state = self._shown  # type: ignore[assignment]

    def _leaf(self, parameter: torch.Tensor) -> torch.Tensor:
        known = self._leaves.get(id(parameter))
        if known is None or known[1] is not known[0].local or known[0].sharded is not parameter:
            one: Sharded | None = getattr(parameter, "_sharded", None)
            if one is None:
                return parameter
            rows = one.local
            known = one, rows, nn.Parameter(one.cut.flat(rows.detach()), requires_grad=False)
            self._leaves[id(parameter)] = known
            self._known = ([], [])
        self._stepped.append((known[0], known[2]))
        return known[2]

    def _flatten(self, optimizer: torch.optim.Optimizer) -> None:
        self._shown, self._flat = optimizer.state, defaultdict(dict)
        for parameter, state in self._shown.items():
            known = self._leaves.get(id(parameter))
            if known is None:
                self._flat[parameter] = state
                continue
            one, rows, leaf = known
            for key, value in state.items():
                if isinstance(value, DTensor) and value.shape == one.shape:
                    local = value.redistribute(one.cut.mesh, one.cut.placements)._local_tensor
                    flat = one.cut.flat(local)
                    if flat.data_ptr() != value._local_tensor.data_ptr():
                        state[key] = _distributed(one, one.cut.shaped(flat, local.shape))
                    value = flat
                self._flat[leaf][key] = value
            self._flat[leaf]  # noqa: B018  (also without any)
        self._known = _fingerprint(self._shown), _fingerprint(self._flat)

    def _show(self) -> None:
        by_leaf = {id(leaf): one for one, _, leaf in self._leaves.values()}
        for parameter, state in self._flat.items():
            one = by_leaf.get(id(parameter))
            if one is None:
                self._shown[parameter] = state
                continue
            shown = self._shown.setdefault(one.sharded, {})
            for key, value in state.items():
                if torch.is_tensor(value) and value.shape == parameter.shape:
                    before = shown.get(key)
                    if not isinstance(before, DTensor) or before._local_tensor.data_ptr() != value.data_ptr() or value.numel() == 0:
                        shown[key] = _distributed(one, one.cut.shaped(value, one.local.shape))
                else:
                    shown[key] = value
            for key in shown.keys() - state.keys():
                del shown[key]
        self._known = _fingerprint(self._shown), _fingerprint(self._flat)


def _distributed(one: Sharded, local: torch.Tensor) -> DTensor:
    return one.cut.distributed(local, one.sharded, local.dtype)


def _fingerprint(state: State) -> list[int]:
    """Which objects it is made of. Both states keep them alive, so that none is taken for another."""
    return [number for one in state.values() for number in (id(one), *map(id, one.values()))]


_rows: weakref.WeakKeyDictionary[torch.optim.Optimizer, Rows] = weakref.WeakKeyDictionary()


def begin(optimizer: torch.optim.Optimizer) -> None:
    """Where nobody else looks on: hooks of the user's own around the step see DTensors."""
    watched = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if optim.is_elementwise(optimizer) and not watched:
        _rows.setdefault(optimizer, Rows()).begin(optimizer)


def end(optimizer: torch.optim.Optimizer) -> None:
    known = _rows.get(optimizer)
    if known is not None:
        known.end(optimizer)


def clear(parameters: Iterable[torch.Tensor], set_to_none: bool) -> None:
    """What ``zero_grad`` asks for that it cannot see: gradients that are kept whole. And without making DTensors to forget them."""
    for parameter in parameters:
        one: Sharded | None = getattr(parameter, "_sharded", None)
        if one is not None and (set_to_none or one.keeps):
            one.set_gradient(None)
