"""An elementwise optimizer's step over flat memory: a few long tensors in place of many short ones, which cost more to name than to update.

The optimizer's state stays what users know it as: by parameter (or by this rank's piece of it), each value of its own shape. Those values
are views of the flat ones. Whoever replaces them, loads others or changes a count is followed: what is shown is the truth, and the flat
state is made from it again before the next step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import chain
from operator import is_
from typing import Any, Protocol

import torch

_PLAIN = (bool, int, float, type(None))

#: Making flat state from what is shown copies all of it. A step that must costs as much trust as so many that need not give, of so much.
_DEAR, _TRUST = 4, 12


class _Run:
    """Neighbours of one group that were treated alike so far: they are stepped as one leaf, with one state."""

    def __init__(self, leaf: torch.Tensor, group: int, stretch: int, begin: int, keys: list[torch.Tensor], offsets: list[int], whole: bool) -> None:
        self.leaf, self.group, self.stretch, self.begin = leaf, group, stretch, begin
        self.keys, self.offsets = keys, offsets  # what the state of each is shown by, and where it begins in the leaf
        self.whole = whole  # it is all of its stretch
        self.values: dict[str, Any] = {}  # of the flat state, when it was last shown
        self.counts: dict[str, torch.Tensor] = {}  # numbers, one for each member
        self.version = 0  # of the leaf, before the step

    def gradient(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        of_all = gradients[self.stretch]
        return of_all if self.whole else of_all.narrow(0, self.begin, self.leaf.numel())


class Lender(Protocol):
    """Who has the flat memory."""

    def flat_gradients(self) -> tuple[int, list[torch.Tensor]]:
        """A number, another one whenever the stretches are others than at the last call; and the gradient of each."""

    def stretches(self) -> list[tuple[torch.Tensor, list[tuple[torch.Tensor, int, int, int]]]]:
        """Those of that call: the memory, and its members: a parameter, where its piece begins in it and in the memory, and its length."""


class Flat:
    """Steps ``optimizer`` over stretches of flat memory.

    ``key_of``: what the optimizer's state of a parameter is kept by. ``rest``: these are the parameters themselves, and those that
    are in no stretch are stepped as they are.
    """

    def __init__(
        self, lender: Lender, optimizer: torch.optim.Optimizer, key_of: Callable[[torch.Tensor], torch.Tensor], rest: bool = False
    ) -> None:
        self._lender, self._optimizer, self._key_of, self._with_rest = lender, optimizer, key_of, rest
        self._number = -1  # of the stretches that the runs are made from
        self._runs: list[_Run] = []
        self._rest: list[list[torch.Tensor]] = []  # by group
        self.state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)  # by what is stepped
        self._begun = False
        self._layout: list[list[int]] = []  # of his groups: the parameters
        self._keys: list[Any] = []  # of the state before this step
        self._dicts: list[dict[str, Any]] = []  # and what it has for them
        self._inner: list[Any] = []  # and their values
        self._tensors: list[torch.Tensor] = []  # among them
        self._places: list[int] = []  # and where these lie
        self._numbers: list[Any] = []  # as they were shown
        self._formed = False  # anew, for this step
        self._doubt = 0  # grows where gradients come for other parameters again and again

    def begin(self, prepare: Callable[[], object]) -> list[list[torch.Tensor]] | None:
        """What each group steps now, with gradients and state; None: it does not pay any more, and what is shown is all there is.
        Empty: this time there is nothing but the rest.

        ``prepare`` makes keys where there are others than at the last step.
        """
        number, gradients = self._lender.flat_gradients()
        if self._with_rest and not gradients:
            return []
        self._doubt = max(0, self._doubt - 1)
        if number != self._number or self._changed():
            self._doubt += _DEAR
            if self._doubt > _TRUST:
                return None
            prepare()
            self._form(self._lender.stretches())
            self._number = number
        groups: list[list[torch.Tensor]] = [list(rest) for rest in self._rest]
        for run in self._runs:
            run.leaf.grad, run.version = run.gradient(gradients), run.leaf._version
            groups[run.group].append(run.leaf)
        for parameter in chain.from_iterable(self._rest):
            if parameter in self._optimizer.state:
                self.state[parameter] = self._optimizer.state[parameter]
        self._begun = True
        return groups

    def end(self) -> None:
        """The step is over, or was left: the user's state is what the step made of it."""
        if not self._begun:
            return
        self._begun = False
        news, self._formed = self._formed, False
        for run in self._runs:
            run.leaf.grad = None
            if self._with_rest and run.leaf._version != run.version:  # graphs that saved one learn of it, as from the optimizer itself
                torch.autograd.graph.increment_version(run.keys)
            news = self._show(run) or news
        for parameter in chain.from_iterable(self._rest):
            if parameter in self.state:
                self._optimizer.state[parameter] = self.state.pop(parameter)
                news = True
        if news:
            if self._with_rest:
                self._sort()
            self._keys = list(self._optimizer.state)
            self._dicts = list(self._optimizer.state.values())
            self._inner = list(chain.from_iterable(map(dict.values, self._dicts)))
            self._tensors = [value for value in self._inner if torch.is_tensor(value)]
            self._places = list(map(torch.Tensor.data_ptr, self._tensors))
        self._numbers = self._numbers_now()

    # ---- from what is shown to the flat state

    def _changed(self) -> bool:
        """Whether the user has other groups or state than were shown after the last step. Values that were changed in place are the same."""
        dicts = self._optimizer.state.values()
        if len(dicts) != len(self._dicts) or not all(map(is_, dicts, self._dicts)):
            return True
        inner = list(chain.from_iterable(map(dict.values, dicts)))
        if len(inner) != len(self._inner) or not all(map(is_, inner, self._inner)):
            return True
        if self._places != list(map(torch.Tensor.data_ptr, self._tensors)):  # one was given other memory (`.data =`)
            return True
        if self._numbers != self._numbers_now():
            return True
        return self._layout != [list(map(id, group["params"])) for group in self._optimizer.param_groups]

    def _numbers_now(self) -> list[Any]:
        """What members' numbers are: their values, also where whoever wrote them told no version of it; on a device, which is not waited for, the version."""
        counts = chain.from_iterable(run.counts.values() for run in self._runs)
        return [count.tolist() if count.device.type == "cpu" else count._version for count in counts]

    def _form(self, stretches: list[tuple[torch.Tensor, list[tuple[torch.Tensor, int, int, int]]]]) -> None:
        self._layout = [list(map(id, group["params"])) for group in self._optimizer.param_groups]
        group_of = {parameter: g for g, group in enumerate(self._layout) for parameter in group}
        self._keys = list(self._optimizer.state)
        self._runs = []
        self.state = defaultdict(dict)
        for index, (weight, members) in enumerate(stretches):
            known = [(group_of.get(id(one)), self._key_of(one), offset) for one, _, offset, numel in members if numel > 0]
            nobodys = [(group_of.get(id(one)), self._key_of(one), 0) for one, _, _, numel in members if numel == 0]
            begin = 0
            while begin < len(known):
                end = begin + 1
                while end < len(known) and self._alike(known[begin], known[end]):
                    end += 1
                until = known[end][2] if end < len(known) else weight.numel()
                self._add(weight, index, known[begin:end], until)
                begin = end
            for one in nobodys:  # elements of others: its numbers are known here all the same
                for run in self._runs:
                    if run.stretch == index and self._alike((run.group, run.keys[0], 0), one):
                        run.keys.append(one[1])
                        run.offsets.append(0)
                        break
                else:
                    self._add(weight, index, [one], 0)
        stepped = {id(key) for run in self._runs for key in run.keys}
        self._rest = [[p for p in group["params"] if self._with_rest and id(p) not in stepped] for group in self._optimizer.param_groups]
        self._formed = True

    def _alike(self, one: tuple[int | None, torch.Tensor, int], other: tuple[int | None, torch.Tensor, int]) -> bool:
        if one[0] != other[0]:
            return False
        some, others = (self._optimizer.state.get(member[1]) or {} for member in (one, other))
        if some.keys() != others.keys():
            return False
        return all(self._same_kind(some[name], others[name], one[1], other[1]) for name in some)

    @staticmethod
    def _same_kind(value: Any, other: Any, key: torch.Tensor, other_key: torch.Tensor) -> bool:
        if not torch.is_tensor(value) or not torch.is_tensor(other):
            return type(value) is type(other) and isinstance(value, _PLAIN) and bool(value == other)
        if value.dtype != other.dtype or value.device != other.device:
            return False
        if value.dim() == 0 and other.dim() == 0:
            return bool(value == other)
        return value.shape == key.shape and other.shape == other_key.shape

    def _add(self, weight: torch.Tensor, stretch: int, members: list[tuple[int | None, torch.Tensor, int]], until: int) -> None:
        group, first, begin = members[0]
        if group is None:  # of no group: nobody steps it
            return
        size = max(until - begin, 0)
        keys, offsets = [key for _, key, _ in members], [offset - begin for _, _, offset in members]
        piece = weight.detach() if size == weight.numel() else weight.detach().narrow(0, begin, size)
        leaf = torch.nn.Parameter(piece, requires_grad=False)
        self._runs.append(_Run(leaf, group, stretch, begin, keys, offsets, size == weight.numel()))
        state = self._optimizer.state.get(first) or {}
        for name, value in state.items():
            if not torch.is_tensor(value) or value.dim() == 0:
                self.state[leaf][name] = value.clone() if torch.is_tensor(value) else value
                continue
            flat = torch.zeros(size, dtype=value.dtype, device=value.device)
            for key, offset in zip(keys, offsets, strict=True):
                shown = self._optimizer.state[key]
                view = self._view(flat, offset, key).copy_(shown[name])
                shown[name] = self._moved(shown[name], view)  # at once, or all of it would be there twice
            self.state[leaf][name] = flat

    # ---- and back

    def _sort(self) -> None:
        """What came new is in the order of the groups, behind what was known, as the optimizer would have made it."""
        state, known = self._optimizer.state, set(map(id, self._keys))
        new = [p for group in self._optimizer.param_groups for p in group["params"] if p in state and id(p) not in known]
        if len(new) > 1:
            state.update({parameter: state.pop(parameter) for parameter in new})

    @staticmethod
    def _view(flat: torch.Tensor, offset: int, key: torch.Tensor) -> torch.Tensor:
        return flat.as_strided(key.shape, key.stride(), flat.storage_offset() + offset)

    @staticmethod
    def _moved(value: Any, view: torch.Tensor) -> torch.Tensor:
        """The tensor that people know, over this memory: a step goes on writing into what they took from the state, or loaded, as it does without us."""
        if type(value) is not torch.Tensor or value.shape != view.shape or value.dtype != view.dtype or value.is_inference():
            return view
        if value.data_ptr() != view.data_ptr() or value.stride() != view.stride():
            value.data = view
        return value

    def _show(self, run: _Run) -> bool:
        """Brings the members' state in line with the run's. Whether they have other values than before, and not only other numbers in them."""
        state = self.state.get(run.leaf) or {}
        if state.keys() == run.values.keys() and all(value is run.values[name] or isinstance(value, _PLAIN) for name, value in state.items()):
            for name, count in run.counts.items():
                count.fill_(state[name])
            plain = {name: value for name, value in state.items() if isinstance(value, _PLAIN) and run.values[name] is not value}
            if not plain:
                return False
            run.values.update(plain)
            for key in run.keys:
                self._optimizer.state[key].update(plain)
            return True
        run.values = dict(state)
        run.counts = {}
        for name, value in state.items():
            if torch.is_tensor(value) and value.dim() == 0:
                run.counts[name] = value.detach().expand(len(run.keys)).clone()
        for number, (key, offset) in enumerate(zip(run.keys, run.offsets, strict=True)):
            shown = self._optimizer.state[key]
            news = {name: self._member(run, name, number, offset, key, value, shown.get(name)) for name, value in state.items()}
            shown.clear()
            shown.update(news)
        return True

    def _member(self, run: _Run, name: str, number: int, offset: int, key: torch.Tensor, value: Any, shown: Any) -> Any:
        if name in run.counts:
            return self._moved(shown, run.counts[name][number])
        if torch.is_tensor(value) and value.numel() == run.leaf.numel():
            return self._moved(shown, self._view(value, offset, key))
        return value
