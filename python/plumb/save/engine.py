"""What an engine saves and loads: all that a run needs to go on, by itself or through ``torch.distributed.checkpoint``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from typing import Any, Union

import torch

from .. import _C, given as _given, optim, save as _save
from .._C import Error, LoadInfo, World

#: What may step the parameters.
AnyOptimizer = Union[_C.AdamW, _C.SGD, torch.optim.Optimizer, None]


class Saving:
    """The part of a ``plumb.Engine`` that knows checkpoints."""

    optimizer: AnyOptimizer
    world: World
    _parameters: list[tuple[str, torch.Tensor]]
    _passing: set[str]  # buffers that are not persistent
    _steps: optim.Whole | optim.Pieces | None
    _follow: Callable[[], None]
    _inside: str  # the call that is under way and needs the engine to its end
    _native: _C.Engine | None

    @property
    def _engine(self) -> _C.Engine:
        if self._native is None:
            raise Error("this engine was never built")
        return self._native

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        samples: int = 0,
        keep: int = 0,
        extras: _save.Extras | None = None,
        background: bool = False,
        leave_out: Collection[str] = (),
        within_step: bool = False,
    ) -> str:
        """Saves all that a run needs to go on bit for bit, generators of torch, Python and numpy too, as one new checkpoint in ``folder``; returns its path.

        Every rank calls it, between steps. Complete or absent: a ``plumb.SaveError``, on every rank, leaves the engine and
        earlier checkpoints as they were, and training may go on.

        Args:
            samples: how many samples of the data all ranks together have used; ``load`` gives it back.
            keep: checkpoints that stay, this one among them; 0: all.
            extras: things with ``state_dict()`` and ``load_state_dict()`` by name: schedulers, samplers. Rank 0's are saved.
            background: returns ("") once the state is copied; what fails is raised by the next step or ``finish_save()``.
            leave_out: names of frozen parameters that are not saved, since others have them; ``load(strict=False)`` takes it.
            within_step: also between the backwards of a step; what is saved is of the step before, without their gradients.
        """
        self._follow()
        outer: _C.Outer | None = None
        refusal, where = "", ""
        words: list[Any] = []
        left: list[str] = []
        try:
            samples, keep = _given.whole(samples, "samples"), _given.whole(keep, "keep")
            where, words, left = _given.path(folder, "the folder"), _save.words(extras), sorted(map(_given.uncompiled, leave_out))
            if self._steps is not None:
                assert isinstance(self.optimizer, torch.optim.Optimizer)
                optim.check_outside(self._steps, "save()")
                outer = _save.collect(self.optimizer, self._steps, self._names, self.world.rank)
        except Exception as error:  # noqa: BLE001  (every rank hears of it)
            refusal = _given.refusal(error)
            samples = keep = 0
        with self._busy("save()"):
            return self._engine.save(where, samples, keep, background, words, outer, left, _save.generators(), refusal, within_step)

    def finish_save(self) -> str:
        """Waits for a save in the background; its path. Every rank calls it."""
        return self._engine.finish_save()

    def load(
        self, path: str | os.PathLike[str], *, strict: bool = True, extras: _save.Extras | None = None
    ) -> LoadInfo:
        """Goes on from a checkpoint, or from the newest complete one in a folder, whatever world and strategy wrote it.

        Unless every saved byte is read and every place is filled, an Error on every rank, before anything is changed.
        ``strict=False``: what fits is loaded, and ``LoadInfo.table()`` says what did not.
        """
        self._follow()
        refusal, where = "", ""
        words: list[Any] = []
        try:
            where, words = _given.path(path, "the path"), _save.words(extras)
            if self._steps is not None:
                optim.check_outside(self._steps, "load()")
        except Exception as error:  # noqa: BLE001  (every rank hears of it)
            refusal = _given.refusal(error)
        with self._busy("load()"):
            return self._apply(self._engine.begin_load(where, bool(strict), words, self._steps is not None, refusal))

    def _apply(self, loading: _C.Loading) -> LoadInfo:
        outer = loading.outer
        refusal = ""
        generators: list[Callable[[], None]] = []
        try:
            generators = _save.check_generators(loading.generators)
            if outer.text:
                assert self._steps is not None and isinstance(self.optimizer, torch.optim.Optimizer)
                _save.check(self.optimizer, self._names, outer)
        except Exception as error:  # noqa: BLE001  (every rank hears of it)
            refusal = _given.refusal(error)
        loading.accept(refusal)
        loading.apply()
        for restore in generators:
            restore()
        if outer.text:
            assert self._steps is not None and isinstance(self.optimizer, torch.optim.Optimizer)
            _save.restore(self.optimizer, self._steps, self._names, outer)
        return loading.info

    def load_weights(self, path: str | os.PathLike[str], *, strict: bool = True) -> LoadInfo:
        """Only the weights and buffers, of a checkpoint or of safetensors files; other dtypes are converted.

        The optimizer and the step stay as they are: for fine-tuning. Buffers that are not persistent may be missing.
        """
        self._follow()
        refusal, where = "", ""
        try:
            where = _given.path(path, "the path")
            if self._steps is not None:
                optim.check_outside(self._steps, "load_weights()")
        except Exception as error:  # noqa: BLE001  (every rank hears of it)
            refusal = _given.refusal(error)
        return self._engine.load_weights(where, bool(strict), self._passing, refusal)

    def state_dict(self) -> dict[str, Any]:
        """For ``torch.distributed.checkpoint``: ``dcp.save({"engine": engine}, …)``, ``dcp.async_save`` and ``dcp.load``.

        Every rank calls it, between steps; each rank gives what it holds, and nothing is gathered. Complete or refused, as
        ``save`` and ``load``, which need no process group and check every byte.
        """
        from . import stateful  # imports half of torch.distributed

        if self._steps is not None:
            optim.check_outside(self._steps, "state_dict()")
        self._follow()
        return stateful.state_dict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what ``dcp.load({"engine": engine}, …)`` has read, of any number of ranks and any strategy."""
        from . import stateful

        if self._steps is not None:
            optim.check_outside(self._steps, "load_state_dict()")
        self._follow()
        stateful.load_state_dict(self, state_dict)

    @property
    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self._parameters}

    @contextlib.contextmanager
    def _busy(self, call: str) -> Iterator[None]:
        """Extras are the user's, who may do anything in them but this."""
        before, self._inside = self._inside, call
        try:
            yield
        finally:
            self._inside = before
