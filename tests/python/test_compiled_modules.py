"""Modules that compilers stumble over, as units of a compiled model: broken in the middle or in one graph, against one process in eager."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import plumb
import plumb.nn
from plumb import compiled
from stage import STEP, WIDTH, ZERO, Block, Net, Play
from test_compiled import AOT_EAGER, compare

by_operator = functools.partial(torch.compile, backend=AOT_EAGER)
one_graph = functools.partial(by_operator, fullgraph=True)


class Small(Block):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any, **_: Any) -> Any:
        return x + torch.tanh(self.up(x))


class Little(Net):
    """Two blocks of a kind between two layers."""

    kind: type[nn.Module] = Small

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.kind() for _ in range(2))


def little(kind: type[nn.Module] = Small, net: type[Little] = Little, dtype: torch.dtype = torch.float64) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(3)
        return type("Of" + kind.__name__, (net,), {"kind": kind})().to(dtype)

    return build


def plain(play: Play) -> Iterator[Any]:
    for i in range(2):
        torch.manual_seed(10 * play.rank + i)  # of what is dropped
        play.backward(play.loss(i))
        yield STEP
        yield ZERO


# ---- units


class Breaks(Small):
    """In the middle, and where a number decides."""

    def forward(self, x: Any, **_: Any) -> Any:
        h = x @ self.up.weight.t()
        torch._dynamo.graph_break()
        h = h + self.up.bias
        return x + (torch.tanh(h) if float(h.detach().sum()) > 0 else torch.sin(h))


class Drops(Small):
    def forward(self, x: Any, **_: Any) -> Any:
        return x + F.dropout(torch.tanh(self.up(x)), 0.5)


class InPlace(Small):
    def forward(self, x: Any, **_: Any) -> Any:
        y = x * 1.0
        y.add_(torch.tanh(self.up(x)))
        y[:, 0].mul_(2)
        return y


class ChangesItsInput(Small):
    def forward(self, x: Any, **_: Any) -> Any:
        h = torch.sin(self.up(x * 1.0))
        x.add_(h)
        return x


class Structures(Small):
    def forward(self, x: Any, *, more: Any = None, **_: Any) -> Any:
        h = torch.tanh(self.up(x))
        return {"x": x + h, "parts": (h, [x, None, more])}


class Outer(Small):
    """A unit inside of a unit, whose weight is used behind it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Small()

    def forward(self, x: Any, **_: Any) -> Any:
        return self.inner(torch.tanh(self.up(x))) + x @ self.up.weight


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class Custom(Small):
    def forward(self, x: Any, **_: Any) -> Any:
        return x + torch.tanh(Product.apply(x, self.up.weight)) + self.up.bias


class Normalised(Small):
    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.parametrizations.weight_norm(self.up)


class Odd(Small):
    """A scalar, sizes that fill no vector, a transposed weight, one of another memory format."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.a, self.b = nn.Parameter(torch.randn(5, WIDTH) / 3), nn.Parameter(torch.randn(WIDTH, 5) / 3)
        self.scale, self.turned = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.randn(7, 5).t() / 3)
        self.conv = nn.Conv2d(2, 3, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: Any, **_: Any) -> Any:
        h = torch.tanh(x @ self.a.t())
        h = h + (h @ self.turned @ self.turned.t()) * self.scale
        return x + h @ self.b.t() + self.conv(x.view(-1, 2, 2, 3)).mean((1, 2, 3)).unsqueeze(1)


class TwoDtypes(Small):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.randn(WIDTH) / 4)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.low.data = self.low.data.float()
        return self

    def forward(self, x: Any, **_: Any) -> Any:
        return x + torch.tanh(self.up(x)) * self.low.to(x.dtype)


class Fused(Small):
    """Whose weight gradients never pass autograd."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.up = plumb.nn.Linear(WIDTH, WIDTH)


# ---- models


class Checkpointed(Little):
    def forward(self, x: Any, around: Any = None) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.last(x)


class Selective(Little):
    """Of a checkpoint, products are kept."""

    def forward(self, x: Any, around: Any = None) -> Any:
        x = self.first(x)
        kept = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default, torch.ops.aten.t.default]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=functools.partial(create_selective_checkpoint_contexts, kept))
        return self.last(x)


