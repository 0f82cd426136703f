"""Parameters that a model got in place of those its engine was built with: each rank would train them alone, or nobody would."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ._C import Error

_watched: weakref.WeakSet[Replaced] = weakref.WeakSet()
_hooked = False


class Replaced:
    """The places of an engine's parameters that something else was put into since it was built."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]], rank: int) -> None:
        global _hooked
        self._names = {id(parameter): name for name, parameter in named}
        self._rank = rank
        self._places: list[tuple[weakref.ref[nn.Module], str, str]] = []
        _watched.add(self)
        if not _hooked:
            _hooked = True
            register_module_parameter_registration_hook(_notice)

    def notice(self, module: nn.Module, attribute: str, old: torch.Tensor) -> None:
        name = self._names.get(id(old))
        if name is not None:
            self._places.append((weakref.ref(module), attribute, name))

    def check(self) -> None:
        """An Error where a parameter that wants gradients stands in a place and is none of the engine's. Others may come and go."""
        for place, attribute, name in self._places:
            module = place()
            now = None if module is None else module._parameters.get(attribute)
            if now is not None and now.requires_grad and id(now) not in self._names:
                raise Error(
                    f"rank {self._rank}: parameter '{name}' was replaced after the engine was built, which knows nothing"
                    " of the new one: write into the old one instead (copy_), or build a new engine"
                )


def _notice(module: nn.Module, attribute: str, parameter: nn.Parameter | None) -> None:
    old = module._parameters.get(attribute)
    if old is not None and old is not parameter:
        for one in list(_watched):
            one.notice(module, attribute, old)
