"""Checkpoints beside plain sequential writes and reads, and beside torch.distributed.checkpoint: one process, one run.

    python benchmarks/save.py [MEGABYTES] [FOLDER]

Each figure is the median of five; the contestants take turns, so that a busy machine is busy for all of them.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import plumb

ROUNDS = 5


def model_of(megabytes: int) -> torch.nn.Module:
    """Weights and the two moments of AdamW are as large as asked, together."""
    width = 1024
    layers = max(1, round(megabytes * 1e6 / 12 / width / width))
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))


def timed(body: Callable[[], object]) -> float:
    start = time.perf_counter()
    body()
    return time.perf_counter() - start


def main() -> None:
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 240
    folder = Path(tempfile.mkdtemp(dir=sys.argv[2] if len(sys.argv) > 2 else None))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = model_of(megabytes)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine = plumb.Engine(model, optimizer)
    model(torch.randn(4, 1024)).sum().backward()
    engine.step()
    engine.zero_grad()
    state = {"model": model.state_dict(), "optimizer": {str(i): s for i, s in enumerate(optimizer.state.values())}}
    bytes_of = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values()) + sum(
        p.numel() * p.element_size() for p in model.parameters()
    )
    flat = torch.randn(bytes_of // 4)

    def plain_write() -> None:
        with open(folder / "plain", "wb", buffering=0) as file:
            view = memoryview(flat.numpy()).cast("B")
            for at in range(0, len(view), 8 << 20):
                file.write(view[at : at + (8 << 20)])
            os.fsync(file.fileno())

    def plain_read() -> None:
        block = bytearray(8 << 20)
        with open(folder / "plain", "rb", buffering=0) as file:
            while file.readinto(block):
                pass

    def dcp_blocked() -> float:
        path = folder / "dcp"
        shutil.rmtree(path, ignore_errors=True)
        start = time.perf_counter()
        future = dcp.async_save(state, checkpoint_id=path)
        blocked = time.perf_counter() - start
        future.result()  # type: ignore[union-attr]
        return blocked

    def plumb_blocked() -> float:
        start = time.perf_counter()
        engine.save(folder / "background", keep=1, background=True)
        blocked = time.perf_counter() - start
        engine.finish_save()
        return blocked

    contestants: dict[str, Callable[[], float]] = {
        "plain write": lambda: timed(plain_write),
        "save": lambda: timed(lambda: engine.save(folder / "now", keep=1)),
        "plain read": lambda: timed(plain_read),
        "load": lambda: timed(lambda: engine.load(folder / "now")),
        "blocked by dcp.async_save": dcp_blocked,
        "blocked by save(background=True)": plumb_blocked,
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(ROUNDS + 1):
        for name, contestant in contestants.items():
            times[name].append(contestant())
    print(f"{bytes_of / 1e6:.0f} MB")
    for name, all_of in times.items():
        median = statistics.median(all_of[1:])
        print(f"{name:34} {median * 1e3:8.1f} ms  {bytes_of / 1e6 / median:8.0f} MB/s")
    engine.close()
    dist.destroy_process_group()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
