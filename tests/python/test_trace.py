"""Where time goes: ``engine.trace``."""

from __future__ import annotations

import json
import pathlib
from collections import Counter
from typing import Any

import pytest
import torch

import plumb

STEPS = 3


def _train(engine: plumb.Engine, model: torch.nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 8)).sum().backward()
        engine.step()
        engine.zero_grad()


def _traced(path: str, strategy: str, optimizer: str) -> list[tuple[int, float, float, list[float]]]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    ours: Any = plumb.SGD(lr=0.1) if optimizer == "plumb" else torch.optim.Adam(model.parameters(), lr=0.1)
    engine = plumb.Engine(model, ours, strategy=strategy, units=[torch.nn.Linear])
    _train(engine, model, 1)
    with engine.trace(pathlib.Path(path)) as trace:
        _train(engine, model, STEPS)
    _train(engine, model, 1)
    parts = []
    for one in trace.stop():
        assert one.step == pytest.approx(one.compute + one.data + one.gathers + one.control + one.optimizer)
        parts.append((one.steps, one.step, one.optimizer, one.waited_for))
    return parts


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("optimizer", ["plumb", "torch"])
@pytest.mark.parametrize("shm", ["1", "0"])
def test_holds_what_two_ranks_did(tmp_path: pathlib.Path, strategy: str, optimizer: str, shm: str) -> None:
    path = tmp_path / "steps.json"
    everybody = plumb.spawn(_traced, 2, (str(path), strategy, optimizer), env={"PLUMB_SHM": shm}, timeout=300)
    assert everybody[0] == everybody[1]
    for steps, step, update, waited_for in everybody[0]:
        assert steps == STEPS and step > update > 0 and len(waited_for) == 2
    events = json.loads(path.read_text())["traceEvents"]
    rows: Counter[tuple[int, str, str]] = Counter((e["pid"], e.get("cat", ""), e["name"]) for e in events if e["ph"] != "M")
    for rank in range(2):
        assert rows[rank, "program", "backward"] == STEPS
        assert rows[rank, "program", "forward"] >= STEPS
        assert rows[rank, "program", "optimizer"] >= STEPS  # the engine's, and that of torch's own optimizer
        assert rows[rank, "gradients", "1.weight"] == STEPS
        assert sum(n for (r, row, _), n in rows.items() if (r, row) == (rank, "control")) >= 2 * STEPS
        assert sum(n for (r, row, _), n in rows.items() if (r, row) == (rank, "buckets")) >= STEPS


def test_alone(tmp_path: pathlib.Path) -> None:
    model = torch.nn.Linear(8, 8)
    engine = plumb.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    trace = engine.trace(tmp_path / "steps.json")
    _train(engine, model, 2)
    (spent,) = trace.stop()
    assert spent.steps == 2 and spent.control == 0 and spent.compute > 0 and "TimeSpent(steps=2" in repr(spent)
    assert json.loads((tmp_path / "steps.json").read_text())["traceEvents"]


def test_an_exception_leaves_no_file(tmp_path: pathlib.Path) -> None:
    model = torch.nn.Linear(8, 8)
    engine = plumb.Engine(model, plumb.SGD(lr=0.1))
    with pytest.raises(ValueError, match="on purpose"):
        with engine.trace(tmp_path / "steps.json") as trace:
            _train(engine, model, 1)
            raise ValueError("on purpose")
    assert not list(tmp_path.iterdir())
    with pytest.raises(plumb.Error, match="was closed"):
        trace.stop()


def test_a_folder_that_is_not_there(tmp_path: pathlib.Path) -> None:
    model = torch.nn.Linear(8, 8)
    engine = plumb.Engine(model, plumb.SGD(lr=0.1))
    with pytest.raises(plumb.Error, match="cannot write a trace to .*none/steps.json"):
        engine.trace(tmp_path / "none" / "steps.json")
