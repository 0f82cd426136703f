"""The engine: carries every gradient of a model from the backward that made it to the optimizer that uses it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, ContextManager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from . import _C, compiled, given as _given, optim, pieces as _pieces, units as _units
from ._C import Error, LossScale, Mesh, Schedule, StepInfo, World
from .deferred import fill
from .save.engine import AnyOptimizer, Saving
from .given import Group
from .replaced import Buffers, Newcomers, Replaced
from .world import of_mesh, remember

Named = Iterable[tuple[str, torch.Tensor]]
_NONFINITE = {"continue": _C.NonFinite.proceed, "skip": _C.NonFinite.skip, "error": _C.NonFinite.error}


class Engine(Saving):
    """Trains ``model`` on all ranks as one process would.

    Args:
        model: a module, or its named parameters. Every rank builds the same one; rank 0's values are everybody's.
        optimizer: ``plumb.AdamW`` or ``plumb.SGD`` (fused, over flat memory); any ``torch.optim`` object, which stays yours
            and may be stepped by itself or by ``engine.step()``; or None: ``step()`` only settles the gradients.
        strategy: a row of the placement table: ``ddp``, ``zero1``, ``zero2``, ``zero3``, ``hsdp``.
        units: where parameters are sharded, the modules that are gathered before use and released after: a list of classes,
            modules or names, a predicate over (name, module), or the number of parameters that makes a module a unit.
            Modules marked by ``plumb.unit`` are units in any case. Parameters of no unit stay whole.
        mesh: the axes that replication and sharding run over; by default the strategy's own. A ``DeviceMesh`` says both the
            ranks and the axes: one dimension is sharded over, of two the first is replicated over.
        world: the ranks taking part; by default ``plumb.world()``. A ``torch.distributed`` process group is taken, too.
        buffers: named tensors that follow rank 0's after each step; by default the module's.
        clip_norm: gradients are scaled so that their global norm is at most this.
        accumulate_dtype: the dtype gradients are summed in, over micro-batches and ranks.
        master_weights: f32 copies of bf16 and f16 parameters, which the optimizer updates. By default with Plumb's
            optimizers, as with a ``torch.optim`` object one process would have none.
        elementwise: whether a ``torch.optim`` object updates each element by its own gradient and state alone. By default
            torch's own that do are known; any other steps whole parameters, each on the rank that owns it.
        loss_scale: dynamic loss scaling, for f16: ``engine.backward`` and ``engine.scale`` multiply the loss.
        nonfinite: what ``step()`` does when a gradient of any rank is not finite: ``"continue"``, ``"skip"`` the update, or
            an ``"error"`` on every rank that names the parameters.
        groups: parameters with their own ``lr`` or ``weight_decay`` (Plumb's optimizers): ``{"match": …, "lr": …}``.
        schedule: of the learning rate (Plumb's optimizers).
        gather_ahead_bytes: where sharded parameters travel, units that are used next are gathered before their use, and kept
            after it, as many bytes of whole parameters as this.
        ask_before_gathers: where sharded parameters travel, ranks may use different units, for a message before each window of gathers.
        deterministic: the same bits on every number of ranks and in every strategy, of ``virtual_ranks / ranks`` backwards a
            step, each of a share's mean loss times ``engine.share_weight()``.

    >>> import plumb, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> engine = plumb.Engine(model, plumb.SGD(lr=0.1))
    >>> model(torch.ones(4, 2)).sum().backward()
    >>> engine.step().step
    0
    """

    def __init__(
        self,
        model: nn.Module | Named,
        optimizer: AnyOptimizer = None,
        *,
        strategy: str = "ddp",
        units: _units.UnitsArgument = None,
        mesh: Mesh | DeviceMesh | tuple[int, int] | None = None,
        world: World | dist.ProcessGroup | None = None,
        buffers: Named | None = None,
        bucket_bytes: int | None = None,
        first_bucket_bytes: int | None = None,
        accumulate_dtype: torch.dtype | None = None,
        master_weights: bool | None = None,
        elementwise: bool | None = None,
        clip_norm: float | None = None,
        loss_scale: LossScale | float | bool | None = None,
        nonfinite: str = "continue",
        schedule: Schedule | None = None,
        groups: Sequence[Group] = (),
        hold_unsharded: bool = False,
        gather_ahead_bytes: int | None = None,
        ask_before_gathers: bool = False,
        deterministic: bool = False,
        virtual_ranks: int | None = None,
        ledger: bool = True,
    ) -> None:
        self._native: _C.Engine | None = None
        self._inside = ""  # the call that is under way and needs the engine to its end
        self._steps: optim.Whole | optim.Pieces | None = None
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        module = model if isinstance(model, nn.Module) else None
        follows = module is not None and buffers is None
        axes: Mesh | tuple[int, int] | None
        try:
            units = _units.kept(units)
            if module is not None and any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()]):
                world = self._fill(module, strategy, units, mesh, world)
            named = _given.named(model.named_parameters() if isinstance(model, nn.Module) else model, "parameters")
            if isinstance(mesh, DeviceMesh):
                if world is not None:
                    raise Error("a DeviceMesh says which ranks take part; leave world= out")
                self.world, axes = of_mesh(mesh)
            else:
                self.world, axes = _given.world_of(world, named), mesh
        except Exception as error:
            _given.refuse_in(mesh, world, model, error)
            raise
        if buffers is None:
            buffers = module.named_buffers() if module is not None else ()
        self._parameters = named
        self._passing = {
            _given.uncompiled(f"{prefix}.{name}" if prefix else name)
            for prefix, part in (module.named_modules() if module is not None else ())
            for name in part._non_persistent_buffers_set
        }
        self.optimizer = optimizer

        try:
            if not isinstance(nonfinite, str) or nonfinite not in _NONFINITE:
                raise Error(f"nonfinite is {nonfinite!r}; it is one of {', '.join(_NONFINITE)}")
            if not (elementwise is None or isinstance(elementwise, bool)):
                raise Error(f"elementwise is {elementwise!r}; expected True or False")
            options = _given.options(
                strategy=_given.strategy(strategy),
                mesh=_given.mesh(axes),
                bucket_bytes=bucket_bytes,
                first_bucket_bytes=first_bucket_bytes,
                accumulate_dtype=accumulate_dtype,
                master_weights=not isinstance(optimizer, torch.optim.Optimizer) if master_weights is None else master_weights,
                clip_norm=clip_norm,
                loss_scale=_given.loss_scale(loss_scale),
                nonfinite=_NONFINITE[nonfinite],
                schedule=schedule,
                groups=_given.groups(groups, named),
                hold_unsharded=hold_unsharded,
                gather_ahead_bytes=gather_ahead_bytes,
                ask_before_gathers=ask_before_gathers,
                deterministic=deterministic,
                virtual_ranks=virtual_ranks,
                ledger=ledger,
            )

            cuts_parameters, cuts_gradients, cuts_state = _C.sharded(strategy, options.mesh, self.world.size)
            if cuts_gradients:
                _pieces.close_ways_out()
            own: list[tuple[nn.Module, list[torch.Tensor]]] = []
            if module is not None and cuts_parameters:
                own = _units.own_parameters(module, _units.choose(module, units))
            elif module is None and units is not None:
                raise Error("units are modules; give the engine the module, not its parameters")
            elif module is not None and units is not None:
                _units.choose(module, units)  # what cannot be found is said in every strategy
            doors = [_C.Door() for _ in own]
            native_optimizer: _C.AdamW | _C.SGD | _C.NoOptimizer | _C.UserOptimizer
            owns = False  # a torch.optim object steps what this rank owns, or masters, and not the parameters themselves
            whole = False
            if isinstance(optimizer, torch.optim.Optimizer):
                if groups or schedule is not None:
                    raise Error("groups and schedule are of Plumb's optimizers; a torch.optim object has its own")
                owns = cuts_state or (options.master_weights and any(_given.is_half(p) for _, p in named))
                optim.check(optimizer, named, cuts_state, strategy, one_by_one=elementwise is True, masters=owns and not cuts_state)
                whole = not (optim.is_elementwise(optimizer) if elementwise is None else elementwise)
                if deterministic and cuts_state and not options.master_weights and any(_given.is_half(p) for _, p in named):
                    whole = True  # torch rounds elements of half precision otherwise where a tensor ends elsewhere
                if cuts_state and whole:
                    options.cut = _C.Cut.at_parameters
                native_optimizer = _C.UserOptimizer() if owns else _C.NoOptimizer()
            elif optimizer is None:
                native_optimizer = _C.NoOptimizer()
            elif isinstance(optimizer, (_C.AdamW, _C.SGD)):
                native_optimizer = optimizer
            else:
                raise Error(
                    f"the optimizer is a {type(optimizer).__name__}; expected plumb.AdamW, plumb.SGD, a torch.optim object or None"
                )
            named_buffers = _given.named(buffers, "buffers")
        except Exception as error:
            _given.refuse(self.world, error)
            raise
        compiled.watch()
        pairs = [(door, parameters) for door, (_, parameters) in zip(doors, own, strict=True)]
        self._native = _C.Engine(self.world, named, named_buffers, pairs, native_optimizer, options)
        remember(self)
        # Buffers that were put in the places of others since are the ones from now on. (Whoever holds it does not hold the engine.)
        self._follow = Buffers(module if follows else None, named_buffers, self._native, self.world.rank).follow
        replaced = self._replaced = Replaced(named, self.world.rank)
        newcomers = None if module is None else Newcomers(module, replaced.knows, self.world.rank)

        def check_model() -> None:
            replaced.check()
            if newcomers is not None:
                newcomers.check()

        self._check_model = check_model
        for door, (unit, parameters) in zip(doors, own, strict=True):
            self._handles += _units.hook(unit, door, parameters)
        if own:
            compiled.forget_graphs()
            _units.let_transforms_in()
        if isinstance(optimizer, torch.optim.Optimizer):
            self._handles.append(optimizer.register_step_pre_hook(lambda *_: check_model()))
            follow, rank, known = self._follow, self.world.rank, frozenset(id(parameter) for _, parameter in named)

            def before_gradients() -> None:
                optim.refuse_newcomers(optimizer, known, rank)
                follow()

            if owns:
                self._steps = optim.Pieces(self._native, optimizer, rank, self.world.size, whole, cuts_state, follow=before_gradients)
            else:
                self._steps = optim.Whole(self._native, optimizer, flat=optim.is_torchs(optimizer), follow=before_gradients)

    @staticmethod
    def _fill(
        module: nn.Module,
        strategy: str,
        units: _units.UnitsArgument,
        mesh: Mesh | DeviceMesh | tuple[int, int] | None,
        world: World | dist.ProcessGroup | None,
    ) -> World | dist.ProcessGroup | None:
        """Gives a model of the meta device its values, on torch's default device; the world to go on with."""
        device = torch.get_default_device()
        place, axes = of_mesh(mesh) if isinstance(mesh, DeviceMesh) else (_given.world_of(world, []), _given.mesh(mesh))
        sharded = _C.sharded(strategy, axes, place.size)[0]
        fill(module, _units.choose(module, units) if sharded else [], place, device)
        return world if isinstance(mesh, DeviceMesh) else place

    # ---- gradients

    def backward(self, loss: torch.Tensor | None, retain_graph: bool = False, weight: float | None = None) -> None:
        """``loss.backward()``, which also counts where ``loss`` reaches no parameter or is None.

        ``weight``: ``loss`` is a sum over that many things (tokens). Then ``step()`` takes the mean over all of them, of all
        micro-batches and ranks, as one process would; every backward of the step has a weight, on every rank. Until then
        gradients are of the sums: clip with ``clip_norm``.
        """
        if loss is not None:
            _given.tensor(loss, "the loss")
        self._engine.backward(loss, retain_graph, None if weight is None else _given.number(weight, "weight"))

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, to call ``backward()`` on; the loss itself without ``loss_scale``."""
        return self._engine.scale(_given.tensor(loss, "the loss"))

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by; 1 without ``loss_scale``."""
        return self._engine.loss_scale

    def one_pass(self) -> ContextManager[None]:
        """All that comes inside is one backward: backwards, ``deliver``, and what ``backward_dw()`` of fused modules brings."""
        return _C.one_pass(self._engine)

    def no_sync(self) -> ContextManager[None]:
        """Backwards inside keep their gradients on this rank; a later one, or ``step()``, reduces the sum."""
        return _C.no_sync(self._engine)

    def deliver(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Hands over a gradient that does not come from autograd, in any dtype; ``end_pass()`` says where a pass ends."""
        self._engine.deliver(_given.tensor(parameter, "the parameter"), _given.tensor(gradient, "the gradient"))

    def end_pass(self) -> None:
        """The gradients that were delivered since the last one are one backward."""
        self._engine.end_pass()

    def zero_grad(self) -> None:
        """Forgets all gradients, and the memory they took."""
        self._engine.zero_grad()

    def full_gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """A copy of the whole reduced gradient; None where there is none. Every rank calls it."""
        return self._engine.full_gradient(_given.tensor(parameter, "the parameter"))

    def grad_norm(self) -> torch.Tensor:
        """The 2-norm over all reduced gradients, without the loss scale, as ``step()`` would find it before clipping."""
        return self._engine.grad_norm()

    # ---- steps

    def step(self, closure: Callable[[], Any] | None = None) -> StepInfo:
        """Settles every gradient of this step over the ranks, clips, and updates the parameters. Every rank calls it."""
        if not (closure is None or callable(closure)):
            raise Error(f"step() was given a {type(closure).__name__}; expected a closure, or nothing")
        if self._steps is None:
            if closure is not None:
                with torch.enable_grad():
                    closure()
            self._check_model()
            self._follow()
            return self._engine.step()
        assert isinstance(self.optimizer, torch.optim.Optimizer)
        self._engine  # noqa: B018  (an Error if it was closed)
        try:
            self.optimizer.step(*(() if closure is None else (closure,)))
        except BaseException:
            self._steps.abandon()
            raise
        assert self._steps.info is not None
        return self._steps.info

    @property
    def steps(self) -> int:
        """Steps taken so far, by the runs before this one too."""
        return self._engine.steps

    @property
    def last_step(self) -> StepInfo | None:
        """What the last step of a ``torch.optim`` object did, whoever called it."""
        return self._steps.info if self._steps is not None else None

    def lr(self, group: int | None = None) -> float:
        """The learning rate of everything without its own, or of one of the groups; before the schedule's factor."""
        if isinstance(self.optimizer, torch.optim.Optimizer):
            return float(_given.group_of(self.optimizer, 0 if group is None else group)["lr"])
        return self._engine.lr(group)

    def set_lr(self, lr: float, group: int | None = None) -> None:
        """The learning rate from now on, of everything without its own, or of one of the groups, which has its own then.

        A ``torch.optim`` object's groups all have their own: without ``group``, it is set in each. Alike on every rank.
        """
        _given.rate(lr)
        if isinstance(self.optimizer, torch.optim.Optimizer):
            groups = self.optimizer.param_groups if group is None else [_given.group_of(self.optimizer, group)]
            for one in groups:
                one["lr"] = lr
        else:
            self._engine.set_lr(lr, group)

    def share_weight(self) -> float:
        """What a share's mean loss counts in a deterministic run: ranks / virtual_ranks. Otherwise 1."""
        return self._engine.share_weight()

    # ---- parameters

    def gathered(self, parameters: Iterable[torch.Tensor] | torch.Tensor | nn.Module, write: bool = False) -> ContextManager[None]:
        """Inside, these parameters are whole, whatever the strategy.

        With ``write``, what rank 0 wrote into them is everybody's at the end; every rank takes part then.
        """
        return _C.gathered(self._engine, _given.parameters(parameters), write)

    def full_parameter(self, parameter: torch.Tensor) -> torch.Tensor:
        """A whole copy of a parameter."""
        return self._engine.full_parameter(_given.tensor(parameter, "the parameter"))

    @property
    def gathered_bytes(self) -> int:
        """Of sharded parameters that are whole right now."""
        return self._engine.gathered_bytes

    # ---- where time goes

    def trace(self, path: str | os.PathLike[str]) -> _C.Trace:
        """From now on, what every rank does when: for Perfetto and chrome://tracing, in a file that rank 0 writes at the end.

        As a context, or until ``stop()``, which returns where the time of each rank's steps went (``TimeSpent``, seconds per
        step). Every rank calls both. A context that an exception leaves writes nothing.

            with engine.trace("steps.json") as trace:
                for batch in batches:
                    ...
            print(trace.stop()[engine.world.rank])
        """
        return _C.Trace(self._engine, _given.path(path, "the path"))

    # ---- its end

    def close(self) -> None:
        """Lets go of the model: later backwards are nobody's business here. Happens by itself at the latest at exit."""
        if self._inside:
            raise Error(f"close() inside of {self._inside} of the same engine; call it afterwards")
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        if self._native is not None:
            self._native.close()

    @property
    def closed(self) -> bool:
        """Whether it has let go of the model."""
        return self._native is None or self._native.closed

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
