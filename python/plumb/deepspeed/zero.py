"""DeepSpeed's names around sharded parameters: ``zero.Init``, ``zero.GatheredParameters``, and what is one unit."""

from __future__ import annotations

import contextlib
import enum
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from .._C import Error
from .config import ConfigError

if TYPE_CHECKING:
    from .config import Config
    from .engine import DeepSpeedEngine

_engines: Any = WeakIdKeyDictionary()  # by parameter
_built_inside = False  # a model was built inside of Init: its parameters are the ranks' common ones, as if they were sharded


def claim(engine: "DeepSpeedEngine") -> None:
    """These functions find the engine of a parameter by itself from now on."""
    for parameter in engine.module.parameters():
        _engines[parameter] = weakref.ref(engine)


def engine_of(parameter: torch.Tensor) -> "DeepSpeedEngine | None":
    found = _engines.get(parameter)
    engine = found() if found is not None else None
    return engine if engine is not None and not engine.destroyed else None


class ZeroParamStatus(enum.Enum):
    """Of a sharded parameter."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class _Status:
    """``parameter.ds_status``: what it is when somebody looks. Equal to the member of this name, of ours and of DeepSpeed's enum."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = weakref.ref(parameter)

    @property
    def name(self) -> str:
        parameter = self._parameter()
        return "AVAILABLE" if parameter is None or is_whole(parameter) else "NOT_AVAILABLE"

    @property
    def value(self) -> int:
        return int(ZeroParamStatus[self.name].value)

    def __eq__(self, other: object) -> bool:
        return self.name == getattr(other, "name", None)

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return repr(ZeroParamStatus[self.name])

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (ZeroParamStatus, self.name)


def is_whole(parameter: torch.Tensor) -> bool:
    """Whether its values are all here, for now."""
    try:
        parameter.data_ptr()
    except RuntimeError:
        return False
    return True


_WORDS = ("ds_id", "ds_status", "ds_persist", "ds_shape", "ds_numel", "partition_numel")


def describe(module: nn.Module, sharded: Iterable[int], part_of: Callable[[torch.Tensor], int]) -> None:
    """The words of DeepSpeed's that programs ask parameters of stage 3 for. ``ds_id`` is of those alone that are ``sharded``
    (their ids): who finds it gathers before he reads. The others persist."""
    cut = set(sharded)
    for number, parameter in enumerate(module.parameters()):
        words: Any = parameter
        words.ds_shape, words.ds_numel = parameter.shape, parameter.numel()
        words.partition_numel = functools.partial(int, part_of(parameter))
        words.ds_status, words.ds_persist = _Status(parameter), id(parameter) not in cut
        if id(parameter) in cut:
            words.ds_id = number


def forget(module: nn.Module) -> None:
    for parameter in module.parameters():
        for word in _WORDS:
            parameter.__dict__.pop(word, None)


def take_over(module: nn.Module) -> None:
    """An engine over this very model lets it go, with whole parameters. Collective where they are sharded."""
    mine = {id(parameter) for parameter in module.parameters()}
    for name, parameter in module.named_parameters():
        engine = engine_of(parameter)
        if engine is None:
            continue
        if not all(id(p) in mine for p in engine.module.parameters()):
            raise ConfigError(f"parameter '{name}' belongs to another engine already, with others that this model does not have: destroy() that one first")
        values: list[tuple[nn.Parameter, torch.Tensor]] = []
        if engine.zero_optimization_partition_weights():
            with engine.engine.gathered(engine.module):
                values = [(p, p.detach().clone()) for p in engine.module.parameters()]
        engine.destroy()
        for p, value in values:
            p.data = value


class Init:
    """A model built inside is the one that a plain program builds, and ``initialize`` shards it.

    Every argument of DeepSpeed's is taken. The model is whole on each rank until then: to build one that no rank can hold, see
    ``plumb.deferred`` and ``plumb.Engine``.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
    ) -> None:
        if remote_device not in (None, "none", "cpu"):
            raise ConfigError(f"zero.Init(remote_device={remote_device!r}) is not supported; expected None or 'cpu'")
        if zero_quantized_weights or zero_quantized_nontrainable_weights:
            raise ConfigError("zero.Init with quantised weights is not supported")

        self._enabled = enabled

    def __enter__(self) -> "Init":
        global _built_inside
        _built_inside = _built_inside or self._enabled
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class MiCS_Init(Init):  # noqa: N801  (DeepSpeed's name)
    """``Init``, for a config with ``mics_shard_size``."""


@contextlib.contextmanager
def GatheredParameters(  # noqa: N802  (DeepSpeed's name)
    params: torch.Tensor | Iterable[torch.Tensor],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Inside, these parameters are whole. What ``modifier_rank`` wrote into them is everybody's at the end."""
    given = [params] if isinstance(params, torch.Tensor) else [p for p in params if isinstance(p, torch.Tensor)]
    by_engine: dict[DeepSpeedEngine, list[torch.Tensor]] = {}
    for param in given:
        engine = engine_of(param)
        if engine is not None:
            by_engine.setdefault(engine, []).append(param)
    if not enabled or not by_engine:  # not sharded yet: initialize() takes rank 0's values
        yield
        if enabled and modifier_rank and _built_inside and dist.is_initialized() and dist.get_world_size() > 1:
            _publish(given, modifier_rank)
        return
    with _in_these_words(), contextlib.ExitStack() as whole:
        for engine, mine in by_engine.items():
            whole.enter_context(engine.engine.gathered(mine, write=modifier_rank is not None))
        yield
        if modifier_rank and any(engine.world_size > 1 for engine in by_engine):  # rank 0's is published
            if not dist.is_initialized():
                raise ConfigError(
                    f"GatheredParameters(modifier_rank={modifier_rank}) needs torch.distributed; initialise it, or write on rank 0"
                )
            _publish([param for mine in by_engine.values() for param in mine], modifier_rank)


