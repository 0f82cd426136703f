"""Programs of other people whose models are sharded: peft's LoRA in every face that shards, transformers' Trainer and accelerate with FSDP2."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import plumb
from test_programs_transformers import Texts, blocks_of, make, with_lora
from together import Parameters, agrees, alone, by_ranks, parameters_of

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
pytest.importorskip("peft")

KIND = "llama"


def started(lora: bool) -> Any:
    return with_lora(make(KIND)) if lora else make(KIND)


def whole(model: Any) -> Parameters:
    return {
        name.removeprefix("module."): (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.named_parameters()
    }


def trained(model: Any) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


# ---- a loop of one's own, adapters on a frozen base


def loop(face: str) -> Parameters:
    model = started(lora=True).train()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    words, blocks = Texts().words, tuple(blocks_of(model))
    if face == "one":
        optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
        for step in range(3):
            for rank in range(2):
                batch = words[8 * step + 4 * rank : 8 * step + 4 * rank + 4]
                (model(input_ids=batch, labels=batch).loss / 2).backward()
            torch.nn.utils.clip_grad_norm_(trained(model), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return parameters_of(model)
    rank = plumb.world().rank
    engine: Any = None
    if face == "fully_shard":
        for module in [module for module in model.modules() if isinstance(module, blocks)]:
            plumb.fully_shard(module)
        plumb.fully_shard(model)
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    if face.startswith("stage"):
        import plumb.deepspeed as deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.5,
            "zero_optimization": {"stage": int(face[-1]), "stage3_param_persistence_threshold": 0},
        }  # fmt: skip
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    elif face != "fully_shard":
        engine = plumb.Engine(model, optimizer, strategy=face, units=blocks, clip_norm=0.5)
    for step in range(3):
        batch = words[8 * step + 4 * rank : 8 * step + 4 * rank + 4]
        loss = (engine if face.startswith("stage") else model)(input_ids=batch, labels=batch).loss
        if face == "fully_shard":
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained(model), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            continue
        engine.backward(loss)
        engine.step()
        engine.zero_grad()
    if face == "fully_shard":
        return whole(model)
    with (engine.engine if face.startswith("stage") else engine).gathered(model):
        return parameters_of(model)


@functools.cache
def of_one_loop() -> Parameters:
    return alone(loop, "one")


@pytest.mark.parametrize("face", ["zero2", "zero3", "fully_shard", "stage2", "stage3"])
def test_adapters_on_a_frozen_base_are_what_one_process_trains(face: str) -> None:
    of_one = of_one_loop()
    of_ranks = plumb.spawn(loop, 2, (face,))
    agrees(of_ranks, of_one, parameters_of(started(lora=True)), 2e-5)
    for parameters in of_ranks:
        for name, value in parameters_of(started(lora=True)).items():
            assert "lora_" in name or torch.equal(parameters[name], value), name


# ---- transformers' Trainer over FSDP2


def sharded_on_cpus() -> None:
    """accelerate takes FSDP2 on accelerators alone, and torch's wrapper on CPUs whatever one asks for."""
    from accelerate.state import AcceleratorState

    inner = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        inner(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = accelerate.DistributedType.FSDP, fsdp_plugin

    AcceleratorState.__init__ = init


def fitted(per_device: int, lora: bool) -> Parameters:
    """A program as people write it."""
    model = started(lora)
    with tempfile.TemporaryDirectory() as folder:
        sharded: dict[str, Any] = {}
        if per_device == 2:
            sharded_on_cpus()
            sharded = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}, "ddp_backend": "gloo"}
        arguments = transformers.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=per_device, gradient_accumulation_steps=2, max_steps=4,
            learning_rate=1e-2, max_grad_norm=0.5, use_cpu=True, report_to=[], save_strategy="no", logging_steps=1,
            disable_tqdm=True, optim="sgd", lr_scheduler_type="constant", **sharded,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Texts())
        trainer.train()
    if per_device == 2:
        assert any(isinstance(module, plumb.FSDPModule) for module in trainer.model_wrapped.modules()), type(trainer.model_wrapped)
        return whole(trainer.model_wrapped)
    return parameters_of(model)


@pytest.mark.parametrize("lora", [False, True])
def test_a_trainer_over_fsdp2_trains_what_one_process_does(lora: bool) -> None:
    agrees(by_ranks(fitted, 2, lora), alone(fitted, 4, lora), parameters_of(started(lora)), 2e-6)


# ---- accelerate over FSDP2


def accelerated(per_device: int, lora: bool) -> Parameters:
    plugin = None
    if per_device == 2:
        sharded_on_cpus()
        plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            reshard_after_forward=True,
        )  # fmt: skip
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin)
    model = started(lora)
    optimizer = torch.optim.SGD(trained(model), lr=0.1, momentum=0.9)
    loader = torch.utils.data.DataLoader(Texts(), batch_size=per_device)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert per_device == 4 or isinstance(model, plumb.FSDPModule), type(model)
    return whole(model)


@pytest.mark.parametrize("lora", [False, True])
def test_accelerate_over_fsdp2_trains_what_one_process_does(lora: bool) -> None:
    agrees(by_ranks(accelerated, 2, lora), alone(accelerated, 4, lora), parameters_of(started(lora)), 2e-6)
