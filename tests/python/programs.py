"""The rows of the README's table, and what units must compose with, as programs (see stage.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stage import STEP, WIDTH, ZERO, Play


def plain(play: Play) -> Iterator[Any]:
    for i in range(3):
        play.backward(play.loss(i))
        yield STEP
        yield ZERO


def two_backwards_accumulating(play: Play) -> Iterator[Any]:
    for i in (0, 2):
        play.backward(play.loss(i))
        play.backward(play.loss(i + 1))
        yield STEP
        yield ZERO


def retained_graph_two_losses(play: Play) -> Iterator[Any]:
    out = play.model(play.data())
    play.backward(out.pow(2).mean(), retain_graph=True)
    play.backward(out.pow(3).mean())
    yield STEP


def retained_with_zero_grad_between(play: Play) -> Iterator[Any]:
    out = play.model(play.data())
    play.backward(out.pow(2).mean(), retain_graph=True)
    yield ZERO
    play.backward(out.pow(3).mean())
    yield STEP


def forward_forward_backward_backward(play: Play) -> Iterator[Any]:
    one, two = play.loss(0), play.loss(1)
    play.backward(one)
    play.backward(two)
    yield STEP


def two_forwards_one_backward(play: Play) -> Iterator[Any]:
    play.backward(play.loss(0) + play.loss(1))
    yield STEP


def forward_in_no_sync_backward_outside(play: Play) -> Iterator[Any]:
    with play.no_sync():
        loss = play.loss(0)
        play.backward(play.loss(1))
    play.backward(loss)
    yield STEP


def submodule_twice_under_checkpoints(play: Play) -> Iterator[Any]:
    block = play.model.blocks[0]
    x = play.data().requires_grad_()
    once = checkpoint(block, x, use_reentrant=True)
    play.backward(checkpoint(block, once, use_reentrant=True).pow(2).mean())
    yield STEP


def used_on_one_rank_only(play: Play) -> Iterator[Any]:
    out = play.model.first(play.data())
    if play.rank == 0:
        out = play.model.blocks[1](out)
    play.backward(out.pow(2).mean())
    yield STEP


def freeze_after_the_first_step(play: Play) -> Iterator[Any]:
    play.backward(play.loss(0))
    yield STEP
    yield ZERO
    yield lambda model: model.blocks[1].up.weight.requires_grad_(False)
    play.backward(play.loss(1))
    yield STEP


def unfreeze_after_wrapping(play: Play) -> Iterator[Any]:
    play.backward(play.loss(0))
    yield STEP
    yield ZERO
    yield lambda model: model.blocks[1].requires_grad_(True)
    play.backward(play.loss(1))
    yield STEP
    yield ZERO
    play.backward(play.loss(2))
    yield STEP


def freeze(model: nn.Module) -> None:
    model.blocks[1].requires_grad_(False)


def gradient_set_before_backward(play: Play) -> Iterator[Any]:
    def assign(model: nn.Module) -> None:
        model.first.weight.grad = torch.ones_like(model.first.weight)

    yield assign
    play.backward(play.loss(0))
    yield STEP


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise ValueError("boom")


def exception_then_a_normal_step(play: Play) -> Iterator[Any]:
    out = play.model.first(play.data())
    for i, block in enumerate(play.model.blocks):
        out = block(Boom.apply(out) if i == 1 and play.rank == 0 else out)
    try:
        play.backward(out.pow(2).mean())
        assert play.rank != 0 and play.engine is None, "the failure of rank 0 is everybody's"
    except (ValueError, RuntimeError) as error:
        assert "boom" in str(error) if play.rank == 0 else "failed on rank 0" in str(error), error
    yield ZERO
    play.backward(play.loss(1))
    yield STEP


def backward_of_some_inputs(play: Play) -> Iterator[Any]:
    play.backward(play.loss(0), inputs=[play.model.last.weight, play.model.first.weight])
    yield STEP
    yield ZERO
    play.backward(play.loss(1))
    yield STEP


def zero_grad_after_no_sync(play: Play) -> Iterator[Any]:
    with play.no_sync():
        play.backward(play.loss(0))
    yield ZERO
    play.backward(play.loss(1))
    yield STEP


def no_sync_until_the_step(play: Play) -> Iterator[Any]:
    with play.no_sync():
        play.backward(play.loss(0))
        play.backward(play.loss(1))
    yield STEP
    yield ZERO
    play.backward(play.loss(2))
    yield STEP


def buffers_follow(play: Play) -> Iterator[Any]:
    play.backward(play.loss(0))
    yield STEP


ROWS = {
    "plain": plain,
    "two backwards, accumulating": two_backwards_accumulating,
    "retained graph, two losses": retained_graph_two_losses,
    "retained, zero_grad between": retained_with_zero_grad_between,
    "forward, forward, backward, backward": forward_forward_backward_backward,
    "two forwards, one backward": two_forwards_one_backward,
    "forward in no_sync, backward outside": forward_in_no_sync_backward_outside,
    "a submodule twice, re-entrant checkpoint": submodule_twice_under_checkpoints,
    "used on one rank only": used_on_one_rank_only,
    "freeze after the first step": freeze_after_the_first_step,
    "sets p.grad before backward": gradient_set_before_backward,
    "exception in backward, then a normal step": exception_then_a_normal_step,
    "backward(inputs=[p])": backward_of_some_inputs,
    "zero_grad after a no_sync backward": zero_grad_after_no_sync,
    "no_sync until the step": no_sync_until_the_step,
}


# ---- what units compose with


def reentrant_around(play: Play) -> Iterator[Any]:
    play.backward(play.loss(0, around=lambda block, x: checkpoint(block, x, use_reentrant=True)))
    yield STEP


def non_reentrant_around(play: Play) -> Iterator[Any]:
    play.backward(play.loss(0, around=lambda block, x: checkpoint(block, x, use_reentrant=False)))
    yield STEP


def _inside(reentrant: bool) -> Any:
    def program(play: Play) -> Iterator[Any]:
        plain_forward = type(play.model.blocks[0]).forward
        for block in play.model.blocks:
            block.forward = lambda x, block=block: checkpoint(plain_forward, block, x, use_reentrant=reentrant)
        play.backward(play.loss(0))
        for block in play.model.blocks:
            del block.forward
        yield STEP

    return program


def saved_on_cpu(play: Play) -> Iterator[Any]:
    with torch.autograd.graph.save_on_cpu():
        loss = play.loss(0)
    play.backward(loss)
    yield STEP


def somebody_elses_hooks(play: Play) -> Iterator[Any]:
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> int:
        kept[len(kept)] = tensor
        return len(kept) - 1

    def scope() -> torch.Tensor:  # whose hooks die with it, before the backward
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda key: kept[key]):
            return play.loss(0)

    loss = scope()
    assert kept
    play.backward(loss)
    yield STEP


def double_backward(play: Play) -> Iterator[Any]:
    model = play.model
    (gradient,) = torch.autograd.grad(play.loss(0), model.last.weight, create_graph=True)
    play.backward(gradient.pow(2).sum())
    yield STEP


def an_error_inside_a_forward(play: Play) -> Iterator[Any]:
    try:
        play.model.blocks[1](torch.ones(3, WIDTH + 1).to(next(play.model.parameters())))
        raise AssertionError("a wrong shape was taken")
    except RuntimeError:
        pass
    play.backward(play.loss(0))
    yield STEP


def evaluation_between(play: Play) -> Iterator[Any]:
    play.backward(play.loss(0))
    with torch.no_grad():
        play.loss(1)
    yield STEP
    yield ZERO
    with torch.no_grad():
        play.loss(1)
    play.backward(play.loss(2))
    yield STEP


def nested_checkpoints(play: Play) -> Iterator[Any]:
    """Deeper than libtorch goes on one thread."""

    def deep(depth: int, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(play.model.blocks[0](x)) if depth % 20 == 0 else torch.sin(x)
        return x if depth == 0 else checkpoint(lambda y: deep(depth - 1, y), x, use_reentrant=True)

    play.backward(deep(100, play.data().requires_grad_()).pow(2).mean())
    yield STEP


UNITS = {
    "re-entrant checkpoint around": reentrant_around,
    "non-re-entrant checkpoint around": non_reentrant_around,
    "re-entrant checkpoint inside": _inside(True),
    "non-re-entrant checkpoint inside": _inside(False),
    "save_on_cpu": saved_on_cpu,
    "somebody else's saved-tensor hooks": somebody_elses_hooks,
    "double backward": double_backward,
    "an error inside a forward": an_error_inside_a_forward,
    "evaluation between": evaluation_between,
}