@contextlib.contextmanager
def _in_these_words() -> Iterator[None]:
    try:
        yield
    except Error as error:
        said = str(error).replace("engine.gathered([...])", "zero.GatheredParameters(modifier_rank=None)")
        said = said.replace("gather it with write=True, on every rank", "pass modifier_rank=R on every rank, the rank whose change counts")
        if said == str(error):
            raise
        raise ConfigError(said.removeprefix("plumb: ")) from None


def _publish(parameters: list[torch.Tensor], rank: int) -> None:
    """What ``rank`` has is everybody's."""
    with torch.no_grad():
        for parameter in parameters:
            value = parameter.detach()
            carried = value.cuda() if value.device.type == "cpu" and dist.get_backend() == "nccl" else value.contiguous()
            dist.broadcast(carried, src=rank)
            if carried is not value:
                value.copy_(carried)


@contextlib.contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Inside, all parameters of an engine stay whole, so that generating gathers nothing token by token."""
    with GatheredParameters(model.parameters()):
        yield model


def register_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    """Nothing to do: whoever looks a parameter up in a forward has the whole of it (``outside.py``)."""
    if not isinstance(module, nn.Module) or not isinstance(parameter, torch.Tensor):
        raise RuntimeError(f"expected a module and a parameter, got {type(module).__name__} and {type(parameter).__name__}")


def unregister_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    """Nothing to do, likewise."""
    register_external_parameter(module, parameter)


# ---- units of stage 3

_LEAF = "_z3_leaf"  # DeepSpeed's own: what its functions and modules of its set counts, too


def _flag(model: nn.Module, classes: Iterable[Any], flag: bool, must_find: bool) -> list[nn.Module]:
    def matches(module: nn.Module) -> bool:
        kind = type(module)
        names = {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}
        return any(one in names if isinstance(one, str) else isinstance(module, one) for one in classes)

    found = [module for module in model.modules() if matches(module)]
    if not found and must_find:
        raise ConfigError(f"No modules of type {classes} found in the model")
    for module in found:
        setattr(module, _LEAF, flag)
    return found


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: list[Any], raise_if_not_found: bool = True) -> list[nn.Module]:
    """Modules of these classes (or names of classes) are one unit each, with everything inside of them."""
    return _flag(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: list[Any], raise_if_not_found: bool = True) -> list[nn.Module]:
    return _flag(model, leaf_module_classes, False, raise_if_not_found)


def _flag_named(
    model: nn.Module, wanted: list[str], matches: Callable[[str, str], bool], flag: bool, must_find: bool
) -> tuple[list[nn.Module], list[str]]:
    named = list(model.named_modules())
    missing = [one for one in wanted if not any(matches(name, one) for name, _ in named)]
    if missing and must_find:
        raise ConfigError(f"No modules named {missing} found in the model")
    found = [module for name, module in named if any(matches(name, one) for one in wanted)]
    for module in found:
        setattr(module, _LEAF, flag)
    return found, missing


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: list[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """The modules of these names, and the names that the model does not have."""
    return _flag_named(model, module_names, str.__eq__, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: list[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    return _flag_named(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def z3_leaf_module(model: nn.Module) -> bool:
    return bool(getattr(model, _LEAF, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if z3_leaf_module(module)]


def units_of(model: nn.Module, config: "Config") -> list[nn.Module]:
    """What is gathered and released together: the members of lists of modules (blocks), and what lies outside of them,
    module by module. Units with fewer elements than the persistence threshold stay whole."""
    leaf = config["zero_optimization.leaf_module"] or {}
    unknown = set(leaf) - {"classes", "names", "name_suffixes"}
    if unknown:
        raise ConfigError(
            f"the DeepSpeed config has the key 'zero_optimization.leaf_module.{sorted(unknown)[0]}', which is not known;"
            " expected classes, names, name_suffixes"
        )
    set_z3_leaf_modules(model, list(leaf.get("classes", ())), raise_if_not_found=False)
    set_z3_leaf_modules_by_name(model, list(leaf.get("names", ())), raise_if_not_found=False)
    set_z3_leaf_modules_by_suffix(model, list(leaf.get("name_suffixes", ())), raise_if_not_found=False)
    units: list[nn.Module] = []

    def walk(module: nn.Module, in_list: bool) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            return  # takes no hooks: it stays whole
        whole = in_list or z3_leaf_module(module) or isinstance(module, nn.MultiheadAttention)
        if whole and next(module.parameters(), None) is not None:
            units.append(module)
            return
        if next(module.parameters(recurse=False), None) is not None and module is not model:
            units.append(module)
        listed = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        for child in module.children():
            # A list of lists is no block.
            walk(child, listed and not isinstance(child, (nn.ModuleList, nn.ModuleDict)))

    walk(model, False)
    least = config["zero_optimization.stage3_param_persistence_threshold"]
    return [unit for unit in units if sum(p.numel() for p in unit.parameters()) >= max(1, least)]
