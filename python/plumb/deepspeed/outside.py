"""Parameters of stage 3 that a forward uses outside of their module: ``F.linear(x, self.embed.weight)``, or a bias that a module
returns to be added later.

Who looks such a parameter up in a forward, or in one that runs again inside a backward, gets the whole value as a tensor of the
graph's own, whose gradient is the parameter's. Nothing has to be released behind it: its memory goes with the graph.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..units import own_parameters
from .config import ConfigError
from .zero import is_whole


class _Whole(torch.autograd.Function):
    """A released parameter, gathered; its gradient is the parameter's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(parameter: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = torch.ops.plumb.gather([parameter.detach()], 0)[0]
        return whole

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        return None

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _Of(threading.local):
    """What of a model runs in this thread."""

    def __init__(self) -> None:
        self.forwards = 0
        self.units: dict[int, int] = {}  # how often each is entered
        self.given: list[tuple[str, torch.Tensor]] = []  # by the running forward


class Outside:
    """Of one engine: begins with ``Outside(module, units)``, and ends with ``close()``.

    A copy of the module (deepcopy, pickle) is sharded by nobody: what its hooks hold knows no parameter.
    """

    def __init__(self, root: nn.Module, units: list[nn.Module]) -> None:
        self._here = _Of()
        self._names = {id(parameter): name for name, parameter in root.named_parameters()}
        self._units: dict[int, list[int]] = {}  # by parameter, the modules that gather it
        self._changed: list[nn.Module] = []
        self._hooks = [
            root.register_forward_pre_hook(self._begin, prepend=True),
            root.register_forward_hook(self._end, always_call=True),
        ]
        for unit, parameters in own_parameters(root, units):
            for parameter in parameters:
                self._units.setdefault(id(parameter), []).append(id(unit))
            self._hooks += [
                unit.register_forward_pre_hook(self._enter, prepend=True),
                unit.register_forward_hook(self._leave, always_call=True),
            ]
        for module in root.modules():
            if any(id(parameter) in self._units for parameter in module.parameters(recurse=False)):
                module._parameters = _Parameters(module._parameters, self)
                self._changed.append(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Outside":
        return _of_a_copy()

    def __reduce__(self) -> Any:
        return _of_a_copy, ()

    @property
    def parameters(self) -> Iterable[int]:
        """The ids of those that are sharded."""
        return self._units.keys()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for module in self._changed:
            module._parameters = dict(module._parameters)
        self._hooks, self._changed = [], []

    def found(self, parameter: torch.Tensor) -> torch.Tensor:
        """What a module's attribute is, whose parameter this is."""
        here, units = self._here, self._units.get(id(parameter))
        again = torch._C._current_graph_task_id() >= 0
        if units is None or not (here.forwards or again):
            return parameter
        # Inside a backward a parameter may be whole for a moment, by another node's need.
        if any(here.units.get(unit, 0) for unit in units) or (not again and is_whole(parameter)):
            return parameter
        whole: torch.Tensor = _Whole.apply(parameter)  # type: ignore[no-untyped-call]
        if not again:
            here.given.append((self._names[id(parameter)], whole))
        return whole

    # ---- hooks

    def _begin(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():  # a graph takes what its units have
            self._here.forwards += 1

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        here = self._here
        here.forwards -= 1
        if here.forwards:
            return
        given, here.given = here.given, []
        for name, whole in given:
            if whole._version:
                raise ConfigError(
                    f"the forward changed parameter '{name}' in place, which is sharded and was gathered for its use outside of its"
                    " module: the change would be lost. Change it inside of zero.GatheredParameters(…, modifier_rank=0)"
                )

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            entered = self._here.units
            entered[id(module)] = entered.get(id(module), 0) + 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        self._here.units[id(module)] -= 1
        return self._returned(output)

    def _returned(self, output: Any) -> Any:
        """The output of a unit with whole values for its parameters in it; None: as it is."""
        if isinstance(output, nn.Parameter):
            value = self.found(output)
            return None if value is output else value
        if isinstance(output, (tuple, list)):
            parts = [self._returned(one) for one in output]
            if all(part is None for part in parts):
                return None
            parts = [one if part is None else part for one, part in zip(output, parts)]
            return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
        if isinstance(output, dict):
            changed = {key: part for key, one in output.items() if (part := self._returned(one)) is not None}
            if not changed:
                return None
            made = copy.copy(output)
            for key, part in changed.items():
                made[key] = part
            return made
        return None


def _of_a_copy() -> Outside:
    return Outside(nn.Module(), [])


class _Parameters(dict[str, Any]):
    """A module's parameters; who looks one up by its name asks ``Outside``. A copy of the module has a plain one."""

    def __init__(self, given: dict[str, Any], outside: Outside) -> None:
        super().__init__(given)
        self._outside = outside

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        return parameter if parameter is None or torch.compiler.is_compiling() else self._outside.found(parameter)

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)
