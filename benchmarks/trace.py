#!/usr/bin/env python3
"""Sums up a trace of bench_step --trace: who waited for the device, and what ran at the same time on it.

    python benchmarks/trace.py FILE

Of the steps: the calls of the host's training threads that wait for the device, the time its kernels took, the time its
transfers took (collectives and what gloo copies to the host and back), and how much of the latter ran beside kernels.
"""
import json
import sys
from collections import Counter

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaFree", "cudaMalloc")


def union(spans):
    """Disjoint spans in order, and their length."""
    merged = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return merged, sum(end - begin for begin, end in merged)


def shared(first, second):
    """How long spans of both run; each list disjoint and in order."""
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        total += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total


def main(path):
    events = [e for e in json.load(open(path))["traceEvents"] if e.get("ph") == "X"]
    steps = [e for e in events if e["name"] == "step" and e.get("cat") == "user_annotation"]
    begin, end = min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)
    # The threads that train: the user's, and those that run the backward.
    threads = {e["tid"] for e in steps} | {e["tid"] for e in events if "Backward" in e["name"] and e.get("cat") == "cpu_op"}
    inside = lambda e: begin <= e["ts"] <= end
    waits = Counter(e["name"] for e in events if e.get("cat") == "cuda_runtime" and e["name"] in WAITS
                    and e["tid"] in threads and inside(e))
    kinds = {"kernel": [], "transfer": []}
    streams = {"kernel": set(), "transfer": set()}
    for e in events:
        if e.get("cat") not in ("kernel", "gpu_memcpy") or e["ts"] + e["dur"] < begin:
            continue
        travels = "nccl" in e["name"].lower() or (e["cat"] == "gpu_memcpy" and "DtoD" not in e["name"])
        kind = "transfer" if travels else "kernel"
        kinds[kind].append((e["ts"], e["ts"] + e["dur"]))
        streams[kind].add(e["args"].get("stream"))
    kernels, kernel_us = union(kinds["kernel"])
    transfers, transfer_us = union(kinds["transfer"])
    print(json.dumps({"steps": len(steps), "host_ms": round((end - begin) / 1e3, 3), "host_waits": dict(waits),
                      "kernels": len(kinds["kernel"]), "kernel_ms": round(kernel_us / 1e3, 3),
                      "kernel_streams": sorted(streams["kernel"]), "transfers": len(kinds["transfer"]),
                      "transfer_ms": round(transfer_us / 1e3, 3), "transfer_streams": sorted(streams["transfer"]),
                      "transfer_beside_kernels_ms": round(shared(kernels, transfers) / 1e3, 3)}))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
