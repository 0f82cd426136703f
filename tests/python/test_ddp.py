"""plumb.DistributedDataParallel in the place of torch's: the same names, every pattern right."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import plumb
from programs import ROWS
from stage import STEP, ZERO, Play, make, reference

LEFT_OUT = {"a submodule twice, re-entrant checkpoint", "used on one rank only"}  # which call submodules by themselves


class Wrapped(Play):
    """A play whose losses go through the wrapper."""

    def __init__(self, wrapper: Any, rank: int) -> None:
        super().__init__(wrapper.module, rank, 2, 1.0, wrapper.engine)
        self.wrapper = wrapper

    def loss(self, i: int = 0, **how: Any) -> torch.Tensor:
        return F.mse_loss(self.wrapper(self.data(i), **how), self.data(i + 50))

    def no_sync(self) -> Any:
        return self.wrapper.no_sync()


def rows() -> dict[str, float]:
    dist.init_process_group("gloo")
    result = {}
    for name, program in ROWS.items():
        if name in LEFT_OUT:
            continue
        model, twin = make(), make()
        wrapper = plumb.DistributedDataParallel(model)
        assert isinstance(wrapper, torch.nn.parallel.DistributedDataParallel)
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
        play = Wrapped(wrapper, dist.get_rank())
        for yielded in program(play):
            if yielded == STEP:
                optimizer.step()
            elif yielded == ZERO:
                optimizer.zero_grad()
            else:
                yielded(model)
        reference(twin, program, 2, torch.optim.SGD(twin.parameters(), lr=0.1))
        far = max(float((a - b).detach().abs().max()) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        result[name] = far
        wrapper.engine.close()
    return result


def test_every_row_is_right_behind_torchs_name() -> None:
    for by_row in plumb.spawn(rows, 2):
        assert {name for name, far in by_row.items() if far > 1e-10} == set()


def habits() -> None:
    dist.init_process_group("gloo")
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    wrapper = plumb.DistributedDataParallel(module, find_unused_parameters=True, gradient_as_bucket_view=True)
    assert list(wrapper.state_dict())[0] == "module.0.weight"
    values = torch.cat([p.detach().flatten() for p in wrapper.parameters()])
    others = [torch.empty_like(values) for _ in range(2)]
    dist.all_gather(others, values)
    assert torch.equal(others[0], others[1])
    assert wrapper.require_backward_grad_sync
    with wrapper.no_sync():
        assert not wrapper.require_backward_grad_sync
        wrapper(torch.randn(4, 3)).sum().backward()
    wrapper(torch.randn(4, 3)).sum().backward()
    wrapper._set_static_graph()


def test_answers_as_others_expect() -> None:
    plumb.spawn(habits, 2)


PROGRAM = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(2, 2))
model(torch.ones(1, 2) * (1 + dist.get_rank())).sum().backward()
print(type(model).__module__, float(model.module.weight.grad[0, 0]))
dist.destroy_process_group()
"""


def test_an_unchanged_program_runs(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    package = str(pathlib.Path(plumb._C.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": package, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "plumb", str(program)], env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["plumb.ddp", "1.0"]
    assert "plumb: torch.nn.parallel.DistributedDataParallel is plumb.DistributedDataParallel" in done.stderr
