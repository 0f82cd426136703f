"""accelerate's own example loop: prepare, accumulate, clip, schedule, gather_for_metrics."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import plumb
from together import Parameters, agrees, alone, by_ranks, parameters_of

accelerate = pytest.importorskip("accelerate")


def make() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def data() -> torch.utils.data.TensorDataset:
    draws = torch.Generator().manual_seed(7)
    return torch.utils.data.TensorDataset(
        torch.randn(36, 4, generator=draws).double(), torch.randint(0, 3, (36,), generator=draws)
    )


def example(batch: int) -> tuple[Parameters, list[int], list[float]]:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, step_scheduler_with_optimizer=False)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    train = torch.utils.data.DataLoader(data(), batch_size=batch)
    test = torch.utils.data.DataLoader(data(), batch_size=batch)
    model, optimizer, train, test, scheduler = accelerator.prepare(model, optimizer, train, test, scheduler)
    if accelerator.num_processes > 1:
        assert isinstance(model, plumb.DistributedDataParallel)
    for _ in range(2):
        model.train()
        for x, y in train:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
    model.eval()
    found: list[int] = []
    for x, y in test:
        with torch.no_grad():
            predictions = model(x).argmax(-1)
        all_predictions, _ = accelerator.gather_for_metrics((predictions, y))
        found += all_predictions.tolist()
    return parameters_of(accelerator.unwrap_model(model)), found, scheduler.get_last_lr()


@functools.cache
def of_one() -> tuple[Parameters, list[int], list[float]]:
    return alone(example, 4)


def test_the_example_unchanged() -> None:
    one, found, _ = of_one()
    results = by_ranks(example, 2)
    agrees([parameters for parameters, _, _ in results], one, parameters_of(make()), 1e-9)
    for _, theirs, _ in results:
        assert len(theirs) == 36 and sorted(theirs) == sorted(found)
