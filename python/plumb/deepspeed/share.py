"""What a gradient counts that comes through an output of an engine's model: in the engine's own backward it is divided already, in one that
the caller begins it is one of the step's micro-batches."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .engine import DeepSpeedEngine

#: By their graphs' tasks, the backwards that engines began: such a loss is divided once, for every engine that it reaches.
_begun: dict[int, "DeepSpeedEngine"] = {}

_engines: "weakref.WeakValueDictionary[int, DeepSpeedEngine]" = weakref.WeakValueDictionary()
_numbers = itertools.count()


#: Whether an engine takes the sum over ranks for the mean: its backward may reach one that does not.
anybody_sums = False


def number(engine: "DeepSpeedEngine") -> int:
    """A new one, by which compiled graphs know the engine."""
    global anybody_sums
    mine = next(_numbers)
    _engines[mine] = engine
    anybody_sums = anybody_sums or engine._times() != 1
    return mine


def _factor(engine: "DeepSpeedEngine") -> float:
    begun = _begun.get(torch._C._current_graph_task_id())
    if begun is not None:
        return engine._times() / begun._times()
    return 1.0 if engine._in_backward else engine._share()


class _Share(torch.autograd.Function):
    """An output of the model for the caller, who may call ``backward()`` on what he makes of it: his gradients count as
    those of ``engine.backward()``, once, although one output may be computed from another."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, engine: "DeepSpeedEngine") -> torch.Tensor:
        ctx.engine = engine
        return output.detach()  # no view: the caller may change what he gets in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        factor = _factor(ctx.engine)
        return gradient if factor == 1.0 else gradient * factor, None


class _ShareInGraph(torch.autograd.Function):
    """The same inside of a compiled graph, which asks when its backward runs and not when it is made."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, engine: int) -> torch.Tensor:
        ctx.engine = engine
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.ops.plumb_deepspeed.share(gradient, ctx.engine), None


@torch.library.custom_op("plumb_deepspeed::share", mutates_args=())
def _shared(gradient: torch.Tensor, engine: int) -> torch.Tensor:
    found = _engines.get(engine)
    return gradient * (1.0 if found is None else _factor(found))


@_shared.register_fake
def _(gradient: torch.Tensor, engine: int) -> torch.Tensor:
    return torch.empty_like(gradient)


def shared(output: torch.Tensor, engine: "DeepSpeedEngine") -> Any:
    """``output``, whose gradient counts what it should. Those of torch.func are the caller's own."""
    if torch._C._are_functorch_transforms_active():
        return output
    if torch.compiler.is_compiling():
        return _ShareInGraph.apply(output, engine._number)  # type: ignore[no-untyped-call]
    return _Share.apply(output, engine)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def begins(root: torch.Tensor, engine: "DeepSpeedEngine") -> Iterator[None]:
    """A backward of ``root`` inside is this engine's, whatever others it reaches."""
    tasks: list[int] = []

    def begin(_: torch.Tensor) -> None:
        tasks.append(torch._C._current_graph_task_id())
        _begun[tasks[-1]] = engine

    handle = root.register_hook(begin)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        handle.remove()
        for task in tasks:
            _begun.pop(task, None)
