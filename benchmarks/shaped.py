"""The step time of Plumb, torch DDP and FSDP2 over links that are slower than this machine's, in one run.

    .venv/bin/python benchmarks/shaped.py --blocks 4,32 --gbps 1,10 --latency 1

Two ranks that share no memory. Plumb's link is shaped by PLUMB_SHAPE, the peers' by a process group around gloo that does the
same sums: every round takes the latency, the bytes of a rank go one after the other, and a collective ends no sooner than that.
Rounds and bytes are counted as rings and trees have them, for both. The models, batches and peers are those of torch_peers.py.
"""

import argparse
import json
import math
import os
import queue
import socket
import statistics
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist
import torch_peers as peers
from torch._C._distributed_c10d import AllgatherOptions

RANKS = 2
VARIANTS = ("plumb ddp", "torch DDP", "plumb zero3", "FSDP2")


class Shaped(dist.ProcessGroup):
    """What gloo does, no sooner than a link of this latency and bandwidth would have it."""

    def __init__(self, inner, latency, gbps):
        super().__init__(inner.rank(), inner.size())
        self.inner, self.latency, self.bytes_per_s = inner, latency, gbps * 1e9 / 8
        self.free = 0.0  # when the link has sent what it was given
        self.under_way = queue.SimpleQueue()
        threading.Thread(target=self._end_in_time, daemon=True).start()

    def getBackendName(self):  # noqa: N802
        return "shaped"

    @property
    def group_name(self):
        return dist.distributed_c10d._world.pg_names[self]

    def _start(self, work, result, rounds, sent):
        self.free = max(self.free, time.monotonic()) + sent / self.bytes_per_s
        future = torch.futures.Future()
        self.under_way.put((work, self.free + rounds * self.latency, future, result))
        return torch._C._distributed_c10d._create_work_from_future(future)

    def _end_in_time(self):
        while True:
            work, arrival, future, result = self.under_way.get()
            work.wait()
            time.sleep(max(0.0, arrival - time.monotonic()))
            future.set_result(result)

    def _ring(self, work, result, turns, whole):
        steps = turns * (self.size() - 1)
        return self._start(work, result, steps, steps * whole.nbytes / self.size())

    def allreduce(self, tensors, opts=None):
        opts = opts or dist.AllreduceOptions()
        return self._ring(self.inner.allreduce(tensors, opts), tensors, 2, tensors[0])

    def _allgather_base(self, full, shard, opts=None):
        return self._ring(self.inner._allgather_base(full, shard, opts or AllgatherOptions()), [full], 1, full)

    def _reduce_scatter_base(self, shard, full, opts=None):
        opts = opts or dist.ReduceScatterOptions()
        return self._ring(self.inner._reduce_scatter_base(shard, full, opts), [shard], 1, full)

    # As torch 2.13 calls them.
    def all_gather_single(self, full, shard, opts=None):
        return self._allgather_base(full, shard)

    def reduce_scatter_single(self, shard, full, opts=None):
        return self._reduce_scatter_base(shard, full, opts)

    def allgather(self, outputs, inputs, opts=None):
        work = self.inner.allgather(outputs, inputs, opts or AllgatherOptions())
        return self._start(work, outputs, self.size() - 1, (self.size() - 1) * inputs[0].nbytes)

    def broadcast(self, tensors, opts=None):
        depth = math.ceil(math.log2(self.size()))
        work = self.inner.broadcast(tensors, opts or dist.BroadcastOptions())
        return self._start(work, tensors, depth, depth * tensors[0].nbytes)

    def barrier(self, opts=None):
        work = self.inner.barrier(opts or dist.BarrierOptions())
        return self._start(work, [], math.ceil(math.log2(self.size())), 0)


def model_of(blocks):
    return type("Gpt", (peers.Gpt,), {"LAYERS": blocks})


def build(variant, module, args):
    if variant.startswith("plumb"):
        import plumb  # noqa: PLC0415

        strategy = variant.split()[1]
        units = list(module.blocks) if strategy == "zero3" else None
        optimizer = torch.optim.AdamW(module.parameters(), **peers.ADAMW)
        engine = plumb.Engine(module, optimizer, strategy=strategy, units=units)

        def finish():
            engine.step()
            engine.zero_grad()

        return module, torch.Tensor.backward, finish, engine
    latency, gbps = args.latency / 1e3, float(args.gbps)

    def create(store, rank, size, timeout):
        return Shaped(dist.ProcessGroupGloo(store, rank, size, timeout), latency, gbps)

    dist.Backend.register_backend("shaped", create, devices=["cpu"])
    dist.init_process_group("shaped")
    built = peers.ddp(module) if variant == "torch DDP" else peers.fsdp2(module)
    return *built, dist


def be_a_rank(args):
    torch.set_num_threads(1)
    kind = model_of(int(args.blocks))
    torch.manual_seed(1)
    model, backward, finish, _kept = build(args.variant, kind(), args)
    torch.manual_seed(100 + int(os.environ["RANK"]))
    batches = kind.batches()
    times = []
    for step in range(args.steps + 3):
        start = time.perf_counter()
        loss = kind.loss(model, batches[step % peers.BATCHES])
        backward(loss)
        finish()
        times.append((time.perf_counter() - start) * 1e3)
    if os.environ["RANK"] == "0":
        print(json.dumps({"ms": times[3:], "loss": loss.item()}), flush=True)
    os._exit(0)


def measure(variant, blocks, gbps, args):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(RANKS):
        environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        if variant.startswith("plumb"):
            environment["PLUMB_SHAPE"] = f"latency={args.latency}ms,gbps={gbps}"
        words = [sys.executable, __file__, "--variant", variant, "--blocks", str(blocks), "--gbps", str(gbps)]
        words += ["--latency", str(args.latency), "--steps", str(args.steps)]
        ranks.append(subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit(f"{variant} failed")
    return json.loads(outputs[0].splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", default="4,32")
    parser.add_argument("--gbps", default="1,10")
    parser.add_argument("--latency", type=float, default=1, help="milliseconds")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--variant", choices=VARIANTS)
    args = parser.parse_args()
    if args.variant:
        be_a_rank(args)
    print("ms per step: the median, and the least, of all steps of all rounds")
    print(f"{'blocks':>6} {'Gbit/s':>6}  " + "".join(f"{name:>20}" for name in VARIANTS))
    for blocks in args.blocks.split(","):
        for gbps in args.gbps.split(","):
            times, losses = {name: [] for name in VARIANTS}, {}
            for number in range(args.rounds):
                for name in VARIANTS if number % 2 == 0 else reversed(VARIANTS):
                    result = measure(name, blocks, gbps, args)
                    times[name] += result["ms"]
                    losses[name] = result["loss"]
            assert max(losses.values()) - min(losses.values()) < 1e-3, losses
            cells = "".join(f"{statistics.median(times[n]):>12.1f} ({min(times[n]):.1f})" for n in VARIANTS)
            print(f"{blocks:>6} {gbps:>6}  {cells}", flush=True)


if __name__ == "__main__":
    main()
