"""Where a parameter under ``plumb.fully_shard`` is held, and how a mesh cuts it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from .._C import Error
from .parallel import Parallel


class Place:
    """Where a module holds a parameter."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        # Some modules keep lists of their parameters, which their own __setattr__ follows (RNNs).
        self.plain = type(module).__setattr__ is nn.Module.__setattr__

    def get(self) -> nn.Parameter | None:
        return self.module._parameters.get(self.name)

    def put(self, parameter: nn.Parameter) -> None:
        if self.plain:
            self.module._parameters[self.name] = parameter
        else:
            setattr(self.module, self.name, parameter)

    def taken(self) -> Error:
        """What a unit says that finds something else here."""
        return Error(
            f"parameter '{self.name}' of a {type(self.module).__name__} under fully_shard gave its place to a"
            f" {type(self.get()).__name__} (torch.func.functional_call, or a swap by hand), which the forward would not see: a unit puts"
            " its own whole parameters there. Write into the parameter (copy_ under torch.no_grad()), or train with plumb.Engine and"
            " call inside engine.gathered(model)"
        )


class Cut:
    """How a mesh cuts a parameter: its placements, and which rows (of dimension ``dim``) are this rank's.

    The engine cuts memory, so what is cut along ``dim`` lies with that dimension outermost there.
    """

    def __init__(
        self, mesh: DeviceMesh, placements: tuple[Placement, ...], rank: int, shards: int, dim: int = 0, replicas: Any = None
    ) -> None:
        self.mesh, self.placements, self.rank, self.shards, self.dim = mesh, placements, rank, shards, dim
        self.replicas = replicas  # the process group of ranks that have the same rows, if there are any

    def around(self, parallel: Parallel, name: str) -> "Cut":
        """The same rows of what this rank has of a parameter that ``parallel`` says how it lies."""
        return Cut(*parallel.around(self.mesh, self.placements, name), self.rank, self.shards, self.dim, self.replicas)

    def along(self, dim: int) -> "Cut":
        if dim == self.dim:
            return self
        # Where one rank has all rows, there is nothing to cut, and they stay as they are.
        placements = (*self.placements[:-1], Shard(dim))
        return Cut(self.mesh, placements, self.rank, self.shards, dim if self.shards > 1 else 0, self.replicas)

    def rows(self, whole: torch.Tensor) -> torch.Tensor:
        length = whole.size(self.dim)
        step = -(-length // self.shards)
        begin = min(self.rank * step, length)
        return whole.narrow(self.dim, begin, min(step, length - begin))

    def outermost(self, shape: torch.Size) -> tuple[int, ...]:
        """Strides of a tensor of this shape in the engine's memory."""
        return torch.empty(shape, device="meta").movedim(self.dim, 0).contiguous().movedim(0, self.dim).stride()

    def flat(self, rows: torch.Tensor) -> torch.Tensor:
        """In the order of the engine's memory; a view where they lie so."""
        return rows.movedim(self.dim, 0).reshape(-1)

    def shaped(self, memory: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Rows of this shape in the engine's memory."""
        if self.dim == 0:
            return memory.view(shape)
        moved = (shape[self.dim], *shape[: self.dim], *shape[self.dim + 1 :])
        return memory.view(moved).movedim(0, self.dim)

    def distributed(self, local: torch.Tensor, like: torch.Tensor, dtype: torch.dtype) -> DTensor:
        meta = TensorMeta(like.shape, like.stride(), dtype)
        spec = DTensorSpec(self.mesh, self.placements, tensor_meta=meta)
        return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
