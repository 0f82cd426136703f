"""``safe_get_*`` and ``safe_set_*``: whole f32 parameters, gradients and optimizer state, wherever their parts lie.

The functions with "full" in their names are collective where the thing is sharded: every rank calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..config import ConfigError
from ..zero import (
    engine_of,
    get_z3_leaf_modules,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
)

if TYPE_CHECKING:
    from ..engine import DeepSpeedEngine

__all__ = [
    "get_z3_leaf_modules", "safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param", "safe_get_local_grad", "safe_get_local_optimizer_state", "safe_set_full_fp32_param",
    "safe_set_full_grad", "safe_set_full_optimizer_state", "safe_set_local_fp32_param", "safe_set_local_grad",
    "safe_set_local_optimizer_state", "safe_update_full_grad_vectorized", "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name", "set_z3_leaf_modules_by_suffix", "unset_z3_leaf_modules", "z3_leaf_module",
]  # fmt: skip


def _owner(param: torch.Tensor) -> "DeepSpeedEngine":
    engine = engine_of(param)
    if engine is None:
        raise ConfigError("this parameter belongs to no engine that plumb.deepspeed.initialize built, or it was destroyed")
    return engine


def _range(param: torch.Tensor) -> tuple[int, int]:
    return _owner(param).engine._engine.updated_range(param)


def _flat(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A whole value in the order of the parameter's memory."""
    if value.numel() != param.numel():
        raise ConfigError(f"the value has shape {list(value.shape)}; expected {list(param.shape)}, the parameter's")
    flat = torch.empty(param.numel(), dtype=value.dtype, device=value.device)
    flat.as_strided(param.shape, param.stride()).copy_(value.reshape(param.shape))
    return flat


