"""torch's DistributedDataParallel by Plumb: uneven inputs, and gradients that travel in bf16.

    torchrun --nproc-per-node 2 examples/wrapped.py

An unchanged program that imports torch's class runs the same way under ``torchrun --nproc-per-node 2 -m plumb program.py``.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import plumb


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = plumb.DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    data = torch.Generator().manual_seed(rank)
    batches = [torch.randn(16, 8, generator=data) for _ in range(20 + 5 * rank)]  # ranks have unlike numbers of them
    with model.join():
        for x in batches:
            loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()  # gradients are the ranks' mean from here on
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    if rank == 0:
        print(f"the last loss of rank 0: {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
