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

folder, struck = sys.argv[1:]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
engine = plumb.Engine(model, optimizer, strategy="zero3")
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
samples = 0
if os.path.isdir(folder):
    info = engine.load(folder, extras={"schedule": schedule})
    samples = info.samples
    sys.stderr.write(f"rank {engine.world.rank} life {life} goes on at step {info.step}\\n")
while engine.steps < 8:
    if struck == "yes" and engine.world.rank == 1 and (life, engine.steps) == (0, 3):
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(samples))  # every rank the same: sums over two are exact
    engine.backward(model(x).square().mean())
    engine.step()
    engine.zero_grad()
    schedule.step()
    samples += 8
    engine.save(folder, samples=samples, keep=2, extras={"schedule": schedule}, background=engine.steps % 2 == 0)
engine.finish_save()
digest = hashlib.sha1(b"".join(engine.full_parameter(p).numpy().tobytes() for p in model.parameters()))
# One write each: the ranks share a pipe.
sys.stdout.write(f"rank {engine.world.rank} ends with {digest.hexdigest()} at {optimizer.param_groups[0]['lr']}\\n")
sys.stdout.flush()
engine.close()
"""


def environment(**more: str) -> dict[str, str]:
    built = {} if "PLUMB_INSTALLED" in os.environ else {"PYTHONPATH": str(PROGRAM.parents[1] / "python")}
    return {**os.environ, "OMP_NUM_THREADS": "1", **built, **more}


def torchrun(words: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    """Two ranks on this machine, at a port of their own; they may be started twice."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", "--max-restarts=1",
        "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--monitor-interval=0.2"]  # fmt: skip
    done = subprocess.run([*launcher, *words], env=environment(**more), capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def test_a_script_goes_on_after_a_rank_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    calm = subprocess.run([sys.executable, str(script), str(tmp_path / "calm"), "no"], env=environment(), capture_output=True, text=True, timeout=800, check=True)
    struck = torchrun([str(script), str(tmp_path / "struck"), "yes"])
    assert re.findall(r"rank (\d) life (\d) goes on at step [23]", struck.stderr) in ([("0", "1"), ("1", "1")], [("1", "1"), ("0", "1")])
    (end,) = re.findall(r"ends with (\w{40} at [\d.e-]+)", calm.stdout)
    assert re.findall(r"ends with (\w{40} at [\d.e-]+)", struck.stdout) == [end, end]


@pytest.mark.skipif(not PROGRAM.exists(), reason="the program is not built")
def test_the_program_goes_on_after_a_rank_was_killed(tmp_path: Path) -> None:
    words = [str(PROGRAM), "train", "--json", "--deterministic", "--virtual-ranks", "4", "--layers", "1", "--heads", "2",
        "--width", "16", "--context", "16", "--digits", "2", "--batch", "8", "--steps", "12", "--questions", "8", "--threads", "1"]  # fmt: skip
    calm = subprocess.run([*words, "--ranks", "1"], env=environment(), capture_output=True, text=True, timeout=800, check=True)
    struck = torchrun(
        ["--no-python", *words, "--save-every", "3", "--strategy", "zero2", "--timeout", "60", "--checkpoint", str(tmp_path)],
        PLUMB_FAULT="rank=1,point=step:8,kind=kill",
    )
    assert "PLUMB_FAULT strikes rank 1" in struck.stderr
    ends = [json.loads(done.stdout.splitlines()[-1]) for done in (calm, struck)]
    assert ends[0]["model_digest"] == ends[1]["model_digest"] and ends[1]["resumed_from_step"] in (3, 6)
