"""Weight gradients accumulated into f32 sums on a GPU: the fused kernels beside the alternatives, in one run.

    python benchmarks/fused_gpu.py --library build/lib/libplumb.so

Checks every kernel against float32 products first, then prints one table per problem: median milliseconds and ratios.
"""
import argparse
import ctypes
import statistics
import sys
import time

import torch


def load(path):
    library = ctypes.CDLL(path)
    function = library.plumb_grouped_wgrad
    function.restype = ctypes.c_char_p
    function.argtypes = ([ctypes.c_void_p] * 3 + [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int] +
                         [ctypes.c_long] * 3 + [ctypes.c_int] * 2 + [ctypes.c_void_p])

    def call(dy, x, ends, sums, accumulate, variant=-1):
        pointers = (ctypes.c_void_p * len(sums))(*[s.data_ptr() for s in sums])
        wrong = function(dy.data_ptr(), x.data_ptr(), ends.data_ptr(), pointers, len(sums), dy.shape[0], dy.shape[1],
                         x.shape[1], int(accumulate), variant, torch.cuda.current_stream().cuda_stream)
        if wrong:
            raise RuntimeError(wrong.decode())
    return call


def milliseconds(ways, rounds=6, repeats=5, rest=0.0):
    """The median of each way, by name. They take turns, so that none always runs on a card that another has heated up. The
    host runs ahead, so that its own time stays out. `rest`: seconds of idleness before each, so that the power limit of
    the card does not decide; then a delay on the device hides the host."""
    events = {name: [] for name in ways}
    for turn in range(rounds):
        for name, work in ways.items():
            for i in range(repeats + 2):
                if rest:
                    torch.cuda.synchronize()
                    time.sleep(rest)
                    torch.cuda._sleep(400_000)  # cycles: longer than the host takes to enqueue
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                work()
                end.record()
                if i >= 2:
                    events[name].append((start, end))
            torch.cuda.synchronize()
    return {name: statistics.median(s.elapsed_time(e) for s, e in pairs) for name, pairs in events.items()}


def check(kernel, variants):
    torch.manual_seed(7)
    bad = 0
    for counts, out, width in [([0, 1, 17, 64, 0, 300, 128, 63], 256, 512), ([700, 0, 0], 200, 328), ([5], 8, 8),
                               ([0, 0, 900, 0], 1408, 2048), ([65, 129, 1, 1, 1, 190], 392, 136)]:
        rows = sum(counts)
        dy = torch.randn(rows, out, device="cuda").bfloat16()
        x = torch.randn(rows, width, device="cuda").bfloat16()
        ends = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
        begin, wanted = 0, []
        for count in counts:
            wanted.append(dy[begin:begin + count].float().t() @ x[begin:begin + count].float())
            begin += count
        for variant in variants:
            for accumulate in (False, True):
                old = [torch.randn(out, width, device="cuda") for _ in counts]
                sums = [o.clone() if accumulate else torch.full_like(o, float("nan")) for o in old]
                kernel(dy, x, ends, sums, accumulate, variant)
                torch.cuda.synchronize()
                for g, s in enumerate(sums):
                    want = wanted[g] + old[g] if accumulate else wanted[g]
                    error = ((s - want).norm() / want.norm().clamp(min=1e-20)).item()
                    exact = counts[g] > 0 or torch.equal(s, want)
                    if not error < 1e-5 or not exact:
                        bad += 1
                        if bad < 20:
                            print(f"WRONG variant {variant} counts {counts} group {g} accumulate {accumulate}: {error:.3g}")
        # What a neighbour holds must not leak in, not even an infinity.
        if len(counts) > 1 and rows > 1:
            begin = ends.tolist()[-2]
            dy2, x2 = dy.clone(), x.clone()
            dy2[begin:], x2[begin:] = float("inf"), float("nan")
            for variant in variants:
                sums = [torch.zeros(out, width, device="cuda") for _ in counts]
                kernel(dy2, x2, ends, sums, True, variant)
                if any(not torch.isfinite(s).all() for s in sums[:-1]):
                    bad += 1
                    print(f"LEAK variant {variant} counts {counts}")
    print("checked:", "all right" if bad == 0 else f"{bad} WRONG")
    return bad


