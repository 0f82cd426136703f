"""Values that a checkpoint holds without pickle: whatever goes in comes out, of the same kinds, to the bit."""

from __future__ import annotations

import argparse
import json
import math
import random
from typing import Any

import numpy
import pytest
import torch

import plumb
from plumb.save import _text, _value, check_generators, pack, unpack

SINGLE: list[Any] = [
    None, True, False, 0, -7, 2**70, "", "naïve \" \\ \n", 0.1, -0.0, math.inf, -math.inf, math.nan, 1e-320, b"", b"\x00\xff",
    torch.tensor(3), torch.tensor([1.5], dtype=torch.bfloat16), torch.zeros(0, 2), torch.arange(6).view(2, 3).t(),
    numpy.float32(0.1), numpy.arange(3), argparse.Namespace(a=1, b=[2.5, (3,)]),
]  # fmt: skip
KEYS: list[Any] = ["a", "dict", "tensor", "float", 3, -1, None, True, 2.5, (1, "x"), b"k"]


def drawn(draw: random.Random, depth: int) -> Any:
    kind = draw.randrange(6) if depth else 5
    if kind == 0:
        return [drawn(draw, depth - 1) for _ in range(draw.randrange(4))]
    if kind == 1:
        return tuple(drawn(draw, depth - 1) for _ in range(draw.randrange(4)))
    if kind == 2:
        return {key: drawn(draw, depth - 1) for key in draw.sample(KEYS, draw.randrange(5))}
    if kind == 3:
        return set(draw.sample([1, "a", 2.5, None, (1, 2), b"z"], draw.randrange(5)))
    if kind == 4:
        return argparse.Namespace(inside=drawn(draw, depth - 1))
    return draw.choice(SINGLE)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, (numpy.ndarray, numpy.generic)):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, float):
        return numpy.float64(one).tobytes() == numpy.float64(other).tobytes() or (math.isnan(one) and math.isnan(other))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=False)
        return len(one) == len(other) and all(same(key, its) and same(a, b) for (key, a), (its, b) in pairs)
    if isinstance(one, argparse.Namespace):
        return same(vars(one), vars(other))
    return bool(one == other)


@pytest.mark.parametrize("value", SINGLE, ids=lambda value: type(value).__name__)
def test_every_kind_comes_back(value: Any) -> None:
    for held in (value, [value], (value,), {"key": value}, argparse.Namespace(key=value)):
        assert same(unpack(pack(held, "it")), held)


def test_every_tree_comes_back() -> None:
    for seed in range(300):
        value = drawn(random.Random(seed), 4)
        assert same(unpack(pack(value, "it")), value), seed


def test_what_cannot_be_held_is_named_by_its_place() -> None:
    for value, place in (({"a": [1, print]}, r"it\['a'\]\[1\]"), ((object(),), r"it\[0\]"), (print, "it")):
        with pytest.raises(plumb.Error, match=f"{place} is a .*; a checkpoint holds tensors"):
            pack(value, "it")


SETTINGS: list[Any] = [
    None, True, 3, 0.1, math.inf, -math.inf, "plain", [], [1, [2.5]], (0.9, 0.999), (1, (math.inf, [2])),
    torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([[7]]), torch.tensor(True), torch.tensor(0.1, dtype=torch.bfloat16),
    torch.tensor(0.1, dtype=torch.float64), torch.tensor(math.inf), torch.tensor(2**40),
]  # fmt: skip


@pytest.mark.parametrize("value", SETTINGS, ids=str)
def test_settings_of_groups_come_back_as_text(value: Any) -> None:
    for held in (value, [value], (value, value)):
        assert same(_value(json.loads(json.dumps(_text(held, "it")))), held)


def test_settings_are_single_real_numbers() -> None:
    for value in (torch.zeros(2), torch.zeros(0), torch.tensor(1j)):
        with pytest.raises(plumb.Error, match="expected a real number"):
            _text(value, "it")


def test_ranks_that_were_not_there_draw_numbers_of_their_own() -> None:
    before = random.getstate(), numpy.random.get_state()
    try:
        for seed in (3, 2**32 + 3, 2**63 + 5):  # numpy takes 32 bits
            for restore in check_generators([("python", None, seed), ("numpy", None, seed), ("unheard of", None, seed)]):
                restore()
            assert random.random() == random.Random(seed).random()
            assert numpy.random.rand() == numpy.random.RandomState(seed % 2**32).rand()
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])
    damaged = torch.frombuffer(bytearray(b"[1, 2]"), dtype=torch.uint8)
    for name in ("python", "numpy"):
        with pytest.raises(plumb.Error, match=f"the state of {name}'s random generator is not one"):
            check_generators([(name, damaged, 0)])
