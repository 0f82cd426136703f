"""The step time of the same programs as step.cpp in PyTorch, plain and with each of Plumb's peers, in one run.

One process is one rank, by the environment of torchrun; run.py starts the ranks and reads the one line of JSON that
each prints. The models, the batches, the blocks and their order are those of step.cpp. DeepSpeed is imported only where
one of its variants is asked for.
"""

import argparse
import json
import logging
import os
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

BATCH = 8  # samples per rank and step
BATCHES = 8  # different ones, in turn
UNTIMED = 2  # steps at the start of a block: they find the caches full of another variant's data
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}  # cpu: of all threads of a rank; sleeping counts nothing
ADAMW = {"lr": 3e-4, "fused": True}


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        qkv = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class Gpt(nn.Module):
    LAYERS, HEADS, WIDTH, CONTEXT, VOCABULARY = 4, 5, 320, 64, 512

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(self.VOCABULARY, self.WIDTH)
        self.positions = nn.Embedding(self.CONTEXT, self.WIDTH)
        self.blocks = nn.ModuleList(Block(self.WIDTH, self.HEADS) for _ in range(self.LAYERS))
        self.norm = nn.LayerNorm(self.WIDTH)
        self.head = nn.Linear(self.WIDTH, self.VOCABULARY, bias=False)
        # As src/model does it: projections that end in the residual stream start smaller.
        for name, p in self.named_parameters():
            if p.dim() > 1:
                residual = name.endswith((".out.weight", ".down.weight"))
                nn.init.normal_(p, 0.0, 0.02 / (2 * self.LAYERS) ** 0.5 if residual else 0.02)
            elif name.endswith(".bias"):
                nn.init.zeros_(p)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @classmethod
    def batches(cls):
        return torch.randint(cls.VOCABULARY, (BATCHES, BATCH, cls.CONTEXT + 1))

    @staticmethod
    def loss(model, batch):
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class TinyBlock(nn.Module):
    LINEARS, WIDTH = 6, 32

    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(self.WIDTH, self.WIDTH) for _ in range(self.LINEARS))

    def forward(self, x):
        y = x
        for linear in self.linears:
            y = linear(y).relu()
        return x + y


class Tiny(nn.Module):
    def __init__(self, blocks=24):
        super().__init__()
        self.blocks = nn.ModuleList(TinyBlock() for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    @staticmethod
    def batches():
        return torch.randn(BATCHES, 2, BATCH, TinyBlock.WIDTH)

    @staticmethod
    def loss(model, batch):
        return F.mse_loss(model(batch[0]), batch[1])


def with_optimizer(model, optimizer):
    """The usual step; a builder returns the model to call, what it does with the loss, and all that follows."""

    def finish():
        optimizer.step()
        optimizer.zero_grad()

    return model, torch.Tensor.backward, finish


def plain(module):
    return with_optimizer(module, torch.optim.AdamW(module.parameters(), **ADAMW))


def ddp(module, **options):
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    return with_optimizer(DistributedDataParallel(module, **options), optimizer)


def ddp_zero(module, views):
    """Replicated parameters and gradients, sharded optimizer state: the peer of zero1."""
    model = DistributedDataParallel(module, gradient_as_bucket_view=views)
    options = {"parameters_as_bucket_view": views} | ADAMW
    return with_optimizer(model, ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, **options))


def fsdp2(module, fully_shard=fully_shard):
    mesh = init_device_mesh(next(module.parameters()).device.type, (dist.get_world_size(),))
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    return plain(fully_shard(module, mesh=mesh))


def deepspeed(module, stage):
    os.environ.setdefault("DS_ACCELERATOR", next(module.parameters()).device.type)
    import deepspeed  # noqa: PLC0415

    logging.disable()
    warnings.simplefilter("ignore", FutureWarning)  # torch's, about the calls that DeepSpeed makes
    config = {"train_micro_batch_size_per_gpu": BATCH, "steps_per_print": 10**9, "zero_allow_untested_optimizer": True}
    config["zero_optimization"] = {"stage": stage}
    deepspeed.init_distributed(dist_backend=dist.get_backend())
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return engine, engine.backward, engine.step


