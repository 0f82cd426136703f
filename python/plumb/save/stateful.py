"""An engine as ``torch.distributed.checkpoint`` sees it: ``dcp.save({"engine": engine}, …)`` and ``dcp.load``.

Each rank names the elements it holds of each tensor, as boxes of its shape, so that nothing is gathered, and another number of
ranks or another strategy finds its own elements. What is loaded goes to memory of its own first: a load that fails, or does not
fit, changes nothing.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import math
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from .. import optim, save as _save
from .._C import Error
from ..given import refusal

if TYPE_CHECKING:
    from .engine import Saving

Box = tuple[tuple[int, ...], tuple[int, ...], int, int]  # offsets, sizes, and which elements they are in the order of the shape


def boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """Elements [begin, end) of a tensor, in the order of its shape, as boxes of it: at most two for each dimension, and one."""
    if begin >= end:
        return
    if len(shape) <= 1:
        yield ((begin,), (end - begin,), begin, end) if shape else ((), (), begin, end)
        return
    inner = math.prod(shape[1:])
    row = begin // inner
    if begin % inner:
        stop = min(end, (row + 1) * inner)
        yield from _in_row(shape, row, begin, stop)
        begin, row = stop, row + 1
    rows = (end - begin) // inner if end > begin else 0
    if rows:
        yield (row, *(0 for _ in shape[1:])), (rows, *shape[1:]), begin, begin + rows * inner
        begin, row = begin + rows * inner, row + rows
    if begin < end:
        yield from _in_row(shape, row, begin, end)


def _in_row(shape: Sequence[int], row: int, begin: int, end: int) -> Iterator[Box]:
    at = row * math.prod(shape[1:])
    for offsets, sizes, first, last in boxes(shape[1:], begin - at, end - at):
        yield (row, *offsets), (1, *sizes), first + at, last + at


def _order(tensor: torch.Tensor) -> list[int]:
    """Its dimensions, from the outermost in its memory inwards."""
    return sorted(range(tensor.dim()), key=lambda i: (-int(tensor.stride()[i]), i))


class Shards(torch.Tensor):
    """Those elements of a tensor that this rank holds. Only torch.distributed.checkpoint can do anything with it."""

    parts: list[torch.Tensor]
    chunks: list[tuple[tuple[int, ...], tuple[int, ...]]]
    loads: bool

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, parts: list[torch.Tensor], chunks: list[Any]
    ) -> "Shards":
        made: Any = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=torch.device("cpu"))
        made.parts, made.chunks, made.loads = parts, chunks, False
        shards: Shards = made
        return shards

    @classmethod
    def of_flat(cls, like: torch.Tensor, flat: torch.Tensor, begin: int) -> "Shards":
        """``flat``: elements from ``begin`` on, in the order of the memory of ``like``."""
        order = None if like.dim() < 2 or like.is_contiguous() else _order(like)
        shape = list(like.shape) if order is None else [like.shape[i] for i in order]
        back = None if order is None else [order.index(i) for i in range(like.dim())]
        parts, chunks = [], []
        for offsets, sizes, first, last in boxes(shape, begin, begin + flat.numel()):
            part = flat[first - begin : last - begin].view(sizes)
            if back is not None:
                part = part.permute(back)
                offsets, sizes = tuple(offsets[i] for i in back), tuple(sizes[i] for i in back)
            parts.append(part)
            chunks.append((offsets, sizes))
        if like.numel() == 0 and begin == 0:
            parts, chunks = [flat.view(like.shape)], [(tuple(0 for _ in like.shape), tuple(like.shape))]
        return cls(like.shape, flat.dtype, parts, chunks)

    @classmethod
    def of_whole(cls, value: torch.Tensor) -> "Shards":
        return cls(value.shape, value.dtype, [value], [(tuple(0 for _ in value.shape), tuple(value.shape))])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.new_empty.default:  # how a copy for an asynchronous save begins
            return cls(args[0].shape, args[0].dtype, [], [])
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise Error(f"{func} of a part of an engine's state; it is for torch.distributed.checkpoint alone")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Shards({list(self.shape)}, {self.dtype}, {self.chunks})"

    # ---- torch.distributed.checkpoint's own words

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)),
                    properties=TensorProperties.create_from_tensor(part),
                    size=self.size(),
                ),
            )
            for part, (offsets, sizes) in zip(self.parts, self.chunks, strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Asked for by a load: what comes is written beside the engine's memory."""
        if not self.loads:
            self.parts, self.loads = [torch.empty_like(part, device="cpu") for part in self.parts], True
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in self.chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for part, (offsets, _) in zip(self.parts, self.chunks, strict=True):
            if torch.Size(offsets) == index.offset:
                return part
        raise ValueError(f"this rank holds nothing at {index.offset} of '{index.fqn}'")

    def filled(self, like: torch.Tensor, numel: int) -> torch.Tensor:
        """What was loaded, flat, in the order of the memory of ``like``."""
        flat = torch.empty(numel, dtype=self.dtype)
        begin = 0
        order = _order(like)
        for part in self.parts:
            turned = part if like.is_contiguous() or like.dim() < 2 else part.permute(order)
            flat[begin : begin + part.numel()].copy_(turned.reshape(-1))
            begin += part.numel()
        if begin != numel:
            raise Error(f"{begin} of {numel} elements were loaded")
        return flat


