"""DeepSpeed's configs: what is taken, what is refused and how it is told, which modules become units."""

from __future__ import annotations

import argparse
import base64
import importlib.util
import math
import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import plumb
import plumb.deepspeed as deepspeed
from plumb.deepspeed import build, methods, utils, zero
from plumb.deepspeed.config import Config
from deepspeeds import config_of, engine_of, make


def refused(config: Any, match: str, size: int = 2) -> None:
    with pytest.raises(plumb.Error, match=match):
        Config(config, size)


def test_an_unknown_key_is_named_with_the_nearest_one() -> None:
    refused({"train_batch_size": 4, "gradient_cliping": 1.0}, "'gradient_cliping'.*'gradient_clipping'")
    refused({"train_batch_size": 4, "zero_optimization": {"stge": 1}}, "'zero_optimization.stge'.*'zero_optimization.stage'")
    refused({"train_batch_size": 4, "fp16": {"loss_scal": 1}}, "'fp16.loss_scal'.*'fp16.loss_scale'")
    refused({"train_batch_size": 4, "zero_optimization": {"zero_quantized_weights": True}}, "not supported: weights travel")
    refused({"train_batch_size": 4, "tensorboard": {"enabled": True}}, "'tensorboard'.*not supported")
    refused({"train_batch_size": 4, "zero_optimization": {"offload_param": {"device": "nvme"}}}, "nvme.*not supported")
    for kind, near in (("Adamm", "Adam"), ("OneBitAdam", "not supported")):
        with pytest.raises(plumb.Error, match=near):
            deepspeed.initialize(model=make(), config={"train_batch_size": 2, "optimizer": {"type": kind}})
    with pytest.raises(plumb.Error, match="nearest one is 'WarmupLR'"):
        engine_of(scheduler={"type": "WarmpLR", "params": {}})
    with pytest.raises(plumb.Error, match="total_num_steps"):
        engine_of(scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}})
    with pytest.raises(plumb.Error, match="gradient_clipping"):
        engine_of(optimizer={"type": "Adam", "params": {"max_grad_norm": 1.0}})


