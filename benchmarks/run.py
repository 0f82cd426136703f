#!/usr/bin/env python3
"""Runs step.cpp's program, torch_peers.py and python.py side by side; prints a table per model and writes all samples as JSON.

    make bench                          1 and 2 ranks on this CPU, one thread each; 2 over shared memory, and by TCP
    make bench ARGS="--device cuda"     1 rank on a GPU
    make bench ARGS="--sides python"    Plumb's faces in Python and the peers they stand for, alone
    make bench ARGS=--quick             does it run at all; the figures mean nothing

Every ratio is to the plain variant of the same language, from the same processes, where the variants take turns in
short blocks. Memory comes from runs of their own, one variant each. DeepSpeed takes part where it can be imported.
"""

import argparse
import importlib.util
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
NAMES = {
    "plain-fused": "plain C++",
    "plumb": "**Plumb** ddp",
    "plumb-noledger": "**Plumb** ddp, no ledger",
    "plumb-zero1": "**Plumb** zero1",
    "plumb-zero2": "**Plumb** zero2",
    "plumb-zero3": "**Plumb** zero3",
    "plain": "plain Python",
    "ddp": "torch DDP",
    "ddp-views": "torch DDP, bucket views",
    "ddp-zero": "DDP + ZeroRedundancyOptimizer",
    "ddp-zero-views": "the same, both with views",
    "fsdp2": "torch FSDP2 per block",
    "engine-ddp": "**plumb.Engine** ddp",
    "engine-zero1": "**plumb.Engine** zero1",
    "engine-zero2": "**plumb.Engine** zero2",
    "engine-zero3": "**plumb.Engine** zero3",
    "fused-ddp": "**plumb.Engine** ddp, plumb.AdamW",
    "fused-zero1": "**plumb.Engine** zero1, plumb.AdamW",
    "fused-zero2": "**plumb.Engine** zero2, plumb.AdamW",
    "fused-zero3": "**plumb.Engine** zero3, plumb.AdamW",
    "face-ddp": "**plumb.DistributedDataParallel**",
    "face-fsdp": "**plumb.fully_shard** per block",
    "face-deepspeed-1": "**plumb.deepspeed** stage 1",
    "face-deepspeed-2": "**plumb.deepspeed** stage 2",
    "face-deepspeed-3": "**plumb.deepspeed** stage 3",
    "deepspeed-1": "DeepSpeed ZeRO-1",
    "deepspeed-2": "DeepSpeed ZeRO-2",
    "deepspeed-3": "DeepSpeed ZeRO-3",
}
LIMIT = 900  # seconds that one set of ranks may take


class Side(NamedTuple):
    """Variants that run in the same processes; the first one, plain steps, is what the others are compared with."""

    program: str
    backend: str
    variants: list


def python_sides(backends):
    """Plumb from Python with the peers in the same processes. DeepSpeed, which changes torch, in processes of its own."""
    strategies = ["ddp", "zero1", "zero2", "zero3"]
    faces = [f"engine-{s}" for s in strategies] + [f"fused-{s}" for s in strategies] + ["face-ddp", "face-fsdp"]
    faces += [f"face-deepspeed-{stage}" for stage in (1, 2, 3)]
    return [
        side
        for backend in backends
        for side in (
            Side("python.py", backend, ["plain", *faces, "ddp", "ddp-views", "fsdp2"]),
            Side("python.py", backend, ["plain", "deepspeed-1", "deepspeed-2", "deepspeed-3"]),
        )
    ]


def sides_of(device, ranks, which):
    if which == "python":
        return python_sides(["nccl"] if device == "cuda" else ["gloo"] if ranks == 1 else ["shm", "gloo"])
    plumb = ["plain-fused", "plumb", "plumb-zero1", "plumb-zero2", "plumb-zero3"]
    peers = ["plain", "ddp", "ddp-views", "ddp-zero", "ddp-zero-views", "fsdp2"]
    if ranks == 1:
        backend = "" if device == "cpu" else "nccl"
        return [
            Side("bench_step", backend, ["plain-fused", "plumb", "plumb-noledger", "plumb-zero3"]),
            Side("torch_peers.py", backend or "gloo", ["plain", "ddp-views", "fsdp2"]),
        ]
    backends = ["shm", "tcp"] if device == "cpu" else ["nccl"]
    theirs = "gloo" if device == "cpu" else "nccl"
    return [
        *(Side("bench_step", backend, plumb) for backend in backends),
        Side("torch_peers.py", theirs, peers),
        Side("torch_peers.py", theirs, ["plain", "deepspeed-1", "deepspeed-2", "deepspeed-3"]),
        *(python_sides(["shm", "gloo"] if device == "cpu" else ["nccl"]) if which == "all" else []),
    ]


