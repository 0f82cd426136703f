"""``plumb checkpoint``: however large a checkpoint is, it needs room for its largest tensor; and it says how far it is."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import plumb

PROGRAM = Path(__file__).resolve().parents[2] / "build" / "bin" / "plumb"
pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="the program is not built")

TENSORS, MEGABYTES = 24, 4
# A process begins with what its parent had, as far as its peak is concerned: this one has nothing.
PEAK = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=2); print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"


def peak(*words: object) -> int:
    """Megabytes that ``plumb checkpoint`` needs at most."""
    command = [sys.executable, "-S", "-c", PEAK, PROGRAM, "checkpoint", *words]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "\r" not in done.stderr  # no terminal, no progress
    return int(done.stdout) // 1024


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    parameters = [(str(i), torch.nn.Parameter(torch.full((MEGABYTES << 18,), float(i)))) for i in range(TENSORS)]
    with plumb.Engine(parameters, plumb.SGD()) as engine:
        return engine.save(tmp_path_factory.mktemp("saved"))


def test_it_needs_room_for_the_largest_tensor(saved: str, tmp_path: Path) -> None:
    least = peak("list", os.path.dirname(saved))
    for words in (
        ("verify", saved),
        ("diff", saved, saved),
        ("consolidate", saved, tmp_path / "all.safetensors"),
        ("reshard", saved, tmp_path / "resharded", "--ranks", 3),
    ):
        assert peak(*words) - least < TENSORS * MEGABYTES / 3, words


def test_it_says_on_a_terminal_how_far_it_is(saved: str) -> None:
    ours, its = pty.openpty()
    with subprocess.Popen([PROGRAM, "checkpoint", "verify", saved], stdout=subprocess.DEVNULL, stderr=its) as process:
        os.close(its)
        said = b""
        while True:
            try:
                said += os.read(ours, 1 << 16)
            except OSError:  # it has ended
                break
        assert process.wait() == 0
    os.close(ours)
    shown = [int(part.split()[1]) for part in said.decode().split("\r")[1:-1]]
    assert shown == sorted(shown) and len(shown) >= TENSORS and shown[-1] == 100, said
    assert said.endswith(b"\r\x1b[K")
