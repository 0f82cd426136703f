"""Compiled training steps, Plumb beside its peers and beside its own eager, in one run.

    PYTHONPATH=build/python python benchmarks/compiled.py [--rounds 12] [--steps 3] [--only 'plumb ddp;torch']

Two ranks of one thread on this machine, a small GPT, AdamW; first what replicates parameters, then what shards them. Every rank
holds all variants of a group, and they take their steps in turn: a round is a few steps of each, and a round's time of a variant
is divided by that of the group's first in the same round, so that a busy machine slows all alike. Printed are the median
times; the medians and quartiles of those ratios; and both by the processor's clock, which counts what all threads of a rank
did and nothing that it waited. ``--host`` takes a model so small that hardly anything but the host's work is left. ``--memory``
instead runs each variant in processes of its own and prints what a step takes at most above what there is between steps: bytes of tensors,
which are counted and no matter of chance, and of the process. ``--device cuda`` has one rank, on a GPU, which shards nothing; with
``--ranks 2`` two that share it, over gloo.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import plumb
from torch_peers import ADAMW, Block, Gpt, deepspeed, fsdp2, plain, with_optimizer

Step = tuple[Any, Callable[[torch.Tensor], None], Callable[[], None]]

# Of this process and of its ranks, which read the same, also where they are not forked.
DEVICE = os.environ.get("PLUMB_BENCH_DEVICE", "cpu")
HOST = os.environ.get("PLUMB_BENCH_HOST") == "1"  # a step is nearly all the host's work


class Model(Gpt):  # type: ignore[misc]
    LAYERS, HEADS, WIDTH, CONTEXT, VOCABULARY = (6, 2, 16, 8, 32) if HOST else (6, 4, 256, 64, 512)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), **ADAMW)


def engine(module: nn.Module, strategy: str) -> Step:
    made = plumb.Engine(module, plumb.AdamW(lr=3e-4), strategy=strategy, units=[Block])

    def finish() -> None:
        made.step()
        made.zero_grad()

    return module, torch.Tensor.backward, finish


def compiled(step: Step, **options: Any) -> Step:
    return torch.compile(step[0], **options), step[1], step[2]


def blocks_compiled(build: Callable[[nn.Module], Step]) -> Callable[[nn.Module], Step]:
    def made(module: Any) -> Step:
        step = build(module)
        for block in module.blocks:
            block.compile()
        return step

    return made


def ddp(module: nn.Module) -> Step:
    step: Step = with_optimizer(nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True), optimizer_of(module))
    return step


def face(module: nn.Module) -> Step:
    step: Step = with_optimizer(plumb.DistributedDataParallel(module, gradient_as_bucket_view=True), optimizer_of(module))
    return step


def deepspeed_compiled(stage: int) -> Callable[[nn.Module], Step]:
    def build(module: nn.Module) -> Step:
        made, backward, finish = deepspeed(module, stage)
        made.compile()
        return made, backward, finish

    return build


REPLICATED: dict[str, Callable[[Any], Step]] = {
    "plumb ddp, compiled": lambda module: compiled(engine(module, "ddp")),
    "plumb ddp, eager": lambda module: engine(module, "ddp"),
    "plumb.DistributedDataParallel, compiled": lambda module: compiled(face(module)),
    "torch DDP, compiled": lambda module: compiled(ddp(module)),
    "torch DDP, eager": ddp,
    "each rank alone, compiled": lambda module: compiled(plain(module)),
    "each rank alone, eager": plain,
    "plumb zero2, compiled": lambda module: compiled(engine(module, "zero2")),
    "DeepSpeed 2, compiled": deepspeed_compiled(2),
}
SHARDED: dict[str, Callable[[Any], Step]] = {
    "plumb zero3, compiled": lambda module: compiled(engine(module, "zero3")),
    "plumb zero3, one graph": lambda module: compiled(engine(module, "zero3"), fullgraph=True),
    "plumb zero3, eager": lambda module: engine(module, "zero3"),
    "each rank alone, eager": plain,
    "each rank alone, blocks compiled": blocks_compiled(plain),  # as many graphs as zero3's, and nothing of ours
    "FSDP2, compiled": lambda module: compiled(fsdp2(module)),
    "FSDP2, blocks compiled": blocks_compiled(fsdp2),
    "FSDP2, eager": fsdp2,
    "DeepSpeed 3, compiled": deepspeed_compiled(3),
}


GROUPS = {"replicated": REPLICATED, "sharded": SHARDED}
CLOCKS = (time.perf_counter, time.process_time)


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def with_code_of_its_own(module: nn.Module) -> nn.Module:
    """torch keeps what it compiled, and what it gave up compiling (a forward whose loop has a graph break), by the code of a function: of
    one class, one variant's decides what the others run."""
    made: dict[type[nn.Module], type[nn.Module]] = {}
    for part in module.modules():
        kind = type(part)
        if kind not in (Model, Block):
            continue
        if kind not in made:
            forward = kind.forward
            own = types.FunctionType(forward.__code__.replace(), forward.__globals__, forward.__name__, forward.__defaults__)
            made[kind] = type(kind.__name__, (kind,), {"forward": own})
        part.__class__ = made[kind]
    return module


