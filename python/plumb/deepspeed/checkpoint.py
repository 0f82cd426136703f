"""Checkpoints as DeepSpeed's engine saves and loads them, over ``plumb.Engine.save``: tags, ``latest``, ``client_state``.

``save_dir/tag`` is a folder of Plumb's checkpoints with one in it, whatever stage and number of ranks wrote it.
"""

from __future__ import annotations

import glob
import logging
import os
from typing import TYPE_CHECKING, Any

from torch import nn

from .. import save as _save
from .._C import Loading, SaveError, SavedCheckpoint
from ..save.durable import write_text
from ..given import uncompiled
from .config import ConfigError

if TYPE_CHECKING:
    from .engine import DeepSpeedEngine

logger = logging.getLogger("plumb.deepspeed")

LATEST = "latest"
EXTRA = "deepspeed"  # of a checkpoint: what is not in the plumb.Engine
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_SCALING = ("cur_iter", "last_overflow_iter", "cur_hysteresis")


class Record:
    """What DeepSpeed's engine knows beside its ``plumb.Engine``, and its user's own state."""

    def __init__(self, engine: "DeepSpeedEngine", client_state: dict[str, Any] | None = None, schedule: bool = True) -> None:
        self.engine, self.client_state, self.schedule = engine, client_state or {}, schedule
        self.loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        engine = self.engine
        scaling = getattr(engine.optimizer, "loss_scale_config", None)
        return {
            "client_state": self.client_state,
            "counters": {name: getattr(engine, name) for name in _COUNTERS},
            "lr_scheduler": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
            "scaling": None if scaling is None else {name: getattr(scaling, name) for name in _SCALING},
            "frozen": [uncompiled(name) for name, p in engine.module.named_parameters() if not p.requires_grad],
            "shared": shared(engine.module),
            "dp_world_size": engine.world_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Only looks: what does not fit is an error before anything has changed. ``apply`` loads."""
        if self.schedule and self.engine.lr_scheduler is not None and state["lr_scheduler"] is None:
            raise ConfigError(
                "the checkpoint has no schedule, and this engine has one: load_lr_scheduler_states=False leaves it as it is"
            )
        self.loaded = state
        self.client_state = state["client_state"]

    def apply(self, scaling: bool) -> None:
        engine, state = self.engine, self.loaded
        if self.schedule and engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
        config = getattr(engine.optimizer, "loss_scale_config", None)
        if scaling and config is not None and state["scaling"] is not None:
            for name in _SCALING:
                setattr(config, name, state["scaling"][name])
        for name in _COUNTERS:
            setattr(engine, name, state["counters"][name])
        engine.loaded_checkpoint_dp_world_size = state["dp_world_size"]
        engine.loaded_checkpoint_mp_world_size = 1


def shared(module: nn.Module) -> dict[str, str]:
    """Parameters with more than one name: the others, and the one that a checkpoint knows."""
    known: dict[int, str] = {}
    pairs = module.named_parameters(remove_duplicate=False)
    return {uncompiled(name): uncompiled(known[id(p)]) for name, p in pairs if known.setdefault(id(p), name) != name}


def record_of(checkpoint: SavedCheckpoint) -> dict[str, Any] | None:
    """What ``Record`` gave; None where no DeepSpeedEngine saved this checkpoint."""
    packed = [(tensor.key, checkpoint.read(tensor)) for tensor in checkpoint.tensors if tensor.kind == "extra" and tensor.name == EXTRA]
    return _save.unpack(packed) if packed else None


# ---- saving


def save(
    engine: "DeepSpeedEngine",
    save_dir: str | os.PathLike[str],
    tag: Any,
    client_state: dict[str, Any] | None,
    save_latest: bool,
    exclude_frozen: bool,
) -> bool:
    if not save_dir:
        raise ConfigError(f"save_dir must be a non-empty string, got {save_dir!r}")
    name = _same_tag(engine, f"global_step{engine.global_steps}" if tag is None else str(tag))
    frozen = {name for name, p in engine.module.named_parameters() if not p.requires_grad} if exclude_frozen else set()
    folder = os.path.join(save_dir, name)
    if engine._backwards and engine.global_rank == 0:
        logger.warning(
            "save_checkpoint() after %d backwards of a step that has not ended: '%s' is of step %d, without their gradients",
            engine._backwards, folder, engine.global_steps,
        )  # fmt: skip
    engine.engine.save(
        folder, samples=engine.global_samples, keep=1, extras={EXTRA: Record(engine, client_state)}, leave_out=frozen, within_step=True
    )
    why = ""
    if save_latest and engine.global_rank == 0:
        try:
            write_text(os.path.join(save_dir, LATEST), name)
        except OSError as error:
            why = f"the checkpoint '{folder}' is complete, and '{LATEST}' beside it could not be written: {error}"
    for said in engine.engine._engine.exchange(why, "save_checkpoint()"):
        if said:
            raise SaveError(said)
    return True


def _same_tag(engine: "DeepSpeedEngine", tag: str) -> str:
    """Every rank's, whatever 'checkpoint.tag_validation' says: one checkpoint has one name."""
    said = engine.engine._engine.exchange(tag, "save_checkpoint()")
    for rank, theirs in enumerate(said):
        if theirs != said[0]:
            raise ConfigError(
                f"save_checkpoint() with the tag '{said[0]}' on rank 0 and '{theirs}' on rank {rank}; expected the same on every rank"
            )
    return _checked(tag)


def _checked(tag: str) -> str:
    if not tag or os.path.isabs(tag) or ".." in tag.split(os.sep):
        raise ConfigError(f"the tag is '{tag}'; expected the name of a folder in the one for checkpoints")
    return tag


# ---- loading


def latest_in(folder: str | os.PathLike[str], name: str = LATEST) -> str | None:
    """The tag that ``latest`` says; None where there is no such file."""
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8") as file:
        return _checked(file.read().strip())


def _agreed_tag(engine: "DeepSpeedEngine", load_dir: str | os.PathLike[str], tag: Any) -> str | None:
    """Rank 0's."""
    mine = ""
    try:
        found = latest_in(load_dir) if tag is None else _checked(str(tag))
        mine = "" if found is None else f"+{found}"
    except (OSError, ValueError) as error:
        mine = f"-{error}"
    said = engine.engine._engine.exchange(mine, "load_checkpoint()")[0]
    if said.startswith("-"):
        raise ConfigError(said[1:])
    return said[1:] or None


def load(
    engine: "DeepSpeedEngine",
    load_dir: str | os.PathLike[str],
    tag: Any,
    module_strict: bool,
    optimizer_states: bool,
    schedule_states: bool,
    module_only: bool,
    custom: Any,
) -> tuple[str | None, dict[str, Any] | None]:
    found = _agreed_tag(engine, load_dir, tag)
    if found is None:
        logger.warning(
            "there is no file '%s': pass the tag of a checkpoint, if there is one; nothing is loaded",
            os.path.join(load_dir, LATEST),
        )
        return None, None
    folder = os.path.join(load_dir, found)
    if glob.glob(os.path.join(glob.escape(folder), "*_model_states.pt")) and not glob.glob(os.path.join(glob.escape(folder), "save-*")):
        raise ConfigError(
            f"'{folder}' was written by DeepSpeed: `python -m plumb checkpoint convert --from deepspeed --to plumb {folder} NEW`"
            " makes a checkpoint of it that load_checkpoint() takes, as its tag"
        )
    record = Record(engine, schedule=schedule_states)
    everything = optimizer_states and not module_only and engine.basic_optimizer is not None
    if custom is not None and everything:
        raise ConfigError(
            "custom_load_fn puts the weights where it likes, and the optimizer's state could not follow: load with"
            " load_module_only=True, or load_optimizer_states=False"
        )
    if everything:
        path = _load_all(engine, folder, record, module_strict)
    else:
        path = _load_weights(engine, folder, record, module_strict, module_only, custom)
    engine._backwards, engine._held, engine._step_applied = 0, False, False
    engine._told.clear()
    return path, record.client_state


def _load_all(engine: "DeepSpeedEngine", folder: str, record: Record, module_strict: bool) -> str:
    inner = engine.engine
    loading: Loading = inner._engine.begin_load(folder, module_strict, _save.words({EXTRA: record}), inner._steps is not None, "")
    of_module = ("weight '", "buffer '")
    if any(one.kind == "reshaped" or not one.what.startswith(of_module) for one in loading.info.mismatches):
        raise ConfigError(
            f"the checkpoint '{loading.info.path}' does not fit this engine, and nothing was loaded (load_module_strict=False is"
            f" for tensors of the module that are missing or extra):\n{loading.info.table()}"
        )
    path = inner._apply(loading).path
    record.apply(scaling=True)
    engine.micro_steps -= engine.micro_steps % engine.gradient_accumulation_steps()  # no gradients are left of a step that had begun
    return path


def _load_weights(
    engine: "DeepSpeedEngine", folder: str, record: Record, strict: bool, module_only: bool, custom: Any
) -> str:
    saved = SavedCheckpoint(folder)
    state = record_of(saved)
    if state is not None:
        record.load_state_dict(state if not module_only else {**state, "lr_scheduler": {}})
    if custom is None:
        live = {uncompiled(name): list(tensor.shape) for name, tensor in (*engine.module.named_parameters(), *engine.module.named_buffers())}
        for tensor in saved.tensors:
            if tensor.kind in ("weight", "buffer") and live.get(tensor.name, tensor.shape) != tensor.shape:
                raise ConfigError(
                    f"size mismatch for '{tensor.name}': it has shape {tensor.shape} in the checkpoint '{saved.path}', and"
                    f" {live[tensor.name]} here; nothing was loaded"
                )
        engine.engine.load_weights(saved.path, strict=strict)
    else:
        weights = {t.name: saved.read(t) for t in saved.tensors if t.kind in ("weight", "buffer")}
        engine.load_module_state_dict(weights, custom_load_fn=custom)
    if state is not None and not module_only:
        record.apply(scaling=False)
    return saved.path
