"""Makes the folders beside it with the DeepSpeed that is installed, and has DeepSpeed load what Plumb writes.

    python tests/python/deepspeed_folders/make.py STAGE fp32|bf16 FOLDER [RANKS]        trains three steps and saves them
    python tests/python/deepspeed_folders/make.py STAGE fp32|bf16 - RANKS FOLDER        loads a universal folder; the state it got,
                                                                                        as FOLDER/resumed.pt

``expected.safetensors`` is what DeepSpeed's own zero_to_fp32 and ds_to_universal find in a folder. Not run by the tests:
DeepSpeed compiles extensions when it is imported.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

os.environ.setdefault("DS_ACCELERATOR", "cpu")
warnings.simplefilter("ignore")


class Net(torch.nn.Module):
    """A tied weight, a frozen layer, buffers, sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(11, 6)
        self.one = torch.nn.Linear(6, 7)
        self.frozen = torch.nn.Linear(7, 7)
        self.norm = torch.nn.LayerNorm(7)
        self.register_buffer("seen", torch.arange(3))
        self.register_buffer("ratio", torch.rand(4))
        self.head = torch.nn.Linear(7, 11)
        self.back = torch.nn.Linear(6, 11, bias=False)
        self.back.weight = self.emb.weight
        self.frozen.requires_grad_(False)
        self.scale = torch.nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.emb(x)
        y = self.head(self.norm(self.frozen(torch.tanh(self.one(h))))) * self.scale
        return (y + self.back(h)).float().square().mean()


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]


def run(rank: int, size: int, stage: int, dtype: str, out: str, load: str) -> None:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29671")
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": dtype == "bf16"},
        "checkpoint": {"load_universal": bool(load)},
    }
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
    if load:
        engine.load_checkpoint(load)
        words = ("exp_avg", "exp_avg_sq")
        state = {
            name: [safe_get_full_fp32_param(p).clone(), *(safe_get_full_optimizer_state(p, key).clone() for key in words)]
            for name, p in model.named_parameters()
            if p.requires_grad
        }
        if rank == 0:
            torch.save(state, os.path.join(load, "resumed.pt"))
    else:
        for _ in range(3):
            generator = torch.Generator().manual_seed(10 * engine.global_steps + rank)
            engine.backward(engine(torch.randint(0, 11, (4,), generator=generator)))
            engine.step()
        engine.save_checkpoint(out, client_state={"epoch": 3, "best": 1.5})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = int(sys.argv[4]) if len(sys.argv) > 4 else 2
    source = sys.argv[5] if len(sys.argv) > 5 else ""
    torch.multiprocessing.spawn(run, (ranks, int(sys.argv[1]), sys.argv[2], sys.argv[3], source), nprocs=ranks)
