"""What it costs that ranks ask before they gather: python benchmarks/asking.py

zero3 over many small units, two ranks that share no memory (TCP alone), with ``ask_before_gathers`` and without; engines take turns
in the same processes, and medians count."""

from __future__ import annotations

import os
import statistics
import sys
import time

import torch

import plumb

UNITS, LINEARS, WIDTH = 24, 6, 32
TURNS, STEPS = 5, 20


def block() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LINEARS)), torch.nn.Tanh())


def measure() -> dict[str, list[float]]:
    torch.set_num_threads(1)
    world = plumb.world()
    variants: dict[str, tuple[torch.nn.Module, plumb.Engine]] = {}
    for name, asks in (("without asking", False), ("asking", True)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(block() for _ in range(UNITS)))
        variants[name] = model, plumb.Engine(model, plumb.AdamW(lr=1e-3), strategy="zero3", units=list(model), world=world,
                                             ask_before_gathers=asks)
    times: dict[str, list[float]] = {name: [] for name in variants}
    batch = torch.randn(8, WIDTH)
    for turn in range(TURNS + 1):
        for name, (model, engine) in variants.items():
            for _ in range(STEPS):
                begin = time.perf_counter()
                model(batch).square().mean().backward()
                engine.step()
                engine.zero_grad()
                if turn > 0:  # the first turn learns the order of the units
                    times[name].append(1e3 * (time.perf_counter() - begin))
    return times


def main() -> None:
    os.environ["PLUMB_SHM"] = "0"
    for name, times in plumb.spawn(measure, ranks=2)[0].items():
        print(f"{name}: {statistics.median(times):.2f} ms a step")


if __name__ == "__main__":
    sys.exit(main())