class Variant:
    def __init__(self, build: Callable[[Any], Step]) -> None:
        torch.manual_seed(1)
        module = with_code_of_its_own(Model().to(DEVICE))
        torch.manual_seed(100 + dist.get_rank())
        self.batches, self.done = Model.batches().to(DEVICE), 0
        self.model, self.backward, self.finish = build(module)
        self.times: list[tuple[float, ...]] = []  # per step, by each of the clocks

    def step(self) -> float:
        loss = Model.loss(self.model, self.batches[self.done % len(self.batches)])
        self.backward(loss)
        self.finish()
        self.done += 1
        return float(loss.detach())

    def round(self, steps: int) -> None:
        dist.barrier()
        synchronize()
        start = [clock() for clock in CLOCKS]
        for _ in range(steps):
            self.step()
        synchronize()
        self.times.append(tuple((clock() - before) / steps for clock, before in zip(CLOCKS, start, strict=True)))


def begin() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable()
    alone = os.environ.get("WORLD_SIZE") == "1"
    dist.init_process_group("nccl" if DEVICE == "cuda" and alone else "gloo")  # NCCL refuses ranks that share a device
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    torch._dynamo.config.recompile_limit = 64


def wanted(group: str, only: str) -> list[str]:
    return [name for name in GROUPS[group] if any(word in name for word in only.split(";"))]


def measure(group: str, rounds: int, steps: int, only: str) -> tuple[dict[str, list[tuple[float, ...]]], dict[str, float]]:
    begin()
    variants, losses = {}, {}
    for name in wanted(group, only):
        build = GROUPS[group][name]
        try:
            variants[name] = Variant(build)
            losses[name] = [variants[name].step() for _ in range(3)][-1]
        except Exception as error:  # noqa: BLE001  (a peer that does not run here is said, and left out)
            if name.startswith("plumb"):
                raise
            variants.pop(name, None)
            if dist.get_rank() == 0:
                print(f"{name}: does not run here: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
    for number in range(rounds):
        names = list(variants)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            variants[name].round(steps)
    return {name: variant.times for name, variant in variants.items()}, losses


def status(field: str) -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(field))


def most_tensors(step: Callable[[], Any]) -> float:
    """MB of tensors that a step has at most above what it begins with. (Not what ranks of one machine read in place of each other.)"""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most / 2**20


def most_memory(group: str, name: str) -> tuple[float, float]:
    """MB of tensors and of the process that a step takes at most above what there is between steps, once everything is compiled."""
    begin()
    variant = Variant(GROUPS[group][name])
    for _ in range(4):
        variant.step()
    if DEVICE == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(4):
            variant.step()
        most = (torch.cuda.max_memory_allocated() - before) / 2**20
        return most, most
    between = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak
    for _ in range(4):
        variant.step()
    of_process = status("VmHWM") - between
    return most_tensors(variant.step), of_process


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} … {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", default="plumb;torch;alone;FSDP2;DeepSpeed")
    parser.add_argument("--group", choices=GROUPS)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: on one GPU")
    parser.add_argument("--ranks", type=int, help="2; on a GPU 1")
    options = parser.parse_args()
    os.environ["PLUMB_BENCH_DEVICE"] = options.device
    on_gpu = options.device == "cuda"
    ranks, method = options.ranks or (1 if on_gpu else 2), "spawn" if on_gpu else None
    if options.host and not HOST:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PLUMB_BENCH_HOST": "1"})
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.memory and "MALLOC_MMAP_THRESHOLD_" not in os.environ:  # so that what is freed is gone
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"})
    for group in GROUPS if options.group is None else [options.group]:
        if options.memory:
            for name in wanted(group, options.only):
                most = plumb.spawn(most_memory, ranks, (group, name), timeout=1000, method=method)
                tensors, process = (max(column) for column in zip(*most, strict=True))
                print(f"{name:42s} {tensors:8.2f} MB of tensors {process:8.1f} MB of the process", flush=True)
            continue
        times, losses = plumb.spawn(measure, ranks, (group, options.rounds, options.steps, options.only), timeout=3000, method=method)[0]
        first = next(iter(times))
        for name, rounds in times.items():
            columns = []
            for clock in range(len(CLOCKS)):
                ratios = [one[clock] / other[clock] for one, other in zip(rounds, times[first], strict=True)]
                columns.append(f"{1e3 * statistics.median(one[clock] for one in rounds):8.1f} ms  × {quartiles(ratios)}")
            print(f"{name:42s} {columns[0]}   processor {columns[1]}   loss {losses[name]:.4f}", flush=True)


if __name__ == "__main__":
    main()
