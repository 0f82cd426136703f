"""plumb.fully_shard against one process: every rank's rows, gradients and steps, as FSDP2's own suite looks at them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import plumb
from sharding import MLP, Cases, batch, mlps, plain_loss, reduce_gradients, same, shard, train_both, transformer

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


# ---- optimizers step plain rows, and show DTensors


@case
def an_optimizer_that_throws_gets_its_groups_and_state_back() -> None:
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model)
    optimizer, other = (torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, reference))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # takes the optimizer's step for itself

    def both(i: int) -> None:
        for one, steps in ((model, optimizer), (reference, other)):
            plain_loss(one, i).backward()
            if one is reference:
                reduce_gradients(reference)
            steps.step()
            steps.zero_grad()

    both(0)
    plain_loss(model, 1).backward()
    betas = optimizer.param_groups[0]["betas"]
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    assert all(mine is stepped for mine, stepped in zip(model.parameters(), optimizer.param_groups[0]["params"], strict=True))
    assert all(isinstance(optimizer.state[parameter]["exp_avg"], DTensor) for parameter in model.parameters())
    optimizer.param_groups[0]["betas"] = betas
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    both(2)
    same(reference, model)


@case
def a_state_that_the_user_exchanges_is_the_one_that_counts() -> None:
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model)
    optimizer, other = (torch.optim.AdamW(one.parameters(), lr=1e-2, amsgrad=True) for one in (model, reference))
    seen: list[type] = []
    for step in range(5):
        for one, steps in ((model, optimizer), (reference, other)):
            plain_loss(one, step).backward()
            if one is reference:
                reduce_gradients(reference)
            steps.step()
            steps.zero_grad(set_to_none=step % 2 == 0)
            state = steps.state[next(one.parameters())]
            if step == 1:
                state["exp_avg"] = state["exp_avg"] * 2  # another tensor
            elif step == 2:
                state["exp_avg_sq"].mul_(2)  # in place
            elif step == 3:
                steps.load_state_dict(copy.deepcopy(steps.state_dict()))
        if step == 3:  # whoever looks on sees the parameters
            optimizer.register_step_pre_hook(lambda steps, *_: seen.append(type(steps.param_groups[0]["params"][0])))
        same(reference, model)
    assert seen and issubclass(seen[0], DTensor)
    for parameter in model.parameters():
        assert optimizer.state[parameter]["exp_avg"].placements == parameter.placements
        assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape


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


@case
def an_optimizer_may_be_older_than_the_shards() -> None:
    model = mlps()
    reference = copy.deepcopy(model)
    kind = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    mine, theirs = kind(model.parameters()), kind(reference.parameters())
    for i in range(4):
        if i == 1:  # with state of its own by then
            shard(model)
        plain_loss(model, i).backward()
        plain_loss(reference, i).backward()
        reduce_gradients(reference)
        if i == 0:
            for ours, whole in zip(model.parameters(), reference.parameters(), strict=True):
                ours.grad = whole.grad.clone()
        mine.step()
        theirs.step()
        mine.zero_grad()
        theirs.zero_grad()
    same(reference, model)


@case
def two_optimizers_share_a_model() -> None:
    model = mlps(count=2)
    reference = copy.deepcopy(model)
    shard(model)
    pairs = []
    for one in (model, reference):
        pairs.append([torch.optim.SGD(one[0].parameters(), lr=0.1), torch.optim.AdamW(one[1].parameters(), lr=0.01)])
    for step in range(3):
        plain_loss(model, step).backward()
        plain_loss(reference, step).backward()
        reduce_gradients(reference)
        for optimizers in pairs:
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        same(reference, model)


@case
def optimizers_run_in_hooks_after_accumulation() -> None:
    model = mlps(count=2)
    reference = copy.deepcopy(model)
    shard(model)
    by_parameter = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def hook(parameter: torch.Tensor) -> None:
        by_parameter[parameter].step()
        by_parameter[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        plain_loss(model, step).backward()
        plain_loss(reference, step).backward()
        reduce_gradients(reference)
        theirs.step()
        theirs.zero_grad()
        same(reference, model)


# ---- gradients


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
    model = mlps(count=2)
    reference = copy.deepcopy(model)
    shard(model)
    model[0].set_gradient_divide_factor(2.0 * dist.get_world_size())
    plain_loss(model, 0).backward()
    plain_loss(reference, 0).backward()
    reduce_gradients(reference)
    for parameter in reference[0].parameters():
        parameter.grad *= 0.5
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


@on_four
def the_rest_on_four_ranks() -> None:
    trains_as_one_process()
    tied_weights_are_one()
    frozen_parameters_stay()
    accumulates_over_micro_batches()


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