# ---- an engine's


def state_dict(engine: "Saving") -> dict[str, Any]:
    native = engine._engine
    model: dict[str, Any] = {}
    state: dict[str, dict[str, Any]] = {}
    buffers = []
    for kind, name, key, owner, memory, begin, *_ in native.all_slots():
        value = Shards.of_whole(owner.detach()) if memory is None else Shards.of_flat(owner, memory, begin)
        if kind == "optimizer":
            state.setdefault(name, {})[key] = value
        else:
            model[name] = value
            if kind == "buffer":
                buffers.append(name)
    words = json.loads(native.words())
    outer: dict[str, Any] | None = None
    if engine._steps is not None:
        outer = _outer(engine, state)
    mine = {name: base64.b64encode(bytes(bits.tolist())).decode() for name, bits in _generators()}
    run = {
        **words,
        "samples": 0,
        "optimizer": outer,
        "own": words["optimizer"],
        "without": [] if outer is None else outer.pop("without"),
        "buffers": buffers,
        "generators": [json.loads(text) for text in native.exchange(json.dumps(mine), "state_dict()")],  # by rank
        "shapes": _shapes(model, state),
    }
    if outer is None and words["optimizer"] != "none":
        run["without"] = sorted(set(state) - set(words["updates"]))
    return {"model": model, "optim": {"state": state}, "run": json.dumps(run)}


_TORCHS = {"cpu": (torch.get_rng_state, torch.set_rng_state), "cuda": (torch.cuda.get_rng_state, torch.cuda.set_rng_state)}


def _generators() -> list[tuple[str, torch.Tensor]]:
    """This rank's random generators: torch's, Python's and numpy's."""
    ours = [name for name in _TORCHS if name == "cpu" or torch.cuda.is_available()]
    return [*((name, _TORCHS[name][0]()) for name in ours), *_save.generators()]


def _set_generators(saved: list[Any], rank: int) -> None:
    """A rank that was not there before gets numbers of its own, the same whenever this is loaded."""
    by_rank = [one if isinstance(one, dict) else {"cpu": one} for one in saved]  # torch's alone, as it was written before
    first, own = by_rank[0], by_rank[rank] if rank < len(by_rank) else {}
    others = []
    for name, text in first.items():
        bits = base64.b64decode(text)
        seed = int.from_bytes(hashlib.blake2b(bits + rank.to_bytes(8, "little"), digest_size=8).digest(), "little")
        state = torch.tensor(list(base64.b64decode(own[name])), dtype=torch.uint8) if name in own else None
        if name not in _TORCHS:
            others.append((name, state, seed))
        elif name == "cuda" and not torch.cuda.is_available():
            continue
        elif state is not None:
            _TORCHS[name][1](state)
        else:
            (torch.default_generator if name == "cpu" else torch.cuda.default_generators[torch.cuda.current_device()]).manual_seed(seed % 2**63)
    for restore in _save.check_generators(others):
        restore()


