"""When gradients reach the engine, as fractions of a backward: eager, compiled as torch does it, and delivered inside.

    PYTHONPATH=build/python python benchmarks/compiled_overlap.py [--backend inductor|aot_eager] [--width 256] [--layers 6]

Two ranks of one thread each. A row: when the first, the middle and the last gradient came, and how many buckets' reductions had
begun when the compiled graph returned. Medians over the passes after the first three.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import plumb
from plumb import compiled


WHOLE = "the whole backward"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def measure(how: str, backend: str, width: int, layers: int, passes: int) -> dict[str, float]:
    torch.set_num_threads(1)
    compiled.deliver_inside = how == "delivered inside"
    world = plumb.World.join(backend="shm", timeout=300)
    torch.manual_seed(1)
    model = nn.Sequential(*[Block(width) for _ in range(layers)])
    chosen: Any = compiled.aot_eager_backend if backend == "aot_eager" else backend
    with plumb.Engine(model, plumb.SGD(lr=1e-3), world=world, bucket_bytes=1 << 20, first_bucket_bytes=1 << 18) as engine:
        seen = model if how == "eager" else torch.compile(model, backend=chosen)
        rows: list[tuple[float, ...]] = []
        for i in range(passes + 3):
            x = torch.randn(64, width, generator=torch.Generator().manual_seed(i), requires_grad=True)
            begun = [0, 0]
            x.register_hook(lambda g: begun.__setitem__(slice(None), engine._engine.reductions))
            loss = seen(x).pow(2).mean()
            with profile(activities=[ProfilerActivity.CPU]) as seen_by, record_function(WHOLE):
                loss.backward()
            engine.step()
            engine.zero_grad()
            if i < 3:
                continue
            events = seen_by.events()
            whole = next(event.time_range for event in events if event.name == WHOLE)
            came = "plumb::deliver" if how == "delivered inside" else "torch::autograd::AccumulateGrad"
            arrivals = sorted((event.time_range.start - whole.start) / whole.elapsed_us() for event in events if event.name == came)
            rows.append((arrivals[0], arrivals[len(arrivals) // 2], arrivals[-1], *begun, whole.elapsed_us() / 1e3))
    names = ("first", "middle", "last", "begun", "buckets", "ms")
    return {name: statistics.median(row[k] for row in rows) for k, name in enumerate(names)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--passes", type=int, default=20)
    options = parser.parse_args()
    for how in ("eager", "compiled", "delivered inside"):
        row = plumb.spawn(measure, 2, (how, options.backend, options.width, options.layers, options.passes), timeout=500)[0]
        print(
            f"{how:18s} gradients at {row['first']:.2f} {row['middle']:.2f} {row['last']:.2f} of a backward of {row['ms']:.1f} ms;"
            f" {row['begun']:.0f} of {row['buckets']:.0f} reductions begun when the graph returned"
        )


if __name__ == "__main__":
    main()
