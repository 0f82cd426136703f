"""DeepSpeed: initialize(), the keys of its config, the methods of its engine, as of 0.19."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import pathlib
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import plumb
import plumb.deepspeed as deepspeed
from plumb.deepspeed import config as keys
from plumb.deepspeed import methods

from . import Entry, State, Table

#: Every name of the original, so that nothing is missed where it is not installed; test_deepspeed_names compares.
NAMES: dict[str, list[str]] = json.loads((pathlib.Path(__file__).parent / "deepspeed_names.json").read_text())

SMALL = {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}}


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def engine(**more: Any) -> Any:
    return deepspeed.initialize(model=model(), config={**SMALL, **more})[0]


@functools.cache
def shared() -> Any:
    """One engine for questions that change nothing."""
    return engine()


def trained(made: Any) -> None:
    made.backward(made(torch.ones(2, 3)).sum())
    made.step()
    assert made.global_steps == 1


# ---- arguments


def with_argument(name: str, value: Any) -> None:
    made = deepspeed.initialize(**{"model": model(), "config": SMALL, name: value})  # type: ignore[arg-type]
    assert len(made) == 4
    trained(made[0])
    made[0].destroy()


def given_config() -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(SMALL, file)
        file.flush()
        trained(deepspeed.initialize(model=model(), config=file.name)[0])


class Mpu:
    @staticmethod
    def get_data_parallel_world_size() -> int:
        return 2


class Args:
    deepspeed_config = SMALL


ARGUMENTS: dict[str, tuple[State, str, Callable[[], None]]] = {
    "args": (State.WORKS, "its `deepspeed_config`", lambda: trained(deepspeed.initialize(Args(), model())[0])),
    "model": (State.WORKS, "", lambda: trained(engine())),
    "optimizer": (State.WORKS, "an object, or a function of parameters", lambda: with_argument("optimizer", torch.optim.SGD)),
    "model_parameters": (State.WORKS, "tensors, or groups", lambda: None),
    "training_data": (State.WORKS, "a loader over this rank's part", lambda: with_argument("training_data", [torch.ones(3)] * 8)),
    "lr_scheduler": (
        State.WORKS,
        "an object, or a function of an optimizer",
        lambda: with_argument("lr_scheduler", lambda o: torch.optim.lr_scheduler.ConstantLR(o)),
    ),
    "distributed_port": (State.WORKS, "where nobody chose one", lambda: with_argument("distributed_port", 29501)),
    "mpu": (State.WORKS, "of data parallelism alone", lambda: with_argument("mpu", Mpu())),
    "dist_init_required": (State.WORKS, "", lambda: with_argument("dist_init_required", False)),
    "collate_fn": (State.WORKS, "of the loader", lambda: with_argument("collate_fn", torch.stack)),
    "config": (State.WORKS, "a dictionary, or a file's path", given_config),
    "mesh_param": (State.RAISES, "no sequence parallelism", lambda: with_argument("mesh_param", (1, 2))),
    "config_params": (State.WORKS, "the old name of `config`", lambda: trained(deepspeed.initialize(model=model(), config_params=SMALL)[0])),
}  # fmt: skip


def parameters_given() -> None:
    one = model()
    made, _, _, _ = deepspeed.initialize(model=one, model_parameters=[{"params": list(one.parameters())}], config=SMALL)
    trained(made)


ARGUMENTS["model_parameters"] = (State.WORKS, "tensors, or groups", parameters_given)


# ---- keys

_SAMPLES: dict[str, Any] = {"bool": True, "int": 7, "every": 7, "float": 0.5, "str": "x", "dtype": "fp32", "dict": {}, "any": None}
_VALUES: dict[str, Any] = {
    "train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_allreduce_op": "sum",
    "zero_optimization.stage": 3, "optimizer.type": "Lamb", "scheduler.type": "WarmupLR", "data_types.param_dtype": "fp32",
    "data_types.keep_in_fp32_modules": ["head"], "torch_autocast.dtype": "bfloat16", "zero_optimization.zenflow": {"topk_ratio": 0.1},
    "zero_optimization.compute_grad_norm": True, "sequence_parallel_size": 2, "data_parallel_size": 2, "zero_optimization.mics_shard_size": 1,
}  # fmt: skip
_BESIDE: dict[str, dict[str, Any]] = {"zero_optimization.mics_shard_size": {"stage": 3}}  # without which a key makes no sense


def key_check(section: str, key: keys.Key) -> Callable[[], None]:
    where = f"{section}.{key.name}".lstrip(".")

    def check() -> None:
        value = _VALUES.get(where, _SAMPLES.get(key.kind))
        if key.kind == "bool" and key.default is True and where not in _VALUES:
            value = False
        if key.kind == "section":
            value = {"enabled": True} if key.status == keys.RAISES or "enabled" in keys.SECTIONS.get(key.name, {}) else {}
        given: dict[str, Any] = {"train_batch_size": 4}
        if section:
            given[section] = {**_BESIDE.get(where, {}), key.name: value}
        else:
            given[key.name] = value
        parsed = keys.Config(given, 2)
        assert key.kind == "section" or key.kind in ("dict", "any") or parsed[where] in (value, keys._DTYPES.get(str(value)))

    return check


def key_entries() -> list[Entry]:
    states = {keys.WORKS: State.WORKS, keys.NOTHING: State.NO_OP, keys.RAISES: State.RAISES}
    return [
        Entry(f"key {f'{section.name}.{key.name}'.lstrip('.')}", states[key.status], key.meaning, key_check(section.name, key))
        for section in keys.TABLE
        for key in section.keys
    ]


# ---- methods


def _saves_16bit() -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert shared().save_16bit_model(folder)


def _saves_checkpoints() -> None:
    folder = os.path.join(tempfile.gettempdir(), f"plumb-compatibility-{os.getppid()}")  # one for all ranks
    made = engine()
    trained(made)
    assert made.save_checkpoint(folder, client_state={"epoch": 1})
    assert made.load_checkpoint(folder)[1] == {"epoch": 1}  # which every rank has read now
    shutil.rmtree(folder, ignore_errors=True)


METHODS: dict[str, tuple[str, Callable[[], Any]]] = {
    "forward": ("", lambda: shared()(torch.ones(2, 3))),
    "backward": ("a loss of one element, or None where this rank ran out of batches; `scale_wrt_gas`, `retain_graph`", lambda: trained(engine())),
    "step": ("", lambda: trained(engine())),
    "scale": ("", lambda: engine().scale(shared()(torch.ones(2, 3)).sum()).backward()),
    "no_sync": ("stages 0 and 1, as there", lambda: engine().no_sync().__enter__()),
    "coalesce_grad_reduction": ("stages 1 to 3; `step()` reduces", lambda: engine(zero_optimization={"stage": 1}).coalesce_grad_reduction()),
    "is_gradient_accumulation_boundary": ("", lambda: shared().is_gradient_accumulation_boundary()),
    "set_gradient_accumulation_boundary": ("", lambda: engine().set_gradient_accumulation_boundary(False)),
    "was_step_applied": ("", lambda: shared().was_step_applied()),
    "get_global_grad_norm": ("", lambda: shared().get_global_grad_norm()),
    "zero_grad": ("", lambda: shared().zero_grad()),
    "get_lr": ("", lambda: shared().get_lr()),
    "get_mom": ("", lambda: shared().get_mom()),
    "get_type": ("", lambda: shared().get_type()),
    "get_batch_info": ("", lambda: shared().get_batch_info()),
    "set_train_batch_size": ("", lambda: engine().set_train_batch_size(8)),
    "set_train_micro_batch_size": ("", lambda: engine().set_train_micro_batch_size(1)),
    "deepspeed_io": ("a `DataLoader` with a `DistributedSampler`", lambda: shared().deepspeed_io([torch.ones(3)] * 4)),
    "is_map_style_dataset": ("", lambda: shared().is_map_style_dataset([])),
    "is_iterable_style_dataset": ("", lambda: shared().is_iterable_style_dataset([])),
    "train": ("", lambda: shared().train()),
    "eval": ("", lambda: shared().eval()),
    "module_state_dict": ("whole parameters in every stage", lambda: shared().module_state_dict()),
    "load_module_state_dict": ("", lambda: shared().load_module_state_dict(shared().module_state_dict())),
    "save_16bit_model": ("one file, by rank 0", _saves_16bit),
    "save_fp16_model": ("the old name of `save_16bit_model`", _saves_16bit),
    "save_checkpoint": ("one that any stage and number of ranks loads; `client_state` without pickles", _saves_checkpoints),
    "load_checkpoint": ("with all its arguments; `custom_load_fn` for weights alone", _saves_checkpoints),
    "offload_states": ("on the CPU, where everything is there already", lambda: shared().offload_states()),
    "reload_states": ("", lambda: shared().reload_states()),
    "compile": ("the module, or each unit of stage 3", lambda: engine().compile(backend="eager")),
    "is_compiled": ("", lambda: shared().is_compiled),
    "destroy": ("", lambda: engine().destroy()),
    "optimizer_name": ("", lambda: shared().optimizer_name()),
    "zero_optimization": ("", lambda: shared().zero_optimization()),
    "zero_optimization_partition_gradients": ("", lambda: shared().zero_optimization_partition_gradients()),
    "zero_optimization_partition_weights": ("", lambda: shared().zero_optimization_partition_weights()),
    "zero_cpu_offload": ("", lambda: shared().zero_cpu_offload()),
    "zero_use_cpu_optimizer": ("", lambda: shared().zero_use_cpu_optimizer()),
    "dynamic_loss_scale": ("", lambda: shared().dynamic_loss_scale()),
    "initial_dynamic_scale": ("", lambda: shared().initial_dynamic_scale()),
    "dynamic_loss_scale_args": ("", lambda: shared().dynamic_loss_scale_args()),
    "postscale_gradients": ("", lambda: shared().postscale_gradients()),
    "get_data_types": ("", lambda: shared().get_data_types()),
    "communication_data_type": ("", lambda: shared().communication_data_type),
    "get_data_parallel_rank": ("", lambda: shared().get_data_parallel_rank()),
    "get_model_parallel_rank": ("", lambda: shared().get_model_parallel_rank()),
    "get_tensor_parallel_rank": ("", lambda: shared().get_tensor_parallel_rank()),
    "get_sequence_parallel_group": ("", lambda: shared().get_sequence_parallel_group()),
}  # fmt: skip

NOTHING: dict[str, str] = {
    "allreduce_gradients": "gradients are reduced with the backward at the boundary, or by `step()`",
    "empty_partition_cache": "units are released after use",
}

def _answers(name: str) -> None:
    assert getattr(shared(), name)() == methods.ANSWERS[name]


def _says(name: str) -> None:
    assert getattr(shared(), name)() == shared()._config[methods.GETTERS[name]]


def method_entries() -> list[Entry]:
    entries = [Entry(f"method {name}", State.WORKS, note, lambda call=call: (call(), None)[1]) for name, (note, call) in METHODS.items()]
    entries += [
        Entry(f"method {name}", State.WORKS, f"`{key}`", functools.partial(_says, name)) for name, key in methods.GETTERS.items()
    ]
    entries += [
        Entry(f"method {name}", State.NO_OP, note, lambda name=name: getattr(shared(), name)()) for name, note in NOTHING.items()
    ]
    entries += [
        Entry(f"method {name}", State.NO_OP, f"answers {value!r}", functools.partial(_answers, name))
        for name, value in methods.ANSWERS.items()
    ]
    entries += [
        Entry(f"method {name}", State.RAISES, why, lambda name=name: getattr(shared(), name)())
        for name, why in methods.NOT_HERE.items()
    ]
    return entries


@functools.cache
def with_parts() -> Any:
    """An engine whose optimizer is wrapped, for questions that change nothing."""
    return engine(zero_optimization={"stage": 1}).optimizer


def optimizer_entries() -> list[Entry]:
    return [
        Entry(f"optimizer.{name}", State.RAISES, why, lambda name=name: getattr(with_parts(), name))
        for name, why in methods.PARTITIONS.items()
    ]


def names() -> list[str]:
    return [f"argument {name}" for name in NAMES["arguments"]] + [f"key {name}" for name in all_keys()] + [
        f"method {name}" for name in NAMES["methods"]
    ] + [f"optimizer.{name}" for name in methods.PARTITIONS]  # fmt: skip


def all_keys() -> set[str]:
    """DeepSpeed's of today, and those of its older versions that people still have in their files."""
    return set(NAMES["keys"]) | set(NAMES["old keys"])