def test_values_of_the_wrong_kind_are_named() -> None:
    refused({"train_batch_size": "four"}, "'train_batch_size' is 'four'.*whole number")
    refused({"train_batch_size": 4, "fp16": {"enabled": "yes"}}, "'fp16.enabled'.*true or false")
    refused({"train_batch_size": 4, "zero_optimization": {"stage": 4}}, "stage' is 4")
    refused({"train_batch_size": 4, "fp16": {"enabled": True}, "bf16": {"enabled": True}}, "simultaneously")
    refused({"train_batch_size": 4, "communication_data_type": "fp8"}, "fp32, fp16 or bf16")
    refused([1], "dictionary or the path")
    refused("/nowhere/at/all.json", "cannot be read")
    assert Config({"train_batch_size": 4.0, "zero_optimization": {"reduce_bucket_size": 5e8}}, 2)["train_batch_size"] == 4


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"fp16": {"enabled": 2}}, "'fp16.enabled' is 2 .*true or false"),
    ({"train_micro_batch_size_per_gpu": 1.5}, "'train_micro_batch_size_per_gpu' is 1.5 .*whole number"),
    ({"steps_per_print": 2.5}, "'steps_per_print' is 2.5 .*whole number"),
    ({"steps_per_print": True}, "'steps_per_print' is True .*whole number"),
    ({"gradient_clipping": math.nan}, "'gradient_clipping' is nan .*a number"),
    ({"gradient_clipping": math.inf}, "'gradient_clipping' is inf .*a number"),
    ({"optimizer": {"type": 3}}, "'optimizer.type' is 3 .*a string"),
    ({"optimizer": {"params": [1]}}, "'optimizer.params' is .*a dictionary"),
    ({"fp16": [1]}, "'fp16' is .*a dictionary"),
    ({"gradient_allreduce_op": "max"}, "'gradient_allreduce_op' is 'max'; expected 'mean' or 'sum'"),
    ({"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}}, "'sum' is not supported with ZeRO stage 3"),
    *(({"zero_optimization": {"stage": stage, "compute_grad_norm": False}}, "compute_grad_norm=false") for stage in (0, 3)),
    ({"data_types": {"param_dtype": "bf16"}}, "param_dtype is torch.bfloat16, and fp16 and bf16 say torch.float32"),
    ({"data_types": {"param_dtype": "fp32"}, "bf16": {"enabled": True}}, "param_dtype is torch.float32, and fp16 and bf16 say torch.bfloat16"),
    ({"data_types": {"param_dtype": "bf16"}, "fp16": {"enabled": True}}, "param_dtype is torch.bfloat16, and fp16 and bf16 say torch.float16"),
    ({"torch_autocast": {"enabled": True, "dtype": "fp16"}}, "needs a loss scaler"),
    ({"checkpoint": {"tag_validation": "Maybe"}}, "'checkpoint.tag_validation' is 'Maybe'"),
    ({"checkpoint": {"tag_validation": 3}}, "'checkpoint.tag_validation' is 3"),
    *(({"zero_optimization": {what: {"device": "nvme"}}}, f"'zero_optimization.{what}.device' is 'nvme'") for what in ("offload_optimizer", "offload_param")),
    *(({section: {name: least}}, f"'{section}.{name}' is .*; expected at least") for section, name, least in (
        ("fp16", "loss_scale", -1), ("fp16", "loss_scale_window", 0), ("fp16", "hysteresis", 0), ("fp16", "min_loss_scale", -1),
        ("zero_optimization", "reduce_bucket_size", 0), ("zero_optimization", "stage3_param_persistence_threshold", -1),
    )),
    ({"gradient_clipping": -1}, "'gradient_clipping' is -1.0 .*at least 0"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "said"), WRONG, ids=str)
def test_values_that_mean_nothing_are_refused(more: dict[str, Any], said: str) -> None:
    refused({"train_batch_size": 4, **more}, said)


FINE: list[tuple[dict[str, Any], str, Any]] = [  # beside the ones above
    ({"fp16": {"enabled": 1}}, "fp16.enabled", True),
    ({"fp16": {"enabled": 0}}, "fp16.enabled", False),
    ({"steps_per_print": 3.0}, "steps_per_print", 3),
    ({"gradient_clipping": 0}, "gradient_clipping", 0.0),
    ({"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 2}}, "gradient_allreduce_op", "sum"),
    *(({"zero_optimization": {"stage": stage, "compute_grad_norm": False}}, "zero_optimization.compute_grad_norm", False) for stage in (1, 2)),
    ({"data_types": {"param_dtype": "fp32"}}, "data_types.param_dtype", torch.float32),
    ({"data_types": {"param_dtype": "fp16"}, "fp16": {"enabled": True}}, "data_types.param_dtype", torch.float16),
    ({"torch_autocast": {"enabled": False, "dtype": "fp16"}}, "torch_autocast.dtype", torch.float16),
    ({"fp16": {"loss_scale": 0, "loss_scale_window": 1, "hysteresis": 1, "min_loss_scale": 0}}, "fp16.min_loss_scale", 0.0),
    ({"zero_optimization": {"offload_optimizer": {"device": "none"}, "offload_param": {}}}, "zero_optimization.offload_param", {}),
    ({"checkpoint": {"tag_validation": "ignore"}}, "train_batch_size", 4),
]  # fmt: skip


@pytest.mark.parametrize(("more", "key", "value"), FINE, ids=str)
def test_values_at_the_edge_are_taken(more: dict[str, Any], key: str, value: Any) -> None:
    found = Config({"train_batch_size": 4, **more}, 2)[key]
    assert found == value and type(found) is type(value)


def test_dtypes_are_known_by_all_their_names_and_told_as_they_were_meant() -> None:
    names = {
        torch.float32: ("fp32", "float32", "float", "torch.float32"), torch.float16: ("fp16", "float16", "half", "torch.float16"),
        torch.bfloat16: ("bf16", "bfp16", "bfloat16", "torch.bfloat16"),
    }  # fmt: skip
    for dtype, each in names.items():
        for name in (*each, dtype):
            assert Config({"train_batch_size": 2, "communication_data_type": name}, 2)["communication_data_type"] == dtype, name


def test_an_engine_tells_the_loss_scale_as_its_config_says_it() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 5, "loss_scale_window": 7, "hysteresis": 3, "consecutive_hysteresis": True, "min_loss_scale": 4}
    for stage in (0, 1):  # also where each skipped step halves it
        engine = engine_of(stage=stage, fp16=fp16, prescale_gradients=bool(stage))
        told = {"init_scale": 32.0, "scale_window": 7, "delayed_shift": 3, "consecutive_hysteresis": True, "min_scale": 4.0}
        assert engine.dynamic_loss_scale_args() == told and engine.initial_dynamic_scale() == 32.0 and engine.dynamic_loss_scale()
        assert engine.postscale_gradients() == (stage == 0) and engine.get_data_types() == (torch.float16, torch.float16)
    fixed = engine_of(fp16={"enabled": True, "loss_scale": 8})
    assert not fixed.dynamic_loss_scale() and fixed.initial_dynamic_scale() == 2.0**16 and fixed.loss_scale() == 8


def test_sums_are_as_wide_as_parameters_at_least() -> None:
    def sums(**more: Any) -> torch.dtype | None:
        return Config({"train_batch_size": 2, **more}, 1).sums

    bf16, fp16, narrow = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}, {"data_types": {"grad_accum_dtype": "bf16"}}
    assert (sums(), sums(**bf16), sums(**fp16)) == (None, torch.float32, torch.float32)
    assert (sums(**narrow), sums(**narrow, **bf16), sums(**narrow, **fp16)) == (torch.float32, torch.bfloat16, torch.float32)
    assert (sums(communication_data_type="fp16"), sums(communication_data_type="fp16", **narrow, **bf16)) == (torch.float32, torch.float32)


def blocks() -> nn.Module:
    return nn.Sequential(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), nn.Linear(4, 2))


