"""What ``plumb.fully_shard`` makes of a module: torch's FSDPModule, with Plumb's engine behind its methods.

Every public method of torch's is here: it works, says in its docstring why there is nothing to do, or raises and names itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as _Torchs
from torch.distributed.fsdp import UnshardHandle
from torch.distributed.tensor import DTensor

from . import rows
from .._C import Error
from .unit import Unit

_UNIT = "_plumb_fsdp_unit"


class Misuse(Error, AssertionError):
    """An Error of ours where torch's asserts."""


def unit_of(module: nn.Module) -> Unit | None:
    return cast("Unit | None", module.__dict__.get(_UNIT))


class FSDPModule(_Torchs):
    """A module whose parameters are sharded over the ranks and gathered around its forward. Made by ``plumb.fully_shard``.

    >>> import plumb, torch
    >>> model = plumb.fully_shard(torch.nn.Linear(4, 2))
    >>> isinstance(model, plumb.FSDPModule), isinstance(model, torch.nn.Linear)
    (True, True)
    >>> model.set_requires_gradient_sync(False)  # micro-batches but the last
    >>> model(torch.ones(3, 4)).sum().backward()
    >>> model.set_requires_gradient_sync(True)
    >>> model(torch.ones(3, 4)).sum().backward()
    >>> model.weight.grad.full_tensor()[0, 0].item()
    6.0
    >>> model.unshard()
    >>> model.weight.shape, type(model.weight)
    (torch.Size([2, 4]), <class 'torch.nn.parameter.Parameter'>)
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # A container that is sliced makes another of its class: a plain one.
        plain = next(base for base in cls.__mro__ if not issubclass(base, _Torchs))
        made = plain.__new__(plain, *args, **kwargs)
        made.__init__(*args, **kwargs)  # type: ignore[misc]
        return made

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise Misuse(
            "FSDP does not support deepcopy. Please use state dict for serialization: this module holds a part of each parameter"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise Error("a module under fully_shard is not pickled: it holds a part of each parameter; save its state_dict()")

    def _get_fsdp_state(self) -> Any:
        unit = unit_of(cast(nn.Module, self))
        assert unit is not None
        return unit

    def _units(self, recurse: bool) -> Iterator[Unit]:
        modules = cast(nn.Module, self).modules() if recurse else [cast(nn.Module, self)]
        for module in modules:
            unit = unit_of(module)
            if unit is not None:
                yield unit

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        unit = self._get_fsdp_state()
        unit.reshard()
        for parameter in unit.parameters:  # torch makes new ones of the old ones' type
            parameter.sharded.__class__ = DTensor
        try:
            return super()._apply(*args, **kwargs)
        finally:
            unit.follow_places()

    def zero_grad(self, set_to_none: bool = True) -> None:
        rows.clear(cast(nn.Module, self).parameters(), set_to_none)
        cast(nn.Module, super()).zero_grad(set_to_none)

    # ---- parameters

    def reshard(self) -> None:
        """Lets go of whole parameters that ``unshard`` gathered; the module shows its rows again. Not recursive."""
        self._get_fsdp_state().reshard()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this module's parameters until ``reshard``, the end of its next forward, or a step. Not recursive.

        They have arrived when this returns, also with ``async_op``: the handle's ``wait`` has nothing left to do.
        """
        self._get_fsdp_state().unshard()
        return UnshardHandle() if async_op else None

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether this module's parameters are released after a forward, or stay whole until the end of the backward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        for unit in self._units(recurse):
            unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Nothing to do: a unit is released when its last gradient has come."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Nothing to do: a backward gathers only what one of its nodes saved."""

    def set_modules_to_forward_prefetch(self, modules: list[_Torchs]) -> None:
        """Nothing to do: what all ranks used next the last time is gathered ahead."""
        _check_sharded(modules)

    def set_modules_to_backward_prefetch(self, modules: list[_Torchs]) -> None:
        """Nothing to do: what all ranks used next the last time is gathered ahead."""
        _check_sharded(modules)

    def set_post_optim_event(self, event: Any) -> None:
        """Nothing to do: gathers come after the updates of the step by themselves."""

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Nothing to do."""

    # ---- gradients

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: backwards keep whole gradients on this rank, and nothing travels; the next one with True, or a step, reduces their sum.

        ``p.grad`` shows nothing of what is kept. Gradients are kept while all modules under one root are set to False; while some
        are not, every backward reduces all, which costs more and is as right.
        """
        for unit in self._units(recurse):
            unit.reduces = bool(requires_gradient_sync)
        root = self._get_fsdp_state().root
        if root.engine is not None:
            root.engine.follow_units()

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Nothing to do: replicas are reduced with every backward that reduces."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Nothing to do: every backward that reduces ends with all reductions waited for."""

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides the sum of this module's gradients over the ranks by ``factor`` instead of their number. Not recursive.

        From the next reduction on, which may be of gradients that are kept already; an Error where those were added to reduced ones.
        """
        if not factor > 0:
            raise Error(f"set_gradient_divide_factor({factor}); expected a positive number")
        unit = self._get_fsdp_state()
        engine = unit.root.engine
        for parameter in unit.parameters:
            parameter.divide_by(factor, unit.mesh.size())
            if engine is not None:  # also between a forward and its backward
                engine.look_at(parameter)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """torch's older name of ``set_gradient_divide_factor``."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Nothing to do: ranks divide before they sum, with sums alone on the wire."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Nothing to do: a parameter that some ranks do not use is always reduced rightly, and hangs nobody."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Nothing to do: two buckets are under way at a time."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Nothing to do: gathers and reductions have connections of their own."""

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> NoReturn:
        raise Error(
            "set_all_reduce_hook: plumb.fully_shard has no hook between the reductions; change p.grad after backward(), or use"
            " a 2-D mesh for replicas"
        )

    def set_custom_all_gather(self, comm: Any) -> NoReturn:
        raise Error("set_custom_all_gather: plumb.fully_shard gathers over its own connections; leave the call out")

    def set_custom_reduce_scatter(self, comm: Any) -> NoReturn:
        raise Error("set_custom_reduce_scatter: plumb.fully_shard reduces over its own connections; leave the call out")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Nothing to do: where the backend has memory of its own, buckets lie in it."""

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Nothing to do: see ``set_allocate_memory_from_process_group_for_comm``."""

    def reset_iter_state(self) -> None:
        """After an exception: every unit is released. A failed backward has let go of its gradients by itself already."""
        unit = self._get_fsdp_state()
        if unit.parent is not None:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module, the outermost")
        if unit.engine is not None:
            unit.engine.reset()


