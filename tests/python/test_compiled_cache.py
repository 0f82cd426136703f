"""Graphs that come from torch's cache of other processes: they deliver and gather as if they were compiled here, also in another world, under
another strategy and another rule. A graph knows nothing of these, or has another key."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
import torch._inductor.config
from torch._dynamo.utils import counters

import plumb
from plumb import compiled
from stage import Block, distance, make, one_step, reference, trained
from test_compiled import NO_KERNELS


def run(strategy: str, rule: torch.dtype | None, mine: torch.dtype) -> dict[str, Any]:
    world = plumb.World.join(backend="shm", timeout=200)
    model, twin = make(mine), make(mine)
    if mine == torch.bfloat16:
        twin = twin.float()  # of whose gradients this is a rounding
    with plumb.Engine(model, plumb.SGD(lr=0.1), strategy=strategy, units=[Block], world=world) as engine:
        for parameter in model.parameters():
            parameter.grad_dtype = rule
        trained(torch.compile(model, fullgraph=True, options=NO_KERNELS), one_step(0), engine)
        reference(twin, one_step(0), world.size, torch.optim.SGD(twin.parameters(), lr=0.1))
        return {
            "far": distance(engine, model, twin), "delivered": compiled.counts().delivered, "gathers": compiled.gathers().times,
            "compiled": len(compiled.explain()), "hits": counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"],
        }  # fmt: skip


# In this order, in one cache.
RUNS = [
    ("zero3", 2, torch.float64, "cold"),
    ("zero3", 2, torch.float64, "warm"),
    ("ddp", 2, torch.float64, "cold"),  # which gathers nothing: another graph
    ("zero2", 2, torch.float64, "warm"),  # of ddp's
    ("zero3", 3, None, "warm"),  # of two ranks, and of gradients that had another rule
    ("zero3", 2, torch.bfloat16, "cold"),  # parameters of another dtype
]


def test_a_graph_of_another_process_world_strategy_or_rule_delivers_and_gathers(tmp_path: pathlib.Path) -> None:
    delivered = None
    for strategy, ranks, rule, expected in RUNS:
        mine = torch.bfloat16 if rule == torch.bfloat16 else torch.float64
        env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
        everybody = plumb.spawn(run, ranks, (strategy, rule, mine), env=env, timeout=400)
        assert any(told["compiled"] for told in everybody) == (expected == "cold"), f"{strategy}, {ranks} ranks, rule {rule}"
        for rank, told in enumerate(everybody):
            row = f"{strategy}, {ranks} ranks, rule {rule}, rank {rank}: {told}"
            assert expected == "cold" or told["hits"] > 0, row
            assert told["far"] < (1e-10 if mine == torch.float64 else 2e-2), row
            assert (told["gathers"] > 0) == (strategy == "zero3"), row
            delivered = delivered or told["delivered"]
            assert told["delivered"] == delivered > 0, row
