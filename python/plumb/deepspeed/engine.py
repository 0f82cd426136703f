"""``initialize`` and the engine it returns: DeepSpeed's face of ``plumb.Engine``."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import optim
from .._C import Error, World
from ..engine import Engine
from ..world import world as _world
from . import build, zero
from .config import Config, ConfigError
from .methods import ANSWERS, GETTERS, NOT_HERE
from .optimizer import DeepSpeedOptimizer
from .state import State

logger = logging.getLogger("plumb.deepspeed")


class NotHere(Error, AttributeError):
    """A method of DeepSpeed's that this engine does not have."""


class _Share(torch.autograd.Function):
    """An output of the model for the caller, who may call ``backward()`` on what he makes of it: his gradients count as
    those of ``engine.backward()``, once, although one output may be computed from another."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, engine: "DeepSpeedEngine") -> torch.Tensor:
        ctx.engine = engine
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient if ctx.engine._in_backward else gradient * ctx.engine._share(), None


def _share(output: torch.Tensor, engine: "DeepSpeedEngine") -> Any:
    return _Share.apply(output, engine)  # type: ignore[no-untyped-call]


class DeepSpeedEngine(State):
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
        if not isinstance(model, nn.Module):
            raise ConfigError(f"the model is a {type(model).__name__}; expected a torch.nn.Module")
        self._destroyed = False
        self._world = _world() if world is None else world
        try:
            self._config = Config(config, self._world.size)
            self.config: dict[str, Any] = self._config.given
            _check_mpu(mpu, self._world.size)
            self.module = model
            self.mpu, self.collate_fn, self.args = mpu, collate_fn, args
            build.cast(model, self._config)
            self.basic_optimizer = build.optimizer(model, self._config, optimizer, model_parameters)
            self.lr_scheduler = build.scheduler(self._config, lr_scheduler, self.basic_optimizer, optimizer)
            self.client_optimizer, self.client_lr_scheduler = optimizer, lr_scheduler
            options = build.options(model, self._config, self.basic_optimizer is not None)
        except Exception as error:
            if self._world.size > 1:  # the others are waiting to build theirs
                with contextlib.suppress(Exception):
                    self._world.refuse(str(error))
            raise
        self.engine = Engine(model, self.basic_optimizer, world=self._world, **options)
        wraps = self.zero_optimization_stage() > 0 or self._config.half is not None
        self.optimizer: Any = self.basic_optimizer
        if self.basic_optimizer is not None and wraps:
            self.optimizer = DeepSpeedOptimizer(self, self.basic_optimizer)
        self.global_steps = self.micro_steps = self.global_samples = self.skipped_steps = 0
        self.inside_no_sync_ctxt = False
        self._boundary: bool | None = None
        self._in_backward = self._in_step = False
        self._backwards = 0  # since the last step
        self._held = False  # the last backward's gradients wait for their reduction
        self._step_applied = False
        self._grad_norm: float | None = None
        zero.claim(self)
        self.training_dataloader = None if training_data is None else self.deepspeed_io(training_data)

    # ---- a forward, a backward, a step

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        half = self._config.half
        if half is not None and (self._config["fp16.auto_cast"] or self._config["bf16.auto_cast"]):
            cast = functools.partial(_map, lambda t: t.to(half) if t.is_floating_point() else t)
            inputs, kwargs = cast(inputs), cast(kwargs)
        with self._autocast():
            output = self.module(*inputs, **kwargs)
        if torch.is_grad_enabled() and self._share() != 1.0:
            output = _map(lambda tensor: _share(tensor, self) if tensor.requires_grad else tensor, output)
        return output

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if not self._config["torch_autocast.enabled"]:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._config["torch_autocast.dtype"])

    def _share(self) -> float:
        """What a loss counts."""
        ranks = self.world_size if self._config["gradient_allreduce_op"] == "sum" else 1
        return float(ranks / self.gradient_accumulation_steps())

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """``loss`` over the number of accumulation steps is one contribution; the mean over ranks is taken at the boundary."""
        self._needs_optimizer("backward")
        if not torch.is_tensor(loss) or loss.numel() != 1 or not loss.requires_grad:
            raise ConfigError(
                "loss must be a scalar tensor. If you need to pass output gradients, backward() of output tensors; a rank with"
                " nothing to contribute calls engine.engine.backward(None)"
            )
        scaled = loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss
        self._backwards += 1
        self._held = self.inside_no_sync_ctxt or not self.is_gradient_accumulation_boundary()
        self._held = self._held and not self.zero_optimization_partition_gradients()
        self._in_backward = True
        try:
            with self.engine.no_sync() if self._held else contextlib.nullcontext():
                summed = scaled * self.world_size if self._config["gradient_allreduce_op"] == "sum" else scaled
                self.engine.backward(summed.reshape(()), retain_graph=retain_graph)
        finally:
            self._in_backward = False
        return scaled

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, to call ``backward()`` on by yourself."""
        self._needs_optimizer("scale")
        if not torch.is_tensor(loss) or loss.numel() != 1 or not loss.requires_grad:
            raise ConfigError("loss must be a scalar tensor with grad_fn. For non-scalar tensors, use tensor.backward(grad)")
        self._held = False
        return self.engine.scale(loss)

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
        clips = self._config["gradient_clipping"] > 0
        looks = self._config["zero_optimization.compute_grad_norm"] and not self._held and not clips
        norm = float(self.engine.grad_norm()) if looks else None
        self._check_unused()
        info = self.engine.step()
        if info.grad_norm is not None:
            norm = float(info.grad_norm)
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

    def _needs_optimizer(self, what: str) -> None:
        if self._destroyed:
            raise ConfigError(f"{what}() of an engine that was destroyed; initialize a new one")
        if self.basic_optimizer is None:
            raise ConfigError(f"must provide optimizer during init in order to use {what}")

    # ---- rates

    def get_lr(self) -> list[float]:
        return self._of_groups("lr")

    def set_lr(self, lr: float) -> None:
        self._needs_optimizer("set_lr")
        self.engine.set_lr(lr)

    def get_type(self) -> list[Any]:
        return self._of_groups("type")

    def get_mom(self) -> list[Any]:
        return self._of_groups("momentum" if self.optimizer_name() in ("SGD", "RMSprop") else "betas")

    def _of_groups(self, key: str) -> list[Any]:
        groups = self.basic_optimizer.param_groups if self.basic_optimizer is not None else []
        return [group.get(key, 0.0) for group in groups]

    # ---- batches

    def get_batch_info(self) -> tuple[Any, Any, Any]:
        return self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """By another number of micro-batches."""
        part = self.train_micro_batch_size_per_gpu() * self.world_size
        if train_batch_size <= 0 or train_batch_size % part != 0:
            raise ConfigError("Train batch size must be divisible by micro-batch data parallelism")
        self._config.values["train_batch_size"] = train_batch_size
        self._config.values["gradient_accumulation_steps"] = train_batch_size // part

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        self._config.values["train_micro_batch_size_per_gpu"] = micro_batch_size
        self._config.values["train_batch_size"] = micro_batch_size * self.gradient_accumulation_steps() * self.world_size

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> torch.utils.data.DataLoader[Any]:
        """A loader of this rank's part of ``dataset``."""
        if not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")):
            raise ConfigError("Training data must be a torch Dataset")
        if data_sampler is None and hasattr(dataset, "__len__"):
            data_sampler = torch.utils.data.DistributedSampler(
                dataset, num_replicas=self.world_size, rank=self.global_rank, shuffle=route == "train"
            )
        return torch.utils.data.DataLoader(
            dataset,
            batch_size=self.train_micro_batch_size_per_gpu() if batch_size is None else batch_size,
            sampler=data_sampler,
            collate_fn=self.collate_fn if collate_fn is None else collate_fn,
            num_workers=num_local_io_workers or 0,
            pin_memory=pin_memory and self.device.type == "cuda",
            drop_last=self._config["dataloader_drop_last"],
        )

    # ---- the world

    @property
    def world_size(self) -> int:
        return self._world.size

    dp_world_size = world_size

    @property
    def global_rank(self) -> int:
        return self._world.rank

    @property
    def local_rank(self) -> int:
        return self._world.local_rank

    @property
    def mp_world_size(self) -> int:
        return 1

    @property
    def data_parallel_group(self) -> Any:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None

    def get_data_parallel_rank(self) -> int:
        return self.global_rank

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_tensor_parallel_rank(self) -> int:
        return 0

    def get_sequence_parallel_group(self) -> None:
        return None

    # ---- what was configured

    def zero_cpu_offload(self) -> bool:
        return build.offloads(self._config, "optimizer")

    def zero_use_cpu_optimizer(self) -> bool:
        return self.zero_cpu_offload()

    @staticmethod
    def is_map_style_dataset(dataset: Any) -> bool:
        return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")

    @staticmethod
    def is_iterable_style_dataset(dataset: Any) -> bool:
        return isinstance(dataset, torch.utils.data.IterableDataset)

    def optimizer_name(self) -> str | None:
        if self.basic_optimizer is None:
            return None
        given: str | None = self._config["optimizer.type"]
        return type(self.basic_optimizer).__name__ if self.client_optimizer is not None or given is None else given

    def zero_optimization(self) -> bool:
        return bool(self._config["zero_optimization.stage"] > 0)

    def zero_optimization_partition_gradients(self) -> bool:
        return bool(self._config["zero_optimization.stage"] >= 2)

    def dynamic_loss_scale(self) -> bool:
        return bool(self._config["fp16.loss_scale"] == 0)

    def initial_dynamic_scale(self) -> float:
        return float(2 ** self._config["fp16.initial_scale_power"])

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": self._config["fp16.loss_scale_window"],
            "delayed_shift": self._config["fp16.hysteresis"],
            "consecutive_hysteresis": self._config["fp16.consecutive_hysteresis"],
            "min_scale": self._config["fp16.min_loss_scale"],
        }

    def postscale_gradients(self) -> bool:
        return not self._config["prescale_gradients"]

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        model = self._config.half or torch.float32
        return model, self._config["data_types.grad_accum_dtype"] or model

    @property
    def communication_data_type(self) -> torch.dtype:
        return self._config.sums or torch.float32

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
        self.engine.close()

    @property
    def destroyed(self) -> bool:
        return self._destroyed

    def leaf_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """What the optimizer steps for ``parameter`` on this rank; None: the parameter itself, or nothing yet."""
        steps = self.engine._steps
        return steps.leaf_of.get(id(parameter)) if isinstance(steps, optim.Pieces) else None

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


