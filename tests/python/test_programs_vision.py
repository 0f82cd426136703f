"""A GAN with its two optimizers, and transformers' ResNet with BatchNorm: wrapped, and under engines."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import plumb
from together import Parameters, agrees, by_ranks, parameters_of

NOISE, WIDTH, BATCH = 4, 6, 8


def generator() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(NOISE, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, WIDTH)).double()


def discriminator() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)).double()


def draws(what: int, step: int, rank: int, width: int) -> torch.Tensor:
    return torch.randn(BATCH, width, generator=torch.Generator().manual_seed(100 * what + 10 * step + rank)).double()


def gan(g: Any, d: Any, g_step: Any, d_step: Any, ranks: list[int], share: float) -> None:
    """The usual loop: the discriminator on real and made-up pictures, then the generator through the discriminator."""
    judge = functools.partial(nn.functional.binary_cross_entropy_with_logits)
    ones, zeros = torch.ones(BATCH, 1).double(), torch.zeros(BATCH, 1).double()
    for step in range(3):
        d.zero_grad()
        made = {}
        for rank in ranks:
            made[rank] = g(draws(0, step, rank, NOISE))
            real = judge(d(draws(1, step, rank, WIDTH)), ones)
            ((real + judge(d(made[rank].detach()), zeros)) * share).backward()
        d_step()
        g.zero_grad()
        for rank in ranks:
            (judge(d(made[rank]), ones) * share).backward()  # gradients of the discriminator's, too, which nobody wants
        g_step()


@functools.cache
def gan_of_one() -> Parameters:
    g, d = generator(), discriminator()
    gan(g, d, torch.optim.Adam(g.parameters(), 1e-2).step, torch.optim.Adam(d.parameters(), 1e-2).step, [0, 1], 0.5)
    return both(g, d)


def both(g: nn.Module, d: nn.Module) -> Parameters:
    return {**{f"g.{n}": p for n, p in parameters_of(g).items()}, **{f"d.{n}": p for n, p in parameters_of(d).items()}}


def gan_of_rank(strategy: str) -> Parameters:
    dist.init_process_group("gloo")
    g, d, rank = generator(), discriminator(), dist.get_rank()
    optimizers = [torch.optim.Adam(g.parameters(), 1e-2), torch.optim.Adam(d.parameters(), 1e-2)]
    if strategy == "wrapped":
        kind = torch.nn.parallel.DistributedDataParallel
        assert kind is plumb.DistributedDataParallel
        gan(kind(g), kind(d), optimizers[0].step, optimizers[1].step, [rank], 1.0)
        return both(g, d)
    with (
        plumb.Engine(g, optimizers[0], strategy=strategy, units=[nn.Linear]) as of_g,
        plumb.Engine(d, optimizers[1], strategy=strategy, units=[nn.Linear]) as of_d,
    ):
        gan(g, d, of_g.step, of_d.step, [rank], 1.0)
        with of_g.gathered(g), of_d.gathered(d):
            return both(g, d)


@pytest.mark.parametrize("strategy", ["wrapped", "ddp", "zero2", "zero3"])
def test_a_gan(strategy: str) -> None:
    agrees(by_ranks(gan_of_rank, strategy), gan_of_one(), both(generator(), discriminator()), 1e-9)


# ---- BatchNorm


def resnet() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(4)
    config = transformers.ResNetConfig(
        num_channels=3, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
    )
    return transformers.ResNetForImageClassification(config).double()


def pictures(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 3, 16, 16, generator=source).double(), torch.randint(0, 3, (4,), generator=source)


def resnet_of_rank(strategy: str) -> tuple[Parameters, torch.Tensor]:
    dist.init_process_group("gloo")
    model = resnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    wrapped = torch.nn.parallel.DistributedDataParallel(model) if strategy == "wrapped" else model
    engine = None if strategy == "wrapped" else plumb.Engine(model, optimizer, strategy=strategy, units=[nn.Conv2d])
    for step in range(3):
        x, y = pictures(step, dist.get_rank())
        wrapped(pixel_values=x, labels=y).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model.eval()
        wrapped(pixel_values=pictures(0, 0)[0])
    mean = next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d)).running_mean.clone()
    if engine is None:
        return parameters_of(model), mean
    with engine.gathered(model):
        return parameters_of(model), mean


@functools.cache
def resnet_of_one() -> tuple[Parameters, torch.Tensor]:
    model = resnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    first = next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    buffers = None
    for step in range(3):
        for rank in range(2):
            if rank == 1:  # rank 0's statistics are everybody's
                buffers = first.running_mean.clone()
            x, y = pictures(step, rank)
            (model(pixel_values=x, labels=y).loss / 2).backward()
        first.running_mean.copy_(buffers)
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(model), first.running_mean.clone()


@pytest.mark.parametrize("strategy", ["wrapped", "ddp", "zero2", "zero3"])
def test_a_resnet_with_batch_norm(strategy: str) -> None:
    one, mean = resnet_of_one()
    results = by_ranks(resnet_of_rank, strategy)
    agrees([parameters for parameters, _ in results], one, parameters_of(resnet()), 1e-9)
    for _, theirs in results:
        assert float((theirs - mean).abs().max()) < 1e-12


def sync_batch_norm() -> str:
    dist.init_process_group("gloo")
    said = []
    for kind in (DistributedDataParallel, plumb.DistributedDataParallel):
        try:
            kind(nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))
        except ValueError as error:
            said.append(str(error))
    assert len(said) == 2 and said[0] == said[1], said
    return said[0]


def test_sync_batch_norm_on_the_cpu_is_refused_as_by_torch() -> None:
    for said in plumb.spawn(sync_batch_norm, 2):
        assert "SyncBatchNorm layers only work with GPU modules" in said