def grouped(kernel, variants, groups, rows, out, width, ragged=False):
    torch.manual_seed(1)
    if ragged:
        weights = torch.rand(groups) ** 2
        counts = (weights / weights.sum() * rows).long()
        counts[0] += rows - counts.sum()
    else:
        counts = torch.full((groups,), rows // groups)
    host = counts.tolist()
    ends = counts.cumsum(0).to(torch.int32).cuda()
    dy = torch.randn(rows, out, device="cuda").bfloat16()
    x = torch.randn(rows, width, device="cuda").bfloat16()
    sums = torch.zeros(groups, out, width, device="cuda")
    parts = list(sums.unbind(0))

    def unfused():
        sums.add_(torch._grouped_mm(dy.t(), x, offs=ends))

    def loop():
        begin = 0
        for g, count in enumerate(host):
            a, b = dy[begin:begin + count], x[begin:begin + count]
            torch.addmm(parts[g], a.t(), b, out_dtype=torch.float32, out=parts[g])
            begin += count

    print(f"\n{groups} experts, {rows} tokens{' (ragged)' if ragged else ''}, weight {out} x {width}"
          f"{'back to back':>25}{'with rests':>20}")
    ways = {"_grouped_mm + f32 add": unfused, "a loop of addmm into f32": loop}
    for variant in variants:
        ways["fused" + (f", variant {variant}" if variant >= 0 else "")] = (
            lambda variant=variant: kernel(dy, x, ends, parts, True, variant))
    ways["fused, overwriting"] = lambda: kernel(dy, x, ends, parts, False)
    measured = [milliseconds(ways), milliseconds(ways, rest=0.005)]
    for name in ways:
        print(f"  {name:34} " + "   ".join(f"{m[name]:7.3f} ms {m['_grouped_mm + f32 add'] / m[name]:5.2f} x" for m in measured))


def linear(kernel, rows, out, width):
    dy = torch.randn(rows, out, device="cuda").bfloat16()
    x = torch.randn(rows, width, device="cuda").bfloat16()
    sums = torch.zeros(out, width, device="cuda")
    ends = torch.tensor([rows], dtype=torch.int32, device="cuda")
    bare_out = torch.empty(out, width, device="cuda")
    ways = {
        "mm + add": lambda: sums.add_(dy.t() @ x),  # the product is rounded to bf16
        "mm to f32 + add": lambda: sums.add_(torch.mm(dy.t(), x, out_dtype=torch.float32)),
        "fused": lambda: torch.addmm(sums, dy.t(), x, out_dtype=torch.float32, out=sums),
        "the grouped kernel": lambda: kernel(dy, x, ends, [sums], True),
        "bare GEMM to f32": lambda: torch.mm(dy.t(), x, out_dtype=torch.float32, out=bare_out),
    }
    for rest in (0.0, 0.005):
        m = milliseconds(ways, rest=rest)
        print(f"  {rows:6} tokens, {out:5} x {width:5}, {'with rests' if rest else 'back to back'}: " + ", ".join(
            f"{name} {t:.3f} ms ({t / m['fused']:.2f} of fused)" for name, t in m.items()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True)
    parser.add_argument("--variants", type=int, nargs="*", default=[-1])
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    kernel = load(arguments.library)
    bad = check(kernel, arguments.variants)
    for size in [(64, 16384, 1408, 2048), (64, 16384, 2048, 1408), (8, 16384, 14336, 4096), (8, 16384, 4096, 14336)]:
        grouped(kernel, arguments.variants, *size)
    grouped(kernel, arguments.variants, 64, 16384, 1408, 2048, ragged=True)
    grouped(kernel, arguments.variants, 8, 16384, 14336, 4096, ragged=True)
    print("\nLinear")
    for size in [(8192, 1024, 4096), (8192, 4096, 4096), (8192, 4096, 14336)]:
        linear(kernel, *size)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
