"""Parameters that show themselves as DTensors of this rank's rows, while forwards use whole tensors.

A sharded parameter is two tensors: ``sharded``, a DTensor (``Shard(0)``) that modules hold outside of forwards and optimizers
update, and ``leaf``, the whole one that a unit gathers, that forwards use and autograd knows. There is one gradient, the
leaf's: the DTensor's ``.grad`` reads and writes it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from .. import _C
from .._C import Error
from .cut import Cut, Place
from .parallel import Parallel, part_of

_BY_AUTOGRAD: Any = torch._C.TensorBase.grad  # where autograd itself would put a gradient


def version(tensor: Any) -> int:
    """Moves with changes in place that torch counts: through the DTensor, or through its rows on this rank."""
    return _C.versions([tensor, tensor._local_tensor])


def sharded_of(parameter: torch.Tensor) -> "Sharded | None":
    """Of what a parameter that was whole once is the leaf. Weakly: the engine keeps leaves, and must not keep itself."""
    known = getattr(parameter, "_plumb_sharded", None)
    return known() if isinstance(known, weakref.ref) else None


@contextlib.contextmanager
def something_to_train(leaves: list[torch.Tensor]) -> Iterator[None]:
    """An engine refuses a model that is all frozen, as nobody means that; who shards one (a teacher) does, and may thaw it later."""
    one = next((leaf for leaf in leaves if leaf.is_floating_point()), None)
    if one is None or any(leaf.requires_grad for leaf in leaves):
        yield
        return
    one.requires_grad_(True)
    try:
        yield
    finally:
        one.requires_grad_(False)


class ShardedParameter(DTensor):
    """This rank's rows of a parameter; its gradient is where the engine keeps it."""

    _sharded: "Sharded"

    @property
    def grad(self) -> torch.Tensor | None:
        return self._sharded.gradient()

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._sharded.set_gradient(value)

    @grad.deleter
    def grad(self) -> None:
        self._sharded.set_gradient(None)

    def detach(self) -> torch.Tensor:
        """What is written into its rows (``to_local()``), in state dicts as well, is counted with this parameter's."""
        seen: Any = super().detach()
        if torch._C._functorch.peek_interpreter_stack() is None and not torch.compiler.is_compiling():
            seen._local_tensor = self._local_tensor.detach()
        return cast(torch.Tensor, seen)

    @property
    def data(self) -> torch.Tensor:
        """Its writes are counted, which those through torch's are not: the next forward waits for them, as for any other."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self._sharded.write(value)

    def register_hook(self, hook: Any) -> RemovableHandle:
        """``hook`` sees this rank's whole gradient in a backward, before ranks are averaged, and may return another."""
        return self._sharded.add_hook(hook)

    @property
    def _plumb_leaf(self) -> torch.Tensor:
        """What a backward that is asked for gradients of this parameter looks for: ``backward(inputs=…)``, ``autograd.grad``."""
        leaf = self._sharded.leaf
        assert leaf is not None
        return leaf


def _nobody() -> None:
    pass


