"""What becomes of DeepSpeed's names, tried over a module that has them and nothing behind them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import plumb
import plumb.deepspeed as deepspeed
from plumb.deepspeed import rebound
from deepspeeds import batch, config_of, make

PARTS = ("runtime", "runtime.engine", "runtime.config", "runtime.zero", "runtime.zero.partition_parameters", "runtime.zero.mics", "runtime.lr_schedules",
         "zero", "utils", "utils.tensor_fragment", "utils.z3_leaf_module", "utils.zero_to_fp32", "ops", "ops.adam", "ops.lion", "ops.lamb", "ops.adagrad")  # fmt: skip


class PipelineModule(torch.nn.Module):
    pass


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Stands where DeepSpeed is imported from."""
    made: Any = ModuleType("deepspeed")
    monkeypatch.setitem(sys.modules, "deepspeed", made)
    for name in PARTS:
        part = ModuleType(f"deepspeed.{name}")
        monkeypatch.setitem(sys.modules, f"deepspeed.{name}", part)
        owner, _, attribute = f"deepspeed.{name}".rpartition(".")
        setattr(sys.modules[owner], attribute, part)
    made.initialize, made.PipelineModule, made.calls = print, PipelineModule, []
    made.init_distributed = lambda **words: made.calls.append(words)
    yield made


def test_every_name_is_ours_wherever_it_is_found(theirs: Any) -> None:
    assert rebound.rebind()
    for ours, places in rebound.REBOUND.items():
        expected = rebound._found(f"plumb.deepspeed.{ours}")
        for place in places:
            owner, _, name = f"deepspeed.{place}".rpartition(".")
            assert getattr(sys.modules[owner], name) is expected, place
    for name in deepspeed.utils.__all__:
        inner = "z3_leaf_module" if "z3_leaf" in name else "tensor_fragment"
        assert getattr(theirs.utils, name) is getattr(sys.modules[f"deepspeed.utils.{inner}"], name) is getattr(deepspeed.utils, name)
    fp32 = deepspeed.utils.zero_to_fp32 if hasattr(deepspeed.utils, "zero_to_fp32") else sys.modules["plumb.deepspeed.utils.zero_to_fp32"]
    assert all(getattr(theirs.utils.zero_to_fp32, name) is getattr(fp32, name) for name in fp32.__all__)
    for name, kind in (("Init", deepspeed.zero.Init), ("MiCS_Init", deepspeed.zero.MiCS_Init)):
        assert issubclass(getattr(theirs.zero, name), kind) and getattr(theirs.zero, name).__name__ == name
    assert theirs.zero.Init is theirs.runtime.zero.partition_parameters.Init and theirs.zero.MiCS_Init is theirs.runtime.zero.mics.MiCS_Init


def test_initialize_asks_deepspeeds_own_ranks_unless_it_is_not_to(theirs: Any) -> None:
    rebound.rebind()
    engine = theirs.initialize(None, make(), config=config_of(), distributed_port=29511)[0]
    assert theirs.calls == [{"distributed_port": 29511}] and isinstance(engine, deepspeed.DeepSpeedEngine)
    engine.backward(engine(*batch(0, 0)))
    engine.step()
    theirs.initialize(model=make(), config=config_of())
    theirs.initialize(model=make(), config=config_of(), dist_init_required=True)
    assert [one.get("distributed_port") for one in theirs.calls] == [29511, 29500, 29500]
    theirs.initialize(model=make(), config=config_of(), dist_init_required=False)
    assert len(theirs.calls) == 3
    theirs.zero.Init(enabled=False)
    assert len(theirs.calls) == 4
    for given, named in (((None, PipelineModule()), {}), ((), {"model": PipelineModule()})):
        with pytest.raises(plumb.Error, match="a PipelineModule is not supported here"):
            theirs.initialize(*given, config=config_of(), **named)
    assert len(theirs.calls) == 4, "what is refused begins nothing"


def test_a_folder_of_that_name_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ModuleType("deepspeed")
    monkeypatch.setitem(sys.modules, "deepspeed", folder)
    rebound.rebind()
    assert not hasattr(folder, "initialize") and not hasattr(folder, "zero")
