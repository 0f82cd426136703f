"""An operator that changes nothing, and calls what a test says where a compiled backward passes it: while its graph runs."""

from __future__ import annotations

from collections.abc import Callable

import torch


def _nothing() -> None:
    pass


_call: list[Callable[[], None]] = [_nothing]


def when_passed(call: Callable[[], None] = _nothing) -> None:
    _call[0] = call


@torch.library.custom_op("plumb_tests::pass_backwards", mutates_args=())
def _pass_backwards(gradient: torch.Tensor) -> torch.Tensor:
    _call[0]()
    return gradient.clone()


@torch.library.custom_op("plumb_tests::pass_forwards", mutates_args=())
def _pass_forwards(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


_pass_backwards.register_fake(torch.empty_like)
_pass_forwards.register_fake(torch.empty_like)
_pass_forwards.register_autograd(lambda ctx, gradient: torch.ops.plumb_tests.pass_backwards(gradient))


def passed(x: torch.Tensor) -> torch.Tensor:
    """``x``; its backward is where a test looks."""
    y: torch.Tensor = torch.ops.plumb_tests.pass_forwards(x)
    return y
