"""What may be given to ``plumb.Engine`` in several forms, in the one that the engine takes."""

from __future__ import annotations

import contextlib
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Union

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from . import _C
from ._C import Error, LossScale, Mesh, ParameterGroup, World
from .world import of_mesh, world as _world

#: By names, by a regular expression over names, or by a predicate over them.
Match = Union[Sequence[str], str, Callable[[str], bool]]
Group = Union[ParameterGroup, dict[str, Any]]


def named(pairs: Any, what: str) -> list[tuple[str, torch.Tensor]]:
    result = []
    try:
        for name, tensor in pairs:
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise TypeError
            result.append((uncompiled(name), tensor))
    except (TypeError, ValueError):
        raise Error(
            f"the engine's {what} are a {type(pairs).__name__}; expected a module, or pairs of a name and a tensor"
            " (module.named_parameters())"
        ) from None
    for name, tensor in result:
        if torch.nn.parameter.is_lazy(tensor):
            raise Error(f"'{name}' is of a lazy module and has no shape yet; run one forward before the engine is built")
        if tensor.is_meta:
            raise Error(f"'{name}' is on the meta device and has no values; give the model memory first (model.to_empty)")
    return result


def tensors(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Those that have memory, of what may be no model at all."""
    pairs = model.named_parameters() if isinstance(model, nn.Module) else model if isinstance(model, (list, tuple)) else []
    found = [pair for pair in pairs if isinstance(pair, tuple) and len(pair) == 2]
    return [(name, tensor) for name, tensor in found if isinstance(tensor, torch.Tensor) and not tensor.is_meta]


def refuse(world: World, why: Exception) -> None:
    """The other ranks, which are waiting to build their engines, get an Error that says why this one does not."""
    if world.size > 1:
        with contextlib.suppress(Exception):
            world.refuse(str(why))


def refuse_in(mesh: Any, world: Any, model: Any, why: Exception) -> None:
    """The same, where the ranks may be what is wrong: to those that a sound argument says, otherwise to those of an engine that is told none.

    Never to ranks that wait for nobody here: a group, or a mesh, of others stays theirs.
    """
    with contextlib.suppress(Exception):
        if isinstance(mesh, DeviceMesh) and (mesh.ndim in (1, 2) or mesh.size() < dist.get_world_size()):
            return refuse(of_mesh(mesh)[0], why)
        if not (dist.is_available() and dist.distributed_c10d._rank_not_in_group(world)):
            is_place = isinstance(world, World) or (dist.is_available() and isinstance(world, dist.ProcessGroup))
            refuse(world_of(world if is_place else None, tensors(model)), why)


def whole(value: Any, what: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise Error(f"{what} is {value!r}; expected a whole number") from None
    if abs(number) >= 2**63:
        raise Error(f"{what} is {number}; expected less than 2**63")
    return number


def path(given: Any, what: str) -> str:
    try:
        name = os.fsdecode(given)
    except TypeError as error:  # "expected str, bytes or os.PathLike object, not …"
        raise Error(f"{what} is {given!r}; {error}") from None
    with contextlib.suppress(UnicodeEncodeError):
        if "\0" not in name.encode().decode():
            return name
    raise Error(f"{what} is {name!r}, which is no name in UTF-8")


def refusal(error: Exception) -> str:
    """What every rank is to hear of it."""
    return str(error).removeprefix("plumb: ") or type(error).__name__


def uncompiled(name: str) -> str:
    """Without what torch.compile puts into names: compiled or not, a model has the same checkpoints."""
    return name.replace("_orig_mod.", "")


def world_of(given: World | dist.ProcessGroup | None, named: list[tuple[str, torch.Tensor]]) -> World:
    if isinstance(given, World):
        return given
    if given is not None and not (dist.is_available() and isinstance(given, dist.ProcessGroup)):
        raise Error(f"the world is a {type(given).__name__}; expected a plumb.World or a process group of torch.distributed")
    return _world(given, device=named[0][1].device.type if named else "cpu")


#: Of options that are neither yes or no nor whole numbers.
_EXPECTED = {
    "accumulate_dtype": "a torch.dtype",
    "clip_norm": "a number",
    "schedule": "a plumb.Schedule",
}


def options(**given: Any) -> _C.Options:
    """Those that were given; where they are None, the engine's own."""
    result = _C.Options()
    for name, value in given.items():
        if value is None:
            continue
        try:
            setattr(result, name, value)
        except (TypeError, ValueError):
            usual = "True or False" if isinstance(getattr(result, name), bool) else "a whole number"
            raise Error(f"{name} is {value!r}; expected {_EXPECTED.get(name, usual)}") from None
    return result


def strategy(name: Any) -> str:
    if not isinstance(name, str):
        raise Error(f"strategy is {name!r}; expected one of {', '.join(_C.strategies())}")
    return name


def mesh(mesh: Mesh | tuple[int, int] | None) -> Mesh:
    if mesh is None:
        return Mesh()
    if isinstance(mesh, tuple) and len(mesh) == 2:
        return Mesh(replicate=whole(mesh[0], "mesh[0]"), shard=whole(mesh[1], "mesh[1]"))
    if not isinstance(mesh, Mesh):
        raise Error(f"mesh is {mesh!r}; expected a plumb.Mesh, a DeviceMesh, or two numbers: (replicate, shard)")
    return mesh


def loss_scale(scale: LossScale | float | bool | None) -> LossScale | None:
    if scale is None or scale is False:
        return None
    if scale is True:
        return LossScale()
    return scale if isinstance(scale, LossScale) else LossScale(number(scale, "loss_scale"))


def number(value: Any, what: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise Error(f"{what} is {value!r}; expected a number") from None


def rate(lr: Any) -> None:
    """An Error if it is no learning rate."""
    value = number(lr, "lr")
    if not (math.isfinite(value) and value >= 0):
        raise Error(f"set_lr({value:g}); a learning rate must be finite and not negative")


def tensor(value: Any, what: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise Error(f"{what} is a {type(value).__name__}; expected a tensor")
    return value


def parameters(given: Any) -> list[torch.Tensor]:
    """Of a module, of several, or one."""
    if isinstance(given, torch.Tensor):
        return [given]
    try:
        found = list(given.parameters() if isinstance(given, nn.Module) else given)
    except TypeError:
        raise Error(f"gathered() of a {type(given).__name__}; expected a module or parameters") from None
    return [tensor(one, "one of the parameters of gathered()") for one in found]


def groups(given: Any, named: list[tuple[str, torch.Tensor]]) -> list[ParameterGroup]:
    if isinstance(given, (str, dict)) or not isinstance(given, Iterable):
        raise Error(f"groups is {given!r}; expected a list of groups")
    return [group(one, named) for one in given]


def group(group: Group, named: list[tuple[str, torch.Tensor]]) -> ParameterGroup:
    if isinstance(group, ParameterGroup):
        return group
    if not isinstance(group, dict):
        raise Error(f"a group is {group!r}; expected a dict of match, and lr or weight_decay")
    unknown = set(group) - {"match", "lr", "weight_decay"}
    if unknown or "match" not in group:
        raise Error(f"a group has the keys {sorted(group)}; expected match, and lr or weight_decay")
    match: Match = group["match"]
    if callable(match):
        names = {name for name, _ in named if match(name)}
    elif isinstance(match, str):
        try:
            names = {name for name, _ in named if re.search(match, name)}
        except re.error as error:
            raise Error(f"a group's match is {match!r}, which is no regular expression: {error}") from None
    else:
        names = {uncompiled(name) for name in match}
    return ParameterGroup(names, lr=group.get("lr"), weight_decay=group.get("weight_decay"))


def group_of(optimizer: torch.optim.Optimizer, number: int) -> dict[str, Any]:
    if not 0 <= whole(number, "group") < len(optimizer.param_groups):
        raise Error(f"there is no parameter group {number}; this optimizer has {len(optimizer.param_groups)}")
    group: dict[str, Any] = optimizer.param_groups[number]
    return group


def is_half(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)
