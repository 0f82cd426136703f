"""accelerate's own example loop: prepare, accumulate, clip, schedule, gather_for_metrics."""

from __future__ import annotations

import functools
from pathlib import Path

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


# ---- save_state and load_state


def saved(folder: str, epochs: int, load: bool) -> tuple[Parameters, list[float], float]:
    """Trains until that many epochs have passed, saving each; a digest of the generators' next numbers."""
    accelerator = accelerate.Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    accelerate.utils.set_seed(3, device_specific=True)
    model = nn.Sequential(*make(), nn.Dropout(0.25))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    train = torch.utils.data.DataLoader(data(), batch_size=4, shuffle=False)
    model, optimizer, train, scheduler = accelerator.prepare(model, optimizer, train, scheduler)
    first = 0
    if load:
        accelerator.load_state(folder)
        first = scheduler.scheduler.last_epoch
    for _ in range(first, epochs):
        for x, y in train:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    if not load:
        accelerator.save_state(folder)
    return parameters_of(accelerator.unwrap_model(model)), scheduler.get_last_lr(), float(torch.rand(()))


def test_a_state_that_accelerate_saved_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    calm = by_ranks(saved, str(tmp_path / "calm"), 3, False)
    by_ranks(saved, str(tmp_path / "halfway"), 2, False)
    resumed = by_ranks(saved, str(tmp_path / "halfway"), 3, True)
    for (one, rates, number), (other, later, again) in zip(calm, resumed, strict=True):
        assert agree(one, other) and rates == later and number == again


def agree(one: Parameters, other: Parameters) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)
