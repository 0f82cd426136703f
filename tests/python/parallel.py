"""What plumb.fully_shard makes of tensor parallelism's parameters, on four ranks: two of data times two of model. Cases of test_fully_shard.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import plumb
from sharding import MLP, reduce_gradients

WIDTH = 6  # shared unevenly: rows of a rank of both meshes are 6 of 24, those of the data mesh alone 3 of 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), MLP(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mlp(self.norm(x))
        return out


def _meshes() -> tuple[DeviceMesh, DeviceMesh]:
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return both["dp"], both["tp"]


def _blocks() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(*[Block() for _ in range(3)]).double()


def _over(tp: DeviceMesh, model: nn.Module) -> nn.Module:
    for block in model:  # type: ignore[attr-defined]
        plan: dict[str, Any] = {
            "norm": SequenceParallel(sequence_dim=0),  # its gradients are sums over the ranks
            "mlp": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
            "mlp.in_proj": ColwiseParallel(),
            "mlp.out_proj": RowwiseParallel(),
        }
        parallelize_module(block, tp, plan)
        parallelize_module(block, tp, PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0)))
    return model


def _sharded(model: nn.Module, dp: DeviceMesh, **how: Any) -> nn.Module:
    for block in model:  # type: ignore[attr-defined]
        plumb.fully_shard(block, mesh=dp, **how)
    return plumb.fully_shard(model, mesh=dp, **how)


def _batch(dp: DeviceMesh, step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + dp.get_local_rank()))


def _close(model: nn.Module, reference: nn.Module) -> None:
    for (name, mine), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(mine, DTensor) and mine.device_mesh.ndim == 2, name
        torch.testing.assert_close(mine.full_tensor(), whole.detach(), msg=lambda m, name=name: f"{name}: {m}")
        if whole.grad is not None:
            assert isinstance(mine.grad, DTensor) and mine.grad.placements == mine.placements, name
            torch.testing.assert_close(mine.grad.full_tensor(), whole.grad, msg=lambda m, name=name: f"gradient of {name}: {m}")


def trains_parts_of_tensor_parallelism_as_one_process() -> None:
    dp, tp = _meshes()

    def plain(model: nn.Module, step: int) -> None:
        model(_batch(dp, step)).pow(2).mean().backward()

    def twice(model: nn.Module, step: int) -> None:
        first, second = (model(_batch(dp, 10 * step + i)).pow(2).mean() for i in range(2))
        first.backward(retain_graph=True)
        second.backward()
        first.backward()

    def recomputed(model: nn.Module, step: int) -> None:
        x = _batch(dp, step).requires_grad_()
        for block in model:  # type: ignore[attr-defined]
            x = checkpoint(block, x, use_reentrant=False)
        x.pow(2).mean().backward()

    for walks, how in ((plain, {}), (twice, {}), (recomputed, {}), (twice, {"reshard_after_forward": False})):
        reference = _blocks()
        model = _sharded(_over(tp, copy.deepcopy(reference)), dp, **how)
        mine, theirs = (torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, reference))
        for step in range(2):
            walks(model, step)
            walks(reference, step)
            reduce_gradients(reference)
            norms = [torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1) for one in (model, reference)]
            torch.testing.assert_close(norms[0].full_tensor(), norms[1])  # type: ignore[operator]
            _close(model, reference)
            for one in (mine, theirs):
                one.step()
            _close(model, reference)
            for one in (mine, theirs):
                one.zero_grad()
        moved = [(a - b).detach().abs().max() for a, b in zip(reference.parameters(), _blocks().parameters(), strict=True)]
        assert max(moved) > 1e-3


def state_of_tensor_parallel_parameters_is_of_whole_ones() -> None:
    dp, tp = _meshes()
    model = _sharded(_over(tp, _blocks()), dp, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    early = model[0].mlp.in_proj.weight  # type: ignore[index,union-attr]
    assert early.shape == (4 * WIDTH, WIDTH) and early.to_local().shape == (WIDTH, WIDTH)
    other = _blocks()
    with torch.no_grad():
        for one in other.parameters():
            one.mul_(1.5)
    values = {
        name: distribute_tensor(other.state_dict()[name], one.device_mesh, [Replicate()] * 2).redistribute(placements=[Replicate(), *one.placements[1:]])
        for name, one in model.named_parameters()
    }
    with torch.no_grad():
        for name, one in model.named_parameters():
            one.copy_(values[name])
    model.load_state_dict(model.state_dict())
    _close(model, other)
    want = other(_batch(dp, 0))
    torch.testing.assert_close(model(_batch(dp, 0).float()).double(), want, atol=1e-4, rtol=1e-4)


def what_an_optimizer_had_of_tensor_parallel_parameters_is_cut() -> None:
    dp, tp = _meshes()
    reference = _blocks()
    model = _over(tp, copy.deepcopy(reference))
    mine, theirs = (torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, reference))
    for step in range(4):
        if step == 2:
            _sharded(model, dp)
        for one, optimizer in ((model, mine), (reference, theirs)):
            batch = _batch(dp, step) if step >= 2 else torch.ones(4, WIDTH, dtype=torch.float64)
            one(batch).pow(2).mean().backward()
            if step >= 2 and one is reference:
                reduce_gradients(reference)
            optimizer.step()
            optimizer.zero_grad()
    _close(model, reference)


def replicas_of_parts_of_tensor_parallelism() -> None:
    for policy, limit in ((MixedPrecisionPolicy(), 1e-9), (MixedPrecisionPolicy(param_dtype=torch.float32), 1e-4)):
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicas", "shards", "tp"))
        reference = _blocks()
        model = _sharded(_over(mesh["tp"], copy.deepcopy(reference)), mesh["replicas", "shards"], mp_policy=policy)
        mine, theirs = (torch.optim.SGD(one.parameters(), lr=1.0) for one in (model, reference))
        for step in range(2):
            batch = _batch(mesh["replicas"], step)
            model(batch if policy.param_dtype is None else batch.float()).pow(2).mean().backward()
            reference(batch).pow(2).mean().backward()
            reduce_gradients(reference)
            for one in (mine, theirs):
                one.step()
                one.zero_grad()
        for parameter, whole in zip(model.parameters(), reference.parameters(), strict=True):
            assert parameter.placements[0] == Replicate()
            torch.testing.assert_close(parameter.full_tensor().detach(), whole.detach(), atol=limit, rtol=limit)


def what_a_forward_uses_of_tensor_parallelism_is_the_parameter() -> None:
    dp, tp = _meshes()
    reference = _blocks()
    model = plumb.fully_shard(_over(tp, copy.deepcopy(reference)), mesh=dp)  # shows whole parameters from a forward to its backward
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def bias() -> torch.Tensor:
        found: torch.Tensor = model[1].mlp.out_proj.bias
        return found

    for one in (model, reference):
        one(_batch(dp, 0)).pow(2).mean().backward()
        loss = one(_batch(dp, 1)).pow(2).mean()
        assert one is reference or (isinstance(bias(), nn.Parameter) and bias().grad is not None and not bias().is_leaf)
        one.zero_grad()
        loss.backward()
    reduce_gradients(reference)
    _close(model, reference)
    model(_batch(dp, 0))
    bias().requires_grad_(False)
    model.zero_grad()
    model(_batch(dp, 0)).pow(2).mean().backward()
    assert not bias().requires_grad and bias().grad is None and model[1].mlp.in_proj.bias.grad is not None
    model(_batch(dp, 0))
    with torch.no_grad():
        bias().mul_(2)
    with pytest.raises(plumb.Error, match="was changed while its module showed it whole"):
        optimizer.step()


def parts_that_are_no_parts_are_refused_by_name() -> None:
    dp, tp = _meshes()
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), tp, [Partial()]))
    with pytest.raises(plumb.Error, match="'weight' is a DTensor with placements.*summand"):
        plumb.fully_shard(model, mesh=dp)
    model.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (4,)), [Shard(0)]))
    with pytest.raises(plumb.Error, match="'weight' is a DTensor over .* slice both from one mesh"):
        plumb.fully_shard(model, mesh=dp)


ALL = [
    trains_parts_of_tensor_parallelism_as_one_process,
    state_of_tensor_parallel_parameters_is_of_whole_ones,
    what_an_optimizer_had_of_tensor_parallel_parameters_is_cut,
    replicas_of_parts_of_tensor_parallelism,
    what_a_forward_uses_of_tensor_parallelism_is_the_parameter,
    parts_that_are_no_parts_are_refused_by_name,
]
