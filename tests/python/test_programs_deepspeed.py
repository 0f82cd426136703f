"""Programs written for DeepSpeed under ``python -m plumb``: DeepSpeed's names rebound, and transformers' Trainer with a config of theirs."""

from __future__ import annotations

import functools
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
from typing import Any

import pytest
import torch

from together import Parameters, agrees, by_ranks, parameters_of

# ---- the names, with or without a DeepSpeed

FOLDER = {
    "__init__.py": """
        from . import ops, utils, zero
        class DeepSpeedEngine: pass
        class PipelineModule: pass
        class DeepSpeedConfigError(Exception): pass
        said = []
        def init_distributed(**kwargs): said.append(kwargs)
        def initialize(**kwargs): raise AssertionError("DeepSpeed's own")
    """,
    "zero.py": "class Init: pass\nclass GatheredParameters: pass\ndef register_external_parameter(module, parameter): parameter.ds_id",
    "ops/__init__.py": "",
    "ops/adam.py": "class FusedAdam: pass\nclass DeepSpeedCPUAdam: pass",
    "utils/__init__.py": "def safe_get_full_grad(parameter): pass\nlogger = 1",
    "utils/zero_to_fp32.py": "def get_fp32_state_dict_from_zero_checkpoint(folder): raise AssertionError(\"DeepSpeed's own\")",
}

PROGRAM = """
    import importlib.util
    assert importlib.util.find_spec("deepspeed") is not None  # whoever only looks takes nothing from whoever imports
    import torch, deepspeed
    from deepspeed import DeepSpeedEngine, initialize
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.utils import logger, safe_get_full_grad
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    with deepspeed.zero.Init():
        model = torch.nn.Linear(4, 1)
    config = {"train_micro_batch_size_per_gpu": 2, "steps_per_print": float("inf")}
    engine, optimizer, _, _ = initialize(model=model, optimizer=FusedAdam(model.parameters(), lr=0.1), config=config)
    loss = engine(torch.ones(2, 4)).mean()
    loss *= 2  # in place, as transformers' Trainer does
    engine.backward(loss)
    assert torch.equal(safe_get_full_grad(model.weight), torch.full((1, 4), 2.0))
    engine.step()
    assert isinstance(engine, DeepSpeedEngine) and len(deepspeed.said) == 2, deepspeed.said
    try:
        deepspeed.initialize(model=model, config={"train_batch_size": 1, "optimiser": {}})
    except deepspeed.DeepSpeedConfigError as error:
        assert "'optimizer'" in str(error)
    deepspeed.zero.register_external_parameter(model, model.weight)
    engine.save_checkpoint("saved")
    assert torch.equal(get_fp32_state_dict_from_zero_checkpoint("saved")["weight"], model.weight)
    assert deepspeed.__loader__ is deepspeed.__spec__.loader and deepspeed.__spec__.origin.endswith("__init__.py")
    print(type(engine).__module__)
"""


def test_deepspeeds_names_are_rebound(tmp_path: pathlib.Path) -> None:
    for name, text in FOLDER.items():
        path = tmp_path / "deepspeed" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(textwrap.dedent(text))
    program = tmp_path / "train.py"
    program.write_text(textwrap.dedent(PROGRAM))
    package = next(path for path in sys.path if (pathlib.Path(path) / "plumb" / "__init__.py").exists())
    run = subprocess.run(
        [sys.executable, "-m", "plumb", str(program)], capture_output=True, text=True, timeout=300, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{package}"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["plumb.deepspeed.engine"]
    assert "deepspeed.initialize is plumb.deepspeed.initialize" in run.stderr


# ---- transformers' Trainer

CONFIG: dict[str, Any] = {
    "zero_optimization": {
        "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto", "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
    },
}  # fmt: skip


def trained(stage: int, per_device: int, resumed: bool) -> Parameters:
    """A program as people write it. ``resumed``: it stopped half-way, and another goes on."""
    import deepspeed
    import deepspeed.comm.torch
    import safetensors.torch
    import transformers
    from test_programs_transformers import Texts, make

    deepspeed.comm.torch.build_shm_op = lambda: None  # which compiles for minutes
    config = {**CONFIG, "zero_optimization": {**CONFIG["zero_optimization"], "stage": stage}}
    folder = os.environ["TRAINED_IN"]

    def trainer() -> Any:
        arguments = transformers.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=per_device, gradient_accumulation_steps=2, max_steps=4, warmup_steps=1,
            learning_rate=1e-2, max_grad_norm=0.5, use_cpu=True, report_to=[], save_steps=2, logging_steps=1, disable_tqdm=True,
            eval_strategy="steps", eval_steps=2, deepspeed=config,
        )  # fmt: skip
        return transformers.Trainer(model=make("llama"), args=arguments, train_dataset=Texts(), eval_dataset=Texts())

    one = trainer()
    one.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-2") if resumed else None)
    assert type(one.model_wrapped).__module__ == "plumb.deepspeed.engine"
    assert len([entry for entry in one.state.log_history if "eval_loss" in entry]) == 2
    one.save_model(os.path.join(folder, "final"))
    torch.distributed.barrier()
    return safetensors.torch.load_file(os.path.join(folder, "final", "model.safetensors"))


@functools.cache
def of_ranks(stage: int, ranks: int) -> tuple[list[Parameters], list[Parameters]]:
    """At the end, and at the end after going on from the middle."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(TRAINED_IN=folder, DS_ACCELERATOR="cpu")
        straight = by_ranks(trained, stage, 4 // ranks, False, ranks=ranks)
        return straight, by_ranks(trained, stage, 4 // ranks, True, ranks=ranks) if ranks > 1 else []


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="no DeepSpeed is installed")
@pytest.mark.parametrize("stage", [2, 3])
def test_trainer_with_a_deepspeed_config(stage: int) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from test_programs_transformers import make

    one = of_ranks(stage, 1)[0][0]
    straight, resumed = of_ranks(stage, 2)
    start = {name: value for name, value in parameters_of(make("llama")).items() if name in one}
    agrees(straight, one, start, 2e-6)
    agrees(resumed, one, start, 2e-6)