def installed_names() -> dict[str, list[str]]:
    """What the installed DeepSpeed has, read from its sources: importing it builds extensions."""
    import ast

    found = importlib.util.find_spec("deepspeed")
    assert found is not None and found.origin is not None
    root = pathlib.Path(found.origin).parent

    def parsed(path: str) -> ast.Module:
        return ast.parse((root / path).read_text())

    def the_class(path: str, name: str) -> ast.ClassDef:
        return next(n for n in parsed(path).body if isinstance(n, ast.ClassDef) and n.name == name)

    def fields(path: str, name: str) -> list[str]:
        result = []
        for node in the_class(path, name).body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                alias = [
                    one.value.value
                    for one in (node.value.keywords if isinstance(node.value, ast.Call) else [])
                    if one.arg == "alias" and isinstance(one.value, ast.Constant)
                ]
                result.append(str(alias[0]) if alias else node.target.id)
        return result

    function = next(n for n in parsed("__init__.py").body if isinstance(n, ast.FunctionDef) and n.name == "initialize")
    engine_class = the_class("runtime/engine.py", "DeepSpeedEngine")
    sections = {
        "zero_optimization": ("runtime/zero/config.py", "DeepSpeedZeroConfig"),
        "fp16": ("runtime/precision_config.py", "DeepSpeedFP16Config"),
        "bf16": ("runtime/precision_config.py", "DeepSpeedBF16Config"),
    }
    constants = {
        target.id: node.value.value
        for node in parsed("runtime/constants.py").body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return {
        # Keys have a default of their own beside them; which section they are in, the sources do not say.
        "constants": sorted({str(value) for name, value in constants.items() if f"{name}_DEFAULT" in constants}),
        "arguments": [argument.arg for argument in function.args.args],
        "methods": sorted({n.name for n in engine_class.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")}),
        "keys": sorted(f"{section}.{name}" for section, where in sections.items() for name in fields(*where)),
    }


TABLE = Table(
    original="deepspeed",
    ours="plumb.deepspeed",
    names=names,
    entries=(
        *(Entry(f"argument {name}", *what) for name, what in ARGUMENTS.items()),
        *key_entries(),
        *method_entries(),
        *optimizer_entries(),
    ),
    order=3,
)

assert inspect.signature(deepspeed.initialize).parameters.keys() == ARGUMENTS.keys()
assert issubclass(deepspeed.DeepSpeedConfigError, plumb.Error)
