"""What the tests of plumb.fully_shard share: models, one process beside the ranks, and cases that ranks run one after another."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import plumb


class Cases:
    """Functions that the same ranks run one after another, in one world; each is a test."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.all: dict[str, Callable[[], None]] = {}
        self._outcomes: list[dict[str, str]] | None = None

    def __call__(self, fn: Callable[[], None]) -> Callable[[], None]:
        self.all[fn.__name__] = fn
        return fn

    def _run(self) -> dict[str, str]:
        dist.init_process_group("gloo")
        outcome = {}
        for name, fn in self.all.items():
            try:
                fn()
                outcome[name] = "good"
            except BaseException:  # the ranks may be out of step from here on
                outcome[name] = traceback.format_exc()
                break
        return outcome

    def check(self, name: str) -> None:
        if self._outcomes is None:
            self._outcomes = plumb.spawn(self._run, self.ranks, timeout=500)
        for rank, by_name in enumerate(self._outcomes):
            said = by_name.get(name, "an earlier case failed")
            assert said == "good", f"rank {rank}: {said}"


# ---- one process


def same(reference: nn.Module, model: nn.Module) -> None:
    """This rank's rows of every parameter and gradient are those of the whole ones."""
    pairs = zip(reference.named_parameters(), model.named_parameters(), strict=True)
    for (name, whole), (other, mine) in pairs:
        assert name == other
        assert isinstance(mine, DTensor) and isinstance(mine, nn.Parameter), name
        rows = functools.partial(_rows, mesh=mine.device_mesh, dim=mine.placements[-1].dim)
        torch.testing.assert_close(mine.to_local(), rows(whole.detach()), atol=1e-9, rtol=1e-7, msg=lambda m: f"{name}: {m}")
        if whole.grad is None:
            assert mine.grad is None, name
            continue
        assert isinstance(mine.grad, DTensor) and mine.grad.placements == mine.placements, name
        torch.testing.assert_close(
            mine.grad.to_local(), rows(whole.grad), atol=1e-9, rtol=1e-7, msg=lambda m: f"gradient of {name}: {m}"
        )


def _rows(whole: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    chunks = whole.chunk(mesh.size(mesh.ndim - 1), dim)
    mine = mesh.get_local_rank(mesh.ndim - 1)
    return chunks[mine] if mine < len(chunks) else whole.narrow(dim, 0, 0)


def reduce_gradients(reference: nn.Module) -> None:
    for parameter in reference.parameters():
        used = torch.tensor(float(parameter.grad is not None))
        dist.all_reduce(used)
        if used == 0:
            continue
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(gradient)
        parameter.grad = gradient / dist.get_world_size()


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = F.relu(self.out_proj(F.relu(self.in_proj(x))))
        return out


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = MLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(x)


class Transformer(nn.Module):
    def __init__(self, tied: bool, recomputes: bool) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(17, 16), nn.Embedding(8, 16)
        self.layers = nn.ModuleList(Attention(16) for _ in range(2))
        self.norm, self.output = nn.LayerNorm(16), nn.Linear(16, 17, bias=False)
        self.register_buffer("seen", torch.zeros(()))
        self.recomputes = recomputes
        if tied:
            self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.size(1)))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        out: torch.Tensor = self.output(self.norm(x))
        return out


def mlps(width: int = 5, count: int = 3) -> nn.Module:
    torch.manual_seed(42)
    return nn.Sequential(*[MLP(width) for _ in range(count)]).double()


def transformer(tied: bool = False, recomputes: bool = False) -> nn.Module:
    torch.manual_seed(42)
    return Transformer(tied, recomputes).double()


def shard(model: nn.Module, **how: Any) -> nn.Module:
    for block in model.layers if isinstance(model, Transformer) else model:
        plumb.fully_shard(block, **how)
    plumb.fully_shard(model, **how)
    return model


def batch(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    if isinstance(model, Transformer):
        return torch.randint(0, 17, (2, 8), generator=generator)
    return torch.randn(4, 5, dtype=torch.float64, generator=generator)


Loss = Callable[[nn.Module, int], torch.Tensor]


def plain_loss(model: nn.Module, step: int) -> torch.Tensor:
    return model(batch(model, step)).pow(2).mean()


def train_both(
    model: nn.Module,
    reference: nn.Module,
    *,
    loss: Loss = plain_loss,
    steps: int = 4,
    optimizer: Callable[..., torch.optim.Optimizer] = functools.partial(torch.optim.AdamW, lr=1e-2),
    micro: int = 1,
) -> None:
    mine, theirs = optimizer(model.parameters()), optimizer(reference.parameters())
    before = [parameter.detach().clone() for parameter in reference.parameters()]
    for step in range(steps):
        for i in range(micro):
            loss(model, step * micro + i).backward()
            loss(reference, step * micro + i).backward()
        reduce_gradients(reference)
        same(reference, model)
        mine.step()
        theirs.step()
        same(reference, model)
        for one in (mine, theirs):
            one.zero_grad(set_to_none=step % 2 == 0)
    moved = max(float((a - b).abs().max()) for a, b in zip(before, reference.parameters(), strict=True))
    assert moved > 1e-4, "nothing was trained"
