"""Lightning's Trainer under the strategies of ``plumb.lightning``."""

from __future__ import annotations

import functools
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import plumb
from together import Parameters, agrees, alone, by_ranks, parameters_of

lightning = pytest.importorskip("lightning")
import plumb.lightning  # noqa: E402


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Net(lightning.LightningModule):  # type: ignore[name-defined,misc]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.Sequential(nn.Linear(4, 8), Block(), Block(), nn.Linear(8, 3)).double()

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("loss", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(4, generator=torch.Generator().manual_seed(i)).double(), torch.tensor(i % 3)


def fit(row: str, devices: int, folder: str, epochs: int, saves: bool = False, resumes: bool = False) -> tuple[Parameters, float, float]:
    """A fit as people write it, one or more epochs of it; the losses of the validation inside and of a test after it."""
    strategy = plumb.lightning.PlumbStrategy(row, units=[Block]) if row in plumb.strategies() else row
    trainer = lightning.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=epochs, accumulate_grad_batches=2, gradient_clip_val=0.05,
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0,
        default_root_dir=folder, use_distributed_sampler=False,
    )  # fmt: skip
    model, path = Net(), f"{folder}/saved.ckpt"
    sampler = torch.utils.data.DistributedSampler(Data(), devices, trainer.global_rank, shuffle=False)  # type: ignore[var-annotated]
    loader = torch.utils.data.DataLoader(Data(), batch_size=8 // devices, sampler=sampler)
    trainer.fit(model, loader, loader, ckpt_path=path if resumes else None)
    validated = float(trainer.callback_metrics["loss"])
    if saves:
        trainer.save_checkpoint(path)
    tested = trainer.test(model, loader, verbose=False)[0]["loss"]
    engine = getattr(trainer.strategy, "engine", None)
    if engine is None:
        return parameters_of(model), validated, tested
    with engine.gathered(model):
        return parameters_of(model), validated, tested


@functools.cache
def of_one(folder: str) -> tuple[Parameters, float, float]:
    made: tuple[Parameters, float, float] = alone(fit, "auto", 1, folder, 2)
    return made


def same(of_ranks: list[tuple[Parameters, float, float]], folder: str) -> None:
    parameters, *losses = of_one(folder)
    agrees([one[0] for one in of_ranks], parameters, parameters_of(Net()), 1e-9)
    for _, *theirs in of_ranks:
        assert theirs == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("row", ["plumb", "zero1", "plumb_zero2", "zero3"])
def test_a_fit_is_what_one_process_computes(row: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = str(tmp_path_factory.getbasetemp())
    same(by_ranks(fit, row, 2, folder, 2), folder)


def test_a_checkpoint_goes_on_under_any_strategy(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    folder = str(tmp_path_factory.getbasetemp())
    by_ranks(fit, "zero3", 2, str(tmp_path), 1, True)
    state = torch.load(tmp_path / "saved.ckpt", weights_only=False)["optimizer_states"][0]["state"]
    shapes = [parameter.shape for parameter in Net().parameters()]
    assert [state[i]["exp_avg"].shape for i in range(len(shapes))] == shapes
    same(by_ranks(fit, "zero2", 2, str(tmp_path), 2, False, True), folder)
    same(by_ranks(fit, "plumb", 2, str(tmp_path), 2, False, True), folder)
    same([alone(fit, "auto", 1, str(tmp_path), 2, False, True)], folder)


def fit_again(row: str, devices: int, folder: str) -> tuple[Parameters, float]:
    """One model through two Trainers, of which one fits twice, and a test by a third."""

    def trainer() -> Any:
        strategy = plumb.lightning.PlumbStrategy(row, units=[Block]) if row in plumb.strategies() else row
        return lightning.Trainer(
            accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder, use_distributed_sampler=False,
        )  # fmt: skip

    first, second, model = trainer(), trainer(), Net()
    sampler = torch.utils.data.DistributedSampler(Data(), devices, first.global_rank, shuffle=False)  # type: ignore[var-annotated]
    loader = torch.utils.data.DataLoader(Data(), batch_size=8 // devices, sampler=sampler)
    first.fit(model, loader)
    first.fit_loop.max_epochs = 2
    first.fit(model, loader)
    second.fit(model, loader)
    tested = trainer().test(model, loader, verbose=False)[0]["loss"]
    return parameters_of(model), tested


def test_a_model_is_fitted_again_by_the_same_trainer_or_another_one(tmp_path: Path) -> None:
    expected, loss = alone(fit_again, "auto", 1, str(tmp_path))
    found = by_ranks(fit_again, "zero3", 2, str(tmp_path))
    agrees([parameters for parameters, _ in found], expected, parameters_of(Net()), 1e-9)
    assert [tested for _, tested in found] == pytest.approx([loss] * 2, rel=1e-6)


class Collecting(Net):
    def prepare_data(self) -> None:
        gc.collect()  # Trainers of before are gone


def in_turn(row: str, devices: int, folder: str) -> tuple[Parameters, list[float]]:
    """Each fit by a Trainer of its own, which nobody keeps; then tests of that model and of others, with weights out of a checkpoint."""

    def trainer() -> Any:
        strategy = plumb.lightning.PlumbStrategy(row, units=[Block]) if row in plumb.strategies() else row
        return lightning.Trainer(
            accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder, use_distributed_sampler=False,
        )  # fmt: skip

    def loader(one: Any) -> Any:
        sampler = torch.utils.data.DistributedSampler(Data(), devices, one.global_rank, shuffle=False)  # type: ignore[var-annotated]
        return torch.utils.data.DataLoader(Data(), batch_size=8 // devices, sampler=sampler)

    def fits(model: Net, path: str) -> None:
        one = trainer()
        one.fit(model, loader(one))
        one.save_checkpoint(path)

    model, paths, losses = Collecting(), [f"{folder}/{row}-{i}.ckpt" for i in range(3)], []
    fits(model, paths[0])
    fits(model, paths[1])
    last = trainer()
    last.fit(model, loader(last))
    last.save_checkpoint(paths[2])
    other, fresh = trainer(), Net()  # a Trainer finds the model as that of before left it
    with torch.no_grad():
        fresh.layers[0].weight.add_(last.global_rank)  # the first rank's is everybody's
    for one, by, path in (
        (Net(), last, paths[1]), (model, last, paths[0]), (fresh, last, None), (model, other, paths[2]), (model, trainer(), None),
    ):  # fmt: skip
        losses.append(by.test(one, loader(by), ckpt_path=path, verbose=False)[0]["loss"])
    ends = torch.load(paths[2], weights_only=False)["state_dict"]
    return {name: ends[name] for name, _ in model.named_parameters()}, losses


def test_a_model_outlives_its_trainers_and_others_are_tested_by_them(tmp_path: Path) -> None:
    expected, losses = alone(in_turn, "auto", 1, str(tmp_path))
    assert len(set(losses)) == 4, "checkpoints of different ends, and a model of the beginning"
    found = by_ranks(in_turn, "zero3", 2, str(tmp_path))
    agrees([parameters for parameters, _ in found], expected, parameters_of(Net()), 1e-9)
    for _, theirs in found:
        assert theirs == pytest.approx(losses, rel=1e-6)


class Two(Net):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.layers[0].parameters(), lr=0.1), torch.optim.SGD(self.layers[3].parameters(), lr=0.1)]

    automatic_optimization = False


def with_two_optimizers() -> str:
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="plumb_zero2", max_steps=1, logger=False, enable_checkpointing=False)
    with pytest.raises(plumb.Error) as said:
        trainer.fit(Two(), torch.utils.data.DataLoader(Data(), batch_size=4))
    return str(said.value)


def test_two_optimizers_are_refused_where_state_is_sharded() -> None:
    for said in by_ranks(with_two_optimizers):
        assert "takes one optimizer, with groups; configure_optimizers() returned 2" in said


class Watched(Net):
    """Says at the beginning of a fit whether it has no gradients."""

    found: list[bool]

    def on_train_start(self) -> None:
        self.found = [*getattr(self, "found", []), all(parameter.grad is None for parameter in self.parameters())]


def interrupted(row: str) -> list[bool]:
    """Fits of which the first ends with a backward that nobody steps: that is not the next one's."""
    model = Watched()
    for _ in range(2):
        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, strategy=plumb.lightning.PlumbStrategy(row, units=[Block]), max_epochs=1, limit_train_batches=2,
            logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, use_distributed_sampler=False,
        )  # fmt: skip
        sampler = torch.utils.data.DistributedSampler(Data(), 2, trainer.global_rank, shuffle=False)  # type: ignore[var-annotated]
        trainer.fit(model, torch.utils.data.DataLoader(Data(), batch_size=4, sampler=sampler))
        model(torch.ones(1, 4).double()).sum().backward()
        assert any(trainer.strategy.engine.full_gradient(parameter) is not None for parameter in model.parameters())
    return model.found


def test_a_fit_begins_without_gradients_of_another_one() -> None:
    assert by_ranks(interrupted, "zero3") == [[True, True]] * 2


def loaded(folder: str) -> list[Any]:
    """Into a model with a layer more than the one that was saved, as its class says."""
    said: list[Any] = []
    for row in ("zero3", "ddp"):
        for strict in (True, False):
            model = Net()
            model.more = nn.Linear(2, 2).double()
            model.strict_loading = strict
            trainer = lightning.Trainer(
                accelerator="cpu", devices=2, strategy=plumb.lightning.PlumbStrategy(row, units=[Block] if row != "ddp" else None), logger=False,
                enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, max_epochs=1, limit_train_batches=0,
            )  # fmt: skip
            trainer.fit(model, torch.utils.data.DataLoader(Data(), batch_size=4))
            checkpoint = {"state_dict": Net().state_dict()}
            try:
                trainer.strategy.load_model_state_dict(checkpoint, strict=model.strict_loading)
                said.append("")
            except RuntimeError as error:
                said.append("Missing key" in str(error))
    return said


def test_a_state_dict_is_loaded_as_strictly_as_is_asked_for(tmp_path: Path) -> None:
    assert by_ranks(loaded, str(tmp_path)) == [[True, "", True, ""]] * 2
