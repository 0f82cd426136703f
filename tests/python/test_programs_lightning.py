"""Lightning's Trainer, unchanged, under ``python -m plumb``: its own launcher with DDP, and fully_shard by its ModelParallelStrategy."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import torch

pytest.importorskip("lightning")

PROGRAM = '''
import sys
import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))

    def configure_model(self):
        if sys.argv[1] == "sharded":
            for layer in (self.layers[0], self.layers[2], self.layers):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, _):
        loss = torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


if __name__ == "__main__":
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(32, 8, generator=generator), torch.randn(32, 4, generator=generator))
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1) if sys.argv[1] == "sharded" else "ddp"
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.1 if strategy == "ddp" else None,
        use_distributed_sampler=False, logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )
    model = Net()
    sampler = DistributedSampler(data, num_replicas=2, rank=trainer.global_rank, shuffle=False)
    trainer.fit(model, DataLoader(data, batch_size=4, sampler=sampler))
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    if trainer.global_rank == 0:
        assert DistributedDataParallel.__module__ == fully_shard.__module__.replace("fsdp", "ddp") == "plumb.ddp"
        torch.save([p.detach() for p in whole], sys.argv[2])
'''


def one_process(clips: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(32, 8, generator=generator), torch.randn(32, 4, generator=generator)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(2):
        for first in range(0, 32, 16):  # two batches of each of two ranks
            torch.nn.functional.mse_loss(model(inputs[first : first + 16]), targets[first : first + 16]).backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        rates.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("how", ["ddp", "sharded"])
def test_trainer(how: str, tmp_path: pathlib.Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    variables = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    run = subprocess.run(
        [sys.executable, "-m", "plumb", str(program), how, str(tmp_path / "trained")],
        env=variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stderr.count("plumb: torch.nn.parallel.DistributedDataParallel is") == 1  # the first rank's line
    trained = torch.load(tmp_path / "trained")
    torch.testing.assert_close(trained, one_process(clips=how == "ddp"))
