"""The engine that ``initialize`` returns: DeepSpeed's face of ``plumb.Engine``."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .. import optim
from .._C import World
from ..engine import Engine
from ..given import refuse
from ..world import world as _world
from . import build, share, zero
from .config import Config, ConfigError
from .errors import NotHere
from .methods import NOT_HERE
from .optimizer import DeepSpeedOptimizer
from .outside import Outside
from .settings import Settings

logger = logging.getLogger("plumb.deepspeed")


class DeepSpeedEngine(Settings):
    """A model that trains as its config says. ``engine(batch)``, ``engine.backward(loss)``, ``engine.step()``.

    ``engine.engine`` is the ``plumb.Engine`` behind it.
    """

    def __init__(
        self,
        args: Any,
        model: nn.Module,
        optimizer: Any = None,
        model_parameters: Any = None,
        training_data: Any = None,
        lr_scheduler: Any = None,
        mpu: Any = None,
        dist_init_required: bool | None = None,
        collate_fn: Callable[..., Any] | None = None,
        config: Any = None,
        world: World | None = None,
    ) -> None:
        super().__init__()
        self._destroyed = False
        self._world = _world() if world is None else world
        try:
            if not isinstance(model, nn.Module):
                raise ConfigError(f"the model is a {type(model).__name__}; expected a torch.nn.Module")
            if training_data is not None:
                self._check_dataset(training_data)
            self._config = Config(config, self._world.size)
            self.config: dict[str, Any] = self._config.given
            build.check_mpu(mpu, self._world.size)
            zero.take_over(model)
            self.module = model
            self.mpu, self.collate_fn, self.args = mpu, collate_fn, args
            build.cast(model, self._config)
            self.basic_optimizer = build.optimizer(model, self._config, optimizer, model_parameters)
            self.lr_scheduler = build.scheduler(self._config, lr_scheduler, self.basic_optimizer, optimizer)
            self.client_optimizer, self.client_lr_scheduler = optimizer, lr_scheduler
            options = build.options(model, self._config, self.basic_optimizer is not None)
        except Exception as error:
            refuse(self._world, error)  # the others are waiting to build theirs
            raise
        self.engine = Engine(model, self.basic_optimizer, world=self._world, **options)
        self._outside = Outside(model, options["units"]) if "units" in options else None
        wraps = self.zero_optimization_stage() > 0 or self._config.half is not None
        self.optimizer: Any = self.basic_optimizer
        if self.basic_optimizer is not None and wraps:
            self.optimizer = DeepSpeedOptimizer(self, self.basic_optimizer)
        self.global_steps = self.micro_steps = self.global_samples = self.skipped_steps = 0
        self.inside_no_sync_ctxt = False
        self._boundary: bool | None = None
        self._in_backward = self._in_step = False
        self._number = share.number(self)
        self._backwards = 0  # since the last step
        self._held = False  # the last of our backwards left its gradients to the next one, or to step()
        self._step_applied = False
        self._grad_norm: float | None = None
        self._told: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # see `tell`
        if self.basic_optimizer is not None and self._config.half is not None:
            torch.optim.Optimizer.register_step_pre_hook(self.basic_optimizer, self._pass_on)  # behind the one that makes masters
        zero.claim(self)
        if self._outside is not None:
            zero.describe(model, self._outside.parameters, self._part_of)
        self.training_dataloader = None if training_data is None else self.deepspeed_io(training_data)

    # ---- a forward, a backward, a step

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        half = self._config.half
        if half is not None and (self._config["fp16.auto_cast"] or self._config["bf16.auto_cast"]):
            cast = functools.partial(_map, lambda t: t.to(half) if t.is_floating_point() else t)
            inputs, kwargs = cast(inputs), cast(kwargs)
        with self._autocast():
            output = self.module(*inputs, **kwargs)
        if torch.is_grad_enabled() and (self._share() != 1.0 or share.anybody_sums):
            output = _map(lambda tensor: share.shared(tensor, self) if tensor.requires_grad else tensor, output)
        return output

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if not self._config["torch_autocast.enabled"]:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._config["torch_autocast.dtype"])

    def _share(self) -> float:
        """What a loss counts."""
        return float(self._times() / self.gradient_accumulation_steps())

    def _times(self) -> int:
        """How often the mean over ranks counts: as often as there are ranks where it is their sum."""
        return self.world_size if self._config["gradient_allreduce_op"] == "sum" else 1

    def backward(self, loss: torch.Tensor | None, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor | None:
        """``loss`` over the number of accumulation steps is one contribution; the mean over ranks is taken at the boundary.

        None: this rank ran out of batches, and contributes nothing to this backward of the others.
        """
        self._needs_optimizer("backward")
        if loss is not None and (not torch.is_tensor(loss) or loss.numel() != 1 or not loss.requires_grad):
            raise ConfigError(
                "loss must be a scalar tensor. If you need to pass output gradients, backward() of output tensors; a rank with"
                " nothing to contribute calls backward(None)"
            )
        scaled = loss / self.gradient_accumulation_steps() if loss is not None and scale_wrt_gas else loss
        self._backwards += 1
        self._held = self.inside_no_sync_ctxt or not self.is_gradient_accumulation_boundary()
        self._held = self._held and not self.zero_optimization_partition_gradients()
        self._in_backward = True
        try:
            with self.engine.no_sync() if self._held else contextlib.nullcontext():
                if scaled is None:
                    self.engine.backward(None)
                else:
                    root = (scaled if self._times() == 1 else scaled * self._times()).reshape(())
                    with share.begins(root, self):
                        self.engine.backward(root, retain_graph=retain_graph)
        finally:
            self._in_backward = False
        return scaled

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, to call ``backward()`` on by yourself."""
        self._needs_optimizer("scale")
        if not torch.is_tensor(loss) or loss.numel() != 1 or not loss.requires_grad:
            raise ConfigError("loss must be a scalar tensor with grad_fn. For non-scalar tensors, use tensor.backward(grad)")
        return self.engine.scale(loss)

    def _backward_prologue(self, *_: Any) -> None:
        """Called by programs that give one loss to several engines: nothing to do, a backward begins by itself."""

    def _backward_epilogue(self) -> None:
        """Likewise: when ``loss.backward()`` returns, the gradients of every engine that it reached are reduced."""

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Ends a micro-batch; at the boundary of accumulation it updates the parameters and clears their gradients."""
        if self.inside_no_sync_ctxt:
            raise ConfigError("It is illegal to call Engine.step() inside no_sync context manager")
        self._needs_optimizer("step")
        self._step_applied = False
        self._in_step = True
        try:
            if self.is_gradient_accumulation_boundary():
                self._update(lr_kwargs or {})
        finally:
            self._in_step = False
        self.micro_steps += 1

    def _update(self, lr_kwargs: dict[str, Any]) -> None:
        looks = self._config["zero_optimization.compute_grad_norm"] and not self._config["gradient_clipping"] > 0
        norm = float(self.engine.grad_norm()) if looks and not self._held else None
        self._check_unused()
        info = self.engine.step()
        if info.grad_norm is not None:
            norm = float(info.grad_norm)
        elif looks and norm is None:  # the step has reduced what was held, and it clips nothing
            norm = float(self.engine.grad_norm())
        self._grad_norm = norm if self._config["zero_optimization.compute_grad_norm"] else None
        self.zero_grad()
        self._step_applied = not info.skipped
        self.global_steps += 1
        samples = self.train_batch_size()
        if not self._config["managed_gradient_accumulation"]:
            samples = samples // self.gradient_accumulation_steps() * self._backwards
        self.global_samples += samples
        self._backwards = 0
        if info.skipped:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        every = self._config["steps_per_print"]
        if every and self.global_rank == 0 and self.global_steps % every == 0:
            logger.info(
                "step=%d, skipped=%d, lr=%s, mom=%s", self.global_steps, self.skipped_steps, self.get_lr(), self.get_mom()
            )
        if isinstance(self.optimizer, DeepSpeedOptimizer):
            self.optimizer.overflow = info.skipped
            self.optimizer.loss_scale_config.stepped(info)

    def _check_unused(self) -> None:
        if self._config["zero_optimization.ignore_unused_parameters"] or self.zero_optimization_stage() != 2:
            return
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                raise ConfigError(
                    f"'{name}' has no gradient on any rank, and 'zero_optimization.ignore_unused_parameters' is false: use it, freeze"
                    " it, or leave that key out"
                )

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.engine.zero_grad()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether this micro-batch is the last one of its step."""
        if self._boundary is not None:
            return self._boundary
        if not self._config["managed_gradient_accumulation"]:
            return self._in_step
        return bool((self.micro_steps + 1) % self.gradient_accumulation_steps() == 0)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        if not self._config["managed_gradient_accumulation"]:
            raise ConfigError(
                "set_gradient_accumulation_boundary() is not supported with managed_gradient_accumulation=False; the caller owns"
                " the boundary by calling step()"
            )
        self._boundary = is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        if self.zero_optimization_partition_gradients():
            raise ConfigError(
                "no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage"
                f" {self.zero_optimization_stage()}"
            )
        if self.inside_no_sync_ctxt:
            raise ConfigError("no_sync context manager reentry is unsupported")
        self.inside_no_sync_ctxt = True
        try:
            yield
        finally:
            self.inside_no_sync_ctxt = False

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Backwards inside are reduced together, by ``step()``, where the stage allows it."""
        if self.zero_optimization_stage() == 0:
            raise NotImplementedError("coalesce_grad_reduction requires ZeRO stage 1/2/3, got stage 0")
        before = self.inside_no_sync_ctxt, self._boundary
        if before[0]:
            raise ConfigError("coalesce_grad_reduction cannot be nested inside another no_sync context")
        self.inside_no_sync_ctxt = True
        try:
            yield
        finally:
            self.inside_no_sync_ctxt, self._boundary = before

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Gradients are reduced with the backward at the boundary, or by ``step()``."""

    def was_step_applied(self) -> bool:
        return self._step_applied

    def get_global_grad_norm(self) -> float | None:
        """Of the last step's gradients, before they were clipped."""
        return self._grad_norm

    # ---- the rest of its life

    def compile(self, backend: Any = "inductor", compile_kwargs: dict[str, Any] | None = None, **_: Any) -> None:
        """Compiles the module; under stage 3 each unit, whose parameters are gathered around it."""
        for module in zero.units_of(self.module, self._config) if self.zero_optimization_partition_weights() else [self.module]:
            module.compile(backend=backend, **(compile_kwargs or {}))

    @property
    def is_compiled(self) -> bool:
        return any(module._compiled_call_impl is not None for module in self.module.modules())

    def empty_partition_cache(self) -> None:
        """Units are released after use; there is no cache."""

    def destroy(self) -> None:
        """Lets go of the model."""
        self._destroyed = True
        if self._outside is not None:
            self._outside.close()
            zero.forget(self.module)
        self.engine.close()

    def _part_of(self, parameter: torch.Tensor) -> int:
        """How many elements of it this rank updates."""
        begin, end = self.engine._engine.updated_range(parameter) if parameter.requires_grad else (0, parameter.numel())
        return end - begin

    @property
    def destroyed(self) -> bool:
        return self._destroyed

    def leaf_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """What the optimizer steps for ``parameter`` on this rank; None: the parameter itself, or nothing yet."""
        steps = self.engine._steps
        return steps.leaf_of.get(id(parameter)) if isinstance(steps, optim.Pieces) else None

    def in_pieces(self, parameter: torch.Tensor) -> bool:
        """Whether the optimizer's state of it is that of this rank's part."""
        steps, key = self.engine._steps, id(parameter)
        return isinstance(steps, optim.Pieces) and (key in steps.leaf_of or key in steps.loaded)

    def dtype_of_state(self, parameter: torch.Tensor) -> torch.dtype:
        leaf = self.leaf_of(parameter)
        return leaf.dtype if leaf is not None else torch.float32 if self._config.half is not None else parameter.dtype

    def loaded_master(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """This rank's part of the f32 master that a checkpoint brought, before the optimizer has stepped it."""
        if not isinstance(self.engine._steps, optim.Pieces) or parameter.dtype == torch.float32:
            return None
        for _, _, key, owner, memory, *_ in self.engine._engine.slots():
            if key == "master" and owner is parameter:
                return memory
        return None

    def tell(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """The f32 value of a half-precision parameter that has no master yet: the first step begins with it."""
        self._told[id(parameter)] = parameter, value.detach().float().reshape(parameter.shape).clone()

    def told(self, parameter: torch.Tensor) -> torch.Tensor | None:
        found = self._told.get(id(parameter))
        return None if found is None else found[1]

    @torch.no_grad()
    def _pass_on(self, *_: Any) -> None:
        for parameter, value in list(self._told.values()):
            leaf = self.leaf_of(parameter)
            if leaf is not None:  # otherwise its first gradient is still to come
                del self._told[id(parameter)]
            if leaf is not None and leaf.dtype != parameter.dtype:
                mine = value
                if leaf.shape != parameter.shape:  # a piece, in the order of the parameter's memory
                    begin, end = self.engine._engine.updated_range(parameter)
                    flat = torch.empty(parameter.numel(), dtype=value.dtype, device=value.device)
                    flat.as_strided(parameter.shape, parameter.stride()).copy_(value)
                    mine = flat[begin:end].view(leaf.shape)
                mine = mine.to(leaf.device)
                # Whoever changed the parameter since has the last word.
                leaf.copy_(torch.where(mine.to(parameter.dtype) == leaf.to(parameter.dtype), mine, leaf))

    def steps_taken(self) -> bool:
        return self.global_steps > self.skipped_steps

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
            if name in NOT_HERE:
                raise NotHere(f"'{name}' of DeepSpeed's engine is not supported: {NOT_HERE[name]}") from None
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'") from None


def _map(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with ``fn`` of its tensors, inside of lists, tuples and dictionaries, too."""
    if torch.is_tensor(value):
        return fn(value)
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, one in value.items():
            made[key] = _map(fn, one)
        return made
    if isinstance(value, (list, tuple)):
        parts = [_map(fn, one) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
