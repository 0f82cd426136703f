"""transformers' Llama and GPT-2 from configs, compiled, against one process in eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import plumb
from plumb import compiled
from test_compiled import AOT_EAGER

transformers = pytest.importorskip("transformers")
from transformers.models.gpt2.modeling_gpt2 import GPT2Block  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaDecoderLayer  # noqa: E402

WORDS, LENGTH = 64, 12


def make(kind: str) -> Any:
    torch.manual_seed(5)
    if kind == "gpt2":
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


def batch(rank: int, i: int) -> torch.Tensor:
    return torch.randint(2, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(10 * i + rank))


def trains(kind: str, strategy: str, backend: Any) -> tuple[float, int]:
    world = plumb.World.join(backend="shm", timeout=200)
    model, twin = make(kind), make(kind)
    with plumb.Engine(
        model, plumb.SGD(lr=0.1), strategy=strategy, units=[GPT2Block if kind == "gpt2" else LlamaDecoderLayer], world=world
    ) as engine:
        seen = torch.compile(model, backend=backend)
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        for i in range(3):
            words = batch(world.rank, i)
            seen(input_ids=words, labels=words).loss.backward()
            engine.step()
            engine.zero_grad()
            for rank in range(2):
                words = batch(rank, i)
                (twin(input_ids=words, labels=words).loss / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        far = max(float((engine.full_parameter(mine) - other).abs().max()) for mine, other in pairs)
        assert engine.gathered_bytes == 0
        return far, compiled.counts().delivered


CASES = [("llama", "ddp", AOT_EAGER), ("llama", "zero3", AOT_EAGER), ("gpt2", "ddp", AOT_EAGER), ("gpt2", "zero3", AOT_EAGER)]


@pytest.mark.parametrize("kind,strategy,backend", [*CASES, ("llama", "ddp", "inductor")])
def test_a_compiled_model_of_transformers_is_what_one_process_computes(kind: str, strategy: str, backend: Any) -> None:
    for far, delivered in plumb.spawn(trains, 2, (kind, strategy, backend), timeout=500):
        assert far < 2e-6 and delivered > 0
