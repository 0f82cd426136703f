"""transformers' Llama, GPT-2 and Mixtral from configs, and a ResNet with batch norms, compiled, against one process in eager."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch._inductor.config

import plumb
from plumb import compiled
from test_compiled import AOT_EAGER, NO_KERNELS
from together import Parameters, agrees, alone, by_ranks, parameters_of

transformers = pytest.importorskip("transformers")
from transformers.models.gpt2.modeling_gpt2 import GPT2Block  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaDecoderLayer  # noqa: E402
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer  # noqa: E402
from transformers.models.resnet.modeling_resnet import ResNetBasicLayer  # noqa: E402

WORDS, LENGTH = 64, 12
UNITS = {"gpt2": GPT2Block, "llama": LlamaDecoderLayer, "mixtral": MixtralDecoderLayer, "resnet": ResNetBasicLayer}


def make(kind: str) -> Any:
    torch.manual_seed(5)
    if kind == "resnet":
        config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=4)
        return transformers.AutoModelForImageClassification.from_config(config)
    if kind == "mixtral":  # experts get other numbers of tokens each time
        config = transformers.MixtralConfig(
            vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2, max_position_embeddings=32, use_cache=False,
        )  # fmt: skip
    elif kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=1, eos_token_id=1, use_cache=False,
        )  # fmt: skip
    else:
        config = transformers.LlamaConfig(
            vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
        )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def batch(kind: str, rank: int, i: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(10 * i + rank)
    if kind == "resnet":
        return {"pixel_values": torch.randn(3, 3, 16, 16, generator=draw), "labels": torch.randint(4, (3,), generator=draw)}
    words = torch.randint(2, WORDS, (2, LENGTH), generator=draw)
    return {"input_ids": words, "labels": words}


def trains(kind: str, strategy: str, how: str) -> tuple[float, int, int]:
    world = plumb.World.join(backend="shm", timeout=200)
    model, twin = make(kind), make(kind)
    with plumb.Engine(model, plumb.SGD(lr=0.1), strategy=strategy, units=[UNITS[kind]], world=world) as engine:
        seen = torch.compile(model, **HOW[how])
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        for i in range(3):
            seen(**batch(kind, world.rank, i)).loss.backward()
            engine.step()
            engine.zero_grad()
            for rank in range(2):
                (twin(**batch(kind, rank, i)).loss / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        far = max(float((engine.full_parameter(mine) - other).abs().max()) for mine, other in pairs)
        assert engine.gathered_bytes == 0
        return far, compiled.counts().delivered, compiled.gathers().times


HOW: dict[str, dict[str, Any]] = {
    "by operator": {"backend": AOT_EAGER}, "by operator, in one graph": {"backend": AOT_EAGER, "fullgraph": True},
    "by inductor": {"options": NO_KERNELS}, "by inductor, in one graph": {"options": NO_KERNELS, "fullgraph": True},
}  # fmt: skip
CASES = [
    ("llama", "zero3", "by operator"), ("gpt2", "ddp", "by operator"), ("gpt2", "zero3", "by operator"),
    ("mixtral", "zero3", "by operator"), ("resnet", "zero3", "by operator"), ("llama", "ddp", "by inductor"),
    ("gpt2", "zero3", "by inductor"), ("llama", "ddp", "by operator, in one graph"), ("llama", "zero3", "by inductor, in one graph"),
]  # fmt: skip


@pytest.mark.parametrize("kind,strategy,how", CASES)
def test_a_compiled_model_of_transformers_is_what_one_process_computes(kind: str, strategy: str, how: str) -> None:
    for far, delivered, gathers in plumb.spawn(trains, 2, (kind, strategy, how), timeout=500):
        assert far < 2e-6 and delivered > 0
        assert gathers == (3 * 2 * 2 if strategy == "zero3" and how.endswith("in one graph") else 0)  # steps, forward and backward, blocks


# ---- their Trainer


class Texts(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        words = torch.randint(2, WORDS, (LENGTH,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": words, "labels": words}


def by_their_trainer(compiles: bool) -> tuple[Parameters, int]:
    """``TrainingArguments(torch_compile=True)``, as people write it: by inductor."""
    model = make("gpt2")
    with tempfile.TemporaryDirectory() as folder, torch._inductor.config.patch(NO_KERNELS):
        arguments = transformers.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=2 if compiles else 4, max_steps=3, learning_rate=1e-2, max_grad_norm=0.5, use_cpu=True,
            report_to=[], save_strategy="no", disable_tqdm=True, optim="sgd", lr_scheduler_type="constant",
            ddp_backend="gloo" if compiles else None, torch_compile=compiles,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Texts())
        trainer.train()
    return parameters_of(model), compiled.counts().delivered


def test_a_trainer_that_compiles_is_what_one_process_computes_in_eager() -> None:
    pytest.importorskip("accelerate")
    of_ranks = by_ranks(by_their_trainer, True)
    assert all(delivered > 0 for _, delivered in of_ranks), "nothing was delivered inside of a compiled backward"
    agrees([one for one, _ in of_ranks], alone(by_their_trainer, False)[0], parameters_of(make("gpt2")), 2e-6)
