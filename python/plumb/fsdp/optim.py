"""The user's own optimizers over the parameters that ``plumb.fully_shard`` shows: what happens around their ``step()``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import compiled, optim
from . import rows, whole
from ..optim import hooks as optim_hooks
from .engine import Engine
from .parallel import part_of
from ..optim.compared import refuse_sparse
from .sharded import Sharded, ShardedParameter, sharded_of


class _Once:
    """A closure's result, for an optimizer that is known to ask for it first, and once."""

    def __init__(self, loss: Any) -> None:
        self.loss = loss

    def __call__(self) -> Any:
        return self.loss


class _Whenever:
    """A closure for an optimizer that may ask for it at any time, and again: what it wrote before counts, and what it finds after is settled."""

    def __init__(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> None:
        self.optimizer, self.closure = optimizer, closure

    def __call__(self) -> Any:
        for engine in engines_of(self.optimizer):
            engine.finish_step()
        with torch.enable_grad():
            loss = self.closure()
        for engine in engines_of(self.optimizer):
            engine.begin_step(self.optimizer)
        return loss


def engines_of(optimizer: torch.optim.Optimizer) -> list[Engine]:
    """Of the parameters that this optimizer updates; those that it was given before they were sharded are exchanged."""
    found: list[Engine] = []
    for group in optimizer.param_groups:
        for i, parameter in enumerate(group["params"]):
            sharded: Sharded | None = getattr(parameter, "_sharded", None)
            if sharded is None:
                sharded = sharded_of(parameter)
                if sharded is None:
                    continue
                _exchange(optimizer, group["params"], i, sharded)
            engine = sharded.unit.root.engine
            if engine is not None and engine not in found:
                found.append(engine)
    return found


def _steps_rows(optimizer: torch.optim.Optimizer) -> bool:
    """Also where there is no engine yet."""
    return any(isinstance(parameter, ShardedParameter) for group in optimizer.param_groups for parameter in group["params"])


def _exchange(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], i: int, one: Sharded) -> None:
    old, parameters[i] = parameters[i], one.sharded
    state = optimizer.state.pop(old, None)
    if state is None:
        return

    def cut(value: Any) -> Any:
        if not torch.is_tensor(value) or value.dim() == 0 or value.shape != one.shape:
            return value
        return one.cut.distributed(one.cut.rows(part_of(value)).clone(), value, value.dtype)

    optimizer.state[one.sharded] = {key: cut(value) for key, value in state.items()}


_outside = compiled.outside("plumb.fully_shard settles gradients around a step, outside of compiled graphs: compile it without fullgraph=True")


@_outside
def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows.end(optimizer)  # of a step that was left by an exception
    engines = engines_of(optimizer)
    closure, args, kwargs = optim_hooks.closure_of(args, kwargs)
    if not engines and (closure is None or not _steps_rows(optimizer)):
        return None
    refuse_sparse(optimizer)
    _guard(type(optimizer))
    result = None
    if closure is not None:
        wrapped: Callable[[], Any]
        if optim.is_elementwise(optimizer):
            with torch.enable_grad():
                wrapped = _Once(closure())
        else:
            wrapped = _Whenever(optimizer, closure)
        result = (args[0], wrapped, *args[1:]), kwargs
        engines = engines_of(optimizer)  # a closure may run the first forward
    for engine in engines:
        engine.begin_step(optimizer)
    if engines:
        rows.begin(optimizer)
    return result


@_outside
def _after_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    rows.end(optimizer)
    for engine in engines_of(optimizer):
        engine.finish_step()


@_outside
def _abandon(optimizer: torch.optim.Optimizer) -> None:
    rows.end(optimizer)
    for engine in engines_of(optimizer):
        engine.abandon()


def _guard(kind: type[torch.optim.Optimizer]) -> None:
    """A step of this class that is left by an exception ends at once: nobody waits for it, and groups and state are the user's again."""
    inner = kind.step
    if getattr(inner, "_plumb_guard", False):
        return

    @functools.wraps(inner)
    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return inner(self, *args, **kwargs)
        except BaseException:
            _abandon(self)
            raise

    step._plumb_guard = True  # type: ignore[attr-defined]
    kind.step = step  # type: ignore[method-assign]


def _guard_who_gets_rows(kind: type[torch.optim.Optimizer]) -> None:
    """Before its first step, and before schedulers take that."""
    inner = kind.add_param_group

    @functools.wraps(inner)
    def add_param_group(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        inner(self, param_group)
        if _steps_rows(self):
            _guard(type(self))

    kind.add_param_group = add_param_group  # type: ignore[method-assign]


def _clear_first(kind: type[torch.optim.Optimizer]) -> None:
    inner = kind.zero_grad

    @functools.wraps(inner)
    def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            rows.clear(group["params"], set_to_none)
        inner(self, set_to_none)

    kind.zero_grad = zero_grad  # type: ignore[method-assign]


_installed = False


def watch_optimizers() -> None:
    """From now on every optimizer's step() over sharded parameters settles their gradients before and the update after."""
    global _installed
    if not _installed:
        _installed = True
        for kind in optim._ELEMENTWISE:  # also those that were built already
            _guard(kind)
        _guard_who_gets_rows(torch.optim.Optimizer)
        whole.watch()
        _clear_first(torch.optim.Optimizer)
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
