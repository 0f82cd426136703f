"""What the tests of plumb.deepspeed share: a model, its batches and configs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import plumb.deepspeed as deepspeed

HIDDEN = 12


class Simple(nn.Module):
    """As the models of DeepSpeed's own tests: a list of layers, and the loss inside."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(layers))
        self.head = nn.Linear(HIDDEN, 5, bias=False)
        self.spare = nn.Linear(HIDDEN, HIDDEN)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            x = torch.tanh(linear(x))
        return self.loss(self.head(x).float(), y)


def make(dtype: torch.dtype = torch.float32) -> Simple:
    torch.manual_seed(5)
    return Simple().to(dtype)


def batch(rank: int, i: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + i)
    return torch.randn(2, HIDDEN, generator=generator).to(dtype), torch.randint(0, 5, (2,), generator=generator)


def config_of(stage: int = 0, gas: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": gas,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.8, 0.99], "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


def engine_of(**more: Any) -> Any:
    return deepspeed.initialize(model=make(), config=config_of(**more))[0]
