"""Optimizers of torch's that look at a whole parameter, or at all of them, over the rows that plumb.fully_shard shows; steps that end by an exception."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import plumb
from sharding import Cases, mlps, plain_loss, reduce_gradients, same, shard, train_both

case = Cases(2)


def matrices(how: Callable[..., torch.optim.Optimizer]) -> Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]:
    return lambda parameters: how([p for p in parameters if p.dim() == 2])


muon = functools.partial(torch.optim.Muon, lr=1e-2)
adafactor = functools.partial(torch.optim.Adafactor, lr=1e-2, weight_decay=0.1)


@case
def muon_sums_as_one_process_does() -> None:
    # Of 20 by 5 and 5 by 20: the first is turned over, and its products are sums over the rows of all ranks.
    model = mlps()
    reference = copy.deepcopy(model)
    train_both(shard(model), reference, optimizer=matrices(muon))


@case
def muon_over_two_dimensions_of_a_mesh() -> None:
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard")))
    train_both(model, reference, optimizer=matrices(muon))


@case
def muon_norms_a_momentum_in_bf16_in_place() -> None:
    """As torch does, whose cast to bf16 is no copy then."""
    model = nn.Sequential(nn.Linear(5, 8, bias=False), nn.Linear(8, 5, bias=False)).bfloat16()
    reference = copy.deepcopy(model)
    shard(model)
    mine, theirs = (torch.optim.Muon(one.parameters(), lr=1e-2, nesterov=False) for one in (model, reference))
    for step in range(3):
        for one, optimizer in ((model, mine), (reference, theirs)):
            one(torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).bfloat16()).sum().backward()  # alike on every rank
            optimizer.step()
            optimizer.zero_grad()
    same(reference, model)
    for parameter, whole in zip(model.parameters(), reference.parameters(), strict=True):
        kept = mine.state[parameter]["momentum_buffer"]
        assert isinstance(kept, DTensor) and torch.equal(kept.full_tensor(), theirs.state[whole]["momentum_buffer"])


@case
def adafactor_steps_rows_of_any_number() -> None:
    for foreach in (False, True):
        model = mlps()
        reference = copy.deepcopy(model)
        train_both(shard(model), reference, optimizer=functools.partial(adafactor, foreach=foreach))


@case
def adafactor_goes_on_from_its_state() -> None:
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model)

    def goes_on(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        parameters = list(parameters)
        before = states.get(isinstance(parameters[0], DTensor))
        made = adafactor(parameters)
        if before is not None:
            made.load_state_dict(before.state_dict())
        states[isinstance(parameters[0], DTensor)] = made
        return made

    states: dict[bool, torch.optim.Optimizer] = {}
    train_both(model, reference, optimizer=goes_on, steps=2)
    train_both(model, reference, optimizer=goes_on, steps=2)


class Waves(nn.Module):
    """Rows that two ranks do not share evenly, numbers of odd places in a flat vector that are complex, and a spare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.spare = nn.Linear(4, 5), nn.Parameter(torch.ones(3))
        self.turns = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = ((self.inner(x).tanh() + 0j) @ self.turns).abs()
        return out


def waves(model: nn.Module, rank: int) -> torch.Tensor:
    return model(torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))).sub(0.5).pow(2).mean()


@case
def lbfgs_looks_at_all_parameters() -> None:
    for search in (None, "strong_wolfe"):
        torch.manual_seed(3)
        model = Waves().double()
        model.turns = nn.Parameter(model.turns.detach().to(torch.complex128))
        reference = copy.deepcopy(model)
        plumb.fully_shard(model.inner)
        plumb.fully_shard(model)
        mine, theirs = (torch.optim.LBFGS(one.parameters(), lr=0.5, max_iter=4, line_search_fn=search) for one in (model, reference))

        def of_ranks(mine: Any = mine, model: nn.Module = model) -> torch.Tensor:
            mine.zero_grad()
            loss = waves(model, dist.get_rank())
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            return mean / 2

        def of_one(theirs: Any = theirs, reference: nn.Module = reference) -> torch.Tensor:
            theirs.zero_grad()
            loss = (waves(reference, 0) + waves(reference, 1)) / 2
            loss.backward()
            return loss.detach()

        before = reference.inner.weight.detach().clone()
        for _ in range(2):
            mine.step(of_ranks)
            theirs.step(of_one)
        same(reference, model)
        assert (reference.inner.weight - before).abs().max() > 1e-3


class LeavesInTheMiddle(torch.optim.SGD):
    leaves = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for i, p in enumerate(self.param_groups[0]["params"]):
            if self.leaves and i == 2:
                raise ValueError("on purpose")
            p.add_(p.grad, alpha=-0.1)


@case
def a_step_that_its_optimizer_leaves_holds_up_nobody() -> None:
    """The last case: what one rank alone left is an error of the next step."""
    model = mlps()
    reference = copy.deepcopy(model)
    optimizers = [LeavesInTheMiddle(one.parameters(), lr=0.1) for one in (shard(model), reference)]
    for step, leaves in enumerate(("nobody", "everybody", "nobody", "rank 1")):
        for one, optimizer in zip((model, reference), optimizers, strict=True):
            plain_loss(one, step).backward()
            optimizer.leaves = leaves == "everybody" or (one is model and leaves == f"rank {dist.get_rank()}")
            if one is reference:
                reduce_gradients(one)
            with pytest.raises(ValueError, match="on purpose") if optimizer.leaves else contextlib.nullcontext():
                optimizer.step()
            optimizer.zero_grad()
        dist.barrier()  # of the user's own, which tells of the exception, say
        if leaves != "rank 1":
            same(reference, model)
    plain_loss(model, 4).backward()
    with pytest.raises(plumb.Error, match="steps that the optimizer left by an exception is 2 on rank 1"):
        optimizers[0].step()


@pytest.mark.parametrize("name", case.all)
def test_on_two_ranks(name: str) -> None:
    case.check(name)
