"""Strategies for Lightning's Trainer: ``import plumb.lightning``, then ``Trainer(strategy="plumb_zero3")``.

``"plumb"`` wraps the module as Lightning's ``ddp`` does; ``"plumb_zero1"``, ``"plumb_zero2"`` and ``"plumb_zero3"`` shard the optimizer's
state, gradients and parameters, as ``PlumbStrategy("zero3", units=[Block])`` does with the modules to gather one by one. Checkpoints
are Lightning's own, of whole parameters and whole state: any strategy on any number of ranks goes on from them.

>>> import plumb.lightning, lightning
>>> trainer = lightning.Trainer(accelerator="cpu", devices=1, strategy=plumb.lightning.PlumbStrategy("zero2"), logger=False)
"""

# mypy: disable-error-code="misc,override,unused-ignore"
from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn

from ._C import Error
from .ddp import DistributedDataParallel
from .engine import Engine
from .optim.whole import whole_state
from .units import UnitsArgument, kept


class PlumbStrategy(DDPStrategy):
    """Lightning's ``DDPStrategy`` over Plumb's engine, for every row of the placement table.

    Args:
        strategy: ``ddp``, ``zero1``, ``zero2``, ``zero3`` or ``hsdp``.
        units: where parameters are sharded, the modules that are gathered before use; see ``plumb.Engine``.
        options: of ``DDPStrategy``, and of ``plumb.Engine`` (of ``plumb.DistributedDataParallel`` for ``ddp``).
    """

    def __init__(self, strategy: str = "ddp", units: UnitsArgument = None, **options: Any) -> None:
        theirs = {name: options.pop(name) for name in inspect.signature(DDPStrategy).parameters if name in options}
        super().__init__(**theirs, **(options if strategy == "ddp" else {}))
        self.strategy, self.units, self.options = strategy, kept(units), options
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine | None:
        """The engine that trains the module; None under ``ddp`` (its wrapper has one), and before a fit of it."""
        return self._engine if self._engine is not None and self._engine is _engine_of(self._module) else None

    @property
    def _module(self) -> torch.nn.Module:
        assert self.lightning_module is not None
        return self.lightning_module

    # ---- its beginning and its end

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    def configure_ddp(self) -> None:
        if self.strategy == "ddp":
            super().configure_ddp()

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        if self.strategy == "ddp":
            return
        if len(self.optimizers) != 1:
            raise Error(f"strategy '{self.strategy}' takes one optimizer, with groups; configure_optimizers() returned {len(self.optimizers)}")
        self._engine = Engine(self._module, self.optimizers[0], strategy=self.strategy, units=self.units, **self.options)
        _engines[self._module] = self._engine

    def setup(self, trainer: Any) -> None:
        if self.engine is None or trainer.state.fn == TrainerFn.FITTING:
            _let_go(self._module)
            return super().setup(trainer)
        assert self.accelerator is not None
        self.accelerator.setup(trainer)  # the module is where the fit left it, and the same on every rank
        self.setup_precision_plugin()

    def teardown(self) -> None:
        if self.engine is None:
            return super().teardown()
        # The module stays where the engine has it, which still saves, evaluates and shows it whole (``engine.gathered``).
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # ---- gradients

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with super().block_backward_sync() if self.engine is None else self.engine.no_sync():
            yield

    # ---- checkpoints

    def _whole(self, write: bool = False) -> contextlib.AbstractContextManager[None]:
        engine = _engine_of(self._module)  # of this Trainer, or of one before: weights are loaded before the model is set up
        return contextlib.nullcontext() if engine is None else engine.gathered(self._module, write=write)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        with self._whole():
            state = super().lightning_module_state_dict()
            if _engine_of(self._module) is None:
                return dict(state)
            return {name: value.clone() if torch.is_tensor(value) else value for name, value in state.items()}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        with self._whole(write=True):
            super().load_model_state_dict(checkpoint, strict)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return super().optimizer_state(optimizer) if self.engine is None else whole_state(self.engine)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register("plumb", cls, description="Plumb, as ddp", override=True)
        for row in ("zero1", "zero2", "zero3"):
            strategy_registry.register(f"plumb_{row}", functools.partial(cls, row), description=f"Plumb, {row}", override=True)


#: The engines of fits, for as long as their modules live: their Trainers may be gone before.
_engines: weakref.WeakKeyDictionary[torch.nn.Module, Engine] = weakref.WeakKeyDictionary()


def _engine_of(module: torch.nn.Module) -> Engine | None:
    engine = _engines.get(module)
    return engine if engine is not None and not engine.closed else None


def _let_go(module: torch.nn.Module) -> None:
    """The engine of a fit before, by this Trainer or another one, leaves the module whole. Collective."""
    engine = _engine_of(module)
    if engine is None:
        return
    del _engines[module]
    engine.zero_grad()
    with engine.gathered(module):
        values = [(parameter, parameter.detach().clone()) for parameter in module.parameters()]
    engine.close()
    for parameter, value in values:
        parameter.grad, parameter.data = None, value


PlumbStrategy.register_strategies(StrategyRegistry)
