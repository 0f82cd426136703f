"""Graphs that come from torch's cache of an earlier process: they deliver and gather as if they were compiled here."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

RUN = """
import json, sys, torch, plumb
import torch._inductor.config
from torch._dynamo.utils import counters
from plumb import compiled
from stage import Block, distance, make, one_step, reference, trained

torch._inductor.config.compile_threads = 1

def run(strategy):
    torch.set_num_threads(1)
    world = plumb.World.join(backend="shm", timeout=200)
    model, twin = make(), make()
    with plumb.Engine(model, plumb.SGD(lr=0.1), strategy=strategy, units=[Block], world=world) as engine:
        trained(torch.compile(model, fullgraph=True), one_step(0), engine)
        reference(twin, one_step(0), 2, torch.optim.SGD(twin.parameters(), lr=0.1))
        return {
            "far": distance(engine, model, twin), "delivered": compiled.counts().delivered, "gathers": compiled.gathers().times,
            "compiled": len(compiled.explain()), "hits": counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"],
        }

sys.stdout.write("told: " + json.dumps(plumb.spawn(run, 2, (sys.argv[1],), timeout=400)))
"""


def run(place: pathlib.Path, strategy: str) -> list[dict[str, Any]]:
    paths = os.pathsep.join([str(pathlib.Path(__file__).parent), *sys.path])
    env = {**os.environ, "PYTHONPATH": paths, "TORCHINDUCTOR_CACHE_DIR": str(place.parent / "cache")}
    ended = subprocess.run([sys.executable, str(place), strategy], capture_output=True, text=True, timeout=500, env=env)
    assert ended.returncode == 0, ended.stderr[-3000:]
    told: list[dict[str, Any]] = json.loads(ended.stdout.rpartition("told:")[2])
    return told


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_graph_of_an_earlier_process_delivers_and_gathers(strategy: str, tmp_path: pathlib.Path) -> None:
    place = tmp_path / "run.py"
    place.write_text(RUN)
    first, second = run(place, strategy), run(place, strategy)
    for cold, warm in zip(first, second, strict=True):
        assert warm["hits"] > 0 and warm["compiled"] == 0, "nothing came from the cache: the test does not test what it should"
        assert cold["far"] < 1e-10 and warm["far"] < 1e-10
        assert warm["delivered"] == cold["delivered"] > 0
        assert warm["gathers"] == cold["gathers"] and (warm["gathers"] > 0) == (strategy == "zero3")