def installed(side):
    return not side.variants[-1].startswith("deepspeed") or importlib.util.find_spec("deepspeed") is not None


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_ranks(command, ranks, backend=""):
    """Starts `ranks` processes of `command`; returns what each of them printed."""
    # Over TCP, as between machines: nothing is shared.
    shared = {"PLUMB_SHM": 0} if backend == "tcp" else {}
    shared |= {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": 1}
    processes = []
    try:
        for rank in range(ranks):
            env = os.environ | {k: str(v) for k, v in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        end = time.monotonic() + LIMIT
        outputs = [p.communicate(timeout=max(1, end - time.monotonic()))[0] for p in processes]
    except subprocess.TimeoutExpired:
        sys.exit(f"bench: {' '.join(command)} did not end within {LIMIT} s; try --quick, or fewer --rounds")
    finally:
        for p in processes:
            if p.poll() is None:
                p.kill()
    for rank, p in enumerate(processes):
        if p.returncode != 0:
            sys.exit(f"bench: rank {rank} of {' '.join(command)} ended with status {p.returncode}; its words are above")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def command_of(side, args, model, variants, rounds, steps, warmup):
    cpp = side.program == "bench_step"
    program = [str(args.bin / side.program)] if cpp else [sys.executable, str(HERE / side.program)]
    options = {"model": model, "device": args.device, "variants": ",".join(variants)}
    options |= {"backend": side.backend} if side.program != "torch_peers.py" and side.backend else {}
    options |= {"rounds": rounds, "steps": steps, "warmup": warmup} | ({} if cpp else {"clock": args.clock})
    return program + [word for key, value in options.items() for word in (f"--{key}", str(value))]


def samples_of(results, variant):
    """The blocks of a variant, over all passes and ranks, in the same order for every variant."""
    return [block for r in results for v in r["variants"] if v["name"] == variant for block in v["rounds"]]


def compare(results, variant, against):
    """Median step time, its ratio to the other's, and the middle half of the ratios of neighbouring blocks."""
    mine, other = samples_of(results, variant), samples_of(results, against)
    median = statistics.median(ms for block in mine for ms in block)
    ratio = median / statistics.median(ms for block in other for ms in block)
    each = [statistics.median(a) / statistics.median(b) for a, b in zip(mine, other)]
    low, _, high = statistics.quantiles(each, n=4) if len(each) > 1 else (each[0],) * 3
    return {"ms": median, "against": against, "ratio": ratio, "low": low, "high": high, "steps": len(mine)}


def measure(args, model, ranks):
    sides = sides_of(args.device, ranks, args.sides)
    here = [i for i, side in enumerate(sides) if installed(side)]
    results = {i: [] for i in here}
    for number in range(args.passes):
        for i in here:
            say(f"{model}, {ranks} rank(s), pass {number + 1} of {args.passes}: {', '.join(sides[i].variants)}")
            command = command_of(sides[i], args, model, sides[i].variants, args.rounds, args.steps, args.warmup)
            results[i] += run_ranks(command, ranks, sides[i].backend)
    sizes = {(r["tensors"], r["parameters"]) for rs in results.values() for r in rs}
    if len(sizes) != 1:
        sys.exit(f"bench: the two languages train different models: (tensors, parameters) are {sizes}")

    rows = []
    for i, side in enumerate(sides):
        memory = {}
        if args.memory and i in here:
            say(f"{model}, {ranks} rank(s), memory: {', '.join(side.variants)}")
            for variant in side.variants:
                memory[variant] = run_ranks(command_of(side, args, model, [variant], 1, 10, 2), ranks, side.backend)
            check_same_work(model, ranks, memory)
        for variant in side.variants if i in here else side.variants[1:]:
            row = {"model": model, "ranks": ranks, "variant": variant, "backend": side.backend}
            if i in here:
                row |= compare(results[i], variant, side.variants[0])
            for key in ("peak_mib", "device_peak_mib"):
                row[key] = max(r[key] for r in memory[variant]) if memory else None
            rows.append(row)
    tensors, parameters = sizes.pop()
    return {
        "model": model,
        "ranks": ranks,
        "tensors": tensors,
        "parameters": parameters,
        "torch": results[0][0]["torch"],
        "rows": rows,
        "ledger": compare(results[0], "plumb", "plumb-noledger") if "plumb-noledger" in sides[0].variants else None,
        "samples": [{"side": sides[i], "results": rs} for i, rs in results.items()],
    }


def check_same_work(model, ranks, memory):
    """All variants of a side that average over the ranks end with the same loss; on one rank, so do plain steps."""
    losses = {variant: results[0]["variants"][0]["loss"] for variant, results in memory.items()}
    same = [loss for variant, loss in losses.items() if ranks == 1 or not variant.startswith("plain")]
    if max(same) - min(same) > 1e-3 * abs(max(same)):
        sys.exit(f"bench: {model}, {ranks} rank(s): the variants do not do the same work; their losses are {losses}")


def table(rows, device):
    memory = ["peak_mib"] + (["device_peak_mib"] if device == "cuda" else [])
    cells = [["ranks", "", "over", "ms", "ratio", "middle half", "MiB"] + ["MiB on the GPU"] * (len(memory) - 1)]
    for r in rows:
        line = [str(r["ranks"]), NAMES[r["variant"]], r["backend"] or "–"]
        if "ms" not in r:
            line += ["not installed here"] + ["–"] * 2
        else:
            line += [f"{r['ms']:.2f}", f"{r['ratio']:.2f}", f"{r['low']:.2f}–{r['high']:.2f}"]
        cells.append(line + ["–" if r[key] is None else f"{r[key]:.0f}" for key in memory])
    widths = [max(map(len, column)) for column in zip(*cells)]
    cells.insert(1, ["-" * w for w in widths])
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths)) + " |" for line in cells)


