"""What `plumb estimate` predicts beside what runs over shaped links take, by strategy and number of ranks.

    .venv/bin/python benchmarks/estimate.py build/bin/plumb --ranks 2,4,8,16,32,64 --latency 10 --gbps 1

Ranks are threads (backend local), whose collectives are counted, shaped and predicted as rings. A run without the link gives
what everything else takes; predicted is that, and what the model says is exposed, and the one message in which the program shares
its loss.
"""

import argparse
import json
import subprocess


def last_line(words):
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def numbers(text):
    return [int(word) for word in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plumb")
    parser.add_argument("--ranks", type=numbers, default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--strategies", default="ddp,zero1,zero2,zero3,hsdp")
    parser.add_argument("--latency", type=float, default=10, help="milliseconds")
    parser.add_argument("--gbps", type=float, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=32)
    args = parser.parse_args()
    model = ["--layers", str(args.layers), "--heads", "2", "--width", str(args.width), "--context", "32"]
    print(f"{'strategy':8} {'ranks':>5} {'free ms':>9} {'predicted':>10} {'measured':>9} {'off by':>7}")
    worst = 0.0
    for strategy in args.strategies.split(","):
        for ranks in args.ranks:
            world = ["--ranks", str(ranks), "--strategy", strategy]
            train = [args.plumb, "train", *model, *world, "--backend", "local", "--batch", "64", "--steps", str(args.steps),
                     "--eval-every", "0", "--questions", "64", "--threads", "1", "--json"]
            free = last_line(train)["step_ms_median"]
            shaped = last_line([*train, "--shape", f"latency={args.latency}ms,gbps={args.gbps}"])["step_ms_median"]
            said = last_line([args.plumb, "estimate", *model, *world, "--backend", "local", "--latency", f"{args.latency}ms",
                              "--bandwidth", str(args.gbps), "--json"])["estimates"][0]["time"]
            predicted = free + 1e3 * (said["exposed_s"] + said["control_s"] / 2)
            off = predicted / shaped - 1
            worst = max(worst, abs(off))
            print(f"{strategy:8} {ranks:5} {free:9.1f} {predicted:10.1f} {shaped:9.1f} {100 * off:+6.1f}%", flush=True)
    print(f"at most {100 * worst:.1f} % off")


if __name__ == "__main__":
    main()
