"""Contract 3 from Python: the leaf's ``grad_dtype`` decides over every gradient before a bucket is chosen, however it comes:
from a compiled backward, from autograd, or delivered by hand; in every strategy alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import plumb
from plumb import compiled
from test_compiled import AOT_EAGER, NO_KERNELS, STRATEGIES

UNSET = "unset"
RULES: list[Any] = [UNSET, torch.float32, torch.bfloat16, None]
ROADS = ["compiled", "eager", "by hand"]
FINE = 2.0**-10  # what f32 adds to 1 and bf16 cannot hold


class Low(torch.nn.Module):
    """bf16 weights, f32 arithmetic: what the backward makes is f32, and autograd would cast it at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(5, 7, dtype=torch.bfloat16))
        self.bias = torch.nn.Parameter(torch.zeros(33, dtype=torch.bfloat16))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return (self.weight.float() * factor).sum() + self.bias.sum().float()


def gradient(strategy: str, road: str, rule: Any, later: bool, how: dict[str, Any]) -> tuple[torch.dtype, float, torch.dtype]:
    """The whole reduced gradient's dtype and value, and the neighbour's dtype. ``later``: the rule is set after a pass. ``how`` it is compiled."""
    world = plumb.world()
    model = torch.nn.Sequential(Low())
    weight, bias = model[0].weight, model[0].bias
    with plumb.Engine(model, None, strategy=strategy, units=[Low]) as engine:
        seen = torch.compile(model, **how) if road == "compiled" else model
        factor = torch.full((5, 7), 1.0 + FINE * (world.rank + 1))

        def once() -> None:
            if road == "by hand":
                engine.deliver(weight, factor)
                engine.deliver(bias, torch.ones(33))
                engine.end_pass()
            else:
                seen(factor).backward()

        if later:
            once()
            engine.zero_grad()
        if rule is not UNSET:
            weight.grad_dtype = rule
        before = compiled.counts().delivered
        once()
        assert (compiled.counts().delivered - before == 2) == (road == "compiled"), "not by the road that was meant"
        whole, other = engine.full_gradient(weight), engine.full_gradient(bias)
        assert whole is not None and other is not None and bool((whole == whole.flatten()[0]).all())
        return whole.dtype, float(whole.double().flatten()[0]), other.dtype


def table(strategy: str, how: dict[str, Any], roads: list[str] = ROADS) -> list[tuple[Any, ...]]:
    return [
        (road, rule, later, *gradient(strategy, road, rule, later, how))
        for road in roads
        for rule in RULES
        for later in (False, True)
    ]


def check(rows: list[tuple[Any, ...]]) -> None:
    for road, rule, later, dtype, value, other in rows:
        row = f"{road}, grad_dtype {rule}, set {'later' if later else 'at first'}: {dtype} {value}"
        keeps = rule in (torch.float32, None)
        # Autograd's own cast comes before the leaf; what it rounded stays rounded.
        exact = keeps and road != "eager"
        assert value == (1.0 + 1.5 * FINE if exact else 1.0), row
        if not (road == "eager" and rule is None):  # as it comes: bf16 sums in an f32 bucket
            assert dtype == (torch.float32 if keeps else torch.bfloat16), row
        assert other == torch.bfloat16, f"{row}: the neighbour's became {other}"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_road_obeys_the_leafs_rule(strategy: str) -> None:
    for rows in plumb.spawn(table, 2, (strategy, {"backend": AOT_EAGER}), timeout=200):
        check(rows)


def test_the_default_backend_obeys_the_leafs_rule() -> None:
    for rows in plumb.spawn(table, 2, ("zero2", {}), timeout=300):
        check(rows)


def in_one_graph(how: dict[str, Any]) -> tuple[list[tuple[Any, ...]], int]:
    return table("zero3", {"fullgraph": True, **how}, ["compiled"]), compiled.gathers().times


@pytest.mark.parametrize("how", [{"backend": AOT_EAGER}, {"options": NO_KERNELS}], ids=["by operator", "by inductor"])
def test_one_graph_of_sharded_units_obeys_the_leafs_rule(how: dict[str, Any]) -> None:
    for rows, gathers in plumb.spawn(in_one_graph, 2, (how,), timeout=300):
        check(rows)
        assert gathers >= len(rows) == 2 * len(RULES), "graphs gathered nothing: the weights were not sharded inside of them"


def explained() -> list[list[tuple[torch.dtype, torch.dtype | None]]]:
    """Of bf16 weights, and of f32 ones whose gradients nothing casts."""
    told = []
    for dtype in (torch.bfloat16, torch.float32):
        model = Low().to(dtype)
        with plumb.Engine(model, None):
            torch.compile(model, backend=AOT_EAGER)(torch.ones(5, 7)).backward()
        told.append([(one.dtype, one.looked_through) for one in sorted(compiled.explain()[-1].deliveries, key=lambda one: one.argument)])
    return told


def test_what_was_looked_through_is_told() -> None:
    (told,) = plumb.spawn(explained, 1)
    assert told == [[(torch.float32, torch.bfloat16), (torch.bfloat16, None)], [(torch.float32, None)] * 2]


def accumulates(strategy: str) -> float:
    """64 micro-batches of bf16 gradients, summed in f32 whatever the road."""
    world = plumb.world()
    model = torch.nn.Sequential(Low())
    with plumb.Engine(model, None, strategy=strategy, units=[Low], accumulate_dtype=torch.float32) as engine:
        seen = torch.compile(model, backend=AOT_EAGER)
        for i in range(64):
            seen(torch.full((5, 7), 1.0 + i / 64 + world.rank)).backward()
        whole = engine.full_gradient(model[0].weight)
        assert whole is not None and whole.dtype == torch.float32
        parts = torch.tensor([[1.0 + i / 64 + r for i in range(64)] for r in range(2)]).bfloat16().double()
        return float((whole.double() - parts.sum(1).mean()).abs().max())


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_compiled_bf16_gradients_are_summed_in_f32(strategy: str) -> None:
    assert max(plumb.spawn(accumulates, 2, (strategy,), timeout=100)) < 1e-6
