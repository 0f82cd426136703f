"""Forwards that save where no hook sees it (transforms of torch.func), over units that are whole only around them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

import plumb
import plumb.deepspeed

Call = Callable[[torch.Tensor], torch.Tensor]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def transforms(call: Call, rank: int) -> list[torch.Tensor]:
    """The first of them is the first forward at all. The last leaves gradients."""
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    penalty = (vmap(grad(lambda one: call(one).pow(2).sum()))(x) ** 2).sum
    made = [
        jvp(call, (x,), (torch.ones_like(x),))[1],
        vmap(call)(x),
        vmap(jacrev(call))(x),
        jacfwd(lambda many: call(many).sum(0))(x),
        hessian(lambda one: call(one).pow(2).sum())(x[0]),
        penalty(),
    ]
    made[-1].backward()  # type: ignore[no-untyped-call]
    return [one.detach() for one in made]


def after_a_step(call: Call, step: Callable[[], object]) -> torch.Tensor:
    step()
    return vmap(call)(torch.ones(1, 4, dtype=torch.float64)).detach()


Made = tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]


def one_process() -> list[Made]:
    plain = model()
    made = [transforms(plain, rank) for rank in range(2)]
    for parameter in plain.parameters():
        assert parameter.grad is not None
        parameter.grad /= 2
    gradients = [parameter.grad for parameter in plain.parameters() if parameter.grad is not None]
    after = after_a_step(plain, torch.optim.SGD(plain.parameters(), lr=0.1).step)
    return [(one, gradients, after) for one in made]


def ranks(face: str) -> Made:
    dist.init_process_group("gloo")
    plain = model()
    units = [plain[0], plain[2]]
    if face == "fully_shard":
        for unit in units:
            plumb.fully_shard(unit)
        plumb.fully_shard(plain)
        made = transforms(plain, dist.get_rank())
        gradients = [parameter.grad.full_tensor() for parameter in plain.parameters() if parameter.grad is not None]  # type: ignore[attr-defined]
        return made, gradients, after_a_step(plain, torch.optim.SGD(plain.parameters(), lr=0.1).step)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    if face == "deepspeed":
        stage = {"stage": 3, "stage3_param_persistence_threshold": 0}
        # Gradients inside of transforms are the caller's own: whole, whatever the steps of accumulation.
        config = {"train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0, "zero_optimization": stage}
        wrapper = plumb.deepspeed.initialize(model=plain, optimizer=optimizer, config=config)[0]
        call, engine = wrapper, wrapper.engine
    else:
        call, engine = plain, plumb.Engine(plain, optimizer, strategy=face, units=units)
    made = transforms(call, dist.get_rank())
    gradients = [engine.full_gradient(parameter) for parameter in plain.parameters()]
    return made, gradients, after_a_step(call, engine.step)


@pytest.mark.parametrize("face", ["zero3", "fully_shard", "deepspeed"])
def test_transforms_see_whole_parameters(face: str) -> None:
    expected = plumb.spawn(one_process, 1)[0]
    for rank, made in enumerate(plumb.spawn(ranks, 2, (face,))):
        torch.testing.assert_close(made, expected[rank])


def without_hooks() -> list[float]:
    """Somebody forbids hooks on saved tensors: what a unit's forward saves is read later all the same."""
    torch.manual_seed(0)
    plain = model()
    engine = plumb.Engine(plain, torch.optim.SGD(plain.parameters(), lr=0.1), strategy="zero3", units=[nn.Linear])
    with torch.autograd.graph.disable_saved_tensors_hooks("none, please"):
        loss = plain(torch.ones(2, 4, dtype=torch.float64)).pow(2).sum()
    loss.backward()
    engine.step()
    return [float(engine.full_parameter(parameter).sum()) for parameter in plain.parameters()]


def test_forwards_without_hooks_on_saved_tensors() -> None:
    alone = plumb.spawn(without_hooks, 1)[0]
    for said in plumb.spawn(without_hooks, 2):
        assert said == pytest.approx(alone)


def by_sample(plain: nn.Module, rank: int) -> list[torch.Tensor]:
    """Each sample's gradients, as private training clips them; and the slope of a loss after a step that is differentiated through."""
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)

    def loss(parameters: dict[str, torch.Tensor], one: torch.Tensor) -> torch.Tensor:
        return functional_call(plain, parameters, (one,)).pow(2).sum()

    parameters = dict(plain.named_parameters())
    apart = {name: parameter.detach() for name, parameter in parameters.items()}
    made = list(vmap(grad(loss), (None, 0))(apart, x).values())
    slopes = grad(loss)(parameters, x)
    loss({name: parameter - 0.1 * slopes[name] for name, parameter in parameters.items()}, x).backward()
    return [one.detach() for one in made]


def inside_of_gathered(start: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    plain = copy.deepcopy(start)
    with plumb.Engine(plain, plumb.SGD(lr=0.1), strategy="zero3", units=[nn.Linear]) as engine:
        with engine.gathered(plain):
            made = by_sample(plain, engine.world.rank)
            again = torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one)
            with again, pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):  # somebody else's
                by_sample(plain, engine.world.rank)
            plain(torch.ones(1, 4, dtype=torch.float64))
        return made, [engine.full_gradient(parameter) for parameter in plain.parameters()]


def test_transforms_begin_inside_of_gathered() -> None:
    twin, start = model(), model()
    expected = [by_sample(twin, rank) for rank in range(2)]
    for rank, (made, gradients) in enumerate(plumb.spawn(inside_of_gathered, 2, (start,), method="thread")):
        torch.testing.assert_close(made, expected[rank])
        torch.testing.assert_close(gradients, [parameter.grad / 2 for parameter in twin.parameters()])  # type: ignore[operator]


class Forces(nn.Module):
    """A unit that runs a transform in its own forward: the slope of an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 1)

    def energy(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x))).sum()  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - vmap(grad(self.energy))(x)


def moves(face: str) -> float:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    plain = nn.Sequential(Forces(), Forces()).double()
    twin, units = copy.deepcopy(plain), [Forces, nn.Linear] if face == "units in units" else [Forces]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    engine: Any = None
    if face == "fully_shard":
        plumb.fully_shard(plain[0])
        plumb.fully_shard(plain)
    else:
        engine = plumb.Engine(plain, optimizer, strategy="zero3", units=units)
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(2):
        for one, ranks in ((plain, [dist.get_rank()]), (twin, [0, 1])):
            for rank in ranks:
                x = torch.randn(5, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
                (one(x).pow(2).sum() / len(ranks)).backward()
        for step in (optimizer, other):
            step.step()
            step.zero_grad()
    assert engine is None or engine.gathered_bytes == 0
    wholes = [engine.full_parameter(one) if engine is not None else one.full_tensor() for one in plain.parameters()]  # type: ignore[attr-defined]
    return max(float((whole - one).abs().max()) for whole, one in zip(wholes, twin.parameters(), strict=True))


@pytest.mark.parametrize("face", ["zero3", "units in units", "fully_shard"])
def test_a_unit_runs_transforms_in_its_forward(face: str) -> None:
    assert max(plumb.spawn(moves, 2, (face,))) < 1e-12