def _shapes(model: dict[str, Any], state: dict[str, dict[str, Any]]) -> dict[str, str]:
    found = {f"'{name}'": value for name, value in model.items()}
    found.update({f"'{key}' of '{name}'": value for name, keys in state.items() for key, value in keys.items()})
    return {what: f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}" for what, value in found.items()}


def _outer(engine: "Saving", state: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The state of a torch.optim object goes to ``state``; what is no tensor is returned."""
    optimizer, steps = engine.optimizer, engine._steps
    assert isinstance(optimizer, torch.optim.Optimizer) and steps is not None
    if isinstance(steps, optim.Pieces) and steps.whole:
        raise Error(
            f"{type(optimizer).__name__} steps whole parameters, each on its rank, and torch.distributed.checkpoint wants every"
            " rank to know all of its state: use engine.save()"
        )
    names = engine._names
    _save.check_whole(optimizer, names)
    groups: list[dict[str, Any]] = []
    values: dict[str, dict[str, Any]] = {}
    without: list[str] = []
    for group in optimizer.param_groups:
        settings = {k: _save._text(v, f"'{k}' of a group") for k, v in group.items() if k not in ("params", "param_names")}
        groups.append({"params": [names[id(p)] for p in group["params"]], "settings": settings})
        expected: dict[str, Any] | None = None
        for parameter in group["params"]:
            name = names[id(parameter)]
            found, begin = steps.state_of(parameter)
            if not parameter.requires_grad:
                if found:
                    warnings.warn(
                        f"plumb: '{name}' is frozen, and what {type(optimizer).__name__} keeps of it is left out of a state for"
                        " torch.distributed.checkpoint; engine.save() has it",
                        stacklevel=2,
                    )
                continue
            if not found:
                expected = _probe(optimizer, group) if expected is None else expected
                found, begin = _placeholder(expected, engine, parameter)
                without.append(name)
            for key, value in found.items():
                if not torch.is_tensor(value):
                    values.setdefault(name, {})[key] = _save._text(value, f"'{key}' of '{name}'")
                elif optim.is_number(key, value, parameter):
                    state.setdefault(name, {})[key] = Shards.of_whole(value)
                elif begin is None and isinstance(steps, optim.Pieces):
                    first, last = engine._engine.updated_range(parameter)
                    flat = torch.empty(parameter.numel(), dtype=value.dtype)
                    flat.as_strided(parameter.shape, parameter.stride()).copy_(value)
                    state.setdefault(name, {})[key] = Shards.of_flat(parameter, flat[first:last], first)
                elif begin is None and value.shape == parameter.shape:
                    state.setdefault(name, {})[key] = Shards.of_whole(value)
                elif begin is not None and steps.is_piece(parameter, value):
                    state.setdefault(name, {})[key] = Shards.of_flat(parameter, value, begin)
                else:
                    raise Error(f"'{key}' of '{name}' has shape {list(value.shape)}, which is not the parameter's: use engine.save()")
    return {"class": type(optimizer).__name__, "groups": groups, "values": values, "without": without, "general": _save.general_of(optimizer)}


def _probe(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """What this optimizer keeps of a parameter of this group, found with one of its own."""
    other = copy.copy(optimizer)
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.zeros(2)
    other.state = defaultdict(dict)
    other.param_groups = [{**group, "params": [parameter], "lr": 0.0}]
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(other, hooks, OrderedDict())
    try:
        type(optimizer).step(other)
    except Exception as error:
        raise Error(
            f"what {type(optimizer).__name__} keeps of a parameter cannot be found before its first step ({error}): take one, or"
            " use engine.load()"
        ) from error
    return dict(other.state.get(parameter, {}))


def _placeholder(
    expected: dict[str, Any], engine: "Saving", parameter: torch.Tensor
) -> tuple[dict[str, Any], int | None]:
    """In the place of state that is not there yet, so that every engine of a model has the same tensors."""
    pieces = isinstance(engine._steps, optim.Pieces)
    begin, end = engine._engine.updated_range(parameter) if pieces else (0, parameter.numel())
    half = parameter.dtype in (torch.bfloat16, torch.float16)
    masters = pieces and half and any(key == "master" for _, _, key, *_ in engine._engine.all_slots())
    found: dict[str, Any] = {}
    for key, value in expected.items():
        if not torch.is_tensor(value) or value.dim() == 0:
            found[key] = value.clone() if torch.is_tensor(value) else value
            continue
        dtype = torch.float32 if masters else parameter.dtype
        found[key] = torch.zeros(end - begin, dtype=dtype) if pieces else torch.zeros_like(parameter, dtype=dtype)
    return found, begin if pieces else None


def load_state_dict(engine: "Saving", given: dict[str, Any]) -> None:
    native = engine._engine
    why = ""
    try:
        if not isinstance(given, dict) or not {"run", "model", "optim"} <= given.keys():
            what = f"has the keys {sorted(map(str, given))}" if isinstance(given, dict) else f"is a {type(given).__name__}"
            raise Error(f"it {what}; expected what state_dict() of an engine has: run, model and optim")
        run = json.loads(given["run"])
        words = {**run, "optimizer": run["own"]}
        _check(engine, given, run, words)
    except Exception as error:  # noqa: BLE001  (every rank hears of it)
        why = refusal(error)
    for rank, said in enumerate(native.exchange(why, "load_state_dict()")):
        if said:
            raise Error(f"the checkpoint does not fit this engine, and nothing was loaded: {said} (rank {rank})")
    values = []
    for kind, name, key, owner, memory, begin, end, _ in native.all_slots():
        held = given["optim"]["state"][name][key] if kind == "optimizer" else given["model"][name]
        values.append(held.parts[0].reshape(-1) if memory is None else held.filled(owner, end - begin))
    native.refill(values, json.dumps(words))
    if engine._steps is not None:
        _restore(engine, given, run)
    _set_generators(run["generators"], engine.world.rank)


def _check(engine: "Saving", given: dict[str, Any], run: dict[str, Any], words: dict[str, Any]) -> None:
    here, there = _shapes(given["model"], given["optim"]["state"]), run["shapes"]
    if not all(value.loads for value in given["model"].values()):
        raise Error("this state was not loaded by torch.distributed.checkpoint")
    for what in here.keys() | there.keys():
        if here.get(what) != there.get(what):
            raise Error(f"{what} is {there.get(what, 'not there')} in the checkpoint, and {here.get(what, 'not there')} here")
    engine._engine.check_words(json.dumps(words))
    if (engine._steps is None) != (run["optimizer"] is None):
        raise Error("one of the checkpoint and this engine has a torch.optim optimizer, and the other has none")
    if engine._steps is not None:
        assert isinstance(engine.optimizer, torch.optim.Optimizer)
        _save.fits(engine.optimizer, engine._names, run["optimizer"])


def _restore(engine: "Saving", given: dict[str, Any], run: dict[str, Any]) -> None:
    optimizer, steps = engine.optimizer, engine._steps
    assert isinstance(optimizer, torch.optim.Optimizer) and steps is not None
    outer = run["optimizer"]
    pieces = isinstance(steps, optim.Pieces)
    for group, saved in zip(optimizer.param_groups, outer["groups"], strict=True):
        group.update({key: _save._value(text) for key, text in saved["settings"].items()})
        on_device = group.get("capturable") or group.get("fused")
        for parameter in group["params"]:
            name = engine._names[id(parameter)]
            begin, end = engine._engine.updated_range(parameter) if pieces and parameter.requires_grad else (0, parameter.numel())
            state: dict[str, Any] = {}
            for key, held in given["optim"]["state"].get(name, {}).items() if name not in run["without"] else ():
                if key == "master" and pieces and parameter.dtype != torch.float32:
                    continue  # the engine's
                if optim.is_number(key, held, parameter):
                    value = held.parts[0]
                    state[key] = value.to(parameter.device) if on_device else value
                elif pieces:
                    state[key] = held.filled(parameter, end - begin).to(parameter.device)
                else:
                    state[key] = held.parts[0].to(parameter.device)
            if name not in run["without"]:
                state.update({key: _save._value(text) for key, text in outer["values"].get(name, {}).items()})
            steps.set_state(parameter, state, begin)
    _save.set_general(optimizer, outer.get("general", []))
