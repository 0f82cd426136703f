"""An optimizer's state of whole parameters, as one process would have it, out of the parts that the ranks hold."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .._C import Error
from ..engine import Engine
from . import MARK, Pieces, is_number

#: Of one parameter on one rank: what is kept of its elements from the first number on, and what is kept of it as a whole.
_Part = tuple[int, dict[str, torch.Tensor], dict[str, Any]]


def whole_state(engine: Engine) -> dict[str, Any]:
    """What ``optimizer.state_dict()`` of one process is, on rank 0; empty elsewhere. Every rank calls it, over torch.distributed."""
    optimizer, steps = engine.optimizer, engine._steps
    if not isinstance(optimizer, torch.optim.Optimizer) or steps is None:
        raise Error("whole_state is of a torch.optim object under an engine that is open")
    shown = optimizer.state_dict()
    if not isinstance(steps, Pieces):
        return shown if engine.world.rank == 0 else {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    mine = [_part(engine, parameter) for parameter in parameters]
    of_ranks = [mine]
    if engine.world.size > 1:
        gathered: list[Any] | None = [None] * engine.world.size if engine.world.rank == 0 else None
        dist.gather_object(mine, gathered)
        if gathered is None:
            return {}
        of_ranks = gathered
    state = {i: made for i, parameter in enumerate(parameters) if (made := _joined(parameter, [one[i] for one in of_ranks]))}
    return {**{key: value for key, value in shown.items() if key != MARK}, "state": state}


def _part(engine: Engine, parameter: torch.Tensor) -> _Part:
    assert engine._steps is not None
    state, begin = engine._steps.state_of(parameter)
    if begin is None:
        return 0, {}, state
    first, end = engine._engine.updated_range(parameter)
    pieces: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for key, value in state.items():
        is_piece = torch.is_tensor(value) and value.numel() == end - first and not is_number(key, value, parameter)
        (pieces if is_piece else values)[key] = value.cpu().reshape(-1) if is_piece else value
    return first, pieces, values if end > first or parameter.numel() == 0 else {}


def _joined(parameter: torch.Tensor, parts: list[_Part]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for begin, pieces, values in parts:
        for key, value in values.items():
            made.setdefault(key, value)
        for key, piece in pieces.items():
            if key not in made:
                made[key] = torch.zeros(parameter.numel(), dtype=piece.dtype)
            made[key][begin : begin + piece.numel()] = piece
    elements = {key for _, pieces, _ in parts for key in pieces}
    return {key: value.as_strided(parameter.shape, parameter.stride()).clone() if key in elements else value for key, value in made.items()}
