"""Programs of other people, run by ranks and by one process: what is compared is the model they end with."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

import plumb
from plumb.rebind import rebind

Parameters = dict[str, torch.Tensor]


def parameters_of(model: torch.nn.Module) -> Parameters:
    return {name.removeprefix("module."): value.detach().clone() for name, value in model.named_parameters()}


def distance(ones: Parameters, others: Parameters) -> float:
    assert ones.keys() == others.keys() and ones
    return max(float((ones[n].double() - others[n].double()).abs().max()) for n in ones)


def _alone(run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    return run(*args)


def alone(run: Callable[..., Any], *args: Any) -> Any:
    """What a process of its own returns that is no rank of anything."""
    return plumb.spawn(_alone, 1, (run, args))[0]


def _rebound(run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    rebind()
    return run(*args)


def by_ranks(run: Callable[..., Any], *args: Any, ranks: int = 2) -> list[Any]:
    """What each rank returns, with torch's names rebound as ``python -m plumb`` does."""
    return plumb.spawn(_rebound, ranks, (run, args), timeout=300)


def agrees(of_ranks: list[Parameters], of_one: Parameters, start: Parameters, limit: float) -> None:
    """Every rank ended where one process did, and not where it started."""
    for rank, parameters in enumerate(of_ranks):
        far = distance(parameters, of_one)
        assert far <= limit, f"rank {rank} is {far:.1e} away"
    assert distance(of_one, start) > 100 * limit, "the program trained nothing"