class Fresh(Little):
    """Blocks get tensors of their own."""

    def forward(self, x: Any, around: Any = None) -> Any:
        x = self.first(x) * 1.0
        for block in self.blocks:
            x = block(x) * 1.0
        return self.last(x)


class Unpacks(Little):
    def forward(self, x: Any, around: Any = None) -> Any:
        x, extra = self.first(x), 0
        for block in self.blocks:
            out = block(x, more=[x, 3])
            x, extra = out["x"], extra + out["parts"][0].mean()
        return self.last(x) + extra


class Tied(Little):
    """An embedding that is the head, and two blocks with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.words.weight
        self.blocks[1].up.weight = self.blocks[0].up.weight

    def forward(self, x: Any, around: Any = None) -> Any:
        words = (x.detach().abs() * 3).long().clamp(0, 9)[:, :3]
        h = self.words(words).sum(1) + self.first(x)
        for block in self.blocks:
            h = block(h)
        return self.last(h) + self.head(h).sum(1, keepdim=True)


def hooked(which: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model: Any = little()()
        if which == "forward":
            model.blocks[0].register_forward_hook(lambda module, args, out: out * 2)
            model.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] * 3,))
        else:
            model.blocks[0].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))
        return model

    return build


#: Models that run in one graph, too; and those that cannot.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout": little(Drops),
    "dropout in checkpoints": little(Drops, Checkpointed),
    "selective checkpoints": little(net=Selective),
    "operations in place": little(InPlace),
    "changes its input": little(ChangesItsInput, Fresh),
    "structures": little(Structures, Unpacks),
    "units in units": little(Outer),
    "functions of its own": little(Custom),
    "weight norm": little(Normalised),
    "odd parameters": little(Odd),
    "two dtypes": little(TwoDtypes),
    "forward hooks": hooked("forward"),
    "tied": little(net=Tied),
}
BROKEN = {"breaks": little(Breaks), "fused": little(Fused), "backward hooks": hooked("backward")}


def modules(strategy: str, transport: str) -> dict[str, float]:
    world = plumb.World.join(backend=transport, timeout=60)
    far = {}
    ways = {"in one graph": one_graph} if transport == "gloo" else {"with breaks": by_operator, "in one graph": one_graph}
    for name, model in (MODELS if transport == "gloo" else MODELS | BROKEN).items():
        for way, compiles in ways.items():
            if not (name in BROKEN and way == "in one graph"):
                far[f"{name}, {way}"] = compare(plain, strategy, world, compiles, model)
    assert compiled.gathers().bytes == 0
    return far


@pytest.mark.parametrize("strategy,transport", [("zero3", "shm"), ("zero3", "gloo")])
def test_whatever_a_unit_does_is_what_one_process_computes(strategy: str, transport: str) -> None:
    env = {"PLUMB_SHM": "0"} if transport == "gloo" else None  # parameters travel, also on one machine
    for far in plumb.spawn(modules, 2, (strategy, transport), env=env, timeout=400):
        for name, distance in far.items():
            assert distance <= (1e-6 if "two dtypes" in name else 1e-10), (name, distance)


class Branches(Little):
    def forward(self, x: Any, around: Any = None) -> Any:
        x = self.first(x)
        x = torch.cond(x.sum() > 0, lambda x: self.blocks[0](x), lambda x: self.blocks[1](x), (x,))
        return self.last(x)


def refused(kind: str) -> str:
    world = plumb.World.join(backend="shm", timeout=60)
    model = little(Fused) if kind == "fused" else little(net=Branches)
    with pytest.raises(RuntimeError) as told:
        compare(plain, "zero3", world, one_graph, model)
    return str(told.value)


@pytest.mark.parametrize("kind,said", [("fused", "plumb.nn writes weight gradients itself"), ("branches", "no unit inside of a branch")])
def test_what_no_graph_can_hold_is_an_error_that_says_so(kind: str, said: str) -> None:
    for told in plumb.spawn(refused, 2, (kind,), timeout=100):
        assert said in told, told