def print_tables(measured, device):
    for model in dict.fromkeys(part["model"] for part in measured):
        parts = [part for part in measured if part["model"] == model]
        first = parts[0]
        print(f"\n**{model}**, {first['tensors']} tensors, {first['parameters']:,} parameters\n")
        print(table([row for part in parts for row in part["rows"]], device))
    print()
    for part in measured:
        if c := part["ledger"]:
            print(
                f"ledger, {part['model']}, {part['ranks']} rank(s): {100 * (c['ratio'] - 1):+.2f} % of a step "
                f"(middle half of the blocks {100 * (c['low'] - 1):+.2f} to {100 * (c['high'] - 1):+.2f})"
            )


def processor():
    with open("/proc/cpuinfo") as info:
        names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    return names[0] if names else platform.machine()


def say(text):
    print(f"bench: {text}", file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, default=HERE.parent / "build/bin", help="where bench_step is")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", help="numbers of ranks, by commas (1,2 on the CPU; 1 on cuda)")
    parser.add_argument("--models", default="gpt,tiny")
    parser.add_argument("--sides", choices=["all", "steps", "python"], default="all", help="C++ beside peers, Python, or both")
    parser.add_argument("--passes", type=int, default=3, help="fresh processes of each side, in turn")
    parser.add_argument("--rounds", type=int, default=3, help="blocks of each variant per pass")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a block")
    parser.add_argument("--warmup", type=int, default=5, help="steps of each variant before the first block")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: a rank's own time, on a busy machine (Python)")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="leave out the memory runs")
    parser.add_argument("--quick", action="store_true", help="one short pass")
    parser.add_argument("--out", type=Path, default=HERE.parent / "build/bench.json")
    args = parser.parse_args()
    if args.quick:
        args.passes, args.rounds, args.steps, args.warmup = 1, 2, 5, 3
    if args.sides != "python" and not (args.bin / "bench_step").exists():
        sys.exit(f"bench: no bench_step in {args.bin}; run `scripts/build build bench_step`, or pass --bin")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and take the ranks along
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > 0.3:
        say(f"the machine is busy (load {load:.1f} on {cores} cores): expect noise")
    ranks = [int(n) for n in (args.ranks or ("1" if args.device == "cuda" else "1,2")).split(",")]
    measured = [measure(args, model, n) for model in args.models.split(",") for n in ranks]

    load = f"{load:.1f} at the start and {os.getloadavg()[0]:.1f} at the end"
    print(f"\n{processor()}, {cores} cores, load {load}; torch {measured[0]['torch']}; {args.device}; ", end="")
    print(f"{args.passes * args.rounds * args.steps} timed steps per variant and rank, {args.clock} time")
    print_tables(measured, args.device)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    machine = {"processor": processor(), "cores": cores, "load": load, "device": args.device}
    args.out.write_text(json.dumps({"machine": machine, "measured": measured}) + "\n")
    print(f"\nall samples: {args.out}")


if __name__ == "__main__":
    main()
