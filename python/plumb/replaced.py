"""What a model got in place of what its engine was built with: parameters, which each rank would train alone, or nobody would; buffers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable
from typing import Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook

from ._C import Engine, Error


class Watcher(Protocol):
    """Is told that a module got something else in the place of ``old``, a parameter."""

    def notice(self, module: nn.Module, attribute: str, old: torch.Tensor) -> None: ...


_watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
_houses: "list[weakref.ref[Newcomers]]" = []
_hooked = False


def watch(watcher: Watcher) -> None:
    _hook()
    _watchers.add(watcher)


def _hook() -> None:
    global _hooked
    if not _hooked:
        _hooked = True
        register_module_parameter_registration_hook(_notice)
        register_module_module_registration_hook(_notice_module)


def watched() -> tuple[int, ...]:
    """The modules that belong to models of engines, by identity."""
    return tuple({number for one in (house() for house in _houses) if one is not None for number in one.modules})


class Newcomers:
    """Parameters that came into a model after its engine was built, in no other's place: of a new module, or a new name.

    ``knows`` answers whether a parameter is the engine's, or none of its business.
    """

    def __init__(self, root: nn.Module, knows: Callable[[torch.Tensor], bool], rank: int) -> None:
        self._root, self._knows, self._rank = weakref.ref(root), knows, rank
        self.modules = {id(module) for module in root.modules()}
        self.came = False
        _hook()
        _houses.append(weakref.ref(self, _houses.remove))

    def check(self) -> None:
        root = self._root()
        if not self.came or root is None:
            return
        strangers = [(name, one) for name, one in root.named_parameters() if not self._knows(one)]
        for name, one in strangers:
            if one.requires_grad:
                raise Error(
                    f"rank {self._rank}: parameter '{name}' came into the model after the engine was built, and nobody would reduce its"
                    " gradient: build a new engine (wrap the model again), or freeze it (requires_grad_(False))"
                )
        self.modules = {id(module) for module in root.modules()}
        self.came = bool(strangers)  # which may be thawed


class Replaced:
    """The places of an engine's parameters that something else was put into since it was built."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]], rank: int) -> None:
        self._names = {id(parameter): name for name, parameter in named}
        self._rank = rank
        self._places: dict[tuple[weakref.ref[nn.Module], str], str] = {}  # the names of what was there, by module and attribute
        watch(self)

    def __bool__(self) -> bool:
        return bool(self._places)

    def knows(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._names

    def notice(self, module: nn.Module, attribute: str, old: torch.Tensor) -> None:
        name = self._names.get(id(old))
        if name is not None:
            self._places.setdefault((weakref.ref(module), attribute), name)

    def check(self, stepped: Container[int] | None = None) -> None:
        """An Error where a parameter that wants gradients stands in a place and is none of the engine's. Others may come and go.

        ``stepped``: the identities of what an optimizer updates, where nothing else counts.
        """
        for (place, attribute), name in self._places.items():
            module = place()
            now = None if module is None else module._parameters.get(attribute)
            if now is None or not now.requires_grad or self.knows(now):
                continue
            if stepped is None or id(now) in stepped:
                raise Error(
                    f"rank {self._rank}: parameter '{name}' was replaced after the engine was built, which knows nothing"
                    " of the new one: write into the old one instead (copy_), or build a new engine (wrap the model again)"
                )


class Buffers:
    """A module's buffers, also where another tensor was put in the place of one (``self.mean = 0.9 * self.mean + …``).

    That one follows rank 0's from then on, and is saved. One of another shape, dtype or device, which other ranks may not have, or with
    a graph is each rank's own.
    """

    def __init__(self, module: nn.Module | None, named: list[tuple[str, torch.Tensor]], native: Engine, rank: int) -> None:
        parts = () if module is None else module.modules()
        places = {id(one): (weakref.ref(part), name) for part in parts for name, one in part._buffers.items() if one is not None}
        self._places = [places.get(id(one)) for _, one in named]
        self._named, self._native, self._rank = named, native, rank

    def follow(self) -> None:
        now = list(map(self._now, self._named, self._places))
        if any(new is not old for (_, new), (_, old) in zip(now, self._named, strict=True)):
            self._native.follow_buffers(now)
            self._named = now

    def _now(self, named: tuple[str, torch.Tensor], place: "tuple[weakref.ref[nn.Module], str] | None") -> tuple[str, torch.Tensor]:
        module = None if place is None else place[0]()
        if module is None or place is None:
            return named
        old, new = named[1], module._buffers.get(place[1])
        if new is None or new is old or new.requires_grad:
            return named
        alike = new.shape == old.shape and new.dtype == old.dtype and new.device == old.device and new.layout == old.layout
        if alike and self._rank > 0:  # rank 0's is written into it, and it may be somebody's (a batch)
            new = module._buffers[place[1]] = new.clone()
        return (named[0], new) if alike else named


# Modules are registered inside of compiled regions, too (torch's own wrappers are), where Dynamo looks at every frame: these two are
# skipped (compiled/units.py), and call nothing else that is written in Python for a newcomer.


def _notice(module: nn.Module, attribute: str, parameter: nn.Parameter | None) -> None:
    old = module._parameters.get(attribute)
    if old is None and parameter is not None:
        _notice_module(module, attribute, None)
    elif old is not None and old is not parameter:
        for one in list(_watchers):
            one.notice(module, attribute, old)


def _notice_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
    number = id(module)
    for house in _houses:
        newcomers = house()
        if newcomers is not None and number in newcomers.modules:
            newcomers.came = True