def scaled(scale: Any) -> Any:
    return None if scale is None else tuple(getattr(scale, name) for name in SCALE)


SCALE = ("initial", "growth", "interval", "minimum", "hysteresis", "consecutive_hysteresis", "delay")
BUILT: list[tuple[dict[str, Any], dict[str, Any]]] = [  # a config on six ranks -> what differs from one that says nothing
    ({}, {}),
    *(({"zero_optimization": {"stage": stage}}, {"strategy": f"zero{stage}"}) for stage in (1, 2)),
    ({"zero_optimization": {"stage": 3}}, {"strategy": "zero2"}),  # all of it is under the threshold
    ({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 11}}, {"strategy": "zero3", "units": 2}),
    ({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}, {"strategy": "zero3", "units": 3}),
    ({"zero_optimization": {"stage": 3, "param_persistence_threshold": 0, "mics_shard_size": 2}}, {"strategy": "hsdp", "units": 3, "mesh": (3, 2)}),
    ({"zero_optimization": {"stage": 3, "param_persistence_threshold": 0, "mics_shard_size": 6}}, {"strategy": "hsdp", "units": 3, "mesh": (1, 6)}),
    ({"zero_optimization": {"reduce_bucket_size": 1000}}, {"bucket_bytes": 4000}),
    ({"zero_optimization": {"reduce_bucket_size": 10**9}}, {"bucket_bytes": 25 << 20}),
    ({"gradient_clipping": 0}, {"clip_norm": None}),
    ({"gradient_clipping": 0.25}, {"clip_norm": 0.25}),
    ({"bf16": {"enabled": True}}, {"accumulate_dtype": torch.float32, "master_weights": True, "nonfinite": "skip"}),
    ({"bf16": {"enabled": True, "check_grad_overflow": False}}, {"accumulate_dtype": torch.float32, "master_weights": True}),
    ({"bf16": {"check_grad_overflow": True}}, {}),
    ({"fp16": {"enabled": True}}, {"accumulate_dtype": torch.float32, "master_weights": True, "loss_scale": (2.0**16, 2.0, 1000, 1.0, 1, False, 1)}),
    (
        {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True, "initial_scale_power": 5, "loss_scale_window": 7, "hysteresis": 3, "consecutive_hysteresis": True, "min_loss_scale": 4}},
        {"strategy": "zero1", "accumulate_dtype": torch.float32, "master_weights": True, "loss_scale": (32.0, 2.0, 7, 4.0, 3, True, 1)},
    ),
    ({"fp16": {"enabled": True, "loss_scale": 8}}, {"accumulate_dtype": torch.float32, "master_weights": True, "loss_scale": (8.0, 1.0, None, 8.0, None, None, None)}),
]  # fmt: skip


