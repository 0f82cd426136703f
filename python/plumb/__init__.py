"""Data-parallel and sharded training whose steps are those of one process.

    engine = plumb.Engine(model, torch.optim.AdamW(model.parameters(), lr=3e-4), strategy="zero3", units=[Block])
    for batch in loader:
        model(batch).loss.backward()  # any pattern of forwards and backwards
        engine.step()
        engine.zero_grad()

After every ``step()`` the parameters are what one process would hold that had run every rank's forwards and backwards
itself (each rank's loss weighted 1/N). Otherwise ``plumb.Error``, on every rank.
"""

import importlib as _importlib
import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING, Any as _Any

import torch as _torch  # first: its libraries are in the process then

try:
    from . import _C
except ImportError as _error:
    raise ImportError(
        f"plumb was built with another torch than the one installed, {_torch.__version__}; install plumb again with it"
        f" (pip install --force-reinstall plumb) [{_error}]"
    ) from None


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


if _minor(_torch.__version__) != _minor(_C.torch_version):
    raise ImportError(
        f"plumb was built with torch {_C.torch_version}, and this is torch {_torch.__version__}; install plumb again with it"
    )

if not getattr(_sys, "_is_gil_enabled", lambda: True)():
    raise ImportError("plumb needs Python's global lock, and this interpreter runs without it; start it with PYTHON_GIL=1")

from . import described as _described
from ._C import AdamW, Error, LoadInfo, LossScale, Mesh, ParameterGroup, SaveError, Schedule, SGD, StepInfo, World, strategies
from .ddp import DistributedDataParallel
from .deferred import deferred
from .engine import Engine
from .launch import spawn
from .optim import elementwise
from . import nn
from .units import unit
from .world import world

if _TYPE_CHECKING:
    from .fsdp import fully_shard
    from .fsdp.module import FSDPModule, register_fsdp_forward_method, share_comm_ctx

_LATER = {  # what torch takes long to import for
    "FSDPModule": "fsdp.module",
    "fully_shard": "fsdp",
    "register_fsdp_forward_method": "fsdp.module",
    "share_comm_ctx": "fsdp.module",
}


def __getattr__(name: str) -> _Any:
    if name not in _LATER:
        raise AttributeError(f"module 'plumb' has no attribute '{name}'")
    value = getattr(_importlib.import_module(f".{_LATER[name]}", __name__), name)
    globals()[name] = value
    return value


__version__: str = _C.version
__all__ = [
    "AdamW",
    "DistributedDataParallel",
    "Engine",
    "Error",
    "FSDPModule",
    "LoadInfo",
    "LossScale",
    "Mesh",
    "ParameterGroup",
    "SGD",
    "SaveError",
    "Schedule",
    "StepInfo",
    "World",
    "deferred",
    "elementwise",
    "fully_shard",
    "nn",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "spawn",
    "strategies",
    "unit",
    "world",
]
