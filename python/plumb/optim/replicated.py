"""Where every rank holds all of the optimizer's state: it steps over the parameters, once their gradients are settled.

torch's elementwise optimizers take that step over a few long tensors, where parameters and gradients lie one behind the other
(``_C.Neighbours``), by a stand-in: the user's object never holds anything but his parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import _C
from .flat import Flat
from .hooks import StandIn, closure_of, inside_a_step, swap
from .compared import settings


class Whole:
    """Steps ``optimizer`` on every rank alike. ``flat``: stepped over any cut of its parameters, it does the same."""

    def __init__(self, native: _C.Engine, optimizer: torch.optim.Optimizer, flat: bool, follow: Callable[[], object] = lambda: None) -> None:
        self.native, self.optimizer = native, optimizer
        self.follow = follow  # before gradients are settled
        self.info: _C.StepInfo | None = None
        self.stepping, self.left = False, 0
        self.groups: list[list[torch.Tensor]] | None = None
        self.handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._ended),
        ]
        self.flat: Flat | None = None
        # Hooks of the user's see his optimizer as it is, whenever they came: this one is the first after a step, and the last before.
        optimizer._optimizer_step_post_hooks.move_to_end(self.handles[1].id, last=False)  # type: ignore[attr-defined]
        if flat:
            self.last = optimizer.register_step_pre_hook(self._stand_in_for_it)
            self.handles += [self.last, optimizer.register_state_dict_pre_hook(self._show)]
            self.flat = Flat(_C.Neighbours(native), optimizer, lambda parameter: parameter, rest=True)
            self.stand_in = StandIn(optimizer)
        self.settled: Callable[[], Any] | None = None  # the closure of this step
        self.stands_in = self.overtaken = False
        self.hidden: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # gradients of a skipped step, by parameter
        native.take_parameters_back()  # they are rank 0's now, and whatever changes them between steps changes them on every rank

    def _before(self, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if inside_a_step(self.optimizer):
            return None
        self.abandon()
        closure, args, kwargs = closure_of(args, kwargs)
        if closure is None:
            self._settle()
            return None

        def settled() -> Any:  # may be called several times; each time gradients are what one process would have
            self._show()
            loss = closure()
            self._settle()
            if self.stands_in:
                self._flatten()
            return loss

        self.settled = settled
        return (args[0], settled, *args[1:]), kwargs

    def _ended(self, *_: object) -> None:
        if not inside_a_step(self.optimizer):
            self._after()
            self.native.take_parameters_back()

    def abandon(self) -> None:
        """If the optimizer threw in the middle of a step: its groups are the user's again."""
        self.left += self.stepping
        self._after()

    # ---- over few tensors

    def _stand_in_for_it(self, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        hooks = self.optimizer._optimizer_step_pre_hooks
        self.overtaken = next(reversed(hooks)) != self.last.id
        closure = closure_of(args, kwargs)[0]
        if self.flat is None or self.overtaken or closure is not self.settled or torch.compiler.is_compiling():
            return None
        self.stands_in = True
        if closure is None:
            self._flatten()
        return (self.stand_in.object, *args[1:]), kwargs

    def _flatten(self) -> None:
        """The gradients are settled: what the stand-in steps is chosen. By itself it steps what the optimizer would."""
        assert self.flat is not None and self.info is not None
        as_it_is = ("capturable", "differentiable")  # a graph knows where things are; a derivative, what they were made from
        if self.info.skipped or any(group.get(key) for group in self.optimizer.param_groups for key in as_it_is):
            return
        groups = self.flat.begin(lambda: None)
        if groups is None:
            self.flat = None
        elif groups:
            self.stand_in.begin(groups, self.flat.state)

    def _show(self, *_: object) -> None:
        if self.flat is not None:
            self.flat.end()
        if self.stands_in:
            self.stand_in.end()

    # ---- checkpoints

    has_owners = False

    def state_of(self, parameter: torch.Tensor) -> tuple[dict[str, Any], int | None]:
        """The optimizer's state of a parameter; None: of all of it."""
        return dict(self.optimizer.state.get(parameter, {})), None

    def is_piece(self, parameter: torch.Tensor, value: torch.Tensor) -> bool:
        """There are none."""
        return False

    def speaks_for(self, parameter: torch.Tensor, rank: int) -> bool:
        """Whether this rank gives what the optimizer keeps of the parameter as a whole."""
        return rank == 0

    def set_state(self, parameter: torch.Tensor, state: dict[str, Any], begin: int | None) -> None:
        self.optimizer.state.pop(parameter, None)
        if state:
            self.optimizer.state[parameter] = state

    def _settle(self) -> None:
        self.native.compare_settings(settings(self.optimizer, self.left))
        self.follow()
        if self.stepping:  # a closure that is called again: the optimizer has changed them meanwhile
            self.native.leave_parameters_to_user()
        self.info = self.native.step()
        self.stepping = True
        self.native.enter(updating=True)
        if self.info.skipped and self.groups is None:
            self.groups = swap(self.optimizer, [[] for _ in self.optimizer.param_groups])
        if self.info.skipped and isinstance(self.optimizer, torch.optim.LBFGS):
            # It keeps a list of its parameters. Where there are no gradients it has arrived, and stops.
            self.hidden = [(parameter, parameter.grad) for group in self.groups or () for parameter in group]
            for parameter, _ in self.hidden:
                parameter.grad = None

    def _after(self) -> None:
        self._show()
        self.settled, self.stands_in = None, False
        if self.overtaken:
            self.overtaken = False
            self.optimizer._optimizer_step_pre_hooks.move_to_end(self.last.id)  # type: ignore[attr-defined]
        if self.stepping:
            self.native.enter(updating=False)
        self.stepping = False
        if self.groups is not None:
            swap(self.optimizer, self.groups)
            self.groups = None
        hidden, self.hidden = self.hidden, []
        for parameter, gradient in hidden:
            parameter.grad = gradient

    def close(self) -> None:
        self._show()
        self.flat = None
        for handle in self.handles:
            handle.remove()