@pytest.mark.parametrize(("given", "expected"), BUILT, ids=str)
def test_what_a_config_says_is_what_the_engine_is_built_with(given: dict[str, Any], expected: dict[str, Any]) -> None:
    found = build.options(blocks(), Config({"train_batch_size": 12, **given}, 6), True)
    usual = {"strategy": "ddp", "accumulate_dtype": None, "loss_scale": None, "nonfinite": "continue", "master_weights": False, "clip_norm": 1.0}
    found = {**dict.fromkeys(("units", "mesh", "bucket_bytes", "clip_norm")), **found}
    scale, told = scaled(found.pop("loss_scale")), {**dict.fromkeys(found), **usual, **expected}
    found["units"] = found["units"] and len(found["units"])
    wanted = told.pop("loss_scale")
    assert found == told and (scale is None) == (wanted is None)
    assert scale is None or all(one is None or one == other for one, other in zip(wanted, scale, strict=True)), scale


def test_an_engine_without_an_optimizer_is_told_of_no_masters() -> None:
    assert "master_weights" not in build.options(blocks(), Config({"train_batch_size": 2, "bf16": {"enabled": True}}, 1), False)


class Ranks:
    def __init__(self, size: int) -> None:
        self.get_data_parallel_world_size = lambda: size


def test_all_ranks_are_data_parallel_or_it_is_told() -> None:
    build.check_mpu(None, 4)
    build.check_mpu(Ranks(4), 4)
    for size in (2, 8):
        with pytest.raises(deepspeed.DeepSpeedConfigError, match=f"{size} of 4 ranks are data parallel"):
            build.check_mpu(Ranks(size), 4)
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="mpu has no get_data_parallel_world_size"):
        build.check_mpu(object(), 4)


def test_offloading_is_told_under_its_old_names_too() -> None:
    for name, what in (("cpu_offload", "optimizer"), ("cpu_offload_param", "param")):
        for zero_section, wanted in (({name: True}, True), ({name: False}, False), ({f"offload_{what}": {"device": "cpu"}}, True), ({f"offload_{what}": {}}, False)):
            config = Config({"train_batch_size": 2, "zero_optimization": zero_section}, 1)
            assert build.offloads(config, what) is wanted, zero_section
            assert not build.offloads(config, {"optimizer": "param", "param": "optimizer"}[what])


