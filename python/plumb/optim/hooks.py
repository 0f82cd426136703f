"""What the steps of a user's optimizer have in common, whatever they run over."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Protocol

import torch
import torch.utils.hooks

from .._C import Error


def inside_a_step(optimizer: torch.optim.Optimizer) -> bool:
    """For a hook of a step: whether another step of the same optimizer is around it, as where a derived class calls super()'s."""
    around: FrameType | None = sys._getframe(2)  # torch's function that calls the hooks
    assert around is not None
    return _steps_around(around.f_back, {around.f_code}, optimizer)


def _steps_around(frame: FrameType | None, codes: set[CodeType], optimizer: torch.optim.Optimizer) -> bool:
    """Whether one of ``codes``, which are torch's around a step, runs for this optimizer in ``frame`` or around it."""
    while frame is not None:
        if frame.f_code in codes and (frame.f_locals.get("args") or (None,))[0] is optimizer:
            return True
        frame = frame.f_back
    return False


_STEPS = {code for code in torch.optim.Optimizer.profile_hook_step.__code__.co_consts if isinstance(code, CodeType)}


class Steps(Protocol):
    """How a user's optimizer is stepped: ``stepping`` from where its gradients are settled."""

    optimizer: torch.optim.Optimizer
    stepping: bool
    groups: list[list[torch.Tensor]] | None

    def abandon(self) -> None: ...


def check_outside(steps: Steps, call: str) -> None:
    """An Error in the middle of a step; one that threw has ended."""
    if not steps.stepping and steps.groups is None:
        return
    if _steps_around(sys._getframe(1), _STEPS, steps.optimizer):
        raise Error(f"{call} inside of a step of {type(steps.optimizer).__name__}: call it when the step has ended")
    steps.abandon()


def swap(optimizer: torch.optim.Optimizer, groups: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    before = [group["params"] for group in optimizer.param_groups]
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = parameters
    return before


class LastHook:
    """A hook before each step that is the last one of them, also of those that come later: they find what the user knows."""

    def __init__(self, optimizer: torch.optim.Optimizer, hook: Callable[..., Any]) -> None:
        self._optimizer = optimizer
        register = optimizer.register_step_pre_hook
        self._handle = register(hook)

        def before_it(other: Callable[..., Any]) -> torch.utils.hooks.RemovableHandle:
            handle = register(other)
            hooks = optimizer._optimizer_step_pre_hooks
            known = list(hooks)
            for mine in known[known.index(self._handle.id) : -1]:  # and what was put behind it on purpose
                hooks.move_to_end(mine)  # type: ignore[attr-defined]
            return handle

        vars(optimizer)["register_step_pre_hook"] = before_it

    def remove(self) -> None:
        self._handle.remove()
        vars(self._optimizer).pop("register_step_pre_hook", None)


class Watch:
    """Ends a call of the optimizer's that an exception leaves, at once: torch has no hook for that, and the next forward needs what was updated."""

    def __init__(self, optimizer: torch.optim.Optimizer, name: str, abandon: Callable[[], None]) -> None:
        self._optimizer, self._name, self._abandon = optimizer, name, abandon
        self._around: Any = getattr(optimizer, name)  # a scheduler may have wrapped it, and may wrap this one

        @functools.wraps(getattr(self._around, "__func__", self._around))
        def watched(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return self._around(*args, **kwargs)
            try:
                return self._around(*args, **kwargs)
            except BaseException:
                self._abandon()
                raise

        self._watched = types.MethodType(watched, optimizer)
        self._had_one = name in vars(optimizer)
        vars(optimizer)[name] = self._watched

    def remove(self) -> None:
        self._abandon = _nothing
        if vars(self._optimizer).get(self._name) is self._watched:  # otherwise somebody has wrapped it
            if self._had_one:
                vars(self._optimizer)[self._name] = self._around
            else:
                del vars(self._optimizer)[self._name]


def _nothing() -> None:
    pass


def closure_of(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[[], Any] | None, tuple[Any, ...], dict[str, Any]]:
    """The closure of optimizer.step(…), and the arguments (the optimizer first) without it."""
    if kwargs.get("closure") is not None:
        return kwargs["closure"], args, {key: value for key, value in kwargs.items() if key != "closure"}
    if len(args) > 1 and callable(args[1]):
        return args[1], (args[0], *args[2:]), kwargs
    return None, args, kwargs


class StandIn:
    """Takes a step in the place of an optimizer, over other parameters: the user's object is all the while what he knows it as.

    Also for whoever looks while the step runs, and where it throws. Before and after it is the optimizer in all but identity.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.object: torch.optim.Optimizer = object.__new__(type(optimizer))
        self.object.__dict__ = vars(optimizer)
        self._before: dict[str, Any] = {}

    def begin(self, groups: list[list[torch.Tensor]], state: Any) -> None:
        known = [{**group, "params": own} for group, own in zip(self._optimizer.param_groups, groups, strict=True)]
        self._before = {**vars(self._optimizer), "param_groups": known, "state": state}
        self.object.__dict__ = dict(self._before)

    def end(self) -> None:
        mine = vars(self.object)
        if mine is vars(self._optimizer):
            return
        self.object.__dict__ = vars(self._optimizer)
        for name, value in mine.items():  # what the step noted of itself
            if name not in self._before or value is not self._before[name]:
                setattr(self._optimizer, name, value)
        self._before = {}
