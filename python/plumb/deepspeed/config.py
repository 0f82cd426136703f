"""DeepSpeed's JSON: one table of its keys, from which the parser, its errors and the compatibility page are made."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from .errors import ConfigError as ConfigError
from .read import load

WORKS, NOTHING, RAISES = "works", "no-op by design", "raises"


class Key(NamedTuple):
    """``kind``: what a value must be. ``default``: what it is where nobody says, or says "auto". A key that ``raises`` is
    accepted with its default, and a section that does so when it is switched off."""

    name: str
    kind: str
    default: Any
    status: str
    meaning: str


class Section(NamedTuple):
    """A dictionary inside of the config; an empty name is the config itself."""

    name: str
    keys: tuple[Key, ...]


def _nothing(name: str, kind: str, default: Any, meaning: str) -> Key:
    return Key(name, kind, default, NOTHING, meaning)


def _raises(name: str, kind: str, default: Any, meaning: str) -> Key:
    return Key(name, kind, default, RAISES, meaning)


def _whole_section(name: str, meaning: str) -> Key:
    return Key(name, "section", None, RAISES, meaning)


#: Sections without ``enabled``: what switches them on, and its values that do not.
_SWITCHES: dict[str, tuple[str, tuple[Any, ...]]] = {"compile": ("deepcompile", (False,)), "tensor_parallel": ("autotp_size", (0, 1))}


def _is_off(key: Key, section: dict[str, Any]) -> bool:
    if "enabled" in section:
        return section["enabled"] is False
    if key.name in _SWITCHES:
        switch, off = _SWITCHES[key.name]
        return section.get(switch, off[0]) in off
    return not section


TABLE: tuple[Section, ...] = (
    Section(
        "",
        (
            Key("train_batch_size", "int", None, WORKS, "samples of a step, of all ranks"),
            Key("train_micro_batch_size_per_gpu", "int", None, WORKS, "samples of a backward on one rank"),
            Key("gradient_accumulation_steps", "int", None, WORKS, "backwards of a step"),
            Key("managed_gradient_accumulation", "bool", True, WORKS, "false: every step() is a boundary"),
            Key("gradient_clipping", "float", 1.0, WORKS, "largest 2-norm over all gradients; 0: none"),
            Key("steps_per_print", "every", None, WORKS, "rank 0 logs step, skipped steps, lr and momentum"),
            Key("gradient_allreduce_op", "str", "mean", WORKS, "'sum': gradients of all ranks are added"),
            Key("prescale_gradients", "bool", False, NOTHING, "gradients are divided before they are summed, always"),
            Key("gradient_predivide_factor", "float", 1.0, NOTHING, "the mean is the mean, however it is divided"),
            Key("communication_data_type", "dtype", None, WORKS, "the widest of it and the dtype of the sums travels"),
            Key("zero_allow_untested_optimizer", "bool", False, NOTHING, "every torch.optim class is stepped as in one process"),
            Key("zero_force_ds_cpu_optimizer", "bool", True, NOTHING, "offloaded state needs no optimizer of its own here"),
            Key("dataloader_drop_last", "bool", False, WORKS, "of the loader over training_data"),
            _nothing("wall_clock_breakdown", "bool", False, "no timers; use a profiler"),
            _nothing("memory_breakdown", "bool", False, "no report; use a profiler"),
            _nothing("dump_state", "bool", False, "nothing is printed"),
            _nothing("log_level", "str", None, "the level of Python's logger 'plumb.deepspeed' is yours"),
            _nothing("disable_python_gc", "bool", False, "Python's collector is left alone"),
            _nothing("vocabulary_size", "int", None, "DeepSpeed only warns by it"),
            _nothing("seq_parallel_communication_data_type", "dtype", torch.float32, "no sequence parallelism"),
            _raises("disable_allgather", "bool", False, "updated parameters are always gathered"),
            _raises("use_data_before_expert_parallelism", "bool", False, "no expert parallelism"),
            _nothing("sparse_gradients", "bool", False, "gradients of embeddings are summed as dense ones, to the same sums"),
            _raises("sequence_parallel_size", "int", 1, "no sequence parallelism"),
            _raises("data_parallel_size", "int", None, "all ranks of the world are data parallel"),
            Key("optimizer", "section", None, WORKS, "see optimizer.*"),
            Key("scheduler", "section", None, WORKS, "see scheduler.*"),
            Key("zero_optimization", "section", None, WORKS, "see zero_optimization.*"),
            Key("fp16", "section", None, WORKS, "see fp16.*"),
            Key("bf16", "section", None, WORKS, "see bf16.*"),
            Key("bfloat16", "section", None, WORKS, "the old name of bf16"),
            Key("data_types", "section", None, WORKS, "see data_types.*"),
            Key("torch_autocast", "section", None, WORKS, "see torch_autocast.*"),
            Key("activation_checkpointing", "section", None, NOTHING, "call torch.utils.checkpoint; it composes with every stage"),
            Key("checkpoint", "section", None, NOTHING, "how save_checkpoint writes is the engine's business"),
            Key("data_efficiency", "section", None, RAISES, "curricula and random layer dropping are not here"),
            Key("aio", "section", None, NOTHING, "of offloading to NVMe, which raises"),
            Key("timers", "section", None, NOTHING, "no timers"),
            Key("comms_logger", "section", None, RAISES, "no log of messages"),
            Key("tensorboard", "section", None, RAISES, "log what step() and get_lr() tell you"),
            Key("wandb", "section", None, RAISES, "log what step() and get_lr() tell you"),
            Key("csv_monitor", "section", None, RAISES, "log what step() and get_lr() tell you"),
            Key("comet", "section", None, RAISES, "log what step() and get_lr() tell you"),
            _whole_section("flops_profiler", "use torch.utils.flop_counter"),
            _whole_section("autotuning", "no search over configs"),
            _whole_section("hybrid_engine", "no generation engine"),
            _whole_section("pipeline", "no pipeline parallelism"),
            _whole_section("tensor_parallel", "no tensor parallelism"),
            _whole_section("expert_parallel", "no expert parallelism"),
            _whole_section("compile", "call engine.compile(); DeepCompile's passes are not here"),
            _whole_section("weight_quantization", "no quantisation"),
            _whole_section("compression_training", "no compression"),
            _whole_section("elasticity", "no elastic training"),
            _whole_section("amp", "apex is not here; use bf16, fp16 or torch_autocast"),
            _whole_section("eigenvalue", "no eigenvalues"),
            _whole_section("progressive_layer_drop", "no layer dropping"),
            _whole_section("curriculum_learning", "no curricula"),
            _whole_section("quantize_training", "no quantisation"),
            _whole_section("sparse_attention", "no attention kernels"),
            _whole_section("zenflow", "no ZenFlow"),
            _whole_section("datastates_ckpt", "see save_checkpoint"),
            _whole_section("nebula", "see save_checkpoint"),
        ),
    ),
    Section(
        "optimizer",
        (
            Key("type", "str", None, WORKS, "Adam, AdamW, SGD, … : see optimizers; or a class of torch.optim"),
            Key("params", "dict", {}, WORKS, "its arguments, under DeepSpeed's and torch's names"),
            _nothing("legacy_fusion", "bool", False, "one way to fuse"),
        ),
    ),
    Section(
        "scheduler",
        (
            Key("type", "str", None, WORKS, "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest"),
            Key("params", "dict", {}, WORKS, "its arguments"),
        ),
    ),
    Section(
        "zero_optimization",
        (
            Key("stage", "int", 0, WORKS, "0: ddp, 1: zero1, 2: zero2, 3: zero3"),
            Key("reduce_bucket_size", "int", 500_000_000, WORKS, "elements; the cap of a bucket, at most 25 MiB"),
            Key("stage3_param_persistence_threshold", "int", 100_000, WORKS, "units with fewer elements stay whole"),
            Key("stage3_gather_16bit_weights_on_model_save", "bool", False, WORKS, "save_16bit_model gathers under stage 3"),
            Key("stage3_gather_fp16_weights_on_model_save", "bool", False, WORKS, "the old name of the above"),
            Key("leaf_module", "dict", {}, WORKS, "classes, names, name_suffixes of modules that are one unit"),
            Key("offload_optimizer", "dict", None, WORKS, "device none; cpu where parameters are there already; nvme raises"),
            Key("offload_param", "dict", None, WORKS, "as offload_optimizer"),
            Key("cpu_offload", "bool", None, WORKS, "the old name of offload_optimizer: cpu"),
            Key("cpu_offload_param", "bool", None, WORKS, "the old name of offload_param: cpu"),
            Key("compute_grad_norm", "bool", True, WORKS, "false: get_global_grad_norm() is None"),
            _nothing("cpu_offload_use_pin_memory", "bool", None, "no copies between host and device"),
            _nothing("contiguous_gradients", "bool", True, "gradients are contiguous, always"),
            _nothing("reduce_scatter", "bool", True, "the placement table decides"),
            _nothing("use_multi_rank_bucket_allreduce", "bool", True, "the placement table decides"),
            _nothing("allgather_partitions", "bool", True, "updated parameters are gathered, always"),
            _nothing("allgather_bucket_size", "int", 500_000_000, "gathered as they were reduced"),
            _nothing("overlap_comm", "bool", None, "communication overlaps with the backward, always"),
            _nothing("load_from_fp32_weights", "bool", True, "of checkpoints"),
            _nothing("elastic_checkpoint", "bool", False, "of checkpoints"),
            _nothing("sub_group_size", "int", 1_000_000_000, "steps bucket by bucket"),
            _nothing("stage3_prefetch_bucket_size", "int", 50_000_000, "the next unit is gathered ahead"),
            _nothing("stage3_model_persistence_threshold", "int", None, "units under the other threshold stay whole, all of them"),
            _nothing("stage3_max_live_parameters", "int", 1_000_000_000, "one unit is whole at a time, and the next one"),
            _nothing("stage3_max_reuse_distance", "int", 1_000_000_000, "a unit is released when it was used"),
            _nothing("stage3_module_granularity_threshold", "int", 0, "units are blocks already"),
            _nothing("stage3_use_all_reduce_for_fetch_params", "bool", False, "units are gathered in place"),
            _nothing("stage3_allgather_sequential", "bool", False, "units are gathered in place"),
            Key("ignore_unused_parameters", "bool", True, WORKS, "false, in stage 2: a parameter that no rank used is an error"),
            _nothing("legacy_stage1", "bool", False, "one stage 1"),
            _nothing("round_robin_gradients", "bool", False, "no copies between host and device"),
            _nothing("parameter_alignment", "bool", False, "parameters are aligned, always"),
            _nothing("memory_efficient_linear", "bool", True, "units gather weights for the backward by themselves"),
            _nothing("pipeline_loading_checkpoint", "bool", False, "of checkpoints"),
            _nothing("override_module_apply", "bool", True, "Module.apply is left alone"),
            _nothing("log_trace_cache_warnings", "bool", False, "there is no trace"),
            _nothing("enable_sanity_checks", "bool", False, "the ledger is on, always"),
            _nothing("save_muon_momentum_buffer_in_memory", "bool", False, "all state is in memory"),
            _raises("zenflow", "dict", None, "no ZenFlow"),
            _raises("zero_hpz_partition_size", "int", 1, "no secondary shards; plumb.Engine has strategy='hsdp'"),
            _raises("zero_quantized_weights", "bool", False, "weights travel as they are"),
            _raises("zero_quantized_nontrainable_weights", "bool", False, "weights travel as they are"),
            _raises("zero_quantized_gradients", "bool", False, "gradients travel as they are"),
            Key("mics_shard_size", "int", -1, WORKS, "stage 3 shards over that many neighbouring ranks, as strategy='hsdp'"),
            _nothing("mics_hierarchical_params_gather", "bool", False, "the way between machines is the backend's choice"),
        ),
    ),
    Section(
        "fp16",
        (
            Key("enabled", "bool", False, WORKS, "f16 parameters, f32 masters, loss scaling"),
            Key("loss_scale", "float", 0.0, WORKS, "0: dynamic; otherwise the scale"),
            Key("initial_scale_power", "int", 16, WORKS, "the first dynamic scale is 2 to this"),
            Key("loss_scale_window", "int", 1000, WORKS, "good steps until the scale doubles"),
            Key("hysteresis", "int", 2, WORKS, "skipped steps until the scale halves; in stage 0 each one does"),
            Key("consecutive_hysteresis", "bool", False, WORKS, "a good step begins that count again"),
            Key("min_loss_scale", "float", 1.0, WORKS, "the least dynamic scale"),
            Key("auto_cast", "bool", False, WORKS, "floating-point inputs of the model are cast to f16"),
            _raises("fp16_master_weights_and_grads", "bool", False, "masters are f32"),
        ),
    ),
    Section(
        "bf16",
        (
            Key("enabled", "bool", False, WORKS, "bf16 parameters, f32 masters"),
            Key("check_grad_overflow", "bool", True, WORKS, "a step whose gradients are not finite is skipped"),
            Key("auto_cast", "bool", False, WORKS, "floating-point inputs of the model are cast to bf16"),
            _nothing("immediate_grad_update", "bool", False, "sums are updated as gradients come, always"),
            _raises("bf16_master_weights_and_grads", "bool", False, "masters are f32"),
            _raises("bf16_optimizer_states", "bool", False, "state is f32"),
        ),
    ),
    Section(
        "data_types",
        (
            Key("grad_accum_dtype", "dtype", None, WORKS, "what gradients are summed in; by default f32 with bf16 or fp16"),
            Key("param_dtype", "dtype", None, WORKS, "must agree with fp16 and bf16"),
            Key("buffer_dtype", "dtype", None, WORKS, "floating-point buffers are cast to it"),
            Key("keep_in_fp32_modules", "any", "auto", WORKS, "buffers of these names are f32 beside half precision; auto: transformers' own lists"),
        ),
    ),
    Section(
        "torch_autocast",
        (
            Key("enabled", "bool", False, WORKS, "the model's forward runs under torch.autocast"),
            Key("dtype", "dtype", torch.bfloat16, WORKS, "bfloat16; float16 needs a scaler: use fp16"),
            _nothing("lower_precision_safe_modules", "any", None, "torch.autocast decides by operation"),
        ),
    ),
)

SECTIONS: dict[str, dict[str, Key]] = {section.name: {key.name: key for key in section.keys} for section in TABLE}

_DTYPES = {
    "fp32": torch.float32, "float32": torch.float32, "float": torch.float32, "torch.float32": torch.float32,
    "fp16": torch.float16, "float16": torch.float16, "half": torch.float16, "torch.float16": torch.float16,
    "bf16": torch.bfloat16, "bfp16": torch.bfloat16, "bfloat16": torch.bfloat16, "torch.bfloat16": torch.bfloat16,
}  # fmt: skip


def nearest(name: str, among: list[str]) -> str:
    found = difflib.get_close_matches(name, among, n=1, cutoff=0.0)
    return found[0] if found else ""


def _value(where: str, key: Key, value: Any) -> Any:
    """The value as the key's kind; an Error otherwise."""
    if value is None or value == "auto":
        return key.default

    def wrong(expected: str) -> ConfigError:
        return ConfigError(f"'{where}' is {value!r} in the DeepSpeed config; expected {expected}")

    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if key.kind == "bool":
        if not isinstance(value, bool) and not (number and value in (0, 1)):
            raise wrong("true or false")
        return bool(value)
    elif key.kind == "every" and number and value == math.inf:
        return value  # never
    elif key.kind in ("int", "every"):
        if not number or (isinstance(value, float) and not value.is_integer()):
            raise wrong("a whole number")
        return int(value)
    elif key.kind == "float":
        if not number or not math.isfinite(value):
            raise wrong("a number")
        return float(value)
    elif key.kind == "str":
        if not isinstance(value, str):
            raise wrong("a string")
    elif key.kind == "dtype":
        if isinstance(value, torch.dtype):
            return value
        if not isinstance(value, str) or value not in _DTYPES:
            raise wrong("fp32, fp16 or bf16")
        return _DTYPES[value]
    elif key.kind in ("dict", "section") and not isinstance(value, Mapping):
        raise wrong("a dictionary")
    return value