def test_an_optimizer_of_the_configs_has_frozen_parameters_for_when_they_thaw() -> None:
    model = blocks()
    model[1].requires_grad_(False)
    config = Config({"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}, 1)
    made = build.optimizer(model, config, None, None)
    assert made is not None and [id(p) for p in made.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    some = list(model.parameters())[:2]
    assert len(build.optimizer(model, config, None, some).param_groups[0]["params"]) == 2  # type: ignore[union-attr]
    for given in (torch.optim.SGD(some, lr=0.1), lambda parameters: torch.optim.SGD(parameters, lr=0.1)):
        assert isinstance(build.optimizer(model, config, given, some), torch.optim.SGD)
    for wrong in (3, lambda parameters: 3):
        with pytest.raises(plumb.Error, match="expected a torch.optim object, or a function of parameters that returns one"):
            build.optimizer(model, config, wrong, some)
    with pytest.raises(plumb.Error, match="no parameter that is trained"):
        build.optimizer(model.requires_grad_(False), config, None, None)


def test_a_file_with_a_key_twice_is_refused(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "twice.json"
    file.write_text('{"train_batch_size": 4, "train_batch_size": 8}')
    refused(str(file), "'train_batch_size' twice")
    file.write_text("{")
    refused(str(file), "no JSON")


def test_a_config_may_have_comments_or_be_base64(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "ds.hjson"
    file.write_text('{\n  # as people write them\n  train_batch_size: 4\n  "zero_optimization": {"stage": 2,},\n}')
    if importlib.util.find_spec("hjson") is None:
        refused(str(file), "install the package hjson")
    else:
        parsed = Config(str(file), 2)
        assert parsed["train_batch_size"] == 4 and parsed["zero_optimization.stage"] == 2
        file.write_text("{train_batch_size: 4\n train_batch_size: 8}")
        refused(str(file), "'train_batch_size' twice")
    packed = base64.urlsafe_b64encode(b'{"train_batch_size": 6, "optimizer": {"type": "~~~???"}}').decode()
    assert "-" in packed and "_" in packed, "as launchers hand it on: in the letters of names of files"
    assert Config(packed, 2)["train_batch_size"] == 6 and Config(packed, 2)["optimizer.type"] == "~~~???"
    refused(base64.urlsafe_b64encode(b"[1]").decode(), "base64 is a list")
    refused("no-such-file.json", "cannot be read")


def test_the_old_name_of_the_configs_argument() -> None:
    args = argparse.Namespace(deepspeed_config=None, deepscale_config={"train_batch_size": 2})
    assert deepspeed.initialize(args=args, model=make())[0].train_batch_size() == 2
    args.deepspeed_config = {"train_batch_size": 4}
    with pytest.raises(AssertionError, match="both"):
        deepspeed.initialize(args=args, model=make())


def test_sections_are_read_under_all_their_names_and_in_their_short_form() -> None:
    def parsed(**more: Any) -> Config:
        return Config({"train_batch_size": 2, **more}, 2)

    assert [parsed(zero_optimization=given)["zero_optimization.stage"] for given in (True, False, {}, {"stage": 2})] == [1, 0, 0, 2]
    assert parsed(bfloat16={"enabled": True}).half == parsed(bf16={"enabled": True}).half == torch.bfloat16
    for section in ("compression_training", "autotuning", "elasticity"):  # on as soon as they say anything, unless they say that they are not
        refused({"train_batch_size": 2, section: {"shared_parameters": {}}}, f"'{section}' in the DeepSpeed config is not supported")
        assert parsed(**{section: {}}).half is None and parsed(**{section: {"enabled": False, "shared_parameters": {}}}).half is None


def test_what_nobody_says_is_deepspeeds_default() -> None:
    parsed = Config({"train_batch_size": 2}, 1)
    wanted = {
        "gradient_clipping": 1.0, "managed_gradient_accumulation": True, "steps_per_print": None, "gradient_allreduce_op": "mean",
        "dataloader_drop_last": False, "communication_data_type": None, "zero_optimization.stage": 0, "zero_optimization.mics_shard_size": -1,
        "zero_optimization.stage3_param_persistence_threshold": 100_000, "zero_optimization.reduce_bucket_size": 500_000_000,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": False, "zero_optimization.compute_grad_norm": True,
        "zero_optimization.ignore_unused_parameters": True, "fp16.enabled": False, "fp16.loss_scale": 0.0, "fp16.initial_scale_power": 16,
        "fp16.loss_scale_window": 1000, "fp16.hysteresis": 2, "fp16.consecutive_hysteresis": False, "fp16.min_loss_scale": 1.0,
        "fp16.auto_cast": False, "bf16.enabled": False, "bf16.check_grad_overflow": True, "bf16.auto_cast": False,
        "data_types.grad_accum_dtype": None, "data_types.buffer_dtype": None, "data_types.keep_in_fp32_modules": "auto",
        "torch_autocast.enabled": False, "torch_autocast.dtype": torch.bfloat16,
    }  # fmt: skip
    assert {name: parsed[name] for name in wanted} == wanted
    sections = {name.partition(".")[0] for name in wanted if "." in name}
    autos = {name: {key.partition(".")[2]: "auto" for key in wanted if key.startswith(f"{name}.")} for name in sections}
    given = Config({"train_batch_size": 2, **dict.fromkeys((name for name in wanted if "." not in name), "auto"), **autos}, 1)
    assert {name: given[name] for name in wanted} == wanted and not {name for name in given.was_given if "." in name}


OTHERWISE = {  # methods of DeepSpeed's that are not called as their keys are
    "bfloat16_enabled": "bf16.enabled", "loss_scale": "fp16.loss_scale", "scheduler_name": "scheduler.type",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads", "bf16_optimizer_states": "bf16.bf16_optimizer_states",
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads", "is_sanity_checks_enabled": "zero_optimization.enable_sanity_checks",
    "zero_multi_rank_bucket_allreduce": "zero_optimization.use_multi_rank_bucket_allreduce", "zero_quantized_weights": "zero_optimization.zero_quantized_weights",
    "zero_hpz_partition_size": "zero_optimization.zero_hpz_partition_size", "zero_quantized_gradients": "zero_optimization.zero_quantized_gradients",
    "zero_quantized_nontrainable_weights": "zero_optimization.zero_quantized_nontrainable_weights",
}  # fmt: skip


def test_sections_that_are_switched_off_are_taken() -> None:
    """Configs that people copy name what they do not use."""
    for name in ("flops_profiler", "tensorboard", "wandb", "comms_logger", "elasticity", "autotuning", "amp", "hybrid_engine"):
        Config({"train_batch_size": 4, name: {"enabled": False, "anything": 1}}, 2)
    for section in ({"compile": {"deepcompile": False}}, {"compile": {}}, {"tensor_parallel": {"autotp_size": 1}}, {"tensor_parallel": {}}):
        Config({"train_batch_size": 4, **section}, 2)
    for section in ({"compile": {"deepcompile": True}}, {"compile": {"enabled": True}}, {"tensor_parallel": {"autotp_size": 2}}):
        refused({"train_batch_size": 4, **section}, f"'{next(iter(section))}' in the DeepSpeed config is not supported")


def test_methods_ask_for_the_key_of_their_name() -> None:
    for method, key in methods.GETTERS.items():
        section, _, name = key.rpartition(".")
        zero = f"zero_{name.removeprefix('stage3_')}" if section == "zero_optimization" else None
        assert OTHERWISE.get(method) == key or method in (f"{section}_{name}".lstrip("_"), zero), (method, key)


def test_f64_stays_what_it_is_beside_half_precision() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.Linear(2, 2).half()])
    deepspeed.initialize(model=model, config=config_of(bf16={"enabled": True}))
    assert [p.dtype for p in model.parameters()] == [torch.bfloat16] * 2 + [torch.float64] * 2 + [torch.bfloat16] * 2


class Buffers(nn.Module):
    _keep_in_fp32_modules_strict = ["bias_of_*"]
    _keep_in_fp32_modules = ["table"]

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("bias_of_experts", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("table", torch.ones(2))
        self.register_buffer("count", torch.ones(2, dtype=torch.int64))


KEPT = [  # keep_in_fp32_modules, buffer_dtype, what half precision -> the buffers that are f32
    ("auto", None, "bf16", {"bias_of_experts", "table"}), ("auto", "bf16", "bf16", {"bias_of_experts"}),
    ("auto", "fp16", "fp16", {"bias_of_experts", "table"}), ([], "bf16", "bf16", set()), ([], None, "bf16", {"table"}),
    (["tab*"], "bf16", "bf16", {"table"}), (["ta*le"], "bf16", "bf16", {"table"}), (["inner.table", "other"], "fp16", "fp16", {"table"}), ("auto", "bf16", "", set()),
]  # fmt: skip


@pytest.mark.parametrize(("keep", "buffers", "half", "wanted"), KEPT)
def test_buffers_that_a_model_names_stay_f32(keep: Any, buffers: str | None, half: str, wanted: set[str]) -> None:
    model = nn.ModuleDict({"inner": Buffers(), "outside": nn.Module()})
    model["outside"].register_buffer("bias_of_nobody", torch.ones(2, dtype=torch.bfloat16))  # what a module names is its own
    config = config_of(data_types={"keep_in_fp32_modules": keep, **({"buffer_dtype": buffers} if buffers else {})})
    deepspeed.initialize(model=model, config={**config, **({half: {"enabled": True}} if half else {})})
    assert {name.split(".")[1] for name, buffer in model.named_buffers() if buffer.dtype == torch.float32} == wanted
    assert model["inner"].count.dtype == torch.int64


@pytest.mark.parametrize("what", ["offload_optimizer", "offload_param"])
def test_offloading_from_another_device_is_told_with_the_parameter(what: str) -> None:
    given = {"train_batch_size": 2, "zero_optimization": {what: {"device": "cpu"}}}
    build.cast(nn.Linear(2, 2), Config(given, 1))
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="not supported here, and 'weight' is on meta"):
        build.cast(nn.Linear(2, 2, device="meta"), Config(given, 1))


def test_names_of_buffers_are_a_list() -> None:
    refused({"train_batch_size": 4, "data_types": {"keep_in_fp32_modules": "head"}}, "expected 'auto' or a list")


BATCHES = [  # train, micro, accumulation -> what becomes of them on two ranks; None: refused
    ((32, 16, 1), (32, 16, 1)), ((32, 8, 2), (32, 8, 2)), ((33, 17, 2), None), ((32, 18, 1), None),
    ((32, 16, None), (32, 16, 1)), ((32, 4, None), (32, 4, 4)), ((32, None, 2), (32, 8, 2)), ((32, None, None), (32, 16, 1)),
    ((None, 16, None), (32, 16, 1)), ((None, 4, 3), (24, 4, 3)), ((None, None, 2), None), ((0, None, None), None),
    ((None, 0, 1), None), ((2, None, 2), None),
]  # fmt: skip


@pytest.mark.parametrize(("given", "wanted"), BATCHES)
def test_three_numbers_of_the_batch_agree(given: tuple[Any, ...], wanted: tuple[Any, ...] | None) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = dict(zip(names, given, strict=True))
    if wanted is None:
        with pytest.raises(AssertionError):
            Config(config, 2)
    else:
        parsed = Config({**config, "optimizer": {"type": "auto", "params": "auto"}}, 2)
        assert tuple(parsed[name] for name in names) == wanted


def wrong_on_one_rank() -> str:
    rank = plumb.world().rank
    config = config_of(stage=1)
    if rank == 1:
        config["zero_optimization"]["stagee"] = 1
    try:
        deepspeed.initialize(model=make(), config=config)
    except plumb.Error as error:
        return str(error)
    return "nothing"


def test_a_config_that_is_wrong_on_one_rank_is_an_error_on_all() -> None:
    assert all("stagee" in said for said in plumb.spawn(wrong_on_one_rank, 2))


ARGUMENTS: dict[str, dict[str, Any]] = {  # what rank 1 alone says, and what is said of it
    "the model is a int": {"model": 3},
    "requires a model": {"model": None},
    "specify configuration file": {"config": None},
    "in the deepspeed arguments and": {"args": argparse.Namespace(deepspeed_config="ds.json")},
    "sequence parallelism": {"mesh_param": (1, 2)},
    "must be a torch Dataset": {"training_data": 3},
    "names a scheduler, and there is no optimizer": {"config": {"train_batch_size": 2, "scheduler": {"type": "WarmupLR"}}},
}


def initialised_wrongly() -> list[str]:
    said = []
    for more in ARGUMENTS.values():
        given = {"model": make(), "config": {"train_batch_size": 2}, **(more if plumb.world().rank == 1 else {})}
        try:
            deepspeed.initialize(**given)
        except plumb.Error as error:
            said.append(str(error))
        else:
            said.append("nothing")
    return said


def test_an_argument_that_is_wrong_on_one_rank_is_an_error_on_all() -> None:
    for rank, said in enumerate(plumb.spawn(initialised_wrongly, 2, timeout=100)):
        for words, one in zip(ARGUMENTS, said, strict=True):
            assert words in one and ("rank 1 could not set up its engine" in one) == (rank == 0), (rank, one)


def test_units_are_blocks_and_leaf_modules() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.zeros(3))
            self.embed = nn.Embedding(10, 8)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2))
            self.attention = nn.MultiheadAttention(8, 2)

    def names(**zero: Any) -> list[str]:
        model = Deep()
        config = Config({"train_batch_size": 2, "zero_optimization": {"stage": 3, **zero}}, 1)
        units = {id(unit) for unit in deepspeed.zero.units_of(model, config)}
        return [name for name, module in model.named_modules() if id(module) in units]

    small = {"stage3_param_persistence_threshold": 0}
    assert names(**small) == ["embed", "blocks.0", "blocks.1", "attention"]
    assert names(stage3_param_persistence_threshold=85) == ["blocks.0", "blocks.1", "attention"]
    assert names(param_persistence_threshold=85) == ["blocks.0", "blocks.1", "attention"]  # the same by its other name
    assert names(**small, leaf_module={"names": ["blocks"]}) == ["embed", "blocks", "attention"]
    assert names(**small, leaf_module={"name_suffixes": ["locks"], "classes": ["Embedding"]}) == ["embed", "blocks", "attention"]
    assert names() == []