def _part(param: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """This rank's part as the optimizer has it, which is of the parameter's own shape where ranks own whole ones: flat, in that order."""
    return _flat(param, mine) if mine.shape == param.shape else mine.reshape(-1)


def _write(param: torch.Tensor, mine: torch.Tensor, value: torch.Tensor) -> None:
    """Into this rank's part, from a whole value."""
    if mine.shape == param.shape:
        mine.copy_(value.reshape(param.shape))
    else:
        begin, end = _range(param)
        mine.view(-1).copy_(_flat(param, value)[begin:end])


# ---- f32 parameters


def _master(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of the f32 master; None: there is none (yet), and the parameter is the truth."""
    owner = _owner(param)
    leaf = owner.leaf_of(param)
    if leaf is None:
        return owner.loaded_master(param)
    return None if leaf.dtype == param.dtype else leaf.detach()


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """None for a parameter that is not trained, as from all of these."""
    if not param.requires_grad:
        return None
    owner, master = _owner(param), _master(param)
    shown = owner.engine.full_parameter(param)
    told = owner.told(param)
    if master is None and told is None:
        return shown.float()
    whole = owner.engine._engine.assemble(param, _part(param, master)) if master is not None else told
    assert whole is not None
    # The parameter is the truth: a master that does not round to it any more follows it at the next step.
    return torch.where(whole.to(shown.dtype) == shown, whole, shown.float())


@torch.no_grad()
def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    owner, master = _owner(param), _master(param)
    with owner.engine.gathered([param], write=True):
        param.copy_(value.reshape(param.shape))
    if master is not None:  # to the last bit; the parameter is what it rounds to
        _write(param, master, value)
    elif param.dtype != torch.float32:
        owner.tell(param, value)


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's part, flat. Every rank calls it."""
    whole = safe_get_full_fp32_param(param)
    if whole is None:
        return None
    begin, end = _range(param)
    return _flat(param, whole)[begin:end].clone()


def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Every rank calls it, with its own part."""
    owner = _owner(param)
    safe_set_full_fp32_param(param, owner.engine._engine.assemble(param, value.detach().reshape(-1).float()))


# ---- gradients


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """With the loss scale in it, as ``step()`` will find it; reduced, unless the backwards were in ``no_sync``."""
    gradient, owner = param.grad, _owner(param)
    if owner.zero_optimization_partition_gradients():
        gradient = owner.engine.full_gradient(param)
    return None if gradient is None else _shown(owner, gradient.detach())


def _shown(owner: "DeepSpeedEngine", gradient: torch.Tensor) -> torch.Tensor:
    """A copy in the dtype that the config says gradients are summed in, which may be narrower than that of the sums."""
    return gradient.to(owner.get_data_types()[1], copy=True)


@torch.no_grad()
def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    gradient = param.grad
    if gradient is None:
        raise ConfigError("safe_set_full_grad of a parameter without a gradient; run a backward first")
    if gradient.shape == param.shape:
        gradient.copy_(value.reshape(param.shape))
    else:
        begin, end = _range(param)
        gradient.copy_(_flat(param, value)[begin:end].to(gradient.dtype).view(gradient.shape))


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    gradient = param.grad
    if gradient is None:
        return None
    if gradient.shape == param.shape:
        begin, end = _range(param)
        return _shown(_owner(param), _flat(param, gradient.detach())[begin:end])
    mine = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device).copy_(gradient.detach())
    return _shown(_owner(param), mine.reshape(-1))


@torch.no_grad()
def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Every rank calls it, with its own part."""
    gradient = param.grad
    if gradient is None:
        raise ConfigError("safe_set_local_grad of a parameter without a gradient; run a backward first")
    if gradient.shape == param.shape:
        gradient.copy_(_owner(param).engine._engine.assemble(param, value.detach().reshape(-1)))
    else:
        gradient.copy_(value.to(gradient.dtype).view(gradient.shape))


def safe_update_full_grad_vectorized(
    param_list: list[torch.Tensor], update_func: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """``update_func(gradient, parameter)`` gives each whole gradient anew."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


# ---- optimizer state


def _state(param: torch.Tensor, key: str) -> torch.Tensor | None:
    """This rank's part, as the optimizer holds it."""
    owner = _owner(param)
    optimizer: Any = owner.basic_optimizer
    if optimizer is None:
        return None
    leaf, steps = owner.leaf_of(param), owner.engine._steps
    state = steps.state_of(param)[0] if leaf is None and steps is not None else optimizer.state.get(leaf, {})
    found = state.get(key)
    return found if torch.is_tensor(found) else None


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    owner = _owner(param)
    mine = _state(param, optim_state_key) if param.requires_grad else None
    if not owner.in_pieces(param) or not param.requires_grad:
        return None if mine is None else mine.clone()
    begin, end = _range(param)
    fits = mine is not None and mine.numel() == end - begin and (mine.dim() > 0 or param.dim() == 0)
    here = "" if mine is None else "here" if fits else str(list(mine.shape))
    said = owner.engine._engine.exchange(here, "safe_get_full_optimizer_state()")
    if not any(said):
        return None  # nobody's, or nobody's yet
    for rank, one in enumerate(said):
        if one not in ("", "here"):
            raise ConfigError(f"'{optim_state_key}' has another shape than its parameter; it is {one} on rank {rank}")
    if mine is None:  # another rank's alone
        return owner.engine._engine.assemble(param, torch.zeros(0, dtype=owner.dtype_of_state(param), device=param.device))
    return owner.engine._engine.assemble(param, _part(param, mine))


@torch.no_grad()
def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    mine = _state(param, optim_state_key)
    owner = _owner(param)
    if mine is None:
        begin, end = _range(param)
        if begin == end and owner.steps_taken():
            return
        raise ConfigError(f"the optimizer has no '{optim_state_key}' for this parameter; it has state after its first step")
    if not owner.in_pieces(param):
        mine.copy_(value.reshape(mine.shape))
    else:
        _write(param, mine, value)


def safe_get_local_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    mine = _state(param, optim_state_key)
    return None if mine is None else _part(param, mine.detach()).clone()


@torch.no_grad()
def safe_set_local_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    mine = _state(param, optim_state_key)
    if mine is None:
        raise ConfigError(f"the optimizer has no '{optim_state_key}' for this parameter on this rank")
    turned = mine.shape == param.shape
    mine.copy_(value.reshape(-1).as_strided(param.shape, param.stride()) if turned else value.reshape(mine.shape))