class Config:
    """A parsed config. ``config["zero_optimization.stage"]`` is a value, the default where nobody gave one."""

    def __init__(self, given: Any, world_size: int) -> None:
        self.given = load(given)
        self.world_size = world_size
        self.values: dict[str, Any] = {}
        self.was_given: set[str] = set()
        for section in TABLE:
            for key in section.keys:
                self.values[f"{section.name}.{key.name}".lstrip(".")] = key.default
        self._read("", self.given)
        self._check()
        self._batches()

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def _read(self, section: str, given: Mapping[str, Any]) -> None:
        keys = SECTIONS[section]
        for name, value in given.items():
            # DeepSpeed takes these without their prefix, too.
            key = keys.get(name) or (keys.get(f"stage3_{name}") if section == "zero_optimization" else None)
            where = f"{section}.{name if key is None else key.name}".lstrip(".")
            if key is None:
                supported = [one.name for one in keys.values() if one.status != RAISES]
                raise ConfigError(
                    f"the DeepSpeed config has the key '{where}', which is not known; the nearest one that is supported is"
                    f" '{f'{section}.'.lstrip('.')}{nearest(str(name), supported)}'"
                )
            if key.kind == "section":
                self._section(key, value)
                continue
            self.values[where] = _value(where, key, value)
            if value is not None and value != "auto":
                self.was_given.add(where)
            if key.status == RAISES and self.values[where] != key.default:
                raise ConfigError(f"'{where}' is {value!r} in the DeepSpeed config, which is not supported: {key.meaning}")

    def _section(self, key: Key, value: Any) -> None:
        if isinstance(value, bool) and key.name == "zero_optimization":
            value = {"stage": 1 if value else 0}
        value = _value(key.name, key, value)
        if value is None:
            return
        target = "bf16" if key.name == "bfloat16" else key.name
        if target in SECTIONS:
            self.was_given.add(target)
            self._read(target, value)
        elif key.status == RAISES and not _is_off(key, value):
            raise ConfigError(f"'{key.name}' in the DeepSpeed config is not supported: {key.meaning}")

    def _check(self) -> None:
        stage = self["zero_optimization.stage"]
        if stage not in (0, 1, 2, 3):
            raise ConfigError(f"'zero_optimization.stage' is {stage} in the DeepSpeed config; expected 0, 1, 2 or 3")
        if self["fp16.enabled"] and self["bf16.enabled"]:
            raise ConfigError("bfloat16 and fp16 modes cannot be simultaneously enabled")
        if self["gradient_allreduce_op"] not in ("mean", "sum"):
            raise ConfigError(f"'gradient_allreduce_op' is {self['gradient_allreduce_op']!r}; expected 'mean' or 'sum'")
        if self["gradient_allreduce_op"] == "sum" and stage == 3:
            raise ConfigError("gradient_allreduce_op='sum' is not supported with ZeRO stage 3")
        for name, least in (
            ("gradient_clipping", 0), ("fp16.loss_scale", 0), ("fp16.loss_scale_window", 1), ("fp16.hysteresis", 1),
            ("fp16.min_loss_scale", 0), ("zero_optimization.reduce_bucket_size", 1),
            ("zero_optimization.stage3_param_persistence_threshold", 0),
        ):  # fmt: skip
            if self[name] < least:
                raise ConfigError(f"'{name}' is {self[name]} in the DeepSpeed config; expected at least {least}")
        shard = self["zero_optimization.mics_shard_size"]
        if shard != -1 and (stage != 3 or shard < 1 or self.world_size % shard):
            raise ConfigError(
                f"'zero_optimization.mics_shard_size' is {shard} in the DeepSpeed config, with stage {stage} on {self.world_size} ranks;"
                " expected stage 3, and a number of ranks that divides all of them"
            )
        if not self["zero_optimization.compute_grad_norm"] and stage not in (1, 2):
            raise ConfigError("compute_grad_norm=false is supported only with ZeRO Stage 1 or 2")
        param = self["data_types.param_dtype"]
        if param is not None and param != (self.half or torch.float32):
            raise ConfigError(f"data_types.param_dtype is {param}, and fp16 and bf16 say {self.half or torch.float32}")
        if self["torch_autocast.enabled"] and self["torch_autocast.dtype"] != torch.bfloat16:
            raise ConfigError("torch_autocast.dtype is float16, which needs a loss scaler: use the section 'fp16'")
        kept = self["data_types.keep_in_fp32_modules"]
        if kept != "auto" and not (isinstance(kept, list) and all(isinstance(one, str) for one in kept)):
            raise ConfigError(f"'data_types.keep_in_fp32_modules' is {kept!r}; expected 'auto' or a list of names")
        validation = (self.given.get("checkpoint") or {}).get("tag_validation", "Warn")
        if not isinstance(validation, str) or validation.upper() not in ("FAIL", "WARN", "IGNORE"):
            raise ConfigError(f"'checkpoint.tag_validation' is {validation!r} in the DeepSpeed config; expected Ignore, Warn or Fail")
        for what in ("offload_optimizer", "offload_param"):
            given = self[f"zero_optimization.{what}"] or {}
            if given.get("device", "none") not in ("none", "cpu", None):
                raise ConfigError(
                    f"'zero_optimization.{what}.device' is {given['device']!r} in the DeepSpeed config, which is not supported;"
                    " expected 'none' or 'cpu'"
                )

    def _batches(self) -> None:
        train = self["train_batch_size"]
        micro = self["train_micro_batch_size_per_gpu"]
        steps = self["gradient_accumulation_steps"]
        size = self.world_size
        if train is not None and micro is not None and steps is None:
            steps = train // micro // size if micro else 0
        elif train is not None and micro is None and steps is not None:
            micro = train // size // steps if steps else 0
        elif train is None and micro is not None:
            steps = 1 if steps is None else steps
            train = micro * steps * size
        elif train is not None and micro is None and steps is None:
            steps, micro = 1, train // size
        elif train is None:
            raise ConfigError("Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided")
        for what, value in (
            ("Train batch size", train), ("Micro batch size per gpu", micro), ("Gradient accumulation steps", steps),
        ):  # fmt: skip
            if not value > 0:
                raise ConfigError(f"{what}: {value} has to be greater than 0")
        if train != micro * steps * size:
            raise ConfigError(
                "Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step *"
                f" world_size {train} != {micro} * {steps} * {size}"
            )
        self.values["train_batch_size"] = train
        self.values["train_micro_batch_size_per_gpu"] = micro
        self.values["gradient_accumulation_steps"] = steps

    @property
    def half(self) -> torch.dtype | None:
        """What parameters are cast to, if anything."""
        return torch.float16 if self["fp16.enabled"] else torch.bfloat16 if self["bf16.enabled"] else None

    @property
    def hysteresis(self) -> int:
        """Skipped steps until the loss scale halves: without ZeRO each one does, in DeepSpeed, too."""
        return int(self["fp16.hysteresis"]) if self["zero_optimization.stage"] > 0 else 1

    @property
    def sums(self) -> torch.dtype | None:
        """What gradients are summed in, over micro-batches and ranks; None: their parameter's dtype."""
        default = torch.float32 if self.half is not None else None
        asked = [self["data_types.grad_accum_dtype"] or default, self["communication_data_type"]]
        wide = None
        for one in asked:
            if one is not None:
                wide = one if wide is None else torch.promote_types(wide, one)
        return None if wide is None else torch.promote_types(wide, self.half or torch.float32)
