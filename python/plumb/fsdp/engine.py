"""The engine behind ``plumb.fully_shard``: one for each outermost sharded module, over the units inside it.

It is built at the first forward, when it is known which modules are units. Until then every rank holds its rows of every
parameter, and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from .. import _C, compiled, replaced
from ..optim.compared import settings
from .sharded import Sharded, ShardedParameter, something_to_train
from ..units import let_transforms_in
from ..world import of_mesh, remember

if TYPE_CHECKING:
    from .unit import Unit

_numbers = itertools.count()


class Engine:
    """The engine of an outermost unit, and the steps of whatever optimizers update its parameters."""

    def __init__(self, root: Unit) -> None:
        self.units = root.all()
        self.number = next(_numbers)  # the same on every rank
        self.stack: list[Unit] = []  # of forwards under way
        self.stepping, self.left = False, 0  # and how many steps an exception ended
        self.lost = ""  # a parameter that was changed where nobody else sees it
        self.parameters: list[Sharded] = []
        for unit in self.units:
            self.parameters += [one for one in unit.parameters if one not in self.parameters]
        world, mesh = of_mesh(root.mesh)
        try:
            named = self._prepare([module for module in (reference() for reference in root.modules) if module is not None])
        except Exception as error:
            if world.size > 1:  # the others are waiting to build theirs
                with contextlib.suppress(Exception):
                    world.refuse(str(error))
            raise
        options = _C.Options()
        options.strategy = "zero3"
        options.mesh = mesh
        options.master_weights = False
        options.cut = _C.Cut.at_rows
        options.hold_unsharded = True
        pairs = [(unit.door, unit.leaves) for unit in self.units if unit.parameters]
        with something_to_train([leaf for _, leaf in named]):
            self.native = _C.Engine(world, named, [], pairs, _C.UserOptimizer(), options)
        self._watched: list[torch.Tensor] | None = None  # what the user may write into
        self._version = 0  # of all that, when every rank had it
        for one in self.parameters:
            one.moved = functools.partial(_forget_version, weakref.ref(self))
        self._evaluated = False  # since the last step: what the user sees is a copy of his own
        self._exchanged = False  # a module got something else in a parameter's place
        replaced.watch(self)
        self._newcomers = self._watch_newcomers(root, world.rank)
        compiled.watch()
        let_transforms_in()
        remember(self)
        self.whole = all(one.cut.shards == 1 for one in self.parameters)
        shards = dict(self.native.shards())
        for (name, _), one in zip(named, self.parameters, strict=True):
            if self.whole:
                one.follow()
            else:
                one.settle_in(shards[name])
        self._remember_version()
        self._held: Any = None  # while no unit reduces
        self.follow_units()
        self._touched: list[Sharded] = []
        self._backwards = 0  # under way, of whatever threads
        _engines.add(self)
        _C.around_backwards(_before_backward, _after_backward)

    def _prepare(self, modules: list[nn.Module]) -> list[tuple[str, torch.Tensor]]:
        if len(modules) > 1:
            raise _C.Error(
                f"FSDP requires a single root module but got {len(modules)}: {', '.join(type(one).__name__ for one in modules)};"
                " call fully_shard on the module around them, too"
            )
        for unit in self.units:
            unit.follow_places()  # what the user put there since
        names = {id(parameter): name for module in modules for name, parameter in module.named_parameters()}
        named: list[tuple[str, torch.Tensor]] = []
        for unit in self.units:
            missing = [names.get(id(one.sharded), "?") for one in unit.parameters if one.sharded.is_meta]
            if not missing:
                continue
            raise _C.Error(
                "FSDP parameters should be materialized from meta device before training, but the following were still on meta"
                f" device: {missing}; give the model memory and values first: model.to_empty(device=\"cpu\"), then every module's"
                " reset_parameters(), or load a checkpoint"
            )
        for one in self.parameters:
            name = names.get(id(one.sharded), f"parameter {len(named)}, which the model no longer has")
            if one.dtype != one.compute and one.cut.replicas is not None:
                # Rows in another dtype than the engine's: replicas begin alike there, too.
                dist.broadcast(one.local, group=one.cut.replicas, group_src=0)
            one.prepare()
            assert one.leaf is not None
            policy = next(unit.policy for unit in self.units if one in unit.parameters)
            wide = one.dtype if policy.reduce_dtype is None else torch.promote_types(one.dtype, policy.reduce_dtype)
            if one.leaf.is_floating_point() and wide != one.leaf.dtype:
                one.leaf.grad_dtype = wide
            named.append((name, one.leaf))
        return named

    def _watch_newcomers(self, root: Unit, rank: int) -> replaced.Newcomers | None:
        ignored = set().union(*(unit.ignored for unit in self.units))
        module = root.modules[0]()
        if module is None:
            return None
        return replaced.Newcomers(module, lambda one: isinstance(one, ShardedParameter) or one in ignored, rank)

    def close(self) -> None:
        _engines.discard(self)
        if self._held is not None:
            held, self._held = self._held, None
            held.__exit__(None, None, None)
        self.native.close()

    # ---- forwards and backwards

    def notice(self, module: nn.Module, attribute: str, old: torch.Tensor) -> None:
        one: Sharded | None = getattr(old, "_sharded", None)
        if one is not None and one.uses == 0 and one in self.parameters:
            self._exchanged = True

    def begin_forward(self, evaluates: bool) -> None:
        """Before the outermost module of a forward: what was written into the parameters, or put in their places, is everybody's.

        ``evaluates``: no backward follows, whose end would say that every rank has read what it needs.
        """
        self.abandon()
        if self._exchanged:
            for unit in self.units:
                unit.follow_places()
            self._exchanged = False
        self.publish()
        self._check_nothing_lost()
        for one in self.parameters:
            one.follow_freezing()
            if one.factor != 1.0 or one.sharded._post_accumulate_grad_hooks or one.hooks:
                self.look_at(one)
        if evaluates and not self.whole:
            self._evaluated = True
            for one in self.parameters:
                one.part()
            self._remember_version()

    def publish(self) -> None:
        if self._watched is not None and _C.versions(self._watched) == self._version:
            # Nothing counts what torch._foreach_* writes into DTensors.
            if not self._evaluated or not any(one.differs() for one in self.parameters):
                return
        self.native.shards_written()  # nobody reads what was there before any more
        for one in self.parameters:
            if one.apart:
                one.publish()
        self._remember_version()
        for unit in self.units:
            unit.reshard()  # what it holds is of before
        self.native.shards_written()

    def _check_nothing_lost(self) -> None:
        lost, self.lost = self.lost, ""
        if lost:
            raise _C.Error(
                f"parameter {lost} was changed while its module showed it whole (in a forward, or from there to the backward), and the change is"
                " lost: that is a copy. Write into it before the forward, or after the backward (copy_ under torch.no_grad()); a module that"
                " changes its own weight in its forward (nn.Embedding with max_norm) trains under plumb.DistributedDataParallel"
            )

    def _remember_version(self) -> None:
        if self._watched is None:
            self._watched = [one.sharded for one in self.parameters] + [one.local for one in self.parameters]
        self._version = _C.versions(self._watched)

    def settle_readers(self) -> None:
        """Before parameters are written: no rank reads them any more. Every rank calls it."""
        self.native.shards_written()

    def follow_units(self) -> None:
        """Backwards keep their gradients whole on this rank while no unit is to reduce; otherwise all reduce, which is never wrong."""
        hold = not any(unit.reduces for unit in self.units)
        if hold and self._held is None:
            self._held = _C.no_sync(self.native)
            self._held.__enter__()
        elif not hold and self._held is not None:
            held, self._held = self._held, None
            held.__exit__(None, None, None)

    def begin_backward(self) -> None:
        """What runs a part of a forward again, inside of a unit, finds whole parameters there."""
        self._backwards += 1
        if self._backwards > 1:
            return
        for one in self.parameters:
            one.write_back()
            one.enter()
            one.begin_keeping(self._held is not None)

    def end_backward(self, good: bool) -> None:
        if self._backwards == 0:
            return  # it was built inside of it
        self._backwards -= 1
        if self._backwards > 0:
            return
        for one in self.parameters:
            one.leave()
        for unit in self.units:
            if unit.entered == 0:
                unit.reshard()
        for one in self.parameters:
            one.bring_up_to_date()
        touched, self._touched = self._touched, []
        for one in sorted(touched, key=self.parameters.index):
            if not good or one.sharded.grad is None:
                continue
            for hook in list((one.sharded._post_accumulate_grad_hooks or {}).values()):
                hook(one.sharded)

    def look_at(self, one: Sharded) -> None:
        """Its gradients come by here in a backward, before they are reduced."""
        one.hook(_LeafHook(self, one))

    def got(self, one: Sharded, gradient: torch.Tensor) -> torch.Tensor | None:
        if one.sharded._post_accumulate_grad_hooks and one not in self._touched:
            self._touched.append(one)
        changed = None
        for hook in list(one.hooks.values()):
            answer = hook(gradient if changed is None else changed)
            changed = changed if answer is None else answer
        if one.factor != 1.0:
            changed = (gradient if changed is None else changed) * one.factor
        return changed

    def reset(self) -> None:
        """After a forward that was left by an exception nobody told us of."""
        while self.stack:
            self.stack.pop().leave()
        for unit in self.units:
            unit.reshard()

    # ---- steps

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.finish_step()
        self.reset()
        self._check_nothing_lost()
        if self._newcomers is not None:
            self._newcomers.check()
        self.publish()
        self._evaluated = False
        for one in self.parameters:
            one.join()
            one.write_back()
            one.merge()
            one.assign_again()
            one.begin_keeping(False)
        self.native.compare_settings(settings(optimizer, self.left))
        self.native.begin_step()
        self.stepping = True
        if self.whole:
            for one in self.parameters:
                one.follow()

    def end_step(self) -> None:
        for one in self.parameters:
            if one.apart:
                one.publish()
        self._remember_version()
        self.stepping = False
        self.native.end_step()

    def finish_step(self) -> None:
        if self.stepping:
            self.end_step()

    def abandon(self) -> None:
        """Ends a step that its optimizer left by an exception, with what was updated."""
        self.left += self.stepping
        self.finish_step()


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _forget_version(engine: "weakref.ref[Engine]") -> None:
    known = engine()
    if known is not None:
        known._watched = None


def _before_backward() -> None:
    for engine in list(_engines):
        engine.begin_backward()


def _after_backward(good: bool) -> None:
    failures: list[BaseException] = []
    for engine in sorted(_engines, key=lambda engine: engine.number):
        try:
            engine.end_backward(good and not failures)
        except BaseException as error:  # noqa: BLE001  (a hook of the user's: the backward has ended for the others, too)
            failures.append(error)
    if failures:
        raise failures[0]


class _LeafHook:
    def __init__(self, engine: Engine, one: Sharded) -> None:
        self.engine, self.one = weakref.ref(engine), weakref.ref(one)

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        engine, one = self.engine(), self.one()
        return None if engine is None or one is None else engine.got(one, gradient)
