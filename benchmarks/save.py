"""Checkpoints beside plain sequential writes and reads, and beside torch.distributed.checkpoint: one process, one run.

    python benchmarks/save.py [MEGABYTES] [FOLDER] [ROUNDS]

The contestants take turns, so that a busy machine is busy for all of them. Of each, the median and the least on the clock, and
the median of the processor's time: what it costs, whoever else is running. What a background save blocks for is the call, and what the
next step takes longer than one without a save; Plumb's is measured with a torch.optim object and with Plumb's own optimizer. Reads come from the disk (the system's cache is told
to forget the files) and from that cache; a plain read fills memory of its own, as a loader must.
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

ROUNDS = int(sys.argv[3]) if len(sys.argv) > 3 else 7


def model_of(megabytes: int) -> torch.nn.Module:
    """Weights and the two moments of AdamW are as large as asked, together."""
    width = 1024
    layers = max(1, round(megabytes * 1e6 / 12 / width / width))
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))


Times = tuple[float, float]  # on the clock, and of the processor


def timed(body: Callable[[], object]) -> Times:
    start, worked = time.perf_counter(), time.process_time()
    body()
    return time.perf_counter() - start, time.process_time() - worked


def main() -> None:
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 240
    folder = Path(tempfile.mkdtemp(dir=sys.argv[2] if len(sys.argv) > 2 else None))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = model_of(megabytes)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine = plumb.Engine(model, optimizer)
    own_model = model_of(megabytes)
    own = plumb.Engine(own_model, plumb.AdamW())
    examples = torch.randn(256, 1024)

    def forward_and_backward(model: torch.nn.Module) -> None:
        model(examples).square().mean().backward()

    for one, its in ((engine, model), (own, own_model)):
        forward_and_backward(its)
        one.step()
        one.zero_grad()
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
        to = memoryview(torch.empty(bytes_of, dtype=torch.uint8).numpy())
        with open(folder / "plain", "rb", buffering=0) as file:
            for at in range(0, len(to), 8 << 20):
                file.readinto(to[at : at + (8 << 20)])

    def forgotten(path: Path) -> None:
        """The system's cache has nothing of these files."""
        for file in [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]:
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def from_disk(path: Path, body: Callable[[], object]) -> Times:
        forgotten(path)
        return timed(body)

    def dcp_blocked() -> Times:
        path = folder / "dcp"
        shutil.rmtree(path, ignore_errors=True)
        alone = step(engine, model)
        futures = []
        call = timed(lambda: futures.append(dcp.async_save(state, checkpoint_id=path)))
        beside = step(engine, model)
        futures[0].result()
        return call[0] + max(0.0, beside[0] - alone[0]), call[1]

    def step(engine: plumb.Engine, model: torch.nn.Module) -> Times:
        forward_and_backward(model)
        times = timed(engine.step)
        engine.zero_grad()
        return times

    def plumb_blocked(engine: plumb.Engine, model: torch.nn.Module, path: Path) -> Times:
        alone = step(engine, model)
        call = timed(lambda: engine.save(path, keep=1, background=True))
        beside = step(engine, model)
        engine.finish_save()
        return call[0] + max(0.0, beside[0] - alone[0]), call[1]

    contestants: dict[str, Callable[[], Times]] = {
        "plain write": lambda: timed(plain_write),
        "save": lambda: timed(lambda: engine.save(folder / "now", keep=1)),
        "plain read, from the disk": lambda: from_disk(folder / "plain", plain_read),
        "load, from the disk": lambda: from_disk(folder / "now", lambda: engine.load(folder / "now")),
        "plain read, from the cache": lambda: timed(plain_read),
        "load, from the cache": lambda: timed(lambda: engine.load(folder / "now")),
        "blocked by dcp.async_save": dcp_blocked,
        "blocked by save, torch.optim": lambda: plumb_blocked(engine, model, folder / "background"),
        "blocked by save, Plumb's own AdamW": lambda: plumb_blocked(own, own_model, folder / "own"),
    }
    times: dict[str, list[Times]] = {name: [] for name in contestants}
    for _ in range(ROUNDS + 1):
        for name, contestant in contestants.items():
            times[name].append(contestant())
    print(f"{bytes_of / 1e6:.0f} MB")
    for name, all_of in times.items():
        clock, worked = (statistics.median(one[i] for one in all_of[1:]) for i in (0, 1))
        least = min(one[0] for one in all_of[1:])
        print(f"{name:36} {clock * 1e3:8.1f} ms (least {least * 1e3:8.1f})  {bytes_of / 1e6 / clock:8.0f} MB/s  processor {worked * 1e3:8.1f} ms")
    engine.close()
    own.close()
    dist.destroy_process_group()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
