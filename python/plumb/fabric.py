"""Lightning Fabric's strategy ``plumb``: ``import plumb.fabric``, then ``Fabric(strategy="plumb")``.

``"plumb"`` wraps modules as Fabric's ``ddp`` does; ``"plumb_zero1"``, ``"plumb_zero2"`` and ``"plumb_zero3"`` shard the optimizer's
state, gradients and parameters, as ``PlumbStrategy("zero3", units=[Block])`` does with the modules to gather one by one.

>>> import plumb.fabric, lightning
>>> fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=plumb.fabric.PlumbStrategy("ddp"))
"""

# mypy: disable-error-code="misc,override,unused-ignore"
from __future__ import annotations

import contextlib
import functools
import os
import weakref
from typing import Any, ContextManager

import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.utilities.types import _Stateful

from ._C import Error, SavedCheckpoint
from .ddp import DistributedDataParallel
from .engine import Engine
from .save import unpack
from .units import UnitsArgument, kept


class PlumbStrategy(DDPStrategy):
    """Fabric's ``DDPStrategy`` over Plumb's engine, for every row of the placement table.

    Args:
        strategy: ``ddp``, ``zero1``, ``zero2``, ``zero3`` or ``hsdp``.
        units: where parameters are sharded, the modules that are gathered before use; see ``plumb.Engine``.
        options: of ``plumb.Engine`` (of ``plumb.DistributedDataParallel`` for ``ddp``), and of ``DDPStrategy``: ``accelerator``,
            ``parallel_devices``, ``process_group_backend``, ``timeout``, …
    """

    _OF_DDP = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision", "process_group_backend", "timeout", "start_method")

    def __init__(self, strategy: str = "ddp", units: UnitsArgument = None, **options: Any) -> None:
        super().__init__(**{name: options.pop(name) for name in self._OF_DDP if name in options})
        self.strategy, self.units, self.options = strategy, kept(units), options
        self._backward_sync_control = _NoSync(self)
        self._engines: weakref.WeakKeyDictionary[torch.nn.Module, Engine] = weakref.WeakKeyDictionary()

    def engine_of(self, module: torch.nn.Module) -> Engine | None:
        """The engine that trains this module; None where it is wrapped as by ddp, or not at all."""
        return self._engines.get(getattr(module, "_forward_module", module))

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        if self.strategy == "ddp":
            return DistributedDataParallel(module, device_ids=self._determine_ddp_device_ids(), **self.options)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return module
        raise Error(f"strategy '{self.strategy}' shards the optimizer too: fabric.setup(module, optimizer) takes both")

    def setup_module_and_optimizers(
        self, module: torch.nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any = None
    ) -> tuple[torch.nn.Module, list[torch.optim.Optimizer], Any]:
        if self.strategy == "ddp":
            return super().setup_module_and_optimizers(module, optimizers, scheduler)
        if len(optimizers) != 1:
            raise Error(f"strategy '{self.strategy}' takes one optimizer per module, with groups; {len(optimizers)} were given")
        self._engines[module] = Engine(module, optimizers[0], strategy=self.strategy, units=self.units, **self.options)
        return module, optimizers, scheduler

    # ---- whole parameters, for whoever looks at them

    def get_module_state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        engine = self.engine_of(module)
        if engine is None:
            return super().get_module_state_dict(module)
        with engine.gathered(module):
            return {name: value.clone() if torch.is_tensor(value) else value for name, value in module.state_dict().items()}

    def load_module_state_dict(self, module: torch.nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        engine = self.engine_of(module)
        with contextlib.nullcontext() if engine is None else engine.gathered(module, write=True):
            super().load_module_state_dict(module, state_dict, strict)

    def get_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if any(engine.optimizer is optimizer for engine in self._engines.values()):
            raise Error(
                f"the optimizer's state lies in parts under '{self.strategy}': fabric.save() takes it with its module, into a folder"
            )
        return super().get_optimizer_state(optimizer)

    # ---- checkpoints: with an optimizer whose state lies in parts, a folder that any number of ranks under any strategy loads

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any | None = None, filter: dict[str, Any] | None = None
    ) -> None:
        engine = self._engine_in(state)
        if engine is None or not _steps_it(engine, state):
            return super().save_checkpoint(path, state, storage_options, filter)
        if storage_options is not None or filter:
            raise Error(f"strategy '{self.strategy}' saves a folder of its own: it takes no storage_options and no filter")
        engine.save(path, keep=1, extras={_REST: _Rest(self._rest_of(state))})

    def load_checkpoint(
        self, path: Any, state: Any | None = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if not os.path.isdir(path):
            return super().load_checkpoint(path, state, strict, weights_only)
        if isinstance(state, torch.nn.Module) and (engine := self.engine_of(state)) is not None:
            engine.load_weights(path, strict=strict)
            return {}
        engine = self._engine_in(state) if isinstance(state, dict) else None
        if engine is None or state is None:
            raise Error(
                f"'{path}' is a checkpoint of sharded state: fabric.load(path, state) needs the module that it goes into, set up with its"
                " optimizer by a strategy that shards"
            )
        rest = _Rest(self._rest_of(state), strict)
        if _steps_it(engine, state):
            engine.load(path, strict=strict, extras={_REST: rest})
        else:  # whoever names no optimizer keeps the one that he has
            saved = SavedCheckpoint(os.fspath(path))
            packed = [(one.key, saved.read(one)) for one in saved.tensors if one.kind == "extra" and one.name == _REST]
            values = unpack(packed) if packed else {}
            rest.check(values)
            engine.load_weights(saved.path, strict=strict)
            rest.load_state_dict(values)
        return rest.put_into(state)

    def _engine_in(self, state: dict[str, Any]) -> Engine | None:
        found = [engine for one in state.values() if isinstance(one, torch.nn.Module) and (engine := self.engine_of(one))]
        if len(found) > 1:
            raise Error(f"{len(found)} modules of one checkpoint are sharded; save each with its optimizer into a folder of its own")
        return found[0] if found else None

    def _rest_of(self, state: dict[str, Any]) -> dict[str, Any]:
        sharded = self._engine_in(state)
        return {
            name: one
            for name, one in state.items()
            if sharded is None or not (one is sharded.optimizer or (isinstance(one, torch.nn.Module) and self.engine_of(one) is sharded))
        }

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register("plumb", cls, description="Plumb, as ddp", override=True)
        for row in ("zero1", "zero2", "zero3"):
            strategy_registry.register(f"plumb_{row}", functools.partial(cls, row), description=f"Plumb, {row}", override=True)


_REST = "fabric"


def _steps_it(engine: Engine, state: dict[str, Any]) -> bool:
    """Whether the engine's optimizer is among these things."""
    return any(one is engine.optimizer for one in state.values())


class _Rest:
    """What a checkpoint holds beside a module and its optimizer: schedulers, counters."""

    def __init__(self, things: dict[str, Any], strict: bool = True) -> None:
        self.things, self.strict, self.values = things, strict, dict[str, Any]()

    def state_dict(self) -> dict[str, Any]:
        return {name: one.state_dict() if isinstance(one, _Stateful) else one for name, one in self.things.items()}

    def check(self, state: dict[str, Any]) -> None:
        missing = self.things.keys() - state.keys()
        if missing and self.strict:
            raise Error(f"the checkpoint has no {', '.join(sorted(missing))}; it has {', '.join(sorted(state)) or 'nothing'}")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check(state)
        self.values = dict(state)
        for name, one in self.things.items():
            if isinstance(one, _Stateful) and name in self.values:
                one.load_state_dict(self.values.pop(name))

    def put_into(self, state: dict[str, Any]) -> dict[str, Any]:
        """Plain values go to where they came from; what nobody asked for is returned."""
        for name in self.things:
            if name in self.values:
                state[name] = self.values.pop(name)
        return self.values


class _NoSync(_BackwardSyncControl):
    def __init__(self, strategy: PlumbStrategy) -> None:
        self.strategy = strategy

    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> ContextManager[None]:
        if not enabled:
            return contextlib.nullcontext()
        if isinstance(module, DistributedDataParallel):
            return module.no_sync()
        engine = self.strategy.engine_of(module)
        if engine is None:
            raise Error("no_backward_sync of a module that fabric.setup() has not seen with its optimizer")
        return engine.no_sync()


PlumbStrategy.register_strategies(STRATEGY_REGISTRY)
