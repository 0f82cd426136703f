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
from typing import Any, ContextManager

import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl

from ._C import Error
from .ddp import DistributedDataParallel
from .engine import Engine
from .units import UnitsArgument


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
        self.strategy, self.units, self.options = strategy, units, options
        self._backward_sync_control = _NoSync(self)
        self._engines: dict[int, Engine] = {}  # by module

    def engine_of(self, module: torch.nn.Module) -> Engine | None:
        """The engine that trains this module; None where it is wrapped as by ddp, or not at all."""
        return self._engines.get(id(getattr(module, "_forward_module", module)))

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
        self._engines[id(module)] = Engine(module, optimizers[0], strategy=self.strategy, units=self.units, **self.options)
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
        if self.strategy != "ddp":
            raise Error(
                f"the optimizer's state lies in parts under '{self.strategy}', and one file would have one rank's: save"
                " optimizer.state_dict() of each rank"
            )
        return super().get_optimizer_state(optimizer)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register("plumb", cls, description="Plumb, as ddp", override=True)
        for row in ("zero1", "zero2", "zero3"):
            strategy_registry.register(f"plumb_{row}", functools.partial(cls, row), description=f"Plumb, {row}", override=True)


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