def _check_sharded(modules: list[_Torchs]) -> None:
    for module in modules:
        if not isinstance(module, _Torchs):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Gathers ``module``'s parameters around the method of that name, too. Nothing happens to a module that is not sharded.

    >>> import plumb, torch
    >>> class Tower(torch.nn.Linear):
    ...     def encode(self, x):
    ...         return torch.tanh(self(x))
    >>> tower = plumb.fully_shard(Tower(4, 2), reshard_after_forward=True)
    >>> plumb.register_fsdp_forward_method(tower, "encode")
    >>> tower.encode(torch.ones(3, 4)).shape
    torch.Size([3, 2])
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    inner = getattr(module, method_name)
    unit = cast(Unit, module._get_fsdp_state())

    @functools.wraps(inner)
    def around(*args: Any, **kwargs: Any) -> Any:
        output = None
        args, kwargs = unit._pre_forward(module, args, kwargs)
        try:
            output = inner(*args, **kwargs)
        finally:
            output = unit._post_forward(module, args, output)
        return output

    setattr(module, method_name, around)


def share_comm_ctx(modules: list[_Torchs]) -> None:
    """Nothing to do: engines share what they can by themselves.

    >>> import plumb, torch
    >>> stages = [plumb.fully_shard(torch.nn.Linear(4, 4)) for _ in range(2)]
    >>> plumb.share_comm_ctx(stages)
    """
    for module in modules:
        if not isinstance(module, _Torchs):
            raise ValueError(f"Expects list of FSDPModules but got {module}")