VARIANTS = {
    "plain": plain,
    "ddp": ddp,
    "ddp-views": lambda module: ddp(module, gradient_as_bucket_view=True),
    "ddp-zero": lambda module: ddp_zero(module, views=False),
    "ddp-zero-views": lambda module: ddp_zero(module, views=True),
    "fsdp2": fsdp2,
    "deepspeed-1": lambda module: deepspeed(module, 1),
    "deepspeed-2": lambda module: deepspeed(module, 2),
    "deepspeed-3": lambda module: deepspeed(module, 3),
}


class Variant:
    def __init__(self, name, kind, device, *size):
        self.name, self.kind, self.done, self.rounds = name, kind, 0, []
        torch.manual_seed(1)
        module = kind(*size).to(device)
        parameters = list(module.parameters())
        self.tensors, self.parameters = len(parameters), sum(p.numel() for p in parameters)
        torch.manual_seed(100 + dist.get_rank())
        self.batches = kind.batches().to(device)
        self.model, self.backward, self.finish = VARIANTS[name](module)

    def step(self):
        self.backward(self.kind.loss(self.model, self.batches[self.done % BATCHES]))
        self.done += 1
        self.finish()

    def run_block(self, steps, cuda, clock):
        """On the CPU each step is timed; on a device, which runs behind the host, the block as a whole."""
        for _ in range(UNTIMED):
            self.step()
        if cuda:
            torch.cuda.synchronize()
        times, start = [], clock()
        for _ in range(steps):
            self.step()
            if not cuda:
                times.append((clock() - start) * 1e3)
                start = clock()
        if cuda:
            torch.cuda.synchronize()
            times = [(clock() - start) * 1e3 / steps]
        self.rounds.append([round(ms, 5) for ms in times])

    def final_loss(self):
        with torch.no_grad():
            return self.kind.loss(self.model, self.batches[0]).item()


def status_mib(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(key)) / 1024


def bring_up(names, device):
    """Loads and starts what the variants need, so that it counts for none: modules, threads, connections."""
    for name in names:
        Variant(name, Tiny, device, 1).step()
    with open("/proc/self/clear_refs", "w") as peak:  # the peak of memory begins anew
        peak.write("5")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["gpt", "tiny"], default="gpt")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--variants", default=",".join(v for v in VARIANTS if not v.startswith("deepspeed")))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    args = parser.parse_args()
    names = args.variants.split(",")
    for name in names:
        if name not in VARIANTS:
            parser.error(f"variant '{name}' is unknown; there are {', '.join(VARIANTS)}")

    torch.set_num_threads(1)
    cuda = args.device == "cuda"
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    bring_up(names, device)
    dist.barrier()
    start_mib = status_mib("VmRSS:")

    kind = {"gpt": Gpt, "tiny": Tiny}[args.model]
    variants = [Variant(name, kind, device) for name in names]
    for variant in variants:
        for _ in range(args.warmup):
            variant.step()
    for number in range(args.rounds):
        # Every other round runs backwards: no variant always follows the same one.
        for variant in variants if number % 2 == 0 else reversed(variants):
            if cuda:
                torch.cuda.synchronize()
            dist.barrier()
            variant.run_block(args.steps, cuda, CLOCKS[args.clock])
    dist.barrier()

    result = {
        "language": "python",
        "torch": torch.__version__,
        "rank": dist.get_rank(),
        "world": dist.get_world_size(),
        "model": args.model,
        "device": args.device,
        "tensors": variants[0].tensors,
        "parameters": variants[0].parameters,
        "peak_mib": status_mib("VmHWM:") - start_mib,
        "device_peak_mib": torch.cuda.max_memory_allocated() / 2**20 if cuda else 0,
        "variants": [{"name": v.name, "loss": v.final_loss(), "rounds": v.rounds} for v in variants],
    }
    print(json.dumps(result), flush=True)
    variants.clear()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
