"""Every row of the README's table and every pattern of units through plumb.fully_shard, against one process."""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import plumb
from programs import ROWS, UNITS, freeze, nested_checkpoints, plain, unfreeze_after_wrapping
from stage import STEP, ZERO, Play, Program, make, reference

PLACES = [(2, "shm"), (2, "gloo"), (4, "shm"), (4, "gloo")]
PATTERNS: dict[str, Program] = {**ROWS, **UNITS, "nested checkpoints": nested_checkpoints}
NAMES = [*PATTERNS, "tied weights", "unfreeze after wrapping", "replicas"]


class Face:
    """What a program asks of an engine, as FSDP2 has it."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)


def compare(program: Program, tied: bool = False, prepare: Callable[[nn.Module], None] | None = None, **how: Any) -> float:
    model, twin, fresh = make(tied=tied), make(tied=tied), make(tied=tied)
    if prepare is not None:
        prepare(model)
        prepare(twin)
    for module in (*model.blocks, model.first, model.last, model.spare):
        plumb.fully_shard(module, **how)
    plumb.fully_shard(model, **how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = dist.get_world_size()
    for yielded in program(Play(model, dist.get_rank(), size, 1.0, Face(model))):  # type: ignore[arg-type]
        if yielded == STEP:
            optimizer.step()
        elif yielded == ZERO:
            optimizer.zero_grad()
        else:
            yielded(model)
    reference(twin, program, size, torch.optim.SGD(twin.parameters(), lr=0.1))

    def away(other: nn.Module) -> float:
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        return max(float((a.detach().full_tensor() - b.detach()).abs().max() / b.detach().abs().max()) for a, b in pairs)

    assert away(fresh) > 1e-4, "the program trained nothing"
    return away(twin)


def everything(backend: str) -> dict[str, float | str]:
    dist.init_process_group("gloo")
    everybody = dist.distributed_c10d._get_default_group()
    sys.modules["plumb.world"]._worlds[everybody] = plumb.World.join(backend=backend, timeout=30)
    cases: dict[str, Callable[[], float]] = {name: functools.partial(compare, one) for name, one in PATTERNS.items()}
    cases["tied weights"] = lambda: compare(plain, tied=True)
    cases["unfreeze after wrapping"] = lambda: compare(unfreeze_after_wrapping, prepare=freeze)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    cases["replicas"] = lambda: compare(plain, mesh=mesh)
    outcome: dict[str, float | str] = {}
    for name, case in cases.items():
        try:
            outcome[name] = case()
        except Exception:  # the ranks may be out of step from here on
            outcome[name] = traceback.format_exc()
            break
    return outcome


@functools.cache
def outcome(ranks: int, backend: str) -> list[dict[str, float | str]]:
    result: list[dict[str, float | str]] = plumb.spawn(everything, ranks, (backend,), timeout=300)
    return result


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks,backend", PLACES, ids=[f"{ranks}-{backend}" for ranks, backend in PLACES])
def test_is_what_one_process_computes(ranks: int, backend: str, name: str) -> None:
    for rank, by_name in enumerate(outcome(ranks, backend)):
        result = by_name.get(name, "an earlier case failed")
        assert isinstance(result, float), f"rank {rank}: {result}"
        assert result <= 1e-10, f"rank {rank} is {result:.1e} away"
