"""Models larger than a rank's memory: built unit by unit, each cut to this rank's part as soon as it is made.

The values are those that one process with the same seed would have made.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from . import _C
from ._C import Error, World
from .world import world as _world


class _Building(threading.local):
    """Of this thread, which may be a rank: the worlds that models are being built for, with the classes of units."""

    def __init__(self) -> None:
        self.now: list[tuple[World, frozenset[type[nn.Module]]]] = []


_building = _Building()
_patched: dict[type[nn.Module], list[Any]] = {}  # by class: its own __init__ (None: a base's), and how many build with it
_patching = threading.Lock()


@contextlib.contextmanager
def deferred(units: Iterable[type[nn.Module]] = (), *, world: World | None = None) -> Iterator[None]:
    """Inside, every module that becomes a unit keeps only this rank's part of its parameters, until an engine has it.

    A module becomes a unit when one of the classes ``units`` has built it, or by ``plumb.unit(module)``. Its parameters must
    have their values by then: using them between there and the engine is an error. Seed alike on every rank.

    >>> import plumb, torch
    >>> torch.manual_seed(1)  # doctest: +ELLIPSIS
    <torch...>
    >>> with plumb.deferred([torch.nn.Linear]):
    ...     model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    >>> engine = plumb.Engine(model, plumb.SGD(lr=0.1), strategy="zero3", units=[torch.nn.Linear])
    """
    if not isinstance(units, Iterable):
        raise Error(f"deferred({units!r}); expected classes of modules, in a list")
    classes = list(units)
    for one in classes:
        if not (isinstance(one, type) and issubclass(one, nn.Module)):
            raise Error(f"deferred({one!r}); expected classes of modules")
    _building.now.append((_world() if world is None else world, frozenset(classes)))
    try:
        with _patching:
            for one in dict.fromkeys(classes):
                _patch(one)
        yield
    finally:
        with _patching:
            for one in dict.fromkeys(classes):
                _restore(one)
        _building.now.pop()


def _patch(cls: type[nn.Module]) -> None:
    known = _patched.setdefault(cls, [vars(cls).get("__init__"), 0])
    known[1] += 1
    if known[1] == 1:
        cls.__init__ = _cutting(cls)  # type: ignore[method-assign]


def _restore(cls: type[nn.Module]) -> None:
    own, count = _patched[cls]
    _patched[cls][1] -= 1
    if count > 1:  # others still build with it
        return
    del _patched[cls]
    if own is None:
        del cls.__init__
    else:
        cls.__init__ = own  # type: ignore[method-assign]


def _cutting(cls: type[nn.Module]) -> Callable[..., None]:
    inner: Callable[..., None] | None = vars(cls).get("__init__")

    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if inner is None:
            super(cls, self).__init__(*args, **kwargs)
        else:
            inner(self, *args, **kwargs)
        is_unit = any(cls in classes for _, classes in _building.now)
        if is_unit and type(self).__init__ is __init__:  # and not a class derived from it, which goes on
            cut(self)

    return __init__


def cut(module: nn.Module) -> None:
    """``module`` became a unit: where a model is being built in parts, its parameters are cut."""
    if _building.now and _building.now[-1][0].size > 1:
        _C.cut(_building.now[-1][0], [parameter for parameter in module.parameters() if not parameter.is_meta])


def fill(model: nn.Module, units: list[nn.Module], world: World, device: torch.device) -> None:
    """Gives a model that was made on the meta device memory and values, module by module, units cut as they are complete.

    The values come from each module's ``reset_parameters``, in the order of ``model.modules()``. What has values already keeps them.
    """
    chosen = {id(unit) for unit in units}

    def places(module: nn.Module) -> collections.Counter[int]:
        return collections.Counter(id(p) for one in module.modules() for p in one.parameters(recurse=False))

    everywhere = places(model)

    def visit(module: nn.Module, name: str) -> None:
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(tensor.is_meta for tensor in own):
            reset = getattr(module, "reset_parameters", None)
            if reset is None:
                raise Error(
                    f"module '{name}' ({type(module).__name__}) is on the meta device and has no reset_parameters() to give it"
                    " values; add one, or build the model under plumb.deferred()"
                )
            there = [(tensor, tensor.detach().clone()) for tensor in own if not tensor.is_meta]
            for tensor in own:
                if tensor.is_meta:
                    whole = torch.empty_like(tensor, device=device)
                    filled = nn.Parameter(whole, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else whole
                    torch.utils.swap_tensors(tensor, filled)  # type: ignore[no-untyped-call]
            reset()
            with torch.no_grad():
                for tensor, value in there:
                    tensor.copy_(value)
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name)
        if id(module) in chosen and world.size > 1:
            inside = places(module)  # what is used elsewhere, too, is not complete, or stays whole
            _C.cut(world, [p for p in module.parameters() if inside[id(p)] == everywhere[id(p)]])

    visit(model, "")