def test_leaf_modules_by_class_name_and_suffix() -> None:
    utils = deepspeed.utils
    model = nn.ModuleDict({"one": nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "other": nn.Linear(2, 2)})
    assert utils.set_z3_leaf_modules(model, ["Sequential"]) == [model["one"]]
    assert utils.set_z3_leaf_modules_by_name(model, ["other", "none"], raise_if_not_found=False) == ([model["other"]], ["none"])
    assert utils.get_z3_leaf_modules(model) == [model["one"], model["other"]]
    assert utils.unset_z3_leaf_modules(model, [nn.Sequential, "Linear"]) == [model["one"], *(m for m in model.modules() if type(m) is nn.Linear)]
    assert not any(utils.z3_leaf_module(module) for module in model.modules())
    for by, name in ((utils.set_z3_leaf_modules_by_suffix, ".0"), (utils.set_z3_leaf_modules_by_name, "one.0")):
        for flag in (True, False):
            assert by(model, [name], flag=flag) == ([model["one"][0]], [])  # type: ignore[index]
            assert utils.get_z3_leaf_modules(model) == ([model["one"][0]] if flag else [])  # type: ignore[index]
    for wrong in (utils.set_z3_leaf_modules_by_name, utils.set_z3_leaf_modules_by_suffix, utils.set_z3_leaf_modules):
        with pytest.raises(plumb.Error, match="No modules"):
            wrong(model, ["nobody"])


def test_the_list_of_deepspeeds_names_is_that_of_the_installed_one() -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    from compatibility.deepspeed import NAMES, installed_names

    found = installed_names()
    assert NAMES["arguments"] == found["arguments"]
    assert NAMES["methods"] == found["methods"]
    assert set(found["keys"]) - set(NAMES["keys"]) == set()
    known = {key.split(".")[-1] for key in NAMES["keys"]} | {"load_universal", "use_node_local_storage", "pipeline_stage"}
    assert set(found["constants"]) - known == set()  # beside keys of `checkpoint`, which is read as a whole
