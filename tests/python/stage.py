"""One program, run by ranks under an engine and by one process that does every rank's work.

A program is a generator over a Play. Between two yields it does what one rank does; what it yields is done by all together:
``STEP``, ``ZERO``, or a function of the model.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import plumb

STEP, ZERO = "step", "zero"
WIDTH = 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between two layers of no unit, one layer that nobody uses, and a buffer."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))
        if tied:
            self.blocks[2].up.weight = self.blocks[0].up.weight
            self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor, around: Callable[..., torch.Tensor] | None = None) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if around is None else around(block, x)
        return self.last(x)


class Play:
    """What a program sees of one rank."""

    def __init__(self, model: nn.Module, rank: int, size: int, share: float, engine: plumb.Engine | None = None) -> None:
        self.model, self.rank, self.size, self.share, self.engine = model, rank, size, share, engine

    def data(self, i: int = 0) -> torch.Tensor:
        some = next(self.model.parameters())
        return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * self.rank + i)).to(some)

    def loss(self, i: int = 0, **how: Any) -> torch.Tensor:
        return F.mse_loss(self.model(self.data(i), **how).double(), self.data(i + 50).double())

    def backward(self, loss: torch.Tensor, **how: Any) -> None:
        (loss * self.share).backward(**how)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self.engine.no_sync() if self.engine is not None else contextlib.nullcontext()


Program = Callable[[Play], Iterator[Any]]


def one_step(i: int) -> Program:
    """The smallest program: a backward, a step."""

    def program(play: Play) -> Iterator[Any]:
        play.backward(play.loss(i))
        yield STEP
        yield ZERO

    return program


def reference(model: nn.Module, program: Program, size: int, optimizer: torch.optim.Optimizer) -> None:
    """One process: every rank's part of the program up to the next yield, then what they yield."""
    running = [program(Play(model, rank, size, 1 / size)) for rank in range(size)]
    while True:
        yielded = [next(one, None) for one in running]
        assert all(one is None for one in yielded) or all(one is not None for one in yielded)
        if yielded[0] is None:
            return
        if yielded[0] == STEP:
            optimizer.step()
        elif yielded[0] == ZERO:
            model.zero_grad()
        else:
            yielded[0](model)


def trained(model: nn.Module, program: Program, engine: plumb.Engine) -> None:
    """The same by one rank of an engine."""
    for yielded in program(Play(model, engine.world.rank, engine.world.size, 1.0, engine)):
        if yielded == STEP:
            engine.step()
        elif yielded == ZERO:
            engine.zero_grad()
        else:
            yielded(model)


def distance(engine: plumb.Engine, model: nn.Module, other: nn.Module) -> float:
    """The largest difference of a parameter, against the largest value of its twin."""
    worst = 0.0
    other = copy.deepcopy(other).requires_grad_(False)
    for (_, mine), (_, twin) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        whole = engine.full_parameter(mine).double()
        if whole.numel() == 0:
            continue
        worst = max(worst, float((whole - twin.double()).abs().max() / twin.double().abs().max().clamp_min(1e-30)))
    return worst


def make(dtype: torch.dtype = torch.float64, tied: bool = False) -> Net:
    torch.manual_seed(1)
    return Net(tied).to(dtype)


def compare(
    program: Program,
    *,
    strategy: str,
    world: plumb.World | None = None,
    dtype: torch.dtype = torch.float64,
    tied: bool = False,
    model: Callable[[], nn.Module] | None = None,
    prepare: Callable[[nn.Module], None] = lambda model: None,
    kept: int = 0,
    **options: Any,
) -> float:
    """On every rank: how far the ranks' parameters are from one process's, which uses plain torch.

    ``kept``: bytes that may stay gathered; where parameters travel, a unit that is used next is kept.
    """
    model = model or (lambda: make(dtype, tied))
    mine, twin = model(), model()
    prepare(mine)
    prepare(twin)
    with plumb.Engine(
        mine, plumb.SGD(lr=0.1), strategy=strategy, units=[Block], world=world, bucket_bytes=4096,
        first_bucket_bytes=1024, **options,
    ) as engine:
        trained(mine, program, engine)
        reference(twin, program, engine.world.size, torch.optim.SGD(twin.parameters(), lr=0.1))
        result = distance(engine, mine, twin)
        moved = distance(engine, mine, copy_of(model, prepare))
        assert moved > 1e-4, "the program trained nothing"
        assert engine.gathered_bytes <= kept, "parameters are still gathered"
    return result


def copy_of(model: Callable[[], nn.Module], prepare: Callable[[nn.Module], None]) -> nn.Module:
    fresh = model()
    prepare(fresh)
    return copy.deepcopy(fresh)


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]


def step_twin(twin: torch.nn.Module, optimizer: torch.optim.Optimizer, size: int, number: int) -> None:
    for rank in range(size):
        other = Play(twin, rank, size, 1 / size)
        other.backward(other.loss(number))
    optimizer.step()
    optimizer.zero_grad()
