"""Units: modules whose parameters are whole only around their forward and while a backward needs them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, Union

import torch
from torch import nn

from ._C import Door, Error, set_aside
from .deferred import cut
from .given import uncompiled

M = TypeVar("M", bound=nn.Module)

#: Classes, modules or names of modules; a predicate over (name, module); or a number of parameters from which on a module
#: is a unit.
UnitsArgument = Union[Iterable[Union[type[nn.Module], nn.Module, str]], Callable[[str, nn.Module], bool], int, None]


def unit(module: M) -> M:
    """Makes ``module`` a unit of the engine that will be built over it: its own parameters, without those of units inside.

    >>> import plumb, torch
    >>> block = plumb.unit(torch.nn.Linear(4, 4))
    """
    if not isinstance(module, nn.Module):
        what = f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
        raise Error(f"unit() of {what}; expected a module (classes are named by Engine(units=[…]))")
    module._plumb_unit = True  # type: ignore[assignment]
    cut(module)
    return module


def kept(wanted: UnitsArgument) -> UnitsArgument:
    """What may be looked at again: of a generator, what it makes."""
    return list(wanted) if isinstance(wanted, Iterator) else wanted


class _Hook:
    """Enters or leaves a unit. A copy of the module (deepcopy, pickle) is no unit any more."""

    def __init__(self, door: Door | None = None, parameters: list[torch.Tensor] | None = None) -> None:
        self.door = door
        self.parameters = parameters or []

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Hook":
        return type(self)()

    def __reduce__(self) -> tuple[type["_Hook"], tuple[()]]:
        return type(self), ()


class _Enter(_Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.door is not None:
            self.door.enter()


class _Leave(_Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if self.door is not None:
            self.door.leave()


def choose(root: nn.Module, wanted: UnitsArgument) -> list[nn.Module]:
    """The modules of ``root`` that are units, each once, the outer before the inner."""
    named = [(uncompiled(name), module) for name, module in root.named_modules()]
    chosen = {id(module) for _, module in named if getattr(module, "_plumb_unit", False)}
    if isinstance(wanted, bool) or isinstance(wanted, (str, nn.Module, type)):
        raise Error(f"units={wanted!r}; expected a list of classes, modules or names, a predicate, or a number")
    if isinstance(wanted, int):
        _by_size(root, wanted, chosen)
    elif callable(wanted):
        chosen |= {id(module) for name, module in named if wanted(name, module)}
    elif wanted is not None:
        if not isinstance(wanted, Iterable):
            raise Error(f"units={wanted!r}; expected a list of classes, modules or names, a predicate, or a number")
        for one in wanted:
            if isinstance(one, str):
                found = [module for name, module in named if name == uncompiled(one)]
            elif isinstance(one, type):
                found = [module for _, module in named if isinstance(module, one)]
            else:
                found = [module for _, module in named if module is one]
            if not found:
                what = one if isinstance(one, str) else one.__name__ if isinstance(one, type) else type(one).__name__
                raise Error(f"units names '{what}', and the model has no such module")
            chosen |= {id(module) for module in found}
    return [module for _, module in named if id(module) in chosen]


def _by_size(module: nn.Module, size: int, chosen: set[int]) -> int:
    """From the inside: a module with ``size`` parameters that no unit inside of it has. How many are left outside."""
    if size <= 0:
        raise Error(f"units={size}; a number of parameters must be positive")
    left = sum(_by_size(child, size, chosen) for child in module.children())
    left += sum(parameter.numel() for parameter in module.parameters(recurse=False))
    if left < size:
        return left
    chosen.add(id(module))
    return 0


def own_parameters(root: nn.Module, units: list[nn.Module]) -> list[tuple[nn.Module, list[torch.Tensor]]]:
    """By unit, its own parameters: those of no unit inside it.

    A tied parameter is known to every unit that uses it, and stays whole if a module outside of all units uses it too.
    """
    chosen = {id(module) for module in units}
    own: dict[int, tuple[nn.Module, dict[int, torch.Tensor]]] = {}
    outside: set[int] = set()

    def walk(module: nn.Module, around: dict[int, torch.Tensor] | None) -> None:
        if id(module) in chosen:
            around = own.setdefault(id(module), (module, {}))[1]
        for parameter in module.parameters(recurse=False):
            if around is None:
                outside.add(id(parameter))
            else:
                around[id(parameter)] = parameter
        for child in module.children():
            walk(child, around)

    walk(root, None)
    result = []
    for module, parameters in own.values():
        mine = [parameter for key, parameter in parameters.items() if key not in outside]
        if mine:
            result.append((module, mine))
    return result


def hook(module: nn.Module, door: Door, parameters: list[torch.Tensor]) -> list[torch.utils.hooks.RemovableHandle]:
    """Opens the unit before everything else that runs around its forward, and closes it after, also after an exception."""
    return [
        module.register_forward_pre_hook(_Enter(door, parameters), prepend=True),
        module.register_forward_hook(_Leave(door), always_call=True),
    ]


_aside: Any = threading.local()
_let_in = False


def let_transforms_in() -> None:
    """Transforms of torch.func forbid hooks on saved tensors, and refuse to begin where there are any: ours step aside meanwhile.

    What a transform saves goes through no hooks in any case: units that it runs, or that run it, stay whole until the next backward or
    step is over.
    """
    global _let_in
    if _let_in:
        return
    _let_in = True
    autograd: Any = torch._C._autograd
    disable, enable = autograd._saved_tensors_hooks_disable, autograd._saved_tensors_hooks_enable

    @functools.wraps(disable)
    def without_ours(message: str, *args: Any, **kwargs: Any) -> None:
        ours = []
        while (top := autograd._top_saved_tensors_default_hooks(True)) is not None and getattr(top[0], "__name__", "") == "plumb_pack":
            ours.append(top)
            autograd._pop_saved_tensors_default_hooks()
        try:
            disable(message, *args, **kwargs)
        except BaseException:  # of somebody else's
            _push(ours)
            raise
        _aside.hooks = [*getattr(_aside, "hooks", ()), *ours]
        if ours:
            set_aside()

    @functools.wraps(enable)
    def with_ours() -> None:
        enable()
        ours, _aside.hooks = getattr(_aside, "hooks", []), []
        _push(ours)

    def _push(hooks: list[Any]) -> None:
        for one in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(*one)

    autograd._saved_tensors_hooks_disable, autograd._saved_tensors_hooks_enable = without_ours, with_ours
