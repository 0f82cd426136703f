"""``plumb.DistributedDataParallel``: torch's, with Plumb's engine where torch's reducer would be."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import contextlib
import inspect
import itertools
import weakref
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch._C._distributed_c10d import BuiltinCommHookType, GradBucket
from torch.nn.parallel import DistributedDataParallel as _Torchs
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import compiled
from .._C import Error
from .reducer import JoinHook, Logger, Reducer
from .steps import Steps
from ..engine import Engine
from ..given import refuse_in
from ..optim.compared import refuse_sparse
from ..world import check_processes, world

_TORCHS = frozenset(inspect.signature(_Torchs).parameters)  # the arguments that this torch knows
_wrappers: weakref.WeakSet["DistributedDataParallel"] = weakref.WeakSet()
_numbers = itertools.count()


def _inside_functional_call() -> bool:
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is torch.nn.utils.stateless._functional_call.__code__:
            return True
        frame = frame.f_back
    return False


def _check_arguments(module: Any, mixed_precision: Any, delayed: Any, by: Any) -> None:
    """Those that torch would not, or too late for the other ranks to hear of it."""
    if not isinstance(module, torch.nn.Module):
        raise Error(f"DistributedDataParallel wraps a module; this is a {type(module).__name__}")
    if (delayed is None) != (by is None):
        raise ValueError("delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time.")
    if not (mixed_precision is None or all(hasattr(mixed_precision, name) for name in ("param_dtype", "buffer_dtype"))):
        raise Error(f"mixed_precision is {mixed_precision!r}; expected torch.nn.parallel.distributed._MixedPrecision")


class DistributedDataParallel(_Torchs):
    """A drop-in for ``torch.nn.parallel.DistributedDataParallel``: the same arguments and methods, and every pattern right.

    Unused parameters need no ``find_unused_parameters``, retained graphs and several forwards before a backward no
    ``static_graph``. ``backward()`` returns with the mean over the ranks in every ``.grad``; step with any optimizer. Where
    backwards inside ``no_sync()`` are followed by a step and not by a backward outside, the step reduces them first.
    docs/compatibility.md has every argument and method.

    >>> import plumb, torch
    >>> def train():
    ...     torch.distributed.init_process_group("gloo")
    ...     model = plumb.DistributedDataParallel(torch.nn.Linear(2, 1))
    ...     model(torch.ones(1, 2) * torch.distributed.get_rank()).sum().backward()
    ...     return model.module.weight.grad.tolist()
    >>> plumb.spawn(train, ranks=2)
    [[[0.5, 0.5]], [[0.5, 0.5]]]
    """

    _engine: Engine | None
    _steps: Steps
    _number: int  # of its engine, on every rank the same

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: list[tuple[str, torch.nn.Parameter]] | None = None,
        param_to_hook_all_reduce: torch.nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        # Which rank's values: everybody's own, if the user says that they agree.
        self.__dict__["_takes_first_ranks_values"] = init_sync
        self.__dict__["_takes_first_ranks_buffers"] = init_sync and (forward_sync_buffers is not None or broadcast_buffers is not False)
        if "forward_sync_buffers" not in _TORCHS:
            broadcast_buffers = forward_sync_buffers if forward_sync_buffers is not None else broadcast_buffers is not False
        arguments = dict(
            device_ids=device_ids,
            output_device=output_device,
            dim=dim,
            broadcast_buffers=broadcast_buffers,
            init_sync=False,  # the engine compares the models first: where they differ, every rank hears of it
            process_group=process_group,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            check_reduction=check_reduction,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            device_mesh=device_mesh,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            bucket_cap_mb_list=bucket_cap_mb_list,
            batched_grad_copy=batched_grad_copy,
            forward_sync_buffers=forward_sync_buffers,
        )
        check_processes()
        self.__dict__["_unheard"] = True  # what is refused here; the engine tells the other ranks what it refuses
        try:
            _check_arguments(module, mixed_precision, delay_all_reduce_named_params, param_to_hook_all_reduce)
            # An older torch has fewer; what the others say is the engine's business, or nobody's.
            super().__init__(module, **{name: value for name, value in arguments.items() if name in _TORCHS})
        except Exception as error:
            if self.__dict__.pop("_unheard", False) and dist.is_initialized():
                mesh_group = device_mesh.get_group(0) if getattr(device_mesh, "ndim", 0) == 1 else None
                refuse_in(None, mesh_group if process_group is None else process_group, module, error)
            raise
        # torch's reducers in Python, and delayed reductions: here gradients are where they belong when backward() returns.
        self._use_python_reducer = False
        if mixed_precision is not None:
            self.mixed_precision = mixed_precision
            torch.nn.parallel.distributed._cast_buffers(mixed_precision, self.module)

    def _register_accum_grad_hook(self) -> None:
        pass

    # ---- the engine

    def _ddp_init_helper(self, parameters: Any, expect_sparse: Any, names: Any, static_graph: bool) -> None:
        self._passing_sync_batchnorm_handle(self.module)
        self.__dict__["_engine"] = None
        self.reducer: Any = Reducer(self)
        self.logger: Any = Logger(self, static_graph)
        if "_comm_hooks" not in self.__dict__:  # not for a copy, which need not be made on every rank
            self._build_engine()
            if self._takes_first_ranks_buffers and self.modules_buffers:
                self._default_broadcast_coalesced()
        self._forwards = self._looks = 0

    @property
    def engine(self) -> Engine:
        """The engine that reduces this model's gradients. A copied or unpickled wrapper builds its own when first used."""
        if self._engine is None:
            self._build_engine()
        assert isinstance(self._engine, Engine)
        return self._engine

    def _build_engine(self) -> None:
        named = [(n, p) for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore]
        theirs = {id(parameter) for _, parameter in named}
        before = [
            other for other in _wrappers if other._engine is not None and theirs & {id(p) for p in other._module_parameters}
        ]
        wider = [other for other in before if {id(p) for p in other._module_parameters} - theirs]
        if not all(other.engine.closed for other in wider):  # closed, one has let go of all its parameters
            raise Error(
                "a parameter of this module belongs to another DistributedDataParallel, which has more parameters;"
                " wrap what they share once"
            )
        before = [other for other in before if other not in wider]
        for other in before:  # of the same module: their backwards are seen by this engine from now on
            other.engine.close()
        kept = None if self._takes_first_ranks_values else [parameter.detach().clone() for _, parameter in named]
        first = dist._DEFAULT_FIRST_BUCKET_BYTES if self.bucket_bytes_cap_default else self.bucket_bytes_cap  # type: ignore[attr-defined]
        options: dict[str, Any] = {
            "world": world(self.process_group, device=self.device_type),
            "bucket_bytes": max(1, int(self.bucket_bytes_cap)),
            "first_bucket_bytes": max(1, int((*self.bucket_bytes_cap_list, first)[0])),
        }
        self.__dict__.pop("_unheard", None)
        engine = Engine(named, **options)
        if kept is not None:
            with torch.no_grad():
                for (_, parameter), value in zip(named, kept, strict=True):
                    parameter.copy_(value)
        steps, number = Steps(engine, [parameter for _, parameter in named]), next(_numbers)
        for wrapper in (self, *before):
            wrapper.__dict__.update(_engine=engine, _steps=steps, _number=number)
            wrapper._follow_sync()
        for hook, state in self.__dict__.get("_comm_hooks", []):
            engine._engine.use_hook(state, _checked(hook))
        _wrappers.add(self)

    # ---- forwards

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            engine = self.engine
            if not self._join_config.enable:
                self.reducer.divide_by(engine.world.size)
            if self._forwards < 3 or self._forwards % 64 == 0:
                self._check_parameters()
            self._forwards += 1
        return super()._pre_forward(*inputs, **kwargs)

    def _check_parameters(self, stepped: Container[int] | None = None) -> None:
        """Now and then: a parameter that came after wrapping would be trained by each rank for itself. ``stepped``: by whom it is."""
        known = {id(parameter) for parameter in self._module_parameters}
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and id(parameter) not in known and name not in self.parameters_to_ignore:
                if stepped is not None and id(parameter) not in stepped:
                    continue
                if _inside_functional_call():  # other tensors in the parameters' places, for this forward only
                    return
                raise Error(f"parameter '{name}' came into the model after it was wrapped, and nobody would reduce its gradient; wrap again")

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.mixed_precision is None or self.mixed_precision.param_dtype is None:
            return super()._run_ddp_forward(*inputs, **kwargs)
        low = {
            name: parameter.to(self.mixed_precision.param_dtype)
            for name, parameter in self.module.named_parameters()
            if parameter.is_floating_point() and not getattr(parameter, "_ddp_ignored", False)
        }
        with self._inside_ddp_forward():
            return torch.func.functional_call(self.module, low, inputs, kwargs)

    @contextlib.contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        yield  # torch would cut compiled graphs at its reducer's buckets; gradients are delivered inside of whole ones

    def _post_forward(self, output: Any) -> Any:
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep their gradients on this rank; where the forward ran does not matter."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """False: as inside ``no_sync()``. Programs that accumulate set it by hand, too."""
        return bool(self.__dict__.get("_reduces", True))

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.__dict__["_reduces"] = bool(value)
        self._follow_sync()

    def _follow_sync(self) -> None:
        engine: Engine | None = self.__dict__.get("_engine")
        holds = None if self.require_backward_grad_sync or engine is None or engine.closed else engine
        held, scope = self.__dict__.get("_held") or (None, None)
        if held is holds:
            return
        if scope is not None:
            scope.__exit__(None, None, None)
        self.__dict__["_held"] = None
        if holds is not None:
            scope = holds.no_sync()
            scope.__enter__()
            self.__dict__["_held"] = holds, scope

    # ---- communication hooks, and joins

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """``hook(state, bucket)`` makes the mean of each bucket: torch's own hooks, or any that returns a Future."""
        if self._comm_hooks:
            raise Error(
                "register_comm_hook or register_builtin_comm_hook can only be called once. There is one hook per model: wrap the module again"
                " for another"
            )
        self._check_comm_hook(hook)
        self.logger._set_comm_hook_name(hook.__qualname__)
        self._comm_hooks.append((hook, state))
        _keep_groups(self.process_group, dist.group.WORLD, state, getattr(state, "process_group", None))
        self.engine._engine.use_hook(state, _checked(hook))

    def _check_comm_hook(self, hook: Any) -> None:
        """torch's checks, for annotations that are text as well; what the process group carries is its own business."""
        if not callable(hook):
            self._log_and_throw(TypeError, "Communication hook must be callable.")
        signature = inspect.signature(hook)
        empty = inspect.Signature.empty
        asked = {
            "bucket annotation should be dist.GradBucket": (signature.parameters["bucket"].annotation, GradBucket),
            "return annotation should be torch.futures.Future[torch.Tensor]": (
                signature.return_annotation,
                torch.futures.Future[torch.Tensor],
            ),
        }
        for what, (found, expected) in asked.items():
            if found is not empty and not isinstance(found, str) and found != expected:
                self._log_and_throw(ValueError, f"Communication hook: {what}.")

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        hooks = {
            BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
            BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        self.register_comm_hook(self.process_group, hooks[comm_hook_type])
        self.logger._set_comm_hook_name(str(comm_hook_type))

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a rank does that ran out of inputs: takes part in everybody's backwards, with nothing."""
        hook = JoinHook(self, divide_by_initial_world_size=kwargs.get("divide_by_initial_world_size", True))
        if not self.engine.closed:  # a copy builds its own now
            self._steps.suspend()
        return hook

    @compiled.outside(
        "plumb.DistributedDataParallel sends its buffers around a forward, outside of compiled graphs: compile without"
        " fullgraph=True, or wrap with broadcast_buffers=False"
    )
    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        super()._sync_module_buffers(authoritative_rank)
        self.reducer.wait_for_buffers()

    def _setup_in_backward_optimizers(self) -> None:
        for name, parameter in self.module.named_parameters():
            if hasattr(parameter, "_in_backward_optimizers"):
                raise Error(
                    f"parameter '{name}' has an optimizer that steps inside the backward, where its gradient is not yet the"
                    " ranks' mean; step the optimizer after backward()"
                )

    def _register_fused_optim(self, optim: type, *args: Any, **kwargs: Any) -> None:
        raise Error(f"{optim.__name__} would step inside the backward; step it after backward()")

    # ---- its life

    def _remove_autograd_hooks(self) -> None:
        self.engine.close()

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        if dist.distributed_c10d._rank_not_in_group(new_process_group):
            return
        self.engine.close()
        self.process_group = new_process_group
        self._has_rebuilt_buckets = False
        self._takes_first_ranks_values = False
        self._build_engine()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        state["_engine"] = state["_steps"] = state["_held"] = None
        state["_reduces"] = True
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__["_takes_first_ranks_values"] = False


#: What a hook's futures call back is let go of by a thread of its process group, some time after they were waited for. Were it
#: the last to hold the group, the group would end on its own thread, and the process with it: groups of hooks stay until the exit.
_groups_of_hooks: set[dist.ProcessGroup] = set()


def _keep_groups(*candidates: object) -> None:
    _groups_of_hooks.update(one for one in candidates if isinstance(one, dist.ProcessGroup))


def _checked(hook: Callable[..., Any]) -> Callable[..., Any]:
    def run(state: object, bucket: GradBucket) -> Any:
        answer = hook(state, bucket)
        if not isinstance(answer, (torch.futures.Future, torch._C.Future)):
            raise Error(
                f"callback must return a torch.futures.Future object, but got {type(answer).__name__}: the communication hook's answer is a"
                " Future of a tensor (torch.futures.Future().set_result(tensor))"
            )
        return answer

    return run


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """What would leave each rank with parameters of its own: gradients of backwards that were all inside no_sync are reduced
    first; parameters that came after wrapping are an Error, also where a compiled forward did not look at them."""
    stepped: set[int] | None = None
    for wrapper in sorted(_wrappers, key=lambda wrapper: wrapper._number):  # in one order on every rank: what is held is reduced together
        engine = wrapper._engine
        if engine is None or engine.closed:
            continue
        looks = wrapper._looks < 3 or wrapper._looks % 64 == 0
        wrapper._looks += 1
        if not looks and not engine._engine.holds and not engine._replaced:
            continue
        if stepped is None:
            stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if any(id(parameter) in stepped for parameter in wrapper._module_parameters):
            refuse_sparse(optimizer)
        engine._replaced.check(stepped)
        if looks:
            wrapper._check_parameters(stepped)
        if engine._engine.holds and any(id(parameter) in stepped for parameter in wrapper._module_parameters):
            engine.step()


register_optimizer_step_pre_hook(_before_step)
