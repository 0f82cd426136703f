"""Under ``torchrun --max-restarts`` a run goes on from its newest complete checkpoint, and ends with the undisturbed run's bits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "build" / "bin" / "plumb"

SCRIPT = """
import hashlib, os, signal, sys
import torch, plumb

folder, strategy, struck = sys.argv[1:]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
engine = plumb.Engine(model, optimizer, strategy=strategy)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
samples = 0
if os.path.isdir(folder):
    info = engine.load(folder, extras={"schedule": schedule})
    samples = info.samples
    print(f"rank {engine.world.rank} life {life} goes on at step {info.step}", file=sys.stderr)
while engine.steps < 8:
    if struck == "yes" and engine.world.rank == 1 and (life, engine.steps) in ((0, 3), (1, 5)):
        engine.finish_save() if life else None
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(samples))  # every rank the same: sums over two are exact
    engine.backward(model(x).square().mean())
    engine.step()
    engine.zero_grad()
    schedule.step()
    samples += 4 * engine.world.size
    engine.save(folder, samples=samples, keep=2, extras={"schedule": schedule}, background=engine.steps % 2 == 0)
engine.finish_save()
digest = hashlib.sha1(b"".join(engine.full_parameter(p).numpy().tobytes() for p in model.parameters()))
print(f"rank {engine.world.rank} ends with {digest.hexdigest()} at {optimizer.param_groups[0]['lr']}", flush=True)
engine.close()
"""


def torchrun(words: list[str], restarts: int, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Two ranks on this machine, at a port of their own."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", f"--max-restarts={restarts}",
        "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--monitor-interval=0.2"]  # fmt: skip
    everything = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    built = str(PROGRAM.parents[1] / "python")
    if "PLUMB_INSTALLED" not in os.environ:
        everything["PYTHONPATH"] = os.pathsep.join([built, os.environ.get("PYTHONPATH", "")])
    return subprocess.run([*launcher, *words], env=everything, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_script_goes_on_after_its_ranks_were_killed(strategy: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ends = []
    for struck in ("no", "yes"):
        done = torchrun([str(script), str(tmp_path / struck), strategy, struck], 2 if struck == "yes" else 0)
        assert done.returncode == 0, done.stderr[-4000:]
        ends.append(sorted(re.findall(r"rank (\d) ends with (.*)", done.stdout)))
        lives = re.findall(r"rank 0 life (\d) goes on at step (\d)", done.stderr)
        assert [life for life, _ in lives] == (["1", "2"] if struck == "yes" else [])
        assert all(int(step) >= least for (_, step), least in zip(lives, (2, 5), strict=False)), lives
    assert ends[0] == ends[1] and len(ends[0]) == 2 and ends[0][0][1] == ends[0][1][1]


@pytest.mark.skipif(not PROGRAM.exists(), reason="the program is not built")
def test_the_program_goes_on_after_a_rank_was_killed(tmp_path: Path) -> None:
    words = ["--no-python", str(PROGRAM), "train", "--json", "--deterministic", "--virtual-ranks", "4", "--layers", "1", "--heads", "2",
        "--width", "16", "--context", "16", "--digits", "2", "--batch", "8", "--steps", "12", "--questions", "8", "--threads", "1",
        "--save-every", "3", "--strategy", "zero2", "--timeout", "60", "--checkpoint"]  # fmt: skip
    digests = []
    for name, fault in (("calm", ""), ("struck", "rank=1,point=step:8,kind=kill")):
        done = torchrun([*words, str(tmp_path / name)], 1, {"PLUMB_FAULT": fault} if fault else None)
        assert done.returncode == 0, done.stderr[-4000:]
        assert ("PLUMB_FAULT strikes rank 1" in done.stderr) == bool(fault)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        digests.append([line["model_digest"] for line in lines if "model_digest" in line])
    assert digests[0] == digests[1] and len(digests[0]) == 1
