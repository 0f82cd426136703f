"""The step time of Plumb's faces in Python beside plain PyTorch and the peers they stand for, in one run.

One process is one rank, as in torch_peers.py, whose models, batches, blocks and peers these are. `--backend gloo` has the
ranks share no memory, as between machines.
"""

import os
import sys

import torch
import torch_peers as peers


def engine(module, strategy, optimizer):
    """The native face. `optimizer` is made over the parameters: torch's own, or Plumb's fused one."""
    import plumb  # noqa: PLC0415

    units = list(module.blocks) if strategy == "zero3" else None
    made = plumb.Engine(module, optimizer(plumb, module), strategy=strategy, units=units)

    def finish():
        made.step()
        made.zero_grad()

    return module, torch.Tensor.backward, finish


def torchs(_, module):
    return torch.optim.AdamW(module.parameters(), **peers.ADAMW)


def plumbs(plumb, _):
    return plumb.AdamW(lr=peers.ADAMW["lr"])


def ddp(module):
    import plumb  # noqa: PLC0415

    return peers.with_optimizer(plumb.DistributedDataParallel(module), torchs(plumb, module))


def fully_shard(module):
    import plumb  # noqa: PLC0415

    return peers.fsdp2(module, plumb.fully_shard)


def deepspeed(module, stage):
    import plumb.deepspeed  # noqa: PLC0415

    config = {"train_micro_batch_size_per_gpu": peers.BATCH, "zero_allow_untested_optimizer": True}
    config["zero_optimization"] = {"stage": stage}
    optimizer = torchs(plumb, module)
    made, *_ = plumb.deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return made, made.backward, made.step


STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
peers.VARIANTS |= {f"engine-{s}": lambda module, s=s: engine(module, s, torchs) for s in STRATEGIES}
peers.VARIANTS |= {f"fused-{s}": lambda module, s=s: engine(module, s, plumbs) for s in STRATEGIES}
peers.VARIANTS |= {f"face-deepspeed-{s}": lambda module, s=s: deepspeed(module, s) for s in (1, 2, 3)}
peers.VARIANTS |= {"face-ddp": ddp, "face-fsdp": fully_shard}


if __name__ == "__main__":
    if "--backend" in sys.argv:
        at = sys.argv.index("--backend")
        if sys.argv[at + 1] == "gloo":
            os.environ["PLUMB_SHM"] = "0"
        del sys.argv[at : at + 2]
    peers.main()