class Sharded:
    """One parameter of a unit. The engine's memory is its truth from the first forward on."""

    unit: Any  # the first that has it

    def __init__(
        self, parameter: nn.Parameter, cut: Cut, device: torch.device, compute: torch.dtype | None, parallel: Parallel | None = None
    ) -> None:
        self.cut, self.parallel = cut, parallel
        self.places: list[Place] = []
        mine = part_of(parameter)
        self.shape, self.dtype = parameter.shape, parameter.dtype  # as the user sees it
        self.whole, self.stride = mine.shape, cut.outermost(mine.shape)  # as forwards use it
        self._compute = compute if parameter.is_floating_point() else None
        self.uses = 0  # forwards under way
        self._used: Any = None  # by those
        self.memory: torch.Tensor | None = None  # the engine's, of this rank's rows, in the dtype of forwards
        self.moved: Any = _nobody  # is told when what the user sees becomes another tensor
        self.factor = 1.0  # of this rank's contributions
        self._joined: bool | None = None  # what this rank keeps, to what was reduced or assigned; None: it keeps nothing
        self._piece: torch.Tensor | None = None  # of the leaf's gradient
        self._shown: DTensor | None = None  # the same as the user sees it, one tensor as long as there is one gradient
        self._seen: torch.Tensor | None = None  # what that held when it was brought up to date, where it is a copy
        self._assigned: DTensor | None = None  # by the user, where there was no piece
        self._trains = parameter.requires_grad  # what the leaf and the DTensor agreed about last
        self._hook: Any = None
        self.hooks: OrderedDict[int, Any] = OrderedDict()  # the user's own, over gradients of the leaf
        with torch.no_grad():
            local = cut.rows(mine.detach().to(device if not parameter.is_meta else "meta")).clone()
            shown = nn.Parameter(cut.distributed(local, parameter, self.dtype), parameter.requires_grad)
        parameter._plumb_sharded = weakref.ref(self)  # type: ignore[attr-defined]  # for whoever it is tied to
        self.leaf = None if parameter.is_meta else parameter if parallel is None else nn.Parameter(mine.detach(), parameter.requires_grad)
        if self.leaf is not None:
            self.leaf._plumb_sharded = weakref.ref(self)  # type: ignore[attr-defined]
            self._hollow(device)
        self.adopt(shown)

    # ---- what the user sees

    def adopt(self, parameter: nn.Parameter) -> None:
        """From now on ``parameter``, a DTensor cut the same way, is what the user sees."""
        if not isinstance(parameter, DTensor) or parameter.shape != self.shape:
            raise Error(
                f"a parameter of a sharded module became a {type(parameter).__name__} of shape {list(parameter.shape)};"
                f" expected a DTensor of shape {list(self.shape)}: load into the model without assign=, or before fully_shard"
            )
        if tuple(parameter.placements) != self.cut.placements or parameter.device_mesh != self.cut.mesh:
            raise Error(
                f"a parameter of a sharded module became a DTensor with placements {parameter.placements}; expected"
                f" {self.cut.placements} over the mesh of fully_shard"
            )
        if self.memory is not None and (parameter.dtype != self.dtype or parameter.device != self.local.device):
            raise Error(
                f"a sharded parameter became {parameter.dtype} on {parameter.device}; it was {self.dtype} on"
                f" {self.local.device} at the first forward; convert the model before that"
            )
        if self.memory is None:
            self.dtype = parameter.dtype
        rows = parameter._local_tensor
        flat = self.cut.flat(rows.detach())
        if flat.data_ptr() != rows.data_ptr():  # optimizers update them as they lie in memory
            parameter._local_tensor = self.cut.shaped(flat, rows.shape)
        if self.memory is not None and not self.apart and parameter._local_tensor.data_ptr() != self.local.data_ptr():
            self._live_in(self.memory.detach().clone())  # what was read from the old parameter does not follow the new one
        parameter.__class__ = ShardedParameter  # type: ignore[assignment]
        parameter._sharded = self  # type: ignore[attr-defined]
        self.sharded: Any = parameter
        self.moved()  # and not yet in the engine's memory, which other ranks may be reading: the next forward or step puts it there
        if self.uses == 0:
            self.show()

    @property
    def compute(self) -> torch.dtype:
        """Of forwards."""
        return self._compute or self.dtype

    @property
    def local(self) -> torch.Tensor:
        rows: torch.Tensor = self.sharded._local_tensor
        return rows

    def show(self) -> None:
        for place in self.places:
            place.put(self.sharded)

    def write(self, value: torch.Tensor) -> None:
        """``p.data = value``: into the rows, which stay where they are."""
        kind = (self.shape, self.dtype, self.local.device)
        if not isinstance(value, DTensor) or (value.shape, value.dtype, value.device) != kind:
            raise Error(
                f".data of a sharded parameter of shape {list(self.shape)}, {self.dtype} on {self.local.device}, was set to a"
                f" {type(value).__name__} of shape {list(value.shape)}, {value.dtype} on {value.device}; expected a DTensor of the same: convert"
                " the whole model before the first forward (model.to(…)), or load a state dict"
            )
        with torch.no_grad():
            self.sharded.detach().copy_(value.redistribute(self.cut.mesh, self.cut.placements))

    # ---- what forwards use

    def _hollow(self, device: torch.device) -> None:
        assert self.leaf is not None
        if self.leaf.device != device or self.leaf.dtype != self.compute or self.leaf.stride() != self.stride:
            self.leaf.data = torch.empty_strided(self.whole, self.stride, dtype=self.compute, device=device)
        if self.cut.shards > 1:
            _C.keep_rows(self.leaf, torch.empty(0, dtype=self.compute, device=device), self.cut.rank)

    def prepare(self) -> None:
        """The leaf is about to be an engine's: its rows are those that the user sees."""
        device = self.local.device
        with torch.no_grad():
            if self.leaf is None or self.leaf.device.type != device.type:
                hollow = torch.empty_strided(self.whole, self.stride, dtype=self.compute, device=device)
                self.leaf = nn.Parameter(hollow, self.sharded.requires_grad)
                self.leaf._plumb_sharded = weakref.ref(self)  # type: ignore[attr-defined]
            if self.leaf.dtype != self.compute or self.leaf.device != device:
                self._hollow(device)
            if self.leaf.requires_grad != self.sharded.requires_grad:
                self.leaf.requires_grad_(self.sharded.requires_grad)
            self._trains = self.leaf.requires_grad
            if self.cut.shards > 1:
                _C.keep_rows(self.leaf, self.cut.flat(self.local.to(self.compute)).contiguous(), self.cut.rank)
            else:
                self.leaf.data = self.local if self.compute == self.dtype else self.local.to(self.compute)

    def follow_freezing(self) -> None:
        """Modules show the DTensor, or the leaf while their unit is kept whole: whichever was frozen or thawed, both are."""
        assert self.leaf is not None
        if self.leaf.requires_grad != self.sharded.requires_grad:
            trains = not self._trains
            self.leaf.requires_grad_(trains)
            self.sharded.requires_grad_(trains)
        self._trains = self.leaf.requires_grad

    def settle_in(self, memory: torch.Tensor) -> None:
        """The engine keeps the rows in ``memory`` from now on."""
        self.memory = memory
        self._rows = self.cut.shaped(memory, self.local.shape)
        if self.dtype == self.compute:
            self._live_in(memory)
        self.moved()

    def _live_in(self, memory: torch.Tensor) -> None:
        """The rows lie in ``memory`` from now on, which holds the same, and with them all that shares their storage: state dicts, views."""
        if not _C.move_rows(self.local, memory):
            self.sharded._local_tensor = self.cut.shaped(memory, self.local.shape)
            self.moved()

    def follow(self) -> None:
        """Where one rank holds everything, an update may move the leaf: the rows are it."""
        assert self.leaf is not None
        if self.memory is None or self.memory.data_ptr() != self.leaf.data_ptr():
            self.settle_in(self.leaf.detach())

    @property
    def apart(self) -> bool:
        """What the user sees is not what forwards gather, which is in another dtype, or read by ranks that still evaluate."""
        return self.memory is not None and self.local.data_ptr() != self._rows.data_ptr()

    def part(self) -> None:
        """Before a forward that no backward follows: the user may write while other ranks, which read in place, still run theirs."""
        if self.memory is None or self.apart or self.local.device.type != "cpu":
            return
        self._live_in(self.memory.detach().clone())

    def differs(self) -> bool:
        """In any bit from what forwards gather."""
        if not self.apart or self.memory is None:
            return False
        return not self._same_bits(self.local.to(self.compute), self._rows)

    def join(self) -> None:
        """Before a step, when all is published: the user's rows are those that forwards gather, where they can be."""
        if self.apart and self.dtype == self.compute:
            assert self.memory is not None
            self._live_in(self.memory)

    def publish(self) -> None:
        """What was written into the rows is what forwards will gather."""
        with torch.no_grad():
            self._rows.copy_(self.local)

    def check_places(self) -> None:
        """Before a forward puts the whole parameter there: nobody else put anything, which would be taken for it in silence."""
        if self.uses > 0:
            return
        for place in self.places:
            now = place.get()
            if now is not self.sharded and now is not self.leaf:
                raise place.taken()

    def enter(self) -> None:
        self.uses += 1
        if self.uses == 1:
            assert self.leaf is not None
            self._used = self.leaf if self.parallel is None else self.parallel.show(self)
            for place in self.places:
                place.put(self._used)

    def leave(self) -> None:
        self.uses -= 1
        if self.uses == 0:
            self._used = self.leaf
            self.show()

    def version_in_use(self) -> int:
        """Moves with every change in place of what forwards use."""
        version = 0 if self.leaf is None else self.leaf._version
        return version if self._used is None or self._used is self.leaf else version + int(self._used._version)

    # ---- the gradient

    def gradient(self) -> torch.Tensor | None:
        if self.leaf is None:
            return None
        self.merge()
        piece = self.leaf.grad
        if piece is not self._piece and self.keeps:
            piece = None
        if piece is None:
            self._piece = self._shown = self._assigned = None
        elif self._assigned is not None:
            if self._untouched(piece):
                return self._assigned
            self._piece = self._assigned = None
            return self.gradient()
        if piece is self._piece and self._shown is not None:
            self.write_back()
            self.bring_up_to_date()
            return self._shown
        self._piece = piece
        self._shown = None if piece is None else self._show(piece)
        return self._shown

    @property
    def keeps(self) -> bool:
        """There is a whole gradient, which this rank keeps until the next reduction."""
        whole = self.leaf.grad if self.leaf is not None and self.cut.shards > 1 else None
        return whole is not None and not _C.is_piece(whole)

    def merge(self) -> None:
        """A gradient of something that was computed with the rows themselves, outside of forwards, is one more contribution."""
        own = _BY_AUTOGRAD.__get__(self.sharded)
        if own is None:
            return
        _BY_AUTOGRAD.__set__(self.sharded, None)
        before = self.gradient()
        self.set_gradient(own if before is None else before + own)

    def _show(self, piece: torch.Tensor) -> DTensor:
        with torch.inference_mode(False):
            rows = self._numbers(piece).to(self.dtype)
            self._seen = rows.clone() if self.narrowed else None
            shown = DTensor(rows, self.sharded._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        self._version = version(shown)
        return shown

    def _numbers(self, piece: torch.Tensor) -> torch.Tensor:
        return self.cut.shaped(_C.unmarked(piece), self.local.shape)

    @property
    def narrowed(self) -> bool:
        """The gradient is kept in a wider dtype than the user sees it in, which is a copy then."""
        return self._piece is not None and self._piece.dtype != self.dtype

    @property
    def _shows_a_copy(self) -> bool:
        return self._seen is not None and self._shown is not None and self.leaf is not None and self.leaf.grad is self._piece is not None

    def write_back(self) -> None:
        """What the user changed in a copy is the gradient.

        Bits are compared, as torch counts not every change (``.data``). Those it counted are counted on, which every rank does or none.
        """
        if not self.narrowed or not self._shows_a_copy:
            return
        assert self._piece is not None and self._shown is not None and self._seen is not None
        mine, counted = self._shown._local_tensor.detach(), version(self._shown) != self._version
        if not counted and self._same_bits(mine, self._seen):
            return
        with torch.inference_mode(False), torch.no_grad():
            numbers = self._numbers(self._piece)
            (numbers if counted else numbers.data).copy_(mine)
            self._seen.copy_(mine)
        self._version = version(self._shown)

    def bring_up_to_date(self) -> None:
        """A copy that the user may hold follows the gradient, after ``write_back``."""
        if not self.narrowed or not self._shows_a_copy:
            return
        assert self._piece is not None and self._shown is not None and self._seen is not None
        with torch.inference_mode(False), torch.no_grad():
            now = self._numbers(self._piece).to(self.dtype)
            if not self._same_bits(now, self._seen):
                self._shown._local_tensor.copy_(now)
                self._seen.copy_(now)
                self._version = version(self._shown)

    def _same_bits(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        first, second = (self.cut.flat(rows.detach()).contiguous().view(torch.uint8) for rows in (one, other))
        return torch.equal(first, second)

    def set_gradient(self, value: torch.Tensor | None) -> None:
        if value is not None and value is self._shown:
            return
        _BY_AUTOGRAD.__set__(self.sharded, None)
        self._joined = None
        if value is None:
            self._piece = self._shown = self._assigned = None
            if self.leaf is not None:
                self.leaf.grad = None
            return
        if not isinstance(value, DTensor) or value.shape != self.shape:
            raise Error(
                f"the gradient of a sharded parameter of shape {list(self.shape)} was set to a {type(value).__name__} of shape"
                f" {list(value.shape)}; expected a DTensor of the parameter's shape"
            )
        if self.leaf is None:
            raise Error("a gradient was set before the model has memory; give it memory first (model.to_empty)")
        with torch.no_grad():
            local = value.redistribute(self.cut.mesh, self.cut.placements).to_local()
            piece = self.leaf.grad
            if piece is not None and (piece.dim() != self.leaf.dim() or self.cut.shards == 1):
                self._numbers(piece).copy_(local)
                self._piece = self._shown = self._assigned = None
                return
            # There is no piece to write: this rank contributes its rows such that the mean gives them back.
            dtype = self.leaf.grad_dtype or self.leaf.dtype
            whole = torch.empty_strided(self.whole, self.stride, dtype=dtype, device=local.device).zero_()
            self.cut.rows(whole).copy_(local).mul_(self.cut.shards)
            self.leaf.grad = whole
        self._piece, self._shown, self._assigned = self.leaf.grad, None, value if self.cut.shards > 1 else None
        self._assigned_version = 0 if self._piece is None else self._piece._version

    def begin_keeping(self, keeps: bool) -> None:
        """Before a backward that ``keeps`` its gradients on this rank, or something that reduces what is kept."""
        assert self.leaf is not None
        if not keeps or self.leaf.grad is None:
            self._joined = False if keeps else None
        elif self._joined is None:
            self._joined = True

    def divide_by(self, factor: float, ranks: int) -> None:
        """The sum over the ranks, of what this rank keeps for the next reduction, too."""
        before, self.factor = self.factor, ranks / factor
        kept = self.leaf.grad if self.leaf is not None and self._joined is not None else None
        if kept is None or self.factor == before or _C.is_piece(kept):
            return
        if self._joined:
            self.factor = before
            raise Error(
                f"set_gradient_divide_factor({factor}): the gradient that is kept of parameter '{self.places[0].name}' of a"
                f" {type(self.places[0].module).__name__} was added to one that was reduced before, or assigned, and is not to be divided again:"
                " set the factor before the backwards that are kept, or clear gradients first"
            )
        with torch.no_grad():
            kept.mul_(self.factor / before)

    def _untouched(self, piece: torch.Tensor) -> bool:
        """What was assigned where there was no piece stands as it was: no backward that reduced nothing added to it."""
        return piece is self._piece and piece._version == self._assigned_version

    def assign_again(self) -> None:
        """A gradient that was assigned where there was no piece may have been changed in place since."""
        if self._assigned is not None and self.leaf is not None and self.leaf.grad is not None and self._untouched(self.leaf.grad):
            self.set_gradient(self._assigned)

    def add_hook(self, hook: Any) -> RemovableHandle:
        if not self.sharded.requires_grad:
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
        handle = RemovableHandle(self.hooks)
        self.hooks[handle.id] = hook
        engine = self.unit.root.engine
        if engine is not None:  # also between a forward and its backward
            engine.look_at(self)
        return handle

    def hook(self, call: Any) -> None:
        """``call`` sees each gradient of the leaf in a backward, once."""
        assert self.leaf is not None
        if self._hook is None and self.leaf.requires_grad:
            self._hook = self.leaf.register_hook(call)  # type: ignore[no-untyped-call]
