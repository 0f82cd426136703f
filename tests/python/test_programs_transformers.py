"""transformers' models from configs: their Trainer under torch's name, and loops of one's own under an engine."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import plumb
from together import Parameters, agrees, alone, by_ranks, distance, parameters_of

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

KINDS = ["gpt2", "llama", "mixtral"]
WORDS, LENGTH = 64, 12


def make(kind: str) -> Any:
    torch.manual_seed(5)
    sizes = dict(vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0)
    wide = dict(sizes, intermediate_size=32, num_key_value_heads=2, max_position_embeddings=32)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=1, eos_token_id=1,
        )  # fmt: skip
    elif kind == "llama":
        config = transformers.LlamaConfig(**wide)
    else:
        config = transformers.MixtralConfig(**wide, num_local_experts=4, num_experts_per_tok=2)
    return transformers.AutoModelForCausalLM.from_config(config)


class Texts(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self) -> None:
        self.words = torch.randint(2, WORDS, (32, LENGTH), generator=torch.Generator().manual_seed(9))

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[i], "labels": self.words[i]}


def trained(kind: str, per_device: int, lora: bool = False) -> Parameters:
    """A program as people write it."""
    model = make(kind)
    if lora:
        model = with_lora(model)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=per_device, gradient_accumulation_steps=2, max_steps=4,
            learning_rate=1e-2, max_grad_norm=0.5, use_cpu=True, report_to=[], save_strategy="no", logging_steps=1,
            disable_tqdm=True, optim="sgd", lr_scheduler_type="constant", ddp_backend="gloo" if per_device == 2 else None,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Texts())
        trainer.train()
        if per_device == 2:
            assert isinstance(trainer.model_wrapped, plumb.DistributedDataParallel), type(trainer.model_wrapped)
    return parameters_of(model)


@functools.cache
def of_one_trainer(kind: str, lora: bool) -> Parameters:
    return alone(trained, kind, 4, lora)


@pytest.mark.parametrize("kind", KINDS)
def test_trainer_unchanged(kind: str) -> None:
    agrees(by_ranks(trained, kind, 2), of_one_trainer(kind, False), parameters_of(make(kind)), 2e-6)


def with_lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(6)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def test_trainer_with_lora() -> None:
    agrees(by_ranks(trained, "llama", 2, True), of_one_trainer("llama", True), parameters_of(with_lora(make("llama"))), 2e-6)


# ---- a Trainer that was interrupted


def interrupted(per_device: int, folder: str, again: bool) -> tuple[Parameters, list[float]]:
    """Four steps with dropout, AdamW and a schedule, saved after two; `again`: from those two on. Its losses."""
    model = make("gpt2")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    arguments = transformers.TrainingArguments(
        output_dir=folder, per_device_train_batch_size=per_device, gradient_accumulation_steps=2, max_steps=4,
        learning_rate=1e-2, use_cpu=True, report_to=[], save_steps=2, logging_steps=1, disable_tqdm=True,
        optim="adamw_torch", lr_scheduler_type="linear", ddp_backend="gloo" if per_device == 2 else None,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Texts())
    if again:
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    else:
        trainer.train()
    return parameters_of(model), [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    calm = by_ranks(interrupted, 2, str(tmp_path), False)
    resumed = by_ranks(interrupted, 2, str(tmp_path), True)
    for (one, losses), (other, later) in zip(calm, resumed, strict=True):
        assert distance(one, other) == 0.0 and losses == later
    # And on one rank, which draws other numbers for its dropout: it need only take everything.
    alone(interrupted, 4, str(tmp_path), True)


# ---- loops of one's own


def blocks_of(model: Any) -> list[type]:
    return [type(module) for module in model.modules() if type(module).__name__ in ("GPT2Block", "LlamaDecoderLayer", "MixtralDecoderLayer")][:1]


def loop(kind: str, strategy: str | None, lora: bool) -> Parameters:
    model = with_lora(make(kind)) if lora else make(kind)
    model.train()
    if kind != "mixtral":
        model.gradient_checkpointing_enable()
        if lora:
            model.enable_input_require_grads()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    words = Texts().words
    if strategy is None:
        for step in range(3):
            for rank in range(2):
                batch = words[8 * step + 4 * rank : 8 * step + 4 * rank + 4]
                (model(input_ids=batch, labels=batch).loss / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        return parameters_of(model)
    with plumb.Engine(model, optimizer, strategy=strategy, units=blocks_of(model)) as engine:
        rank = engine.world.rank
        for step in range(3):
            batch = words[8 * step + 4 * rank : 8 * step + 4 * rank + 4]
            model(input_ids=batch, labels=batch).loss.backward()
            engine.step()
            engine.zero_grad()
        assert engine.gathered_bytes == 0
        with engine.gathered(model):
            return parameters_of(model)


CASES = [(kind, strategy, False) for kind in KINDS for strategy in ("zero2", "zero3")] + [("llama", "zero3", True)]


@functools.cache
def of_one_loop(kind: str, lora: bool) -> Parameters:
    return loop(kind, None, lora)


@pytest.mark.parametrize("kind,strategy,lora", CASES)
def test_a_loop_of_ones_own(kind: str, strategy: str, lora: bool) -> None:
    start = parameters_of(with_lora(make(kind)) if lora else make(kind))
    agrees(by_ranks(loop, kind, strategy, lora), of_one_loop(kind, lora), start, 2e-5)
