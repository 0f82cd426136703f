"""plumb.fully_shard against one process: every rank's rows, gradients and steps, as FSDP2's own suite looks at them."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import parallel
import plumb
from sharding import Cases, batch, mlps, plain_loss, reduce_gradients, same, shard, train_both, transformer

case, on_four = Cases(2), Cases(4)


# ---- training


@case
def trains_as_one_process() -> None:
    for model in (mlps(), transformer()):
        reference = copy.deepcopy(model)
        shard(model)
        assert isinstance(model, FSDPModule) and isinstance(model, plumb.FSDPModule)
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor) and isinstance(parameter, nn.Parameter)
            assert parameter.placements == (Shard(0),)
        same(reference, model)
        train_both(model, reference)


@case
def trains_with_one_unit_and_odd_shapes() -> None:
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1, bias=False), nn.Linear(1, 3)).double()
    reference = copy.deepcopy(model)
    plumb.fully_shard(model)
    rows = [parameter.to_local().size(0) for parameter in model.parameters()]
    first = [-(-parameter.size(0) // dist.get_world_size()) for parameter in reference.parameters()]
    if dist.get_rank() == 0:
        assert rows == first, rows
    train_both(model, reference)


@case
def any_optimizer_steps() -> None:
    kinds: list[Callable[..., torch.optim.Optimizer]] = [
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        functools.partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
        functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
        functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True),
        functools.partial(torch.optim.RMSprop, lr=1e-3),
    ]
    for kind in kinds:
        model = mlps()
        reference = copy.deepcopy(model)
        train_both(shard(model), reference, optimizer=kind, steps=3)


@case
def accumulates_over_micro_batches() -> None:
    for switch in (True, False):
        model = mlps()
        reference = copy.deepcopy(model)
        shard(model)

        def loss(one: nn.Module, i: int) -> torch.Tensor:
            if isinstance(one, FSDPModule) and switch:
                last = i % 3 == 2
                one.set_requires_gradient_sync(last)
                one.set_is_last_backward(last)
                one.set_reshard_after_backward(last)
            return plain_loss(one, i)

        train_both(model, reference, loss=loss, micro=3)


@case
def keeps_gradients_that_are_not_to_be_reduced_and_shows_none() -> None:
    for last_reduces in (True, False):
        model = mlps()
        reference = copy.deepcopy(model)
        shard(model)
        optimizer, other = (torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, reference))
        for step in range(3):
            for micro in range(3):
                reduces = last_reduces and micro == 2
                model.set_requires_gradient_sync(reduces)
                plain_loss(model, 3 * step + micro).backward()
                plain_loss(reference, 3 * step + micro).backward()
                engine = model._get_fsdp_state().engine  # type: ignore[operator]
                assert engine.native.holds == (not reduces)
                assert all((parameter.grad is None) != reduces for parameter in model.parameters())
            reduce_gradients(reference)
            optimizer.step()  # of what was kept, too
            other.step()
            same(reference, model)
            optimizer.zero_grad()
            other.zero_grad()
        # Cleared gradients are gone, also those that were kept.
        model.set_requires_gradient_sync(False)
        for to_none in (True, False):
            plain_loss(model, 0).backward()
            optimizer.zero_grad(set_to_none=to_none)
        model.set_requires_gradient_sync(True)
        train_both(model, reference)


@case
def while_one_module_reduces_all_do() -> None:
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model)
    model.set_requires_gradient_sync(False)
    model[0].set_requires_gradient_sync(True)  # type: ignore[operator]
    plain_loss(model, 0).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()
    train_both(model, reference)


@case
def several_forwards_before_a_backward() -> None:
    def twice(model: nn.Module, step: int) -> torch.Tensor:
        return plain_loss(model, step) + plain_loss(model, step + 100)

    def one_block_twice(model: nn.Module, step: int) -> torch.Tensor:
        x = batch(model, step)
        return model[1](model[0](model[0](x))).pow(2).mean()

    for loss in (twice, one_block_twice):
        model = mlps()
        reference = copy.deepcopy(model)
        train_both(shard(model), reference, loss=loss)


@case
def a_block_is_run_before_the_model_is() -> None:
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model)
    model[0](batch(model, 0)).sum().backward()
    reference[0](batch(model, 0)).sum().backward()
    train_both(model, reference)


@case
def checkpoints_compose() -> None:
    for reentrant in (True, False):

        def loss(model: nn.Module, step: int) -> torch.Tensor:
            x = batch(model, step).requires_grad_()
            for block in model:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x.pow(2).mean()

        model = mlps()
        reference = copy.deepcopy(model)
        train_both(shard(model), reference, loss=loss)
    model = transformer(recomputes=True)
    reference = copy.deepcopy(model)
    train_both(shard(model), reference)


@case
def frozen_parameters_stay() -> None:
    model = mlps()
    for name, parameter in model.named_parameters():
        if "in_proj" in name:
            parameter.requires_grad_(False)
    reference = copy.deepcopy(model)
    shard(model)
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in reference.parameters()]
    train_both(model, reference)
    for one in (model, reference):  # and thaw later
        one.requires_grad_(True)
    train_both(model, reference)


@case
def tied_weights_are_one() -> None:
    model = transformer(tied=True)
    assert model.embedding.weight is model.output.weight
    reference = copy.deepcopy(model)
    shard(model)
    assert model.embedding.weight is model.output.weight
    train_both(model, reference)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)).double()  # across units, and the root's own
    model[1].weight = model[0].weight
    model[2].weight = model[0].weight
    reference = copy.deepcopy(model)
    plumb.fully_shard(model[0])
    plumb.fully_shard(model[1])
    plumb.fully_shard(model)
    assert model[1].weight is model[0].weight and model[2].weight is model[0].weight
    train_both(model, reference)


@case
def what_one_rank_alone_uses_hangs_nobody() -> None:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x = model[0](batch(model, step))
        if dist.get_rank() == 0:
            x = model[1](x)
        return x.pow(2).mean()

    model = mlps()
    reference = copy.deepcopy(model)
    train_both(shard(model), reference, loss=loss, optimizer=functools.partial(torch.optim.SGD, lr=0.1))


@case
def ignored_parameters_are_left_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).double()
    extra = model[0].bias
    plumb.fully_shard(model, ignored_params={extra})
    assert model[0].bias is extra and not isinstance(extra, DTensor)
    (model(batch(model, 0)).sum() * (dist.get_rank() + 1)).backward()
    mine = extra.grad.clone()
    dist.all_reduce(mine)
    assert not torch.equal(mine / dist.get_world_size(), extra.grad), "an ignored gradient was reduced"
    assert isinstance(model[1].weight.grad, DTensor)


# ---- meshes


@on_four
def replicas_of_shards() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for model in (mlps(), transformer()):
        reference = copy.deepcopy(model)
        shard(model, mesh=mesh)
        for parameter in model.parameters():
            assert parameter.placements == (Replicate(), Shard(0))
        train_both(model, reference)
        train_both(model, reference, micro=2)


@on_four
def replicas_begin_alike_also_where_forwards_have_another_dtype() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.float32)):
        model = mlps()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(mesh.get_local_rank(0))  # as of unlike seeds
        shard(model, mesh=mesh, mp_policy=policy)
        plain_loss(model, 0)
        for mine, its in zip(model.parameters(), mlps().parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), its.detach())


@on_four
def an_assigned_gradient_is_that_of_every_replica() -> None:
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model, mesh=init_device_mesh("cpu", (2, 2)))
    plain_loss(model, 0)
    mine, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference))
    for parameter, whole in zip(model.parameters(), reference.parameters(), strict=True):
        parameter.grad, whole.grad = parameter.detach().clone(), whole.detach().clone()
    mine.step()
    theirs.step()
    same(reference, model)


@on_four
def meshes_in_another_order() -> None:
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model, mesh=DeviceMesh("cpu", [[0, 2], [1, 3]]))
    train_both(model, reference)
    with pytest.raises(plumb.Error, match="ascend"):
        shard(mlps(), mesh=DeviceMesh("cpu", [3, 1, 0, 2]))(torch.ones(1, 5, dtype=torch.float64))
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model, mesh=DeviceMesh("cpu", [[0], [1], [2], [3]]))  # four replicas of everything
    train_both(model, reference)


@on_four
def a_part_of_the_world() -> None:
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "shard"))
    mesh = halves["shard"]
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model, mesh=mesh)
    optimizer, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference))
    for step in range(3):
        plain_loss(model, step).backward()
        plain_loss(reference, step).backward()
        for parameter in reference.parameters():
            dist.all_reduce(parameter.grad, group=mesh.get_group())
            parameter.grad /= 2
        optimizer.step()
        theirs.step()
        optimizer.zero_grad()
        theirs.zero_grad()
        same(reference, model)


@on_four
def more_ranks_than_rows() -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1), nn.Linear(1, 2)).double()
    reference = copy.deepcopy(model)
    plumb.fully_shard(model)
    train_both(model, reference)


for one in parallel.ALL:
    on_four(one)


@on_four
def the_rest_on_four_ranks() -> None:
    trains_as_one_process()
    tied_weights_are_one()
    frozen_parameters_stay()
    accumulates_over_micro_batches()


@case
def two_parameters_over_one_memory_are_an_error() -> None:
    for together in (True, False):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = nn.Parameter(model[0].weight.data)
        if not together:
            plumb.fully_shard(model[0])
        with pytest.raises(plumb.Error, match="parameter '(1.)?weight' of shape .* shares memory with parameter '(0.)?weight'"):
            plumb.fully_shard(model if together else model[1])
    flat = torch.randn(40)  # of which two have a part each
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for i, linear in enumerate(model):
        linear.weight = nn.Parameter(flat[20 * i : 20 * i + 16].view(4, 4))
    model[0].bias = model[1].bias
    plumb.fully_shard(model[0])
    plumb.fully_shard(model)


@case
def averaged_weights_are_evaluated_and_taken_out_again() -> None:
    """Without a barrier: a rank that still evaluates does not see what the others write back, however they write."""
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model)
    averages: list[list[torch.Tensor]] = [[], []]

    def looked_at(model: nn.Module, averages: list[torch.Tensor], step: int) -> torch.Tensor:
        own = [parameter.detach().clone() for parameter in model.parameters()]
        for i, now in enumerate(own):
            averages[i : i + 1] = [now.clone() if step == 0 else averages[i].lerp(now, 0.5)]
        parameters = list(model.parameters())
        before = model(batch(model, step + 5))  # whatever is written next is behind a forward, too
        for parameter, value in zip(parameters, averages, strict=True):
            parameter.copy_(value)
        if dist.get_rank() == 0 and model is not reference:
            time.sleep(0.02)  # the others are done meanwhile
        with torch.inference_mode(step >= 3):
            out: torch.Tensor = torch.stack([before, *(model(batch(model, step + i)) for i in range(3))]).clone()
        if step % 3 == 0:
            torch._foreach_mul_(parameters, 0.0)
            torch._foreach_add_(parameters, own)
        for parameter, value in zip(parameters, own, strict=True):
            if step % 3 == 1:
                parameter.copy_(value)
            elif step % 3 == 2:
                parts = [one.to_local() if isinstance(one, DTensor) else one for one in (parameter, value)]
                parts[0].copy_(parts[1])
        return out

    def looking(*args: object, **kwargs: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(*args, lr=0.3, **kwargs)  # type: ignore[arg-type]

    for step in range(6):
        train_both(model, reference, steps=1, optimizer=looking)
        with torch.no_grad():
            torch.testing.assert_close(looked_at(model, averages[0], step), looked_at(reference, averages[1], step))
        same(reference, model)


# ---- running them


@pytest.mark.parametrize("name", case.all)
def test_on_two_ranks(name: str) -> None:
    case.check(name)


@pytest.mark.parametrize("name", on_four.all)
def test_on_four_ranks(name: str) -> None:
    on_four.check(name)


def _alone() -> str:
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model)
    train_both(model, reference)
    return "good"


def test_on_one_rank() -> None:
    assert plumb.spawn(_alone, 1) == ["good"]


ASKS = {"PLUMB_SHM": "0", "PLUMB_ASK_BEFORE_GATHERS": "1"}


def _other_blocks_than_the_other_rank() -> str:
    """Nothing of the program says that ranks ask: it is somebody else's."""
    dist.init_process_group("gloo")
    model = mlps(count=4)
    reference = copy.deepcopy(model)
    shard(model)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x = batch(model, step)
        for i in (0, (dist.get_rank() + step) % 3, 3):
            x = model[i](x)  # type: ignore[operator]
        return x.pow(2).mean()

    def routed(model: nn.Module, step: int) -> torch.Tensor:
        plain, model.forward = model.forward, lambda _: loss(model, step)  # type: ignore[method-assign]
        try:
            out: torch.Tensor = model(None)
        finally:
            model.forward = plain  # type: ignore[method-assign]
        return out

    train_both(model, reference, loss=routed)
    return "good"


def test_ranks_that_share_no_memory_may_use_different_blocks_where_the_environment_lets_them_ask() -> None:
    assert plumb.spawn(_other_blocks_than_the_other_rank, 2, env=ASKS) == ["good"] * 2
    with pytest.raises(plumb.Error, match="PLUMB_ASK_BEFORE_GATHERS=1"):
        plumb.spawn(_other_blocks_than_the_other_rank, 2, env={"PLUMB_SHM": "0"})
