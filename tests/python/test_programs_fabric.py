"""Lightning Fabric's example loop under the strategy ``plumb``."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import nn

import plumb
from together import Parameters, agrees, alone, by_ranks, parameters_of

lightning = pytest.importorskip("lightning")
import plumb.fabric  # noqa: E402


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def make() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), Block(), Block(), nn.Linear(8, 3)).double()


class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(4, generator=torch.Generator().manual_seed(i)).double(), torch.tensor(i % 3)


def example(strategy: object, devices: int) -> Parameters:
    """Fabric's own example: setup, a loader with a distributed sampler, accumulation, clipping, a checkpoint."""
    fabric = lightning.Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    fabric.launch()
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    sampler_size = 8 // devices
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(Data(), batch_size=sampler_size))
    for i, (x, y) in enumerate(loader):
        accumulating = i % 2 == 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            fabric.backward(nn.functional.cross_entropy(model(x), y) / 2)
        if strategy != "auto" and getattr(fabric.strategy, "strategy", "ddp") == "ddp":
            bias = fabric.all_gather(model.module[0].bias.grad)
            assert bool((bias[0] != bias[1]).any()) == accumulating, "held back: each rank's own; otherwise the mean"
        if not accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=0.05)
            optimizer.step()
            optimizer.zero_grad()
    engine = fabric.strategy.engine_of(model) if isinstance(fabric.strategy, plumb.fabric.PlumbStrategy) else None
    if engine is not None:
        with engine.gathered(model.module):
            return parameters_of(model.module)
    return parameters_of(model.module)


def of_strategy(row: str) -> Parameters:
    if row in plumb.strategies():
        return example(plumb.fabric.PlumbStrategy(row, units=[Block]) if row != "ddp" else plumb.fabric.PlumbStrategy(), 2)
    return example(row, 2)


@functools.cache
def of_one() -> Parameters:
    return alone(example, "auto", 1)


@pytest.mark.parametrize("row", ["plumb", "ddp", "zero2", "zero3", "plumb_zero2"])
def test_the_example_is_what_one_process_computes(row: str) -> None:
    agrees(by_ranks(of_strategy, row), of_one(), parameters_of(make()), 1e-9)


def saved_and_loaded(folder: str) -> tuple[float, str]:
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=plumb.fabric.PlumbStrategy("zero3", units=[Block]))
    fabric.launch()
    model, optimizer = make(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    fabric.save(f"{folder}/model.ckpt", {"model": model})
    with torch.no_grad(), fabric.strategy.engine_of(model).gathered(model.module, write=True):
        for parameter in model.module.parameters():
            parameter.zero_()
    fabric.load(f"{folder}/model.ckpt", {"model": model})
    with fabric.strategy.engine_of(model).gathered(model.module):
        far = max(float((a - b).abs().max().detach()) for a, b in zip(model.module.parameters(), make().parameters(), strict=True))
    try:
        fabric.save(f"{folder}/optimizer.ckpt", {"optimizer": optimizer})
        said = ""
    except plumb.Error as error:
        said = str(error)
    return far, said


def test_checkpoints_hold_whole_parameters(tmp_path: object) -> None:
    for far, said in by_ranks(saved_and_loaded, str(tmp_path)):
        assert far == 0.0 and "fabric.save() takes it with its module" in said


def interrupted(folder: str, row: str, devices: int, until: int, load: bool) -> tuple[Parameters, int, list[float], dict[str, object]]:
    """Trains until that step, from nothing or from a checkpoint, and saves everything as Fabric's users do."""
    fabric = lightning.Fabric(accelerator="cpu", devices=devices, strategy=plumb.fabric.PlumbStrategy(row, units=[Block]))
    fabric.launch()
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer = fabric.setup(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    left = fabric.load(f"{folder}/saved", {**state, "more": None} if row == "zero2" else state, strict=row != "zero2") if load else {}
    if load and row == "zero2":
        state["step"] = scheduler.last_epoch
    for step in range(state["step"], until):
        x, y = zip(*[Data()[(4 * step + i) % 32] for i in range(4)], strict=True)  # every rank the same: sums over two are exact
        fabric.backward(nn.functional.cross_entropy(model(torch.stack(x)), torch.stack(y)))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    state["step"] = until
    if not load:
        fabric.save(f"{folder}/saved", state)
        fabric.save(f"{folder}/saved", state)  # again, in its place
    with fabric.strategy.engine_of(model).gathered(model.module):
        return parameters_of(model.module), state["step"], scheduler.get_last_lr(), left


def test_a_checkpoint_of_sharded_state_goes_on_under_another_strategy_on_other_ranks(tmp_path: Path) -> None:
    calm = by_ranks(interrupted, str(tmp_path / "calm"), "zero3", 2, 5, False)
    by_ranks(interrupted, str(tmp_path / "all"), "zero3", 2, 3, False)
    for row, ranks in (("zero3", 2), ("zero2", 1)):
        for parameters, step, rates, _ in by_ranks(interrupted, str(tmp_path / "all"), row, ranks, 5, True, ranks=ranks):
            assert step == 5 and rates == calm[0][2]
            assert all(parameters[name].equal(calm[0][0][name]) for name in parameters)
