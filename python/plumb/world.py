"""The ranks taking part, found without being told; and leaving them when the interpreter ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh

from ._C import Error, Mesh, World

_worlds: dict[Any, World] = {}  # by process group; None: without torch.distributed


class _Closable(Protocol):
    def close(self) -> None: ...


_engines: weakref.WeakSet[Any] = weakref.WeakSet()


def world(group: dist.ProcessGroup | None = None, *, device: str = "cpu", timeout: float = 60.0) -> World:
    """The world of this process, the same one at every call.

    Where ``torch.distributed`` is initialised, its ranks (those of ``group``, if given) over its backend. Otherwise the
    ranks that torchrun, mpirun or srun describe in the environment. Otherwise one rank.

    ``timeout``: seconds a collective may wait for a rank before every waiting rank gets an error.

    >>> import plumb
    >>> plumb.spawn(lambda: plumb.world().size, ranks=2)
    [2, 2]
    """
    mine: World | None = getattr(_thread, "world", None)
    if mine is not None and group is None:
        return mine
    initialised = dist.is_available() and dist.is_initialized()
    if group is None and initialised:
        group = dist.distributed_c10d._get_default_group()
    known = _worlds.get(group)
    if known is not None:
        return known
    if group is None:
        found = World.join(device=device, timeout=timeout)
    else:
        found = _of_group(group, device, timeout)
    _worlds[group] = found
    return found


_thread = threading.local()


@contextlib.contextmanager
def as_thread(mine: World) -> Iterator[None]:
    """This thread is a rank of ``mine``, and its process is none."""
    _thread.world = mine
    try:
        yield
    finally:
        del _thread.world


def check_processes() -> None:
    """An Error where ranks are threads: torch.distributed knows one rank per process."""
    if getattr(_thread, "world", None) is not None:
        raise Error(
            "ranks are threads here, and torch.distributed's process groups are of processes: use plumb.Engine, or spawn with"
            " method='fork'"
        )


def _of_group(group: dist.ProcessGroup, device: str, timeout: float) -> World:
    check_processes()
    try:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        store = dist.distributed_c10d._get_process_group_store(group)
    except (ValueError, RuntimeError, KeyError) as error:
        raise Error(f"this process group was destroyed, or this process is none of its ranks; make a new one [{error}]") from None
    if size == 1:
        return World()
    name = group._get_backend(torch.device(device)).name()
    if name in ("gloo", "nccl"):
        # Connections of our own beside the user's: his collectives and ours need no common order.
        return World.meet(store, rank, size, backend=_ours(name, device), device=device, timeout=timeout)
    return World.adopt(group, store, device=device, timeout=timeout)


def _ours(backend: str, device: str) -> str:
    """What our connections run over beside the user's: tensors on the CPU go through shared memory where ranks can share it."""
    return "" if backend == "gloo" and torch.device(device).type == "cpu" else backend


def of_mesh(mesh: DeviceMesh) -> tuple[World, Mesh]:
    """The ranks of a DeviceMesh as a world, and its axes: the last is sharded over, the one before replicated over."""
    check_processes()
    if mesh.ndim not in (1, 2):
        raise Error(f"the mesh has {mesh.ndim} dimensions; expected one (sharded over) or two (replicated over, sharded over)")
    ranks = tuple(int(rank) for rank in mesh.mesh.flatten())
    grid = mesh.mesh
    if any(bool((grid.diff(dim=dim) <= 0).any()) for dim in range(grid.dim())):
        raise Error(f"the mesh's ranks {grid.tolist()} do not ascend along every dimension, as torch's process groups do; sort them")
    me = dist.get_rank()
    if me not in ranks:
        raise Error(f"this process, rank {me}, is none of the mesh's ranks {list(ranks)}")
    axes = Mesh(replicate=1 if mesh.ndim == 1 else mesh.size(0), shard=mesh.size(mesh.ndim - 1))
    if len(ranks) == 1:
        return World(), axes
    if ranks == tuple(range(dist.get_world_size())):
        return world(device=mesh.device_type), axes
    if mesh.ndim == 1:
        return world(mesh.get_group(), device=mesh.device_type), axes
    # Ranks in an order of the mesh's own, or a part of the world that no process group stands for.
    everybody = dist.distributed_c10d._get_default_group()
    key = (everybody, ranks)
    if key not in _worlds:
        store = PrefixStore("plumb/" + ",".join(map(str, ranks)), dist.distributed_c10d._get_default_store())
        name = everybody._get_backend(torch.device(mesh.device_type)).name()
        if name not in ("gloo", "nccl"):
            raise Error(f"a mesh of the ranks {list(ranks)} needs gloo or nccl, and this process group is {name}")
        _worlds[key] = World.meet(store, ranks.index(me), len(ranks), backend=_ours(name, mesh.device_type), device=mesh.device_type)
    return _worlds[key], axes


def remember(engine: _Closable) -> None:
    """``engine`` is closed when the interpreter ends, if it still lives then."""
    _engines.add(engine)


def _forget() -> None:
    # A forked process is no rank: what it inherited is its parent's, which uses it and will end it.
    _worlds.clear()
    _engines.clear()


os.register_at_fork(after_in_child=_forget)


def fail(why: str) -> None:
    """Every other rank of this process's worlds gets an Error with ``why`` where it waits for this one, or will."""
    for known in _worlds.values():
        known.fail(why)


@atexit.register
def leave() -> None:
    """Closes every engine and leaves every world of this process. Happens by itself at exit."""
    # While Python is whole: threads that end later would look for an interpreter that is gone.
    for engine in list(_engines):
        engine.close()
    for known in _worlds.values():
        known.leave()
    _worlds.clear()
