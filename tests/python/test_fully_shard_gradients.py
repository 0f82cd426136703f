"""Gradients under plumb.fully_shard in the user's own hands: clipped, scaled, assigned, added to, divided by another factor."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs
from torch.distributed.tensor import DTensor, Replicate

import plumb
from sharding import MLP, Cases, batch, mlps, plain_loss, reduce_gradients, same, shard, train_both, transformer

case = Cases(2)


def same_rows(reference: nn.Module, model: nn.Module) -> None:
    """Of parameters alone: whoever reads a gradient settles it."""
    for mine, whole in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().full_tensor(), whole.detach())


@case
def an_assigned_gradient_that_a_kept_one_is_added_to() -> None:
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model)
    plain_loss(model, 0).backward()
    plain_loss(reference, 0).backward()
    reduce_gradients(reference)
    with torch.no_grad():
        assigned = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        for parameter, gradient in zip(model.parameters(), assigned, strict=True):
            parameter.grad = gradient
    model.set_requires_gradient_sync(False)
    plain_loss(model, 1).backward()
    model.set_requires_gradient_sync(True)
    plain_loss(model, 2).backward()
    other = copy.deepcopy(reference)
    other.zero_grad()
    for i in (1, 2):
        plain_loss(other, i).backward()
    reduce_gradients(other)
    for mine, before, more in zip(model.parameters(), reference.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), before.grad + more.grad)


@case
def gradients_are_clipped_by_the_global_norm() -> None:
    model = transformer()
    reference = copy.deepcopy(model)
    shard(model)
    mine, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference))
    for step in range(3):
        plain_loss(model, step).backward()
        plain_loss(reference, step).backward()
        reduce_gradients(reference)
        for order in (2.0, float("inf")):
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=order)
            expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01, norm_type=order)
            torch.testing.assert_close(norm.full_tensor() if isinstance(norm, DTensor) else norm, expected)
        same(reference, model)
        mine.step()
        theirs.step()
        same(reference, model)
        mine.zero_grad()
        theirs.zero_grad()


@case
def gradients_may_be_scaled_zeroed_and_assigned() -> None:
    model = mlps(count=2)
    reference = copy.deepcopy(model)
    shard(model)
    mine, theirs = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, reference))

    def change(one: nn.Module, how: str) -> None:
        for parameter in one.parameters():
            if how == "scale":
                parameter.grad *= 0.5
            elif how == "add":
                parameter.grad.add_(parameter.detach(), alpha=0.1)
            elif how == "assign":
                parameter.grad = parameter.grad * 2 + 1
            elif how == "set":
                parameter.grad = parameter.detach() * 0.25
            elif how == "clear":
                parameter.grad = None

    for step, hows in enumerate((["scale"], ["add", "scale"], ["assign"], ["clear", "set"], ["clear"])):
        plain_loss(model, step).backward()
        plain_loss(reference, step).backward()
        reduce_gradients(reference)
        for how in hows:
            change(model, how)
            change(reference, how)
        same(reference, model)
        if "set" in hows:  # what was assigned counts as accumulated
            plain_loss(model, 50).backward()
            with_more = copy.deepcopy(reference)
            with_more.zero_grad()
            plain_loss(with_more, 50).backward()
            reduce_gradients(with_more)
            for one, more in zip(reference.parameters(), with_more.parameters(), strict=True):
                one.grad += more.grad
            same(reference, model)
        mine.step()
        theirs.step()
        same(reference, model)


@case
def a_penalty_on_the_rows_themselves_counts() -> None:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        penalty: Any = sum(parameter.pow(2).sum() for parameter in model.parameters())
        if isinstance(penalty, DTensor):
            penalty = penalty.full_tensor()
        return plain_loss(model, step) + 0.1 * penalty

    model = mlps(count=2)
    reference = copy.deepcopy(model)
    train_both(shard(model), reference, loss=loss)


@case
def the_sum_is_divided_by_another_factor() -> None:
    for shape in ((2,), (2, 1), (1, 2)):  # replicas are ranks, too
        model = mlps(count=2)
        reference = copy.deepcopy(model)
        shard(model, mesh=init_device_mesh("cpu", shape))
        model[0].set_gradient_divide_factor(2.0 * dist.get_world_size())
        plain_loss(model, 0).backward()
        plain_loss(reference, 0).backward()
        reduce_gradients(reference)
        for parameter in reference[0].parameters():
            parameter.grad *= 0.5
        same(reference, model)


@case
def another_factor_counts_from_when_it_is_set_as_with_torchs_own() -> None:
    """Each word is a call: a forward, its backward, a backward that keeps what it makes, a factor of the next reductions."""
    calls = ("7 fb", "f 7 b", "f 7 b fb", "fb 7 fb", "k 7 fb", "7 k fb", "7 k 3 k 5 fb", "7 fb 3 k fb", "k k f 7 b k fb", "7 k 2 fb 5 k fb")
    mesh = init_device_mesh("cpu", (2,))
    x = torch.full((1, 3), 1.0 + dist.get_rank(), dtype=torch.float64)
    for words in calls:
        sums = []
        for kind in (torchs, plumb.fully_shard):
            torch.manual_seed(2)
            model = kind(nn.Sequential(kind(nn.Linear(3, 4), mesh=mesh), nn.Linear(4, 5)).double(), mesh=mesh)
            loss = torch.zeros(())
            for word in words.replace("fb", "f b").split():
                if word == "f":
                    loss = model(x).pow(2).sum()
                elif word == "b":
                    loss.backward()
                elif word == "k":
                    model.set_requires_gradient_sync(False)
                    model(x).pow(2).sum().backward()
                    model.set_requires_gradient_sync(True)
                else:
                    for one in (model, model[0]):
                        one.set_gradient_divide_factor(float(word))
            sums.append([parameter.grad.full_tensor() for parameter in model.parameters()])
        for theirs, mine in zip(*sums, strict=True):
            torch.testing.assert_close(mine, theirs, msg=lambda m, words=words: f"{words}: {m}")


@case
def a_factor_of_what_is_kept_beside_what_was_reduced_is_an_error() -> None:
    model = shard(mlps(count=1))
    plain_loss(model, 0).backward()
    model.set_requires_gradient_sync(False)
    plain_loss(model, 1).backward()
    model[0].set_gradient_divide_factor(2.0)  # as it is
    with pytest.raises(plumb.Error, match="'weight' of a Linear .* was reduced before"):
        model[0].set_gradient_divide_factor(7.0)
    model.zero_grad()
    model[0].set_gradient_divide_factor(7.0)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    model[0].set_gradient_divide_factor(2.0)  # what was assigned is a mean
    for parameter in model.parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), parameter.full_tensor().detach())


@case
def gradients_that_are_kept_are_cleared_either_way() -> None:
    for clears in ("optimizer", "model"):
        for to_none in (True, False):
            model = mlps(count=2)
            reference = copy.deepcopy(model)
            shard(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model.set_requires_gradient_sync(False)
            plain_loss(model, 0).backward()
            (optimizer if clears == "optimizer" else model).zero_grad(set_to_none=to_none)
            model.set_requires_gradient_sync(True)
            plain_loss(model, 1).backward()
            plain_loss(reference, 1).backward()
            reduce_gradients(reference)
            same(reference, model)


@case
def an_exception_leaves_no_trace() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MLP(5)
            self.fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.fails:
                raise ValueError("on purpose")
            out: torch.Tensor = self.inner(x)
            return out

    torch.manual_seed(5)
    model: nn.Module = nn.Sequential(MLP(5), Fails()).double()
    reference = copy.deepcopy(model)
    shard(model)
    model[1].fails = True
    with pytest.raises(ValueError, match="on purpose"):
        model(batch(model, 0))
    model[1].fails = False
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    model.reset_iter_state()
    train_both(model, reference)


@case
def an_assigned_gradient_may_be_changed_in_place() -> None:
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model)
    plain_loss(model, 0)  # there is an engine, and no gradient
    mine, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference))
    for parameter, whole in zip(model.parameters(), reference.parameters(), strict=True):
        parameter.grad = parameter.detach().clone()
        parameter.grad.mul_(3.0)
        whole.grad = 3.0 * whole.detach()
    mine.step()
    theirs.step()
    same(reference, model)


@case
def a_gradient_that_is_shown_narrower_than_it_is_kept_may_be_changed_in_place() -> None:
    model = mlps().bfloat16()
    shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 5, dtype=torch.bfloat16) * (1 + dist.get_rank())).float().pow(2).mean().backward()
        before = [parameter.to_local().clone() for parameter in model.parameters()]
        if step == 0:
            for parameter in model.parameters():
                parameter.grad.zero_()
        optimizer.step()
        moved = any(not torch.equal(a, b.to_local()) for a, b in zip(before, model.parameters(), strict=True))
        assert moved == (step == 1)


@case
def a_penalty_on_the_rows_counts_where_nobody_looked_at_its_gradient() -> None:
    for kind in (torch.optim.SGD, torch.optim.LBFGS):  # of which one is handed rows, and one all parameters
        model = mlps(count=2)
        reference = copy.deepcopy(model)
        shard(model)
        for one, rate in ((model, 1.0), (reference, 1.0)):
            optimizer = kind(one.parameters(), lr=0.1, **({} if kind is torch.optim.SGD else {"max_iter": 1}))  # type: ignore[arg-type]

            def closure(one: nn.Module = one, optimizer: Any = optimizer, rate: float = rate) -> float:
                optimizer.zero_grad()
                penalty: Any = sum(parameter.pow(2).sum() for parameter in one.parameters())
                penalty = penalty.full_tensor() if isinstance(penalty, DTensor) else penalty
                (plain_loss(one, 0) + rate * penalty).backward()
                if one is reference:  # noqa: B023
                    reduce_gradients(one)
                return 0.0

            optimizer.step(closure)
        same_rows(reference, model)


@case
def a_gradient_that_is_whole_on_every_rank_may_be_assigned() -> None:
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model)
    mine, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference))
    for there_is_one in (False, True, True):
        for one in (model, reference):
            loss = plain_loss(one, 0)
            if there_is_one:
                loss.backward()
            for parameter in one.parameters():
                gradient = parameter.detach() * 0.25
                parameter.grad = gradient.redistribute(placements=[Replicate()]) if isinstance(gradient, DTensor) else gradient
        mine.step()
        theirs.step()
        same_rows(reference, model)


@case
def a_gradient_that_is_deleted_is_gone() -> None:
    model = mlps(count=1)
    shard(model)
    plain_loss(model, 0).backward()
    for parameter in model.parameters():
        del parameter.grad
    assert all(parameter.grad is None for parameter in model.parameters())
    reference = mlps(count=1)
    plain_loss(model, 1).backward()
    plain_loss(reference, 1).backward()
    reduce_gradients(reference)
    same(reference, model)


@case
def a_gradient_may_be_assigned_whatever_dtype_it_is_summed_in() -> None:
    for policy in (
        MixedPrecisionPolicy(reduce_dtype=torch.float32),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float64),
    ):
        model = shard(mlps().bfloat16() if policy.param_dtype is None else mlps().float(), mp_policy=policy)
        for ran in (False, True):
            if ran:
                model(torch.ones(2, 5, dtype=next(model.parameters()).dtype))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            before = [parameter.full_tensor().clone() for parameter in model.parameters()]
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            for parameter, was in zip(model.parameters(), before, strict=True):
                torch.testing.assert_close(parameter.full_tensor(), was - 0.5)
            optimizer.zero_grad()

@pytest.mark.parametrize("name", case.all)
def test_on_two_ranks(name: str) -> None:
    case.check(name)
