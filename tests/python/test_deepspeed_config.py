"""DeepSpeed's configs: what is taken, what is refused and how it is told, which modules become units."""

from __future__ import annotations

import argparse
import base64
import importlib.util
import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import plumb
import plumb.deepspeed as deepspeed
from plumb.deepspeed import methods, utils, zero
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
    (["tab*"], "bf16", "bf16", {"table"}), (["inner.table", "other"], "fp16", "fp16", {"table"}), ("auto", "bf16", "", set()),
]  # fmt: skip


@pytest.mark.parametrize(("keep", "buffers", "half", "wanted"), KEPT)
def test_buffers_that_a_model_names_stay_f32(keep: Any, buffers: str | None, half: str, wanted: set[str]) -> None:
    model = nn.ModuleDict({"inner": Buffers()})
    config = config_of(data_types={"keep_in_fp32_modules": keep, **({"buffer_dtype": buffers} if buffers else {})})
    deepspeed.initialize(model=model, config={**config, **({half: {"enabled": True}} if half else {})})
    assert {name.split(".")[1] for name, buffer in model.named_buffers() if buffer.dtype == torch.float32} == wanted
    assert model["inner"].count.dtype == torch.int64


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
