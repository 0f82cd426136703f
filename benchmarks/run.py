#!/usr/bin/env python3
"""Runs step.cpp's program and torch_ddp.py side by side; prints one table and writes all samples as JSON.

    make bench                          1 and 2 ranks on this CPU, one thread each; 2 over shared memory and over gloo
    make bench ARGS="--device cuda"     1 rank on a GPU
    make bench ARGS=--quick             does it run at all; the figures mean nothing

Every ratio is to the plain variant of the same language, from the same processes, where the variants take turns in
short blocks. Memory comes from runs of their own, one variant each.
"""

import argparse
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

HERE = Path(__file__).resolve().parent
VARIANTS = {
    "c++": ["plain", "plain-fused", "plumb", "plumb-noledger"],
    "python": ["plain", "plain-fused", "ddp", "ddp-fused", "ddp-views", "ddp-views-fused"],
}
LIMIT = 900  # seconds that one set of ranks may take


def baseline(variant):
    """The plain variant with the same optimizer; the engine's is libtorch's fused one."""
    return "plain-fused" if variant.endswith("-fused") or variant.startswith("plumb") else "plain"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_ranks(command, ranks):
    """Starts `ranks` processes of `command`; returns what each of them printed."""
    shared = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": 1}
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


def sides_of(args, ranks):
    """What is run beside each other: its name, its backend (empty: the program's choice), its variants."""
    if ranks == 1 or args.device == "cuda":
        return {language: ("", variants) for language, variants in VARIANTS.items()}
    return {
        "c++, shm": ("shm", VARIANTS["c++"]),
        "c++, gloo": ("gloo", ["plain-fused", "plumb"]),
        "python, gloo": ("", VARIANTS["python"]),
    }


def command_of(side, backend, args, model, variants, rounds, steps, warmup):
    cpp = side.startswith("c++")
    program = [str(args.bin / "bench_step")] if cpp else [sys.executable, str(HERE / "torch_ddp.py")]
    options = {"model": model, "device": args.device, "variants": ",".join(variants)}
    options |= {"backend": backend} if backend else {}
    options |= {"rounds": rounds, "steps": steps, "warmup": warmup}
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
    sides = sides_of(args, ranks)
    results = {side: [] for side in sides}
    for number in range(args.passes):
        for side, (backend, variants) in sides.items():
            say(f"{model}, {ranks} rank(s), {args.device}: {side}, pass {number + 1} of {args.passes}")
            command = command_of(side, backend, args, model, variants, args.rounds, args.steps, args.warmup)
            results[side] += run_ranks(command, ranks)
    sizes = {(r["tensors"], r["parameters"]) for rs in results.values() for r in rs}
    if len(sizes) != 1:
        sys.exit(f"bench: the two languages train different models: (tensors, parameters) are {sizes}")

    rows = []
    for side, (backend, variants) in sides.items():
        memory = {}
        if args.memory:
            say(f"{model}, {ranks} rank(s), {args.device}: {side}, memory")
            for variant in variants:
                memory[variant] = run_ranks(command_of(side, backend, args, model, [variant], 1, 10, 2), ranks)
            check_same_work(side, model, ranks, memory)
        for variant in variants:
            row = {"side": side, "model": model, "ranks": ranks, "device": args.device, "variant": variant}
            row |= compare(results[side], variant, baseline(variant))
            for key in ("peak_mib", "device_peak_mib"):
                row[key] = max(r[key] for r in memory[variant]) if memory else None
            rows.append(row)
    ledger = compare(next(iter(results.values())), "plumb", "plumb-noledger")
    tensors, parameters = sizes.pop()
    return {
        "model": model,
        "ranks": ranks,
        "tensors": tensors,
        "parameters": parameters,
        "torch": {side: rs[0]["torch"] for side, rs in results.items()},
        "rows": rows,
        "ledger": ledger,
        "samples": results,
    }


def check_same_work(side, model, ranks, memory):
    """On one rank every variant of a language trains the same model on the same batches: so are the losses."""
    losses = {variant: results[0]["variants"][0]["loss"] for variant, results in memory.items()}
    if ranks == 1 and max(losses.values()) - min(losses.values()) > 1e-3 * abs(losses["plain"]):
        sys.exit(f"bench: {side}, {model}: the variants do not do the same work; their losses are {losses}")


def print_table(measured, device):
    cells = [["model", "ranks", "", "variant", "ms", "ratio", "middle half", "to", "MiB"]]
    if device == "cuda":
        cells[0].append("MiB on the GPU")
    for part in measured:
        for r in part["rows"]:
            line = [r["model"], r["ranks"], r["side"], r["variant"], f"{r['ms']:.3f}", f"{r['ratio']:.3f}"]
            line += [f"{r['low']:.3f}–{r['high']:.3f}", r["against"]]
            line += ["–" if r["peak_mib"] is None else f"{r['peak_mib']:.0f}"]
            if device == "cuda":
                line += ["–" if r["device_peak_mib"] is None else f"{r['device_peak_mib']:.0f}"]
            cells.append([str(c) for c in line])
    widths = [max(map(len, column)) for column in zip(*cells)]
    cells.insert(1, ["-" * w for w in widths])
    for line in cells:
        print("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths)) + " |")
    print()
    for part in measured:
        c = part["ledger"]
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
    parser.add_argument("--passes", type=int, default=2, help="fresh processes of each language, in turn")
    parser.add_argument("--rounds", type=int, default=6, help="blocks of each variant per pass")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a block")
    parser.add_argument("--warmup", type=int, default=10, help="steps of each variant before the first block")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="leave out the memory runs")
    parser.add_argument("--quick", action="store_true", help="one short pass")
    parser.add_argument("--out", type=Path, default=HERE.parent / "build/bench.json")
    args = parser.parse_args()
    if args.quick:
        args.passes, args.rounds, args.steps, args.warmup = 1, 2, 5, 3
    if not (args.bin / "bench_step").exists():
        sys.exit(f"bench: no bench_step in {args.bin}; run `scripts/build build bench_step`, or pass --bin")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and take the ranks along
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > 0.3:
        say(f"the machine is busy (load {load:.1f} on {cores} cores): expect noise")
    ranks = [int(n) for n in (args.ranks or ("1" if args.device == "cuda" else "1,2")).split(",")]
    measured = [measure(args, model, n) for model in args.models.split(",") for n in ranks]

    torch = list(measured[0]["torch"].values())[-1]
    print(f"\n{processor()}, {cores} cores, load {load:.1f} at the start; torch {torch}; {args.device}; ", end="")
    print(f"{args.passes * args.rounds * args.steps} timed steps per variant and rank\n")
    print_table(measured, args.device)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    machine = {"processor": processor(), "cores": cores, "load": load, "device": args.device}
    args.out.write_text(json.dumps({"machine": machine, "measured": measured}) + "\n")
    print(f"\nall samples: {args.out}")


if __name__ == "__main__":
    main()
