"""plumb.fully_shard while a module shows whole parameters, from a forward on: what is frozen, thawed or written there; and models that are all frozen."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import plumb
from sharding import Cases, mlps, plain_loss, reduce_gradients, same, shard

case = Cases(2)


def step_both(model: nn.Module, reference: nn.Module, optimizers: list[torch.optim.Optimizer], number: int) -> None:
    for one in (model, reference):
        plain_loss(one, number).backward()
    reduce_gradients(reference)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    model.reshard()  # type: ignore[operator]
    same(reference, model)


def both() -> tuple[nn.Module, nn.Module, list[torch.optim.Optimizer]]:
    model = mlps(count=2)
    reference = copy.deepcopy(model)
    plumb.fully_shard(model)
    return model, reference, [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]


@case
def freezing_counts_after_a_forward_without_a_backward() -> None:
    model, reference, optimizers = both()
    step_both(model, reference, optimizers, 0)
    for trains in (False, True, False, True):
        plain_loss(model, 0)  # the outermost module shows whole parameters from here on
        for one in (model, reference):
            next(iter(one.children())).requires_grad_(trains)
        step_both(model, reference, optimizers, 1)


@case
def freezing_counts_through_the_dtensors_too() -> None:
    model, reference, optimizers = both()
    step_both(model, reference, optimizers, 0)
    shown = [list(one.parameters())[0] for one in (model, reference)]
    for trains in (False, True):
        plain_loss(model, 0)
        for parameter in shown:
            parameter.requires_grad_(trains)
        step_both(model, reference, optimizers, 1)


@case
def a_model_that_is_all_frozen_runs_passes_gradients_on_and_trains_when_thawed() -> None:
    teacher = mlps(count=2).requires_grad_(False)
    reference = copy.deepcopy(teacher)
    shard(teacher)
    x = torch.randn(3, next(reference.parameters()).size(1), dtype=next(reference.parameters()).dtype)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [one(value) for one, value in zip((teacher, reference), inputs, strict=True)]
    torch.testing.assert_close(*outputs)
    for output in outputs:
        output.sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    assert all(p.grad is None and not p.requires_grad for p in teacher.parameters())
    for one in (teacher, reference):
        one.requires_grad_(True)
    step_both(teacher, reference, [torch.optim.SGD(one.parameters(), lr=0.1) for one in (teacher, reference)], 0)


@case
def what_is_written_into_whole_parameters_is_an_error() -> None:
    model, _, (optimizer, _) = both()
    plain_loss(model, 0)
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)
    with pytest.raises(plumb.Error, match="weight.* was changed while its module showed it whole"):
        plain_loss(model, 0).backward()
        optimizer.step()
    plain_loss(model, 0).backward()  # and the process goes on
    optimizer.step()


@case
def a_weight_that_its_own_forward_changes_is_an_error() -> None:
    torch.manual_seed(dist.get_world_size())
    model = plumb.fully_shard(nn.Embedding(6, 4, max_norm=0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(6)).sum().backward()
    with pytest.raises(plumb.Error, match="'weight' of a FSDPEmbedding was changed"):
        optimizer.step()


@case
def what_is_written_into_whole_parameters_is_an_error_of_the_forward_that_lets_them_go() -> None:
    model = mlps(count=2)
    plumb.fully_shard(model[0])  # type: ignore[operator]
    plumb.fully_shard(model)
    plain_loss(model, 0)
    with torch.no_grad():
        model[0].in_proj.weight.mul_(0.5)  # rows, which the next forward gathers anew
        model[1].in_proj.weight.mul_(0.5)
        with pytest.raises(plumb.Error, match="was changed while its module showed it whole"):
            plain_loss(model, 0)
        plain_loss(model, 0)  # said once


@case
def a_step_after_a_forward_without_a_backward_shows_rows_again() -> None:
    model, reference, optimizers = both()
    step_both(model, reference, optimizers, 0)
    for one in (reference, model):  # whose backward is the last one
        plain_loss(one, 1).backward()
        plain_loss(one, 2)  # nobody asks for its backward
    reduce_gradients(reference)
    for optimizer in optimizers:
        optimizer.step()
    same(reference, model)  # of rows, and not of what was whole before the step
    for optimizer in optimizers:
        optimizer.zero_grad()
    step_both(model, reference, optimizers, 3)


@case
def what_is_converted_while_it_is_whole_is_what_was_or_refused() -> None:
    model, reference, optimizers = both()
    plain_loss(model, 0)
    model.double().to("cpu")
    same(reference, model)
    step_both(model, reference, optimizers, 1)
    plain_loss(model, 0)
    assert not isinstance(next(model.parameters()), DTensor)
    with pytest.raises(plumb.Error, match="convert the model before"):
        model.half()


@case
def a_backward_inside_of_a_forward_leaves_the_unit_whole() -> None:
    """Forces, which are gradients, and a unit that is whole already from a forward before."""

    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            (forces,) = torch.autograd.grad(self.inner(x).sum(), x, create_graph=True)
            assert self.inner[0].weight.shape == (6, 5) and not isinstance(self.inner[0].weight, DTensor)
            return forces + self.inner(x)

    torch.manual_seed(3)
    model = Forces()
    reference = copy.deepcopy(model)
    plumb.fully_shard(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
    for step in range(2):
        for one in (model, reference):
            (plain_loss(one, step) + plain_loss(one, step + 9)).backward()
        reduce_gradients(reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same(reference, model)


@case
def what_is_written_after_an_evaluation_is_what_a_step_begins_from() -> None:
    for how in ("in place", "rows"):
        model, reference, optimizers = both()
        step_both(model, reference, optimizers, 0)
        for one in (model, reference):
            plain_loss(one, 1).backward()
            with torch.no_grad():
                plain_loss(one, 2)
                for parameter in one.parameters():
                    (parameter.to_local() if how == "rows" and isinstance(parameter, DTensor) else parameter).mul_(0.5)
        reduce_gradients(reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same(reference, model)
        for one in (model, reference):  # and after the step, too
            with torch.no_grad():
                for parameter in one.parameters():
                    (parameter.to_local() if how == "rows" and isinstance(parameter, DTensor) else parameter).mul_(1.5)
        step_both(model, reference, optimizers, 3)

@pytest.mark.parametrize("name", case.all)
def test_on_two_ranks(name: str) -> None:
    case.check(name)
