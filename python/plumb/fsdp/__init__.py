"""``plumb.fully_shard``: torch's (FSDP2), with Plumb's engine behind it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.multiprocessing.reductions import StorageWeakRef

from .._C import Error
from .module import _UNIT, FSDPModule, Misuse, unit_of
from .optim import watch_optimizers
from .parallel import Parallel, part_of
from .unit import Unit
from .cut import Cut, Place
from .sharded import Sharded, ShardedParameter, sharded_of
from ..world import check_processes

M = TypeVar("M", bound=nn.Module)


@overload
def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: Any = ...,
) -> M: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: Any = ...,
) -> list[nn.Module]: ...


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """A drop-in for ``torch.distributed.fsdp.fully_shard``: shards ``module``'s parameters over the ranks, in place.

    Call it on blocks first, then on the model. ``model.parameters()`` are DTensors of this rank's rows from then on: build
    any ``torch.optim`` optimizer over them (one that was built before is taken over at its first step), and call
    ``backward``, ``optimizer.step()`` and ``optimizer.zero_grad()`` as ever. Every pattern of forwards and backwards is right.

    Args:
        module: a module, or a list of modules that are gathered together.
        mesh: one dimension to shard over, or two: replicate over the first, shard over the second. By default all ranks.
        reshard_after_forward: False keeps parameters whole from a forward to the end of its backward, and the module shows them
            until then. Otherwise they are released after the forward, and a backward gathers what it needs. None: False for
            the outermost module, True for those inside.
        shard_placement_fn: answers by parameter which dimension is cut, ``Shard(dim)``; None is the first. Others than the first
            must be even. Such a parameter lies in memory with that dimension outermost: its rows, and the whole parameter in
            forwards, have those strides.
        mp_policy: forwards in ``param_dtype``, on inputs and outputs cast as asked. Gradients are summed in the parameters'
            own dtype, or in ``reduce_dtype`` where that is wider.
        offload_policy: ``CPUOffloadPolicy`` is taken where the mesh is of CPUs, which hold everything anyway.
        ignored_params: stay as they are, and are none of our business.
        dp_mesh_dims: is an error; give the data-parallel part of the mesh.

    >>> import plumb, torch
    >>> model = plumb.fully_shard(torch.nn.Linear(4, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model(torch.ones(3, 4)).sum().backward()
    >>> optimizer.step()
    """
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    _check_modules(modules)
    if dp_mesh_dims is not None:
        raise Error("dp_mesh_dims: plumb.fully_shard takes the data-parallel mesh itself; pass mesh=mesh['dp']")
    for name, value, kind in (("mesh", mesh, DeviceMesh), ("mp_policy", mp_policy, MixedPrecisionPolicy), ("offload_policy", offload_policy, OffloadPolicy)):
        if value is not None and not isinstance(value, kind):
            raise Error(f"{name} of fully_shard is {value!r}; expected a {kind.__name__}")
    mesh = _default_mesh() if mesh is None else mesh
    cut = _cut(mesh)
    _check_reshard(reshard_after_forward, cut.shards)
    device = _device(mesh, offload_policy)
    watch_optimizers()

    unit = Unit(modules, mesh, mp_policy)
    unit.reshard_after_forward = None if reshard_after_forward is None else bool(reshard_after_forward)
    unit.ignored = set(ignored_params or ())
    own = list(_own(modules, unit.ignored))
    for one, name, _ in own:
        if isinstance(one, torch.jit.ScriptModule):
            raise Error(
                f"parameter '{name}' is of a TorchScript module, which cannot show one part at one time and the whole at another; put its"
                " parameters into ignored_params, or do not script it"
            )
    for one, name, parameter in own:
        sharded = sharded_of(parameter)  # by another unit that it is tied to
        if sharded is None:
            sharded = _shard(parameter, name, cut, device, mp_policy, shard_placement_fn)
            sharded.unit = unit
        if sharded not in unit.parameters:
            unit.parameters.append(sharded)
        sharded.places.append(Place(one, name.rpartition(".")[2]))
        sharded.show()
    for one in modules:
        for inner in one.modules():
            child = unit_of(inner)
            if child is not None and child.parent is None and child is not unit:
                _check_child(child, unit)
                child.parent = unit
                unit.children.append(child)
        _move_buffers(one, device)
    for one in modules:
        _become(one, unit)
    return module


fully_shard.state = unit_of  # type: ignore[attr-defined]  # as torch's has it

# ---- arguments


def _check_modules(modules: list[Any]) -> None:
    if not modules:
        raise Error("fully_shard of an empty list; expected a module or modules")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise Error(f"fully_shard of a {type(module).__name__}; expected a torch.nn.Module")
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise ValueError(
                f"fully_shard does not support containers that do not implement forward: a {type(module).__name__}; shard the"
                " modules inside, or pass them as a list"
            )
        if unit_of(module) is not None:
            raise Misuse(
                "Each distinct composable distributed API can only be applied to a module once. fully_shard has already been"
                f" applied to this {type(module).__name__}"
            )


def _default_mesh() -> DeviceMesh:
    check_processes()
    if not dist.is_initialized():
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group()
        else:
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return init_device_mesh(accelerator.type if accelerator is not None else "cpu", (dist.get_world_size(),))


def _cut(mesh: DeviceMesh) -> Cut:
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}: sharded over, or replicated and sharded over")
    if mesh.get_coordinate() is None:
        raise Error(f"this process, rank {dist.get_rank()}, is none of the ranks of the mesh {mesh}")
    placements: tuple[Placement, ...] = (Shard(0),) if mesh.ndim == 1 else (Replicate(), Shard(0))
    replicas = mesh.get_group(0) if mesh.ndim == 2 else None
    return Cut(mesh, placements, mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1), replicas=replicas)


def _check_reshard(value: bool | int | None, shards: int) -> None:
    if value is None or isinstance(value, bool):
        return
    if not isinstance(value, int):
        raise ValueError(
            f"reshard_after_forward should be a bool or an int representing the group size to reshard to, not {value}"
        )
    if value < 1 or shards % value != 0:
        raise ValueError(f"If passing reshard_after_forward as an int, it should be a factor of {shards}, not {value}")


def _device(mesh: DeviceMesh, offload: OffloadPolicy) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    if isinstance(offload, CPUOffloadPolicy):
        raise Error(
            f"offload_policy: plumb.fully_shard keeps shards where the mesh is, and this one is of {mesh.device_type}; leave"
            " the policy out, or use a mesh of CPUs"
        )
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


# ---- parameters


def _own(modules: list[nn.Module], ignored: set[nn.Parameter]) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """The parameters of ``modules`` that no unit inside has; a tied one as often as it is registered."""
    seen: set[int] = set()

    def walk(module: nn.Module, prefix: str) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        if id(module) in seen or unit_of(module) is not None:
            return
        seen.add(id(module))
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in ignored and not isinstance(parameter, ShardedParameter):
                yield module, prefix + name, parameter
        for name, child in module.named_children():
            yield from walk(child, f"{prefix}{name}.")

    for module in modules:
        yield from walk(module, "")


def _shard(
    parameter: nn.Parameter,
    name: str,
    cut: Cut,
    device: torch.device,
    policy: MixedPrecisionPolicy,
    placement: Callable[[nn.Parameter], Any] | None,
) -> Sharded:
    parallel = Parallel(parameter, name) if isinstance(parameter, DTensor) else None
    mine = part_of(parameter.data)
    if type(mine) is not torch.Tensor:
        raise Error(f"parameter '{name}' is a {type(mine).__name__}; plumb.fully_shard takes plain tensors, and DTensors of them")
    if parameter.dim() == 0:
        raise ValueError(
            f"fully_shard doesn't support scalar parameters. Change {name} to a 1D tensor with numel equal to 1."
        )
    if not parameter.is_contiguous():
        raise NotImplementedError(
            f"FSDP does not support non-contiguous parameters yet: {name} has shape {list(parameter.shape)} and strides"
            f" {parameter.stride()}; make it contiguous"
        )
    asked = placement(parameter) if placement is not None else None
    _check_memory(mine, name)
    cut = cut.along(_dim(asked, mine, name, cut.shards))
    return Sharded(parameter, cut if parallel is None else cut.around(parallel, name), device, policy.param_dtype, parallel)


# What was cut, by its storage while that lives: name, first and last byte.
_memory: dict[int, tuple[StorageWeakRef, list[tuple[str, int, int]]]] = {}


def _check_memory(parameter: torch.Tensor, name: str) -> None:
    """Two parameters over one memory are one weight of a plain program, and would be two from here on."""
    if parameter.is_meta or parameter.numel() == 0:
        return
    for gone in [key for key, (storage, _) in _memory.items() if storage.expired()]:  # type: ignore[no-untyped-call]
        del _memory[gone]
    mine = StorageWeakRef(parameter.untyped_storage())  # type: ignore[no-untyped-call]
    begin = int(parameter.storage_offset()) * parameter.element_size()
    end = begin + parameter.numel() * parameter.element_size()
    _, others = _memory.setdefault(mine.cdata, (mine, []))
    for other, first, last in others:
        if begin < last and first < end:
            raise Error(
                f"parameter '{name}' of shape {list(parameter.shape)} shares memory with parameter '{other}', which was sharded before, but"
                " they are two tensors, and would be two weights from here on; tie weights by registering the same tensor twice"
            )
    others.append((name, begin, end))


def _dim(asked: Any, parameter: torch.Tensor, name: str, shards: int) -> int:
    """The dimension that ``shard_placement_fn`` asks for."""
    if asked is None:
        return 0
    if not isinstance(asked, Shard):
        raise Misuse(
            f"Expected Shard, got {type(asked)}: {asked}, which shard_placement_fn answered for parameter '{name}'; expected"
            " None or a Shard"
        )
    dim: int = asked.dim + parameter.dim() if asked.dim < 0 else asked.dim
    if not 0 <= dim < parameter.dim():
        raise Misuse(f"Shard dim {asked.dim} is invalid for {parameter.dim()}D tensor: parameter '{name}'")
    if dim > 0 and parameter.size(dim) % shards != 0:
        raise NotImplementedError(
            f"FSDP does not support uneven sharding on dim {dim}: parameter '{name}' of shape {list(parameter.shape)}, {shards}"
            " ranks; shard it by rows: Shard(0)"
        )
    return dim


def _check_child(child: Unit, unit: Unit) -> None:
    if child.engine is not None:
        raise Error("fully_shard of a module around one that ran already; shard all modules before the first forward")
    if child.mesh != unit.mesh:
        raise Error(f"fully_shard over {unit.mesh} around a module that is sharded over {child.mesh}; give both the same mesh")


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for one in module.modules():
        for name, buffer in one._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device.type != device.type:
                one._buffers[name] = buffer.to(device)


# ---- modules

_classes: dict[type, type] = {}


def _become(module: nn.Module, unit: Unit) -> None:
    plain = type(module)
    if plain not in _classes:
        _classes[plain] = type(f"FSDP{plain.__name__}", (FSDPModule, plain), {"__module__": plain.__module__})
    module.__dict__[_UNIT] = unit
    module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()  # where others look for what was applied
    module.__class__ = _classes[plain]
    module.register_forward_pre_hook(unit._pre_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(unit._post_forward, always_call=True)
    module.register_state_dict_pre_hook(unit.before_save)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(unit.before_load)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(unit.after_load)  # type: ignore[no-untyped-call]
    for place in (place for parameter in unit.parameters for place in parameter.places):
        if place.module is not module:
            place.module.register_load_state_dict_post_hook(unit.after_load)  # type: ignore[no-untyped-call]