def _getter(name: str, key: str) -> Callable[[DeepSpeedEngine], Any]:
    def get(self: DeepSpeedEngine) -> Any:
        return self._config[key]

    get.__name__, get.__doc__ = name, f"``{key}`` of the config."
    return get


def _answer(name: str, value: Any) -> Callable[[DeepSpeedEngine], Any]:
    def get(self: DeepSpeedEngine) -> Any:
        return value

    get.__name__, get.__doc__ = name, f"{value!r}: what it asks about is not here."
    return get


for _name, _key in GETTERS.items():
    setattr(DeepSpeedEngine, _name, _getter(_name, _key))
for _name, _value in ANSWERS.items():
    setattr(DeepSpeedEngine, _name, _answer(_name, _value))


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """The engine, its optimizer, a loader of ``training_data`` and the learning-rate schedule, as the config says.

    >>> import torch, plumb.deepspeed
    >>> model = torch.nn.Linear(4, 1)
    >>> config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    >>> engine, optimizer, _, _ = plumb.deepspeed.initialize(model=model, config=config)
    >>> engine.backward(engine(torch.ones(2, 4)).mean()).requires_grad
    True
    >>> engine.step()
    >>> engine.global_steps
    1
    """
    if model is None:
        raise ConfigError("deepspeed.initialize requires a model")
    if mesh_param is not None and tuple(mesh_param)[1:] not in ((), (1,)):
        raise ConfigError(f"mesh_param is {mesh_param}; sequence parallelism is not supported, leave it out")
    if config is None:
        config = config_params
    from_args = getattr(args, "deepspeed_config", None)
    if from_args is not None:
        if config is not None:
            raise ConfigError(
                "Not sure how to proceed, we were given deepspeed configs in the deepspeed arguments and deepspeed.initialize()"
                " function call"
            )
        config = from_args
    if config is None:
        raise ConfigError("DeepSpeed requires --deepspeed_config to specify configuration file")
    if dist_init_required is not False:
        init_distributed(distributed_port=distributed_port)
    engine = DeepSpeedEngine(
        args, model, optimizer, model_parameters, training_data, lr_scheduler, mpu, dist_init_required, collate_fn, config
    )
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def init_distributed(
    dist_backend: str | None = None, auto_mpi_discovery: bool = True, distributed_port: int = 29500, **_: Any
) -> None:
    """``torch.distributed`` from the variables of the launcher, if there is one and nobody did so before."""
    if not dist.is_available() or dist.is_initialized() or "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(distributed_port))
    dist.init_process_group(dist_backend or ("nccl" if torch.cuda.is_available() else "gloo"))


def _check_mpu(mpu: Any, size: int) -> None:
    if mpu is None:
        return
    if not hasattr(mpu, "get_data_parallel_world_size"):
        raise Error("mpu has no get_data_parallel_world_size(); expected a unit of model parallelism")
    if mpu.get_data_parallel_world_size() != size:
        raise ConfigError(
            f"mpu says that {mpu.get_data_parallel_world_size()} of {size} ranks are data parallel; model parallelism is not"
            " supported here"
        )


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
