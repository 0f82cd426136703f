"""How many steps optimizers took over the parameters of a wrapped model, and by which numbers: the same on every rank.

Nothing of ours runs in a step of an optimizer under DistributedDataParallel. One that throws on a rank, that a rank leaves out, or
that has another learning rate there, would leave that rank with parameters of its own: so what steps did travels with the next
backward (as a digest), and is an error there on every rank.
"""

from __future__ import annotations

import itertools
import sys
import weakref
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..engine import Engine
from ..optim.compared import numbers_of

NAME = "the number of optimizer steps over the wrapped model's parameters (one that throws does not count)"
BEGUN = (
    "the number of optimizer steps at rate 0 that counted as updates of the wrapped model's parameters (as get_optimizer_state_dict takes"
    " one before the first step: call it on every rank, or after that)"
)
EARLIER = "the numbers of optimizers that stepped the wrapped model before the last ones did (as a digest)"

#: As many optimizers are told of by name: those that stepped last.
_BY_NAME = 16


class Steps:
    """Over one engine's parameters."""

    def __init__(self, engine: Engine, parameters: Iterable[torch.Tensor]) -> None:
        self._engine = weakref.ref(engine)
        self._ids = {id(parameter) for parameter in parameters}
        self._taken = self._begun = 0
        self._counts = True
        # By optimizer, in the order of their last steps. Kept when one is gone: that is at another time on each rank.
        self._numbers: dict[int, list[tuple[str, float]]] = {}
        self._earlier = 0  # a digest of others' numbers
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._next = itertools.count()
        self._tell()
        _all.add(self)

    def suspend(self) -> None:
        """Ranks that ran out of inputs take no steps: every rank calls it when it enters a join, and ``resume`` when it leaves."""
        self._counts = False
        self._tell()

    def resume(self) -> None:
        self._counts, self._taken, self._begun, self._earlier = True, 0, 0, 0
        self._numbers.clear()
        self._tell()

    def count(self, optimizer: torch.optim.Optimizer) -> None:
        moved = [g for g, group in enumerate(optimizer.param_groups) if self._moves(group)] if self._counts else []
        if moved:
            self._taken += 1
            number = self._known.setdefault(optimizer, next(self._next))
            self._numbers.pop(number, None)
            self._numbers[number] = self._numbers_of(optimizer, moved)
            if len(self._numbers) > _BY_NAME:
                oldest = self._numbers.pop(next(iter(self._numbers)))
                self._earlier = zlib.crc32(repr(oldest).encode(), self._earlier)
            self._tell()
        elif self._counts and self._counted(optimizer):
            self._begun += 1
            self._tell()

    @staticmethod
    def _numbers_of(optimizer: torch.optim.Optimizer, moved: list[int]) -> list[tuple[str, float]]:
        numbers: list[tuple[str, float]] = []
        for g in moved:
            group = optimizer.param_groups[g]
            where = f"group {g} of {type(optimizer).__name__}, which stepped the wrapped model,"
            numbers.append((f"the number of parameters in {where}", float(len(group["params"]))))
            numbers += numbers_of(group, where)
        return numbers

    def _moves(self, group: dict[str, Any]) -> bool:
        """At rate 0 nothing moves: so torch's checkpoints make an optimizer's state, maybe on one rank alone."""
        return group.get("lr") != 0 and any(id(parameter) in self._ids for parameter in group["params"])

    def _counted(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a step that moved nothing counts all the same: by it an Adam corrects the next ones."""
        ours = (parameter for group in optimizer.param_groups for parameter in group["params"] if id(parameter) in self._ids)
        return any("step" in optimizer.state.get(parameter, ()) for parameter in ours)

    def _tell(self) -> None:
        engine = self._engine()
        if engine is not None and not engine.closed:
            taken = [(NAME, float(self._taken)), (BEGUN, float(self._begun)), (EARLIER, float(self._earlier))]
            taken += [number for one in self._numbers.values() for number in one]
            engine._engine.compare_in_backwards(taken if self._counts else [])


_all: weakref.WeakSet[Steps] = weakref.WeakSet()


def _inside_another_step() -> bool:
    """One optimizer may step others, over parts that differ between ranks. Called from a hook of torch's wrapper of ``step``."""
    wrapper = sys._getframe(2)
    frame = wrapper.f_back
    while frame is not None:
        if frame.f_code is wrapper.f_code:
            return True
        frame = frame.f_back
    return False


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not _all or torch.compiler.is_compiling():
        return
    # Inside a backward each parameter may have an optimizer, and not every rank every gradient.
    if torch._C._current_graph_task_id() != -1 or _inside_another_step():
        return
    for steps in list(_all):
        steps.count(optimizer)


register_optimizer_step_post_hook(_after_step)
