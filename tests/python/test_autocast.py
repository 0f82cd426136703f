"""Forwards under torch.autocast, through the engine and the faces: the bits of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import plumb
from stage import WIDTH, Block, make

FACES = ["ddp", "zero1", "zero2", "zero3", "hsdp", "DistributedDataParallel", "fully_shard"]


def data(rank: int, i: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * rank + i))


def loss_of(model: nn.Module, rank: int, step: int, autocast: bool = True) -> torch.Tensor:
    """Weights are cast once for both forwards, of which one is recomputed; the loss is f32."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain = model(data(rank, step))
        again = model(data(rank, step + 50), around=lambda block, x: checkpoint(block, x, use_reentrant=False))
        assert plain.dtype == (torch.bfloat16 if autocast else torch.float32)
    return F.mse_loss(plain.float(), data(rank, step + 70)) + again.float().pow(2).mean()


def whole(face: str, model: Any, engine: plumb.Engine | None) -> list[torch.Tensor]:
    if engine is not None:
        return [engine.full_parameter(parameter) for parameter in model.parameters()]
    return [p.detach().full_tensor() if face == "fully_shard" else p.detach() for p in model.parameters()]


def under_autocast(face: str) -> tuple[float, float]:
    """How far it ends from one process under autocast, and how far that is from one without."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model: Any = make(torch.float32)
    forward, engine = model, None
    if face == "DistributedDataParallel":
        forward = plumb.DistributedDataParallel(model)
    elif face == "fully_shard":
        for module in (*model.blocks, model):
            plumb.fully_shard(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if face not in ("DistributedDataParallel", "fully_shard"):
        engine = plumb.Engine(model, optimizer, strategy=face, units=[Block])
    twins = [make(torch.float32), make(torch.float32)]
    for step in range(3):
        loss_of(forward, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        for twin, autocast in zip(twins, (True, False), strict=True):
            for other in range(size):
                (loss_of(twin, other, step, autocast) / size).backward()
            with torch.no_grad():
                for parameter in twin.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
            twin.zero_grad()
    mine = whole(face, model, engine)
    far, apart = (
        max(float((a - b).detach().abs().max()) for a, b in zip(mine, twin.parameters(), strict=True)) for twin in twins
    )
    return far, apart


@pytest.mark.parametrize("face", FACES)
def test_autocast_computes_what_one_process_computes(face: str) -> None:
    for far, apart in plumb.spawn(under_autocast, 4 if face == "hsdp" else 2, (face,)):
        assert apart > 1e-4, "autocast did nothing"
        assert far < 1e-6, f"{far:.1e} away"
