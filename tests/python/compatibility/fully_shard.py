"""torch.distributed.fsdp.fully_shard (FSDP2), as of torch 2.13."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import plumb

from . import Entry, State, Table

WORKS, NO_OP, RAISES = State.WORKS, State.NO_OP, State.RAISES


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def data(rank: int, i: int = 0) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * rank + i))


def sharded(**arguments: Any) -> Any:
    model = net()
    plumb.fully_shard(model[0], **arguments)
    return plumb.fully_shard(model, **arguments)


def trains(model: Any, limit: float = 1e-6, before: Callable[[Any, int], None] = lambda model, i: None) -> None:
    """Three steps of two backwards each are what one process computes."""
    twin = net()
    mine, theirs = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, twin))
    for step in range(3):
        for i in range(2):
            before(model, i)
            model(data(dist.get_rank(), 2 * step + i)).float().pow(2).sum().backward()
            for rank in range(2):
                (twin(data(rank, 2 * step + i)).pow(2).sum() / 2).backward()
        for one in (mine, theirs):
            one.step()
            one.zero_grad()
    agrees(model, twin, limit)


def agrees(model: Any, twin: nn.Module, limit: float = 1e-6) -> None:
    for (name, parameter), whole in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert isinstance(parameter, DTensor), name
        away = float((parameter.detach().full_tensor() - whole.detach()).abs().max())
        assert away <= limit * max(1.0, float(whole.abs().max())), f"{name} is {away} away"


# ---- arguments


def module() -> None:
    model = sharded()
    assert isinstance(model, fsdp.FSDPModule) and isinstance(model, nn.Sequential)
    assert [parameter.placements for parameter in model.parameters()] == [(Shard(0),)] * 4
    trains(model)
    listed = net()
    assert plumb.fully_shard([listed[0], listed[2]]) == [listed[0], listed[2]]
    trains(plumb.fully_shard(listed))


def mesh() -> None:
    trains(sharded(mesh=init_device_mesh("cpu", (2,))))
    trains(sharded(mesh=init_device_mesh("cpu", (2, 1))))
    trains(sharded(mesh=init_device_mesh("cpu", (1, 2))))


def reshard_after_forward() -> None:
    for value in (None, True, False, 2):
        trains(sharded(reshard_after_forward=value))
    model = sharded(reshard_after_forward=False)
    out = model(data(0))
    assert not isinstance(model[0].weight, DTensor)
    out.sum().backward()
    assert isinstance(model[0].weight, DTensor)


def shard_placement_fn() -> None:
    trains(sharded(shard_placement_fn=lambda parameter: Shard(0)))
    trains(sharded(shard_placement_fn=lambda parameter: None))
    trains(sharded(shard_placement_fn=lambda parameter: Shard(-1 if parameter.size(-1) % 2 == 0 else 0)))


def mp_policy() -> None:
    model = sharded(mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    assert model(data(0)).dtype == torch.bfloat16
    trains(model, limit=0.1)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def offload_policy() -> None:
    trains(sharded(offload_policy=fsdp.CPUOffloadPolicy()))
    trains(sharded(offload_policy=fsdp.OffloadPolicy()))


def ignored_params() -> None:
    model = net()
    bias = model[2].bias
    plumb.fully_shard(model, ignored_params={bias})
    assert model[2].bias is bias and not isinstance(bias, DTensor)
    model(data(dist.get_rank())).pow(2).sum().backward()
    mine = bias.grad.clone()
    dist.all_reduce(mine)
    assert not torch.allclose(mine / 2, bias.grad)


def dp_mesh_dims() -> None:
    sharded(dp_mesh_dims=fsdp.DataParallelMeshDims(shard="dp") if hasattr(fsdp, "DataParallelMeshDims") else object())


# ---- MixedPrecisionPolicy


def param_dtype() -> None:
    seen = []
    model = sharded(mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model[0].register_forward_pre_hook(lambda module, args: seen.append((args[0].dtype, module.weight.dtype)))
    model(data(0))
    assert seen == [(torch.bfloat16, torch.bfloat16)]


def reduce_dtype() -> None:
    model = plumb.fully_shard(net().bfloat16(), mp_policy=fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float32))
    x = torch.ones(1, 3, dtype=torch.bfloat16)
    for i in range(64):
        (model(x).sum() * (1 + i / 64)).backward()
    expected = sum(float(torch.tensor(1 + i / 64).bfloat16()) for i in range(64))
    got = model[2].bias.grad
    assert got.dtype == torch.bfloat16 and abs(float(got.full_tensor()[0]) - expected) / expected < 4e-3


def output_dtype() -> None:
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    assert plumb.fully_shard(net(), mp_policy=policy)(data(0)).dtype == torch.float64


def cast_forward_inputs() -> None:
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    with pytest.raises(RuntimeError, match="dtype"):
        sharded(mp_policy=policy)(data(0))


# ---- methods


def reshard() -> None:
    model = sharded()
    model[0].unshard()
    assert not isinstance(model[0].weight, DTensor) and torch.equal(model[0].weight, net()[0].weight)
    model[0].reshard()
    assert isinstance(model[0].weight, DTensor)
    trains(model)


def unshard() -> None:
    model = sharded()
    handle = model[0].unshard(async_op=True)
    handle.wait()
    assert torch.equal(model[0].weight, net()[0].weight)
    assert model.unshard() is None
    trains(model)


def with_calls(*calls: Callable[[Any], None]) -> Callable[[], None]:
    """These calls before every backward change nothing."""

    def check() -> None:
        for call in calls:
            trains(sharded(), before=lambda model, i, call=call: call(model))

    return check


def reset_iter_state() -> None:
    model = sharded()
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 5))
    model.reset_iter_state()
    with pytest.raises(RuntimeError, match="outermost"):
        model[0].reset_iter_state()
    trains(model)


def set_reshard_after_forward() -> None:
    model = sharded()
    model.set_reshard_after_forward(False)
    trains(model)
    model.set_reshard_after_forward(True, recurse=False)
    with pytest.raises(ValueError, match="bool"):
        model.set_reshard_after_forward(1)


def divided(name: str) -> Callable[[], None]:
    def check() -> None:
        model = sharded()
        for one in (model, model[0]):
            getattr(one, name)(4.0)
        model(data(dist.get_rank())).pow(2).sum().backward()
        twin = net()
        for rank in range(2):
            (twin(data(rank)).pow(2).sum() / 4).backward()
        for mine, whole in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), whole.grad)

    return check


def prefetch(name: str) -> Callable[[], None]:
    def check() -> None:
        model = sharded()
        getattr(model, name)([model[0]])
        trains(model)
        with pytest.raises(ValueError, match="FSDPModule"):
            getattr(model, name)([model[1]])

    return check


def raising(call: Callable[[Any], None]) -> Callable[[], None]:
    return lambda: call(sharded())


def max_input_buffers() -> None:
    with pytest.raises(ValueError):
        sharded().set_reduce_scatter_max_input_buffers(0)
    with_calls(lambda model: model.set_reduce_scatter_max_input_buffers(2))()


# ---- functions


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


def forward_method(register: Callable[[nn.Module, str], None]) -> None:
    model = plumb.fully_shard(Encoder())
    register(model, "encode")
    assert torch.allclose(model.encode(data(0)), net()(data(0)))
    register(net(), "encode")
    with pytest.raises(ValueError):
        register(model, "decode")


def share() -> None:
    plumb.share_comm_ctx([sharded(), sharded()])
    fsdp.share_comm_ctx([sharded(), sharded()])
    with pytest.raises(ValueError):
        plumb.share_comm_ctx([net()])


def both_forward_methods() -> None:
    forward_method(plumb.register_fsdp_forward_method)
    forward_method(fsdp.register_fsdp_forward_method)


def isinstance_holds() -> None:
    model = sharded()
    assert isinstance(model, fsdp.FSDPModule) and isinstance(model[0], nn.Linear) and type(model[:1]) is nn.Sequential
    with pytest.raises(plumb.Error, match="state dict"):
        copy.deepcopy(model)


def wait() -> None:
    handle = sharded().unshard(async_op=True)
    assert isinstance(handle, fsdp.UnshardHandle)
    handle.wait()


def names() -> Iterator[str]:
    yield from (f"argument {name}" for name in inspect.signature(fsdp.fully_shard).parameters)
    yield from (f"policy MixedPrecisionPolicy.{field.name}" for field in dataclasses.fields(fsdp.MixedPrecisionPolicy))
    yield from (f"method {name}" for name in vars(fsdp.FSDPModule) if not name.startswith("_"))
    yield from (f"function {name}" for name in ("register_fsdp_forward_method", "share_comm_ctx"))
    yield from ("class FSDPModule", "class UnshardHandle")


def entry(name: str, state: State, note: str, check: Callable[[], None]) -> Entry:
    return Entry(name, state, note, check)


ARGUMENTS = (
    entry("argument module", WORKS, "a module or a list; parameters are DTensors of this rank's rows; those of tensor parallelism over both meshes", module),
    entry("argument mesh", WORKS, "one dimension or two; parts of the world; ranks ascend along each dimension", mesh),
    entry("argument reshard_after_forward", WORKS, "a number is taken as True", reshard_after_forward),
    entry("argument shard_placement_fn", WORKS, "any dimension, evenly where it is not the first; another mesh raises", shard_placement_fn),
    entry("argument mp_policy", WORKS, "see below", mp_policy),
    entry("argument offload_policy", WORKS, "`CPUOffloadPolicy` on CPUs, which hold everything anyway; with a mesh of GPUs it raises", offload_policy),
    entry("argument ignored_params", WORKS, "left as they are, gradients too", ignored_params),
    entry("argument dp_mesh_dims", RAISES, "give the data-parallel part of the mesh", dp_mesh_dims),
    entry("policy MixedPrecisionPolicy.param_dtype", WORKS, "forwards in it; optimizers keep the parameters' own", param_dtype),
    entry("policy MixedPrecisionPolicy.reduce_dtype", WORKS, "where it is wider than the parameters; sums are never narrower than those", reduce_dtype),
    entry("policy MixedPrecisionPolicy.output_dtype", WORKS, "", output_dtype),
    entry("policy MixedPrecisionPolicy.cast_forward_inputs", WORKS, "", cast_forward_inputs),
)

METHODS = (
    entry("method reshard", WORKS, "", reshard),
    entry("method unshard", WORKS, "has arrived when it returns, `async_op` or not", unshard),
    entry("method reset_iter_state", WORKS, "needed by nobody: exceptions are cleaned up after", reset_iter_state),
    entry("method set_is_last_backward", NO_OP, "every backward ends with its reductions waited for", with_calls(lambda model: model.set_is_last_backward(False))),
    entry("method set_requires_gradient_sync", WORKS, "while all modules of a root are set to False, backwards keep whole gradients and nothing travels; the next other one, or a step, reduces the sum", with_calls(lambda model: model.set_requires_gradient_sync(False), lambda model: model.set_requires_gradient_sync(True, recurse=False))),
    entry("method set_requires_all_reduce", NO_OP, "the same", with_calls(lambda model: model.set_requires_all_reduce(False))),
    entry("method set_reshard_after_forward", WORKS, "", set_reshard_after_forward),
    entry("method set_reshard_after_backward", NO_OP, "units are released when their last gradient has come", with_calls(lambda model: model.set_reshard_after_backward(False))),
    entry("method set_modules_to_forward_prefetch", NO_OP, "what all ranks used next the last time is gathered ahead", prefetch("set_modules_to_forward_prefetch")),
    entry("method set_modules_to_backward_prefetch", NO_OP, "the same", prefetch("set_modules_to_backward_prefetch")),
    entry("method set_custom_all_gather", RAISES, "gathers have connections of their own", raising(lambda model: model.set_custom_all_gather(None))),
    entry("method set_custom_reduce_scatter", RAISES, "reductions have connections of their own", raising(lambda model: model.set_custom_reduce_scatter(None))),
    entry("method set_all_reduce_hook", RAISES, "change `p.grad` after `backward()`", raising(lambda model: model.set_all_reduce_hook(print))),
    entry("method set_post_optim_event", NO_OP, "gathers come after updates by themselves", with_calls(lambda model: model.set_post_optim_event(None))),
    entry("method set_reduce_scatter_divide_factor", WORKS, "torch's older name of the next", divided("set_reduce_scatter_divide_factor")),
    entry("method set_gradient_divide_factor", WORKS, "", divided("set_gradient_divide_factor")),
    entry("method set_force_sum_reduction_for_comms", NO_OP, "only sums travel anyway", with_calls(lambda model: model.set_force_sum_reduction_for_comms(True))),
    entry("method set_reduce_scatter_unused_params", NO_OP, "unused parameters are always right, and hang nobody", with_calls(lambda model: model.set_reduce_scatter_unused_params(True))),
    entry("method set_reduce_scatter_max_input_buffers", NO_OP, "two buckets are under way at a time", max_input_buffers),
    entry("method set_separate_reduce_scatter_group", NO_OP, "they are separate", with_calls(lambda model: model.set_separate_reduce_scatter_group(True))),
    entry("method set_unshard_in_backward", NO_OP, "a backward gathers only what its nodes saved", with_calls(lambda model: model.set_unshard_in_backward(False))),
    entry("method set_allocate_memory_from_process_group_for_comm", NO_OP, "buckets lie in the backend's memory where it has some", with_calls(lambda model: model.set_allocate_memory_from_process_group_for_comm(True))),
    entry("method set_symm_mem_for_comm", NO_OP, "the same", with_calls(lambda model: model.set_symm_mem_for_comm())),
    entry("function register_fsdp_forward_method", WORKS, "torch's own, too", both_forward_methods),
    entry("function share_comm_ctx", NO_OP, "there is nothing to share", share),
    entry("class FSDPModule", WORKS, "`isinstance` holds; deepcopy and pickle raise", isinstance_holds),
    entry("class UnshardHandle", WORKS, "", wait),
)

TABLE = Table(
    original="torch.distributed.fsdp.fully_shard",
    ours="plumb.fully_shard",
    names=names,
    entries=(*ARGUMENTS, *METHODS),
    order=1,
)
