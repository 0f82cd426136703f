"""What Python adds to a checkpoint: the state of a ``torch.optim`` object, and of anything with ``state_dict()``.

No pickle: tensors are tensors, everything else is JSON.
"""

from __future__ import annotations

import argparse
import base64
import collections
import functools
import json
import math
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from .. import _C, optim
from .._C import Error, Outer, OuterTensor

Place = OuterTensor.Place


@runtime_checkable
class Stateful(Protocol):
    """Anything that gives its state and takes it back: schedulers, loaders, samplers."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


Extras = Mapping[str, Stateful]
_JSON = "json"
_MAPPINGS: dict[str, Callable[[dict[Any, Any]], Any]] = {
    "dict": dict, "ordered": collections.OrderedDict, "counter": collections.Counter,  # MultiStepLR's milestones are counted
}  # fmt: skip
_PACKED = f"/{_JSON}"  # behind the key of optimizer state that is no tensor and no number


def pack(value: Any, what: str) -> list[tuple[str, torch.Tensor]]:
    """A nested value as named tensors, one of which is its structure in JSON."""
    tensors: list[tuple[str, torch.Tensor]] = []

    def one(value: Any, where: str) -> Any:
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, complex):
            return {"complex": [one(value.real, where), one(value.imag, where)]}
        if isinstance(value, torch.Tensor):
            if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or value.is_meta:
                kind = "tensor of the meta device" if value.is_meta else type(value).__name__
                raise Error(f"{where} is a {kind}; a checkpoint holds tensors with numbers of their own")
            tensors.append((f"{len(tensors)}", value.detach()))
            return {"tensor": tensors[-1][0]}
        if isinstance(value, torch.Size):
            return {"size": list(value)}
        if isinstance(value, collections.deque):
            return {"deque": [one(item, f"{where}[{i}]") for i, item in enumerate(value)], "longest": value.maxlen}
        if isinstance(value, (list, tuple)):
            items = [one(item, f"{where}[{i}]") for i, item in enumerate(value)]
            return items if isinstance(value, list) else {"tuple": items}
        if isinstance(value, (set, frozenset)):
            return {"set": [one(item, where) for item in sorted(value, key=repr)]}
        if isinstance(value, Mapping):
            word = next((word for word, kind in _MAPPINGS.items() if type(value) is kind), "dict")
            return {word: [[one(key, where), one(item, f"{where}[{key!r}]")] for key, item in value.items()]}
        if isinstance(value, bytes):
            return {"bytes": base64.b64encode(value).decode()}
        if isinstance(value, argparse.Namespace):
            return {"namespace": one(vars(value), where)}
        if getattr(getattr(value, "dtype", None), "kind", "") in tuple("?biufcSUmM"):  # numpy's, to the bit
            bits = torch.frombuffer(bytearray(value.tobytes()) or bytearray(1), dtype=torch.uint8)[: value.nbytes]
            tensors.append((f"{len(tensors)}", bits))
            return {"array": tensors[-1][0], "dtype": value.dtype.str, "shape": list(value.shape), "scalar": not hasattr(value, "__setitem__")}
        raise Error(f"{where} is a {type(value).__name__}; a checkpoint holds tensors, numbers, strings, lists and dicts")

    text = json.dumps(one(value, what)).encode()
    return [(_JSON, torch.frombuffer(bytearray(text), dtype=torch.uint8)), *tensors]


def unpack(packed: list[tuple[str, torch.Tensor]]) -> Any:
    """The value that ``pack`` was given."""
    tensors = dict(packed)

    def one(value: Any) -> Any:
        if isinstance(value, list):
            return [one(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "tensor" in value:
            return tensors[value["tensor"]]
        if "tuple" in value:
            return tuple(one(item) for item in value["tuple"])
        if "set" in value:
            return {one(item) for item in value["set"]}
        if "float" in value:
            return float(value["float"])
        if "complex" in value:
            return complex(*one(value["complex"]))
        if "size" in value:
            return torch.Size(value["size"])
        if "deque" in value:
            return collections.deque((one(item) for item in value["deque"]), value["longest"])
        if "bytes" in value:
            return base64.b64decode(value["bytes"])
        if "namespace" in value:
            return argparse.Namespace(**one(value["namespace"]))
        if "array" in value:
            import numpy

            found = numpy.frombuffer(bytes(tensors[value["array"]].tolist()), dtype=value["dtype"]).reshape(value["shape"]).copy()
            return found[()] if value["scalar"] else found
        if "numpy" in value:  # as it was written before
            import numpy

            return numpy.array(one(value["value"]), dtype=value["numpy"])[()]
        ((word, items),) = value.items()
        return _MAPPINGS[word]({one(key): one(item) for key, item in items})

    return one(json.loads(bytes(tensors[_JSON].tolist()).decode()))


def words(extras: Extras | None) -> list[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    """The extras as the binding takes them."""
    if extras is not None and not isinstance(extras, Mapping):
        raise Error(f"extras is a {type(extras).__name__}; expected a dict of things with state_dict() by name")
    for name in extras or {}:
        if not isinstance(name, str):
            raise Error(f"an extra is called {name!r}; expected a name")
    result: list[tuple[str, Callable[[], Any], Callable[[Any], Any]]] = []
    for name, thing in (extras or {}).items():

        def give(thing: Stateful = thing, name: str = name) -> list[tuple[str, torch.Tensor]]:
            return pack(_stateful(thing, name).state_dict(), f"extra '{name}'")

        def take(packed: list[tuple[str, torch.Tensor]], thing: Stateful = thing, name: str = name) -> None:
            _stateful(thing, name).load_state_dict(unpack(packed))

        result.append((name, give, take))
    return result


def _stateful(thing: Stateful, name: str) -> Stateful:
    """Asked when its turn comes, so that every rank hears of it."""
    if not isinstance(thing, Stateful):
        raise Error(f"extra '{name}' is a {type(thing).__name__}, which has no state_dict() and load_state_dict()")
    return thing


# ---- random generators that are not torch's


def generators() -> list[tuple[str, torch.Tensor]]:
    """What Python's ``random`` and numpy's global generator are at, on this rank."""
    states: dict[str, Any] = {"python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = numpy.random.get_state()
    return [(name, torch.frombuffer(bytearray(json.dumps(_plain(state)).encode()), dtype=torch.uint8)) for name, state in states.items()]


def _plain(state: Any) -> Any:
    return [_plain(item) for item in state] if isinstance(state, tuple) else state.tolist() if hasattr(state, "tolist") else state


def check_generators(saved: list[tuple[str, torch.Tensor | None, int]]) -> list[Callable[[], None]]:
    """What sets them back, tried on generators of no consequence; a rank that was not there before gets numbers of its own."""
    found: list[Callable[[], None]] = []
    for name, bits, seed in saved:
        state = None if bits is None else json.loads(bytes(bits.tolist()).decode())
        try:
            if name == "python":
                value = None if state is None else (state[0], tuple(state[1]), state[2])
                _set_python(random.Random(), value, seed)
                found.append(functools.partial(_set_python, random, value, seed))
            elif name == "numpy":
                import numpy

                _set_numpy(numpy.random.RandomState(), state, seed)
                found.append(functools.partial(_set_numpy, numpy.random, state, seed))
        except (TypeError, ValueError, IndexError, KeyError) as error:
            raise Error(f"the state of {name}'s random generator is not one: {error}") from None
    return found


def _set_python(generator: Any, state: Any, seed: int) -> None:
    if state is None:
        generator.seed(seed)
    else:
        generator.setstate(state)


def _set_numpy(generator: Any, state: Any, seed: int) -> None:
    if state is None:
        generator.seed(seed % 2**32)
    else:
        generator.set_state(tuple(state))


# ---- the state of a torch.optim object


def _text(value: Any, what: str) -> Any:
    """A value without tensors of any size, as JSON."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise Error(f"{what} is a {value.dtype} tensor of {value.numel()} elements; expected a real number")
        return {
            "scalar": str(value.dtype).removeprefix("torch."), "value": _text(value.item(), what), "shape": list(value.shape),
        }  # fmt: skip
    if isinstance(value, tuple):
        return {"tuple": [_text(item, what) for item in value]}
    if isinstance(value, list):
        return [_text(item, what) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise Error(f"{what} is a {type(value).__name__}; a checkpoint holds numbers, strings and tensors of it")


def _value(text: Any) -> Any:
    if isinstance(text, list):
        return [_value(item) for item in text]
    if not isinstance(text, dict):
        return text
    if "tuple" in text:
        return tuple(_value(item) for item in text["tuple"])
    if "float" in text:
        return float(text["float"])
    return torch.tensor(_value(text["value"]), dtype=getattr(torch, text["scalar"])).reshape(text.get("shape", ()))


def check_whole(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> None:
    """An Error where a checkpoint would not hold all that this optimizer has."""
    kind = type(optimizer)
    optim.refuse_foreign(optimizer, names, "build the engine after the optimizer has all its groups")
    if kind.state_dict is not torch.optim.Optimizer.state_dict:
        beside = optimizer.state_dict().keys() - {"state", "param_groups", optim.MARK}
        if beside:
            raise Error(
                f"{kind.__name__}.state_dict() has {', '.join(repr(key) for key in sorted(beside, key=str))} beside its state and groups, which"
                " a checkpoint would lose: keep it in a group, or save it as an extra"
            )


def general_of(optimizer: torch.optim.Optimizer) -> list[list[Any]]:
    """What it keeps of no parameter in particular."""
    return [[_text(key, "a key of the optimizer's state"), _text(value, f"'{key}' of the optimizer's state")]
        for key, value in optimizer.state.items() if not torch.is_tensor(key)]  # fmt: skip


def names_of_general(outer: dict[str, Any]) -> list[str]:
    return [repr(_value(name)) for name, _ in outer.get("general", [])]


def set_general(optimizer: torch.optim.Optimizer, saved: list[list[Any]]) -> None:
    general: dict[Any, Any] = optimizer.state  # what is kept beside the parameters' own
    for name in [name for name in general if not torch.is_tensor(name)]:
        del general[name]
    for name, text in saved:
        general[_value(name)] = _value(text)


def collect(
    optimizer: torch.optim.Optimizer, steps: optim.Whole | optim.Pieces, names: dict[int, str], rank: int
) -> Outer:
    """The optimizer's state, by the parameters' names; of pieces where this rank holds pieces."""
    check_whole(optimizer, names)
    tensors: list[OuterTensor] = []
    values: dict[str, dict[str, Any]] = {}
    groups = []
    for group in optimizer.param_groups:
        members = [names[id(parameter)] for parameter in group["params"]]
        settings = {key: _text(value, f"'{key}' of a group") for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({"params": members, "settings": settings})
        for parameter, name in zip(group["params"], members, strict=True):
            state, begin = steps.state_of(parameter)
            for key, value in state.items():
                if isinstance(value, (list, dict)) or (steps.has_owners and not torch.is_tensor(value)):
                    # A history, as LBFGS has; or what its owner alone knows.
                    if steps.speaks_for(parameter, rank):
                        inside = pack(value, f"'{key}' of '{name}'")
                        tensors += [OuterTensor(Place.other, name, f"{key}/{inner}", one) for inner, one in inside]
                elif not torch.is_tensor(value):
                    values.setdefault(name, {})[key] = _text(value, f"'{key}' of '{name}'")
                elif begin is not None and steps.is_piece(parameter, value):
                    tensors.append(OuterTensor(Place.piece, name, key, value, begin))
                elif begin is None and value.shape == parameter.shape and not optim.is_number(key, value, parameter):
                    tensors.append(OuterTensor(Place.whole, name, key, value))
                elif steps.speaks_for(parameter, rank):
                    tensors.append(OuterTensor(Place.other, name, key, value))
    text = json.dumps({"class": type(optimizer).__name__, "groups": groups, "values": values, "general": general_of(optimizer)})
    return Outer(tensors, text)


def check(optimizer: torch.optim.Optimizer, names: dict[int, str], outer: Outer) -> None:
    """An Error if this optimizer is not the one whose state was saved."""
    fits(optimizer, names, json.loads(outer.text))


def fits(optimizer: torch.optim.Optimizer, names: dict[int, str], saved: dict[str, Any]) -> None:
    """An Error unless this optimizer's class and groups are the saved ones."""
    optim.refuse_foreign(optimizer, names, "build the engine after the optimizer has all its groups")
    here = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    there = [group["params"] for group in saved["groups"]]
    if saved["class"] != type(optimizer).__name__:
        raise Error(
            f"the checkpoint holds the state of {saved['class']}, and this optimizer is {type(optimizer).__name__}; "
            "go on with the same kind, or take the weights alone: load_weights()"
        )
    if here != there:
        pairs = zip(sum(here, []), sum(there, []), strict=False)
        first = next((f"; the first that differ are '{one}' here and '{other}' there" for one, other in pairs if one != other), "")
        raise Error(
            f"the optimizer's groups hold {[len(g) for g in here]} parameters, and those of the checkpoint"
            f" {[len(g) for g in there]}{first}: load_weights() takes the weights alone"
        )


def restore(
    optimizer: torch.optim.Optimizer, steps: optim.Whole | optim.Pieces, names: dict[int, str], outer: Outer
) -> None:
    """Gives the optimizer what was saved; ``check`` has said that it fits."""
    saved = json.loads(outer.text)
    states: dict[str, dict[str, Any]] = {}
    packed: dict[tuple[str, str], list[tuple[str, torch.Tensor]]] = {
        (one.parameter, one.key.removesuffix(_PACKED)): [] for one in outer.tensors if one.key.endswith(_PACKED)
    }
    for one in outer.tensors:
        key, _, inner = one.key.rpartition("/")
        if (one.parameter, key) in packed:
            packed[one.parameter, key].append((inner, one.value))
        else:
            states.setdefault(one.parameter, {})[one.key] = one
    for (name, key), inside in packed.items():
        states.setdefault(name, {})[key] = unpack(inside)
    for name, values in saved["values"].items():
        states.setdefault(name, {}).update({key: _value(text) for key, text in values.items()})
    for group, words_of_group in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update({key: _value(text) for key, text in words_of_group["settings"].items()})
        on_device = group.get("capturable") or group.get("fused")
        for parameter in group["params"]:
            state: dict[str, Any] = {}
            begin: int | None = 0
            for key, value in states.get(names[id(parameter)], {}).items():
                if isinstance(value, OuterTensor):
                    begin = None if value.place == Place.whole or begin is None else max(begin, value.begin)
                    stays = value.place == Place.other and not on_device
                    value = value.value if stays else value.value.to(parameter.device)
                state[key] = value
            steps.set_state(parameter, state, begin)
    set_general(optimizer, saved.get("general", []))
