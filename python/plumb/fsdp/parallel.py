"""Parameters that other ranks hold parts of before ``plumb.fully_shard`` sees them: DTensors of tensor parallelism.

The engine shards this rank's part, a plain tensor, over the data-parallel mesh. What the user sees is one DTensor over both meshes;
what a forward finds in the module is a DTensor over the model-parallel one, made of the gathered part, whose backward hands this rank's
part of the gradient to the engine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from .._C import Error


class WholePart(DTensor):
    """What a forward finds of a parameter: no leaf, but to whoever looks it is the parameter, with the gradient and the freezing of that."""

    _is_param = True  # isinstance(…, nn.Parameter)
    _sharded: Any

    @property
    def grad(self) -> torch.Tensor | None:
        gradient: torch.Tensor | None = self._sharded.gradient()
        return gradient

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._sharded.set_gradient(value)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        self._sharded.leaf.requires_grad_(requires_grad)
        return self


class Parallel:
    """How one parameter lies over the mesh of its tensor parallelism."""

    def __init__(self, parameter: DTensor, name: str) -> None:
        self.mesh, self.placements = parameter.device_mesh, tuple(parameter.placements)
        self.shape, self.stride = parameter.shape, parameter.stride()
        if any(isinstance(placement, Partial) for placement in self.placements):
            raise Error(
                f"parameter '{name}' is a DTensor with placements {list(self.placements)}, of which each rank has a summand; expected Shard or"
                " Replicate: redistribute it first"
            )

    def around(self, mesh: DeviceMesh, placements: tuple[Placement, ...], name: str) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """The mesh and the placements of what the user sees, where the data-parallel mesh alone would say ``placements``."""
        if mesh.device_type != self.mesh.device_type:
            raise ValueError(
                f"Requires DTensor to have mesh of the same type as the FSDP mesh but got {self.mesh.device_type} for DTensor and"
                f" {mesh.device_type} for FSDP: parameter '{name}'"
            )
        try:
            both = DeviceMesh._concatenate([mesh, self.mesh])
        except Exception as error:
            raise Error(
                f"parameter '{name}' is a DTensor over {self.mesh}, which has no mesh in common with {mesh}, that of fully_shard; slice both"
                f" from one mesh: init_device_mesh(…, mesh_dim_names=('dp', 'tp')), mesh['dp'] and mesh['tp'] ({error})"
            ) from error
        *replicated, cut = placements
        assert isinstance(cut, Shard)
        parts = 1
        for size, placement in zip(self.mesh.shape, self.placements, strict=True):
            if isinstance(placement, (Shard, _StridedShard)) and placement.dim == cut.dim:
                parts *= size
        mine = _StridedShard(cut.dim, split_factor=parts) if parts > 1 else cut
        return both, (*replicated, mine, *self.placements)

    def show(self, sharded: Any) -> Any:
        """What a forward finds in its module: the leaf, gathered, as a part of the whole. Gradients of it are the leaf's."""
        leaf: torch.Tensor = sharded.leaf
        with torch.enable_grad():
            shown: Any = DTensor.from_local(
                leaf, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
            )
        shown.__class__ = WholePart
        shown._sharded = sharded
        return shown


def part_of(value: torch.Tensor) -> torch.Tensor:
    """What this rank has of it."""
    return value._local_tensor if isinstance(value, DTensor) else value
