"""An optimizer's state where each rank keeps pieces of it: by piece, and none the less by parameter to whoever forgets or sets it."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import torch

from .._C import Error

Values = dict[str, Any]


class Keeper(Protocol):
    """Who keeps the pieces."""

    def keeps(self, parameter: Any) -> bool:
        """Whether there is state of a piece of it."""

    def forget(self, parameter: Any) -> Values | None:
        """What there was; None: it keeps nothing of this parameter by piece, now or ever."""

    def put(self, parameter: Any, state: Values) -> None:
        """The state of the whole parameter."""


class State(defaultdict[Any, Values]):
    """``optimizer.state`` between steps. A read by parameter would give this rank's own numbers, and is an error."""

    def __init__(self, before: dict[Any, Values], keeper: Keeper) -> None:
        super().__init__(dict, before)
        self._keeper = keeper

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or self._keeper.keeps(key)

    def __missing__(self, key: Any) -> Values:
        self._check(key)
        return super().__missing__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        # torch looks in every copy of an optimizer whether its state is of an older format, and there is none of whole parameters.
        if not super().__contains__(key) and sys._getframe(1).f_code.co_name != "__setstate__":
            self._check(key)
        return super().get(key, default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self._check(key)
        return super().setdefault(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        known = self._keeper.forget(key)
        return super().pop(key, *default) if known is None else known

    def __delitem__(self, key: Any) -> None:
        if self._keeper.forget(key) is None:
            super().__delitem__(key)

    def __setitem__(self, key: Any, state: Values) -> None:
        if self._keeper.forget(key) is None:
            super().__setitem__(key, state)
        elif state:
            self._keeper.put(key, state)

    def _check(self, key: Any) -> None:
        if not self._keeper.keeps(key):
            return
        raise Error(
            f"the optimizer's state of this parameter, of shape {list(key.shape)}, is in pieces, one for each rank. optimizer.state_dict() has"
            " this rank's; optimizer.state.pop(parameter), on every rank, forgets it, and optimizer.state[parameter] = ... takes what one process"
            " would have, of the whole parameter"
        )

    def __copy__(self) -> Any:
        return defaultdict(dict, self)

    def copy(self) -> Any:
        return defaultdict(dict, self)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return defaultdict, (dict, dict(self))


def watch(optimizer: torch.optim.Optimizer, keeper: Keeper) -> None:
    """Also one that came since, from load_state_dict() or the user."""
    if not isinstance(optimizer.state, State):
        optimizer.state = State(optimizer.state, keeper)


def leave(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer.state, State):
        optimizer.state = optimizer.state.copy()
