"""DeepSpeed's own names rebound to these, from the moment that a program imports ``deepspeed``, and not before."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: A name of DeepSpeed's, where it is found, and ours in its place.
REBOUND: dict[str, tuple[str, ...]] = {
    "engine.DeepSpeedEngine": ("DeepSpeedEngine", "runtime.engine.DeepSpeedEngine"),
    "config.ConfigError": ("DeepSpeedConfigError", "runtime.config.DeepSpeedConfigError"),
    "zero.GatheredParameters": ("zero.GatheredParameters", "runtime.zero.partition_parameters.GatheredParameters"),
    "zero.register_external_parameter": (
        "zero.register_external_parameter", "runtime.zero.partition_parameters.register_external_parameter",
    ),
    "zero.unregister_external_parameter": (
        "zero.unregister_external_parameter", "runtime.zero.partition_parameters.unregister_external_parameter",
    ),
    "zero.unwrap_model_for_generation": ("zero.unwrap_model_for_generation",),
    "schedules.LRRangeTest": ("runtime.lr_schedules.LRRangeTest",),
    "schedules.OneCycle": ("runtime.lr_schedules.OneCycle",),
    "schedules.WarmupCosineLR": ("runtime.lr_schedules.WarmupCosineLR",),
    "schedules.WarmupDecayLR": ("runtime.lr_schedules.WarmupDecayLR",),
    "schedules.WarmupLR": ("runtime.lr_schedules.WarmupLR",),
    "ops.adagrad.DeepSpeedCPUAdagrad": ("ops.adagrad.DeepSpeedCPUAdagrad",),
    "ops.adam.DeepSpeedCPUAdam": ("ops.adam.DeepSpeedCPUAdam",),
    "ops.adam.FusedAdam": ("ops.adam.FusedAdam",),
    "ops.lamb.FusedLamb": ("ops.lamb.FusedLamb",),
    "ops.lion.DeepSpeedCPULion": ("ops.lion.DeepSpeedCPULion",),
    "ops.lion.FusedLion": ("ops.lion.FusedLion",),
}

#: The one that is spoken of.
SPOKEN = ("deepspeed.initialize", "plumb.deepspeed.initialize")


def rebind() -> bool:
    """Whether there is a DeepSpeed to be rebound."""
    if "deepspeed" in sys.modules:
        _bind(sys.modules["deepspeed"])
        return True
    if importlib.util.find_spec("deepspeed") is None:
        return False
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    return True


def _bind(module: ModuleType) -> None:
    if not hasattr(module, "initialize"):
        return  # some folder of that name
    from . import utils, zero
    from .utils import zero_to_fp32

    places: list[tuple[Any, tuple[str, ...]]] = [(_found(f"plumb.deepspeed.{ours}"), theirs) for ours, theirs in REBOUND.items()]
    places.append((_initialize(module), ("initialize",)))
    places.append((_init(module, zero.Init), ("zero.Init", "runtime.zero.partition_parameters.Init")))
    places.append((_init(module, zero.MiCS_Init), ("zero.MiCS_Init", "runtime.zero.mics.MiCS_Init")))
    for name in utils.__all__:
        inner = "z3_leaf_module" if "z3_leaf" in name else "tensor_fragment"
        places.append((getattr(utils, name), (f"utils.{name}", f"utils.{inner}.{name}")))
    places += [(getattr(zero_to_fp32, name), (f"utils.zero_to_fp32.{name}",)) for name in zero_to_fp32.__all__]
    for value, theirs in places:
        for place in theirs:
            owner, _, attribute = f"deepspeed.{place}".rpartition(".")
            with contextlib.suppress(ImportError, AttributeError):  # an older or a newer one has others
                setattr(_found(owner), attribute, value)


def _found(path: str) -> Any:
    """A module, or something in one."""
    with contextlib.suppress(ImportError):
        return importlib.import_module(path)
    owner, _, name = path.rpartition(".")
    return getattr(_found(owner), name)


def _initialize(module: Any) -> Any:
    from .config import ConfigError
    from .start import initialize

    @functools.wraps(initialize)
    def rebound(*args: Any, **kwargs: Any) -> Any:
        model = kwargs.get("model", args[1] if len(args) > 1 else None)
        if isinstance(model, getattr(module, "PipelineModule", ())):
            raise ConfigError("a PipelineModule is not supported here; run the program without 'python -m plumb'")
        if kwargs.get("dist_init_required") is not False:
            module.init_distributed(distributed_port=kwargs.get("distributed_port", 29500))  # deepspeed.comm is theirs
        return initialize(*args, **kwargs)

    return rebound


def _init(module: Any, ours: Any) -> type:
    class Rebound(ours):  # type: ignore[misc]
        __doc__ = ours.__doc__

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            module.init_distributed()  # as theirs does: programs ask deepspeed.comm who they are
            super().__init__(*args, **kwargs)

    Rebound.__name__ = Rebound.__qualname__ = ours.__name__
    return Rebound


class _Finder(importlib.abc.MetaPathFinder):
    """Stays, since programs look for a module before they import it, or instead."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != "deepspeed":
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self.inner.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.inner
        if module.__spec__ is not None:
            module.__spec__.loader = self.inner
        self.inner.exec_module(module)
        _bind(module)
