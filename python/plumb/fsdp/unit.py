"""The units behind ``plumb.fully_shard``: one for each call, over the parameters that its modules hold."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map

from .. import _C, compiled
from .engine import Engine
from .sharded import Sharded, ShardedParameter


_outside = compiled.outside(
    "plumb.fully_shard puts whole parameters into a unit's modules before its forward, outside of compiled graphs: compile without"
    " fullgraph=True, or each unit by itself (unit.compile(fullgraph=True)); plumb.Engine(model, strategy='zero3', units=...) has"
    " a whole model in one graph"
)


class Unit:
    """What one call of fully_shard gathers and releases together. Also what torch asks an FSDPModule's state for."""

    _comm_ctx: Any = None  # torch.distributed.fsdp.share_comm_ctx: there is nothing to share

    def __init__(self, modules: list[nn.Module], mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
        self.modules = [weakref.ref(module) for module in modules]
        self.mesh, self.policy = mesh, policy
        self.parameters: list[Sharded] = []
        self.ignored: set[nn.Parameter] = set()
        self.parent: Unit | None = None
        self.children: list[Unit] = []
        self.reshard_after_forward: bool | None = None  # None: unless it is the root
        self.reduces = True  # its gradients, at the end of a backward
        self.door = _C.Door()
        self.held = False  # by unshard(), or from a forward to its backward
        self._versions: list[int] = []  # of whole parameters, when this unit got them
        self.entered = 0
        self.engine: Engine | None = None  # of an outermost unit
        self._fsdp_param_groups: list[Any] = []
        self._fsdp_param_group = None  # its name before torch 2.12

    @property
    def root(self) -> "Unit":
        unit = self
        while unit.parent is not None:
            unit = unit.parent
        return unit

    def all(self) -> list["Unit"]:
        """This unit and those inside, the outer before the inner."""
        return [self, *(one for child in self.children for one in child.all())]

    def ready(self) -> Engine | None:
        """The engine, which is built at the first use; None where no unit has a parameter."""
        root = self.root
        if root.engine is None and any(unit.parameters for unit in root.all()):
            with untransformed():
                root.engine = Engine(root)
        return root.engine

    @property
    def reshards(self) -> bool:
        """After a forward."""
        return self.parent is not None if self.reshard_after_forward is None else self.reshard_after_forward

    def _lazy_init(self) -> None:
        """torch's name, which programs call before a first forward."""
        self.ready()

    # ---- around a forward (the names are those that torch's register_fsdp_forward_method calls)

    @_outside
    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        engine = self.ready()
        if engine is not None:
            if not engine.stack:
                evaluates = not torch.is_grad_enabled()  # inside of untransformed() it is enabled
                with untransformed():
                    engine.begin_forward(evaluates)
            for parameter in self.parameters:
                parameter.check_places()
            self.door.enter()
            if not self.reshards and not self.held and self.entered == 0:
                self._versions = [one.version_in_use() for one in self.parameters]
            self.entered += 1
            engine.stack.append(self)
            for parameter in self.parameters:
                parameter.enter()
        dtype = self.policy.param_dtype
        if dtype is None or not self.policy.cast_forward_inputs:
            return args, kwargs
        cast = _Cast(dtype)
        return tree_map(cast, args), tree_map(cast, kwargs)

    @_outside
    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        engine = self.root.engine
        if engine is not None:
            if not engine.stack or engine.stack[-1] is not self:
                return output  # its entering failed
            engine.stack.pop()
            if not self.reshards and not self.held and torch.is_grad_enabled():
                self.keep(engine)
            self.leave()
            if self.reshards and self.entered == 0:
                self.reshard()
        if self.policy.output_dtype is not None:
            output = tree_map(_Cast(self.policy.output_dtype), output)
        return output

    def leave(self) -> None:
        self.entered -= 1
        for parameter in self.parameters:
            parameter.leave()
        self.door.leave()

    # ---- around what changes parameters from outside

    def before_load(self, *_: object) -> None:
        """Ranks of one machine read each other's rows in place: they are written when nobody reads them any more."""
        self.reshard()
        if self.root.engine is not None and self.parent is None:
            self.root.engine.settle_readers()

    def after_load(self, *_: object) -> None:
        self.follow_places()

    def before_save(self, *_: object) -> None:
        """A state dict has rows, also between a forward and its backward."""
        self.reshard()

    def follow_places(self) -> None:
        """A parameter that was exchanged in its module (to_empty, load_state_dict(assign=True)) is the one that counts."""
        for parameter in self.parameters:
            if parameter.uses > 0:
                continue
            for place in parameter.places:
                now = place.get()
                if now is not None and (now is not parameter.sharded or not isinstance(now, ShardedParameter)):
                    if not isinstance(now, nn.Parameter):
                        raise place.taken()
                    parameter.adopt(now)
                    break

    # ---- by hand

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [one.leaf for one in self.parameters if one.leaf is not None]

    def unshard(self) -> None:
        engine = self.ready()
        if self.held or engine is None:
            return
        if not engine.stack:
            evaluates = not torch.is_grad_enabled()
            with untransformed():
                engine.begin_forward(evaluates)
        self.keep(engine)

    def keep(self, engine: Engine) -> None:
        engine.native.keep(self.leaves)
        if self.entered == 0:
            self._versions = [one.version_in_use() for one in self.parameters]
        self.held = True
        for parameter in self.parameters:
            parameter.enter()

    def reshard(self) -> None:
        engine = self.root.engine
        if not self.held or engine is None:
            return
        self.held = False
        if not engine.whole:
            self._note_changes(engine)
        for parameter in self.parameters:
            parameter.follow_freezing()
            parameter.leave()
        engine.native.drop(self.leaves)

    def _note_changes(self, engine: Engine) -> None:
        """What was written into whole parameters is in a copy that nobody else sees. (Units that reshard are looked at where they end.)"""
        for one, before in zip(self.parameters, self._versions, strict=True):
            if one.version_in_use() != before:
                engine.lost = f"'{one.places[0].name}' of a {type(one.places[0].module).__name__}"


class _Cast:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != self.dtype:
            return value.to(self.dtype)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):  # pytrees know some of them alone
            return self._fields(value)
        return value

    def _fields(self, value: Any) -> Any:
        cast = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(cast, field.name, tree_map(self, getattr(value, field.name)))
        return cast


@contextlib.contextmanager
def untransformed() -> Iterator[None]:
    """What the engine keeps is none of what a transform of torch.func runs over, and no tensor of an inference mode."""
    transforms = torch._C._functorch.peek_interpreter_stack() is not None
    with torch.inference_mode(False), temporarily_clear_interpreter_stack() if transforms else contextlib.nullcontext():
        yield
