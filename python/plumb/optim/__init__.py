"""The user's own ``torch.optim`` object under an engine.

It stays his: its identity, groups, schedulers, ``zero_grad`` and ``state_dict`` are what they were. During ``step()`` alone,
where the optimizer's state is sharded, its groups hold what this rank owns instead of the parameters: pieces of them where
the optimizer is known to be elementwise, otherwise those parameters that are this rank's, whole.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, TypeVar

import torch
import torch.utils.hooks

from .. import _C
from .._C import Error
from .early import Early
from .flat import Flat
from .hooks import LastHook, Watch, check_outside as check_outside, closure_of, inside_a_step, swap
from .replicated import Whole as Whole
from .compared import refuse_sparse, settings
from . import state as _state
from .trial import looks_at_others

O = TypeVar("O", bound=type[torch.optim.Optimizer])

#: Optimizers that update each element by its own gradient and state alone, so that pieces can be updated apart.
_ELEMENTWISE: set[type] = {
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
}

#: Optimizers whose update of a parameter depends on other parameters, by name: no rank can step some of them alone.
_ALL_TOGETHER = ("LBFGS", "Prodigy", "DAdapt")

#: What optimizers keep of a parameter as a whole, by name: where a parameter has no dimensions, its shape does not tell.
_NUMBERS = ("step", "mu_product", "eta", "mu")

MARK = "plumb"
_CLOSED = "_plumb_closed"


def elementwise(optimizer: O) -> O:
    """Declares an optimizer class whose update of an element needs nothing but that element's gradient and state.

    Strategies that shard the optimizer's state then cut parameters anywhere, not between parameters only, which balances
    better. A class decorator, or a call for a class of somebody else's; for one engine, ``Engine(…, elementwise=True)``.

    >>> import plumb, torch
    >>> @plumb.elementwise
    ... class Signs(torch.optim.SGD):
    ...     pass
    """
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise Error(f"elementwise({optimizer!r}); expected a class of optimizers")
    _ELEMENTWISE.add(optimizer)
    return optimizer


def is_number(key: str, value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether this state is of the parameter as a whole, and not of its elements."""
    return value.dim() == 0 and (parameter.dim() > 0 or key in _NUMBERS)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Known to be: a class derived from one that is may do anything."""
    return type(optimizer) in _ELEMENTWISE


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Of torch, and known to be elementwise, whose state is by parameter: stepped over any cut of them, it does the same."""
    differentiable = any(group.get("differentiable") for group in optimizer.param_groups)
    return is_elementwise(optimizer) and type(optimizer).__module__.startswith("torch.optim.") and not differentiable


def check(
    optimizer: torch.optim.Optimizer,
    named: list[tuple[str, torch.Tensor]],
    sharded: bool,
    strategy: str,
    one_by_one: bool = False,
    masters: bool = False,
) -> None:
    """An Error if this optimizer cannot be honoured over these parameters. ``one_by_one``: the user says that it steps each by itself;
    ``masters``: it is to step f32 copies of some."""
    name = type(optimizer).__name__
    if getattr(optimizer, _CLOSED, False):
        _refuse()
    refuse_sparse(optimizer)
    if sharded and any(kind.__name__.startswith(_ALL_TOGETHER) for kind in type(optimizer).__mro__):
        raise Error(
            f"{name} looks at all parameters together, and strategy '{strategy}' gives each rank some of them to step: use"
            " 'ddp', where every rank steps all"
        )
    if masters and isinstance(optimizer, torch.optim.LBFGS):
        raise Error(
            f"{name} keeps a list of its parameters, and would step the half-precision ones themselves, past their f32 masters: leave"
            " master_weights out, or keep the parameters in f32"
        )
    if sharded and not one_by_one and not is_elementwise(optimizer) and looks_at_others(optimizer):
        raise Error(
            f"{name} updates a parameter by other parameters' gradients, too (a trial over small tensors showed that), and strategy '{strategy}'"
            " gives each rank some of them to step: use 'ddp', where every rank steps all; to clip by the norm of all gradients, Engine(clip_norm=)"
        )
    known = {id(parameter) for _, parameter in named}
    refuse_foreign(optimizer, known, "build the optimizer over the parameters of the model that the engine gets")


def refuse_foreign(optimizer: torch.optim.Optimizer, known: Container[int], advice: str) -> None:
    """An Error if it has a parameter whose id is none of these."""
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise Error(f"parameter {i} of the optimizer's group {g}, of shape {list(parameter.shape)}, is none of the engine's; {advice}")


def refuse_newcomers(optimizer: torch.optim.Optimizer, known: frozenset[int], rank: int) -> None:
    """An Error if a group that came since has a parameter that trains, and whose gradient nobody would reduce."""
    for g, group in enumerate(optimizer.param_groups):
        if known.issuperset(map(id, group["params"])):  # as ever
            continue
        for i, parameter in enumerate(group["params"]):
            if id(parameter) not in known and (parameter.requires_grad or parameter.grad is not None):
                raise Error(
                    f"rank {rank}: parameter {i} of the optimizer's group {g}, of shape {list(parameter.shape)}, came into the optimizer after"
                    " the engine was built, and nobody would reduce its gradient: build a new engine over a model that has it"
                )


class Pieces:
    """Where each rank holds a part of the optimizer's state, or masters: it steps over what this rank owns, as leaves.

    With ``whole``, ownership is cut at parameters: a leaf has its parameter's shape, or is empty where another rank steps it.
    Otherwise it is the flat piece of it that this rank owns. Without ``cuts``, every rank owns everything.
    """

    def __init__(
        self,
        native: _C.Engine,
        optimizer: torch.optim.Optimizer,
        rank: int,
        size: int,
        whole: bool = False,
        cuts: bool = True,
        follow: Callable[[], object] = lambda: None,
    ) -> None:
        self.follow = follow  # before gradients are settled
        self.native, self.optimizer, self.whole, self.cuts = native, optimizer, whole, cuts
        self.place = {"rank": rank, "size": size}
        self.info: _C.StepInfo | None = None
        self.early: Early | None = None  # until the optimizer asks for its closure
        self.leaf_of: dict[int, torch.Tensor] = {}  # by parameter
        self.begin_of: dict[int, int] = {}
        self.groups: list[list[torch.Tensor]] | None = None
        self.stepping, self.left = False, 0
        self.shown: Any = None  # the optimizer's state, while it steps flat memory
        self.loaded: dict[int, tuple[dict[str, Any], int]] = {}  # by parameter: state of a piece before its first step; none of another rank's
        self.flat = Flat(native, optimizer, lambda parameter: self.leaf_of[id(parameter)]) if not whole and is_torchs(optimizer) else None
        # Hooks of the user's find his parameters and their gradients, whenever they came.
        after = optimizer.register_step_post_hook(self._ended)
        optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # type: ignore[attr-defined]
        self.handles: list[LastHook | Watch | torch.utils.hooks.RemovableHandle] = [
            LastHook(optimizer, self._before),
            Watch(optimizer, "step", self.abandon),
            *(Watch(optimizer, name, self._swap_out) for name in ("state_dict", "load_state_dict")),
            after,
            optimizer.register_state_dict_pre_hook(self._show),
            optimizer.register_state_dict_post_hook(self._mark),
            optimizer.register_load_state_dict_pre_hook(self._check_load),
            optimizer.register_load_state_dict_post_hook(self._cut_loaded),
        ]
        _state.watch(optimizer, self)

    # ---- a step

    def _before(self, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if inside_a_step(self.optimizer):
            return None
        self.abandon()
        closure, args, kwargs = closure_of(args, kwargs)
        result, early = None, None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            early = None if is_elementwise(self.optimizer) else Early(type(self.optimizer).__name__)
            result = (args[0], self._once(loss, early), *args[1:]), kwargs
        self.native.compare_settings(settings(self.optimizer, self.left))
        self.follow()
        self.info = self.native.begin_step()
        self.stepping = not self.info.skipped
        if self.info.skipped:
            self.groups = swap(self.optimizer, [[] for _ in self.optimizer.param_groups])
            return result
        groups = self.flat.begin(self._make_leaves) if self.flat is not None else None
        if groups is not None:
            assert self.flat is not None
            self.groups = swap(self.optimizer, groups)
            self.shown, self.optimizer.state = self.optimizer.state, self.flat.state
            return result
        self.flat = None
        for piece, leaf in self._make_leaves():
            mine = piece.gradient is not None and not self._is_others(piece)
            leaf.grad = self._shaped(piece, piece.gradient) if mine and piece.gradient is not None else None
        self._swap_in()
        if early is not None:
            self.early = early
            early.begin(list(self.leaf_of.values()))
        return result

    def _once(self, loss: Any, early: "Early | None") -> Callable[[], Any]:
        """The closure that the optimizer gets: its backward has run, and what is stepped now does not change under it."""
        calls = iter([loss])

        def closure() -> Any:
            if early is not None:
                early.end()
            for one in calls:
                return one
            raise Error(
                f"{type(self.optimizer).__name__} calls its closure more than once in a step, and this strategy gives it what this"
                " rank owns of the parameters, which a second backward would not see: use 'ddp' without master_weights"
            )

        return closure

    def _is_others(self, piece: _C.Piece) -> bool:
        return self.whole and piece.weight.numel() != piece.parameter.numel()

    def _shaped(self, piece: _C.Piece, flat: torch.Tensor) -> torch.Tensor:
        if not self.whole or self._is_others(piece):
            return flat
        return flat.as_strided(piece.parameter.shape, piece.parameter.stride())

    def _make_leaves(self) -> list[tuple[_C.Piece, torch.Tensor]]:
        """What this rank may step now; a leaf is made with the first gradient of its parameter, and follows where that lies."""
        leaves = []
        for piece in self.native.pieces():
            leaf = self.leaf_of.get(id(piece.parameter))
            if leaf is None:
                leaf = self._new_leaf(piece)
            elif leaf.data_ptr() != piece.weight.data_ptr():
                leaf.data = self._shaped(piece, piece.weight.detach())
            leaves.append((piece, leaf))
        return leaves

    def _new_leaf(self, piece: _C.Piece) -> torch.Tensor:
        key = id(piece.parameter)
        leaf = torch.nn.Parameter(self._shaped(piece, piece.weight.detach()), requires_grad=False)
        self.leaf_of[key], self.begin_of[key] = leaf, piece.begin
        if key in self.loaded:
            loaded = self.loaded.pop(key)[0]
            if loaded:
                self.optimizer.state[leaf] = loaded
            return leaf
        state = dict.pop(self.optimizer.state, piece.parameter, None)  # of before this engine, or loaded
        if state is not None:
            self._put(leaf, state, piece.parameter, piece.begin)
        return leaf

    def _put(self, leaf: torch.Tensor, state: dict[str, Any], parameter: torch.Tensor, begin: int) -> None:
        """What this rank needs of the state of a whole parameter."""
        if leaf.dtype != parameter.dtype:  # a master: what is kept of it is of its dtype, as torch's load_state_dict has it
            of_half = {key: value for key, value in state.items() if torch.is_tensor(value) and value.dtype == parameter.dtype}
            state = {**state, **{key: value.to(leaf.dtype) for key, value in of_half.items()}}
        if not self.whole:
            self.optimizer.state[leaf] = self._cut(state, parameter, leaf, begin)
        elif leaf.numel() == parameter.numel():
            self.optimizer.state[leaf] = state

    @staticmethod
    def _cut(state: dict[str, Any], parameter: torch.Tensor, leaf: torch.Tensor, begin: int) -> dict[str, Any]:
        def one(key: str, value: Any) -> Any:
            if not torch.is_tensor(value) or value.shape != parameter.shape or is_number(key, value, parameter):
                return value
            flat = torch.empty(parameter.numel(), dtype=value.dtype, device=value.device)
            flat.as_strided(parameter.shape, parameter.stride()).copy_(value)
            return flat[begin : begin + leaf.numel()].clone()

        return {key: one(key, value) for key, value in state.items()}

    def _ended(self, *_: object) -> None:
        if not inside_a_step(self.optimizer):
            self._after()

    def abandon(self) -> None:
        """If the optimizer threw in the middle of a step: ends it with what it had updated."""
        self.left += self.stepping
        self._after()

    def _after(self) -> None:
        if self.early is not None:  # its closure was never asked for
            self.early.let_go()
            self.early = None
        self._swap_out()
        if not self.stepping:
            return
        self.stepping = False
        if self.flat is not None:
            self.optimizer.state, self.shown = self.shown, None
            self.flat.end()
        _state.watch(self.optimizer, self)
        for leaf in () if self.flat is not None else self.leaf_of.values():
            leaf.grad = None
        self.native.end_step()

    # ---- its groups

    def _swap_in(self, *_: object) -> None:
        self._swap_out()
        leaves = [[self.leaf_of.get(id(p), p) for p in group["params"]] for group in self.optimizer.param_groups]
        self.groups = swap(self.optimizer, leaves)

    def _swap_out(self, *_: object) -> None:
        if self.groups is not None:
            swap(self.optimizer, self.groups)
            self.groups = None

    # ---- its state

    def _show(self, *_: object) -> None:
        """For ``state_dict()``: by leaves, and by the parameters themselves where a piece was loaded and is still to be stepped."""
        for parameter, state in self._still_loaded():
            dict.__setitem__(self.optimizer.state, parameter, state)
        self._swap_in()

    def _still_loaded(self) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        members = [p for group in self.optimizer.param_groups for p in group["params"]] if self.loaded else []
        return [(p, self.loaded[id(p)][0]) for p in members if id(p) in self.loaded and self.loaded[id(p)][0]]

    def _mark(self, _: object, state: dict[str, Any]) -> None:
        self._swap_out()
        for parameter, _loaded in self._still_loaded():
            dict.pop(self.optimizer.state, parameter, None)
        if self.leaf_of or self.loaded:
            state[MARK] = dict(self.place)

    def _check_load(self, _: object, state: dict[str, Any]) -> None:
        place = state.get(MARK)
        if place is not None and place != self.place:
            raise Error(
                f"this optimizer state is of rank {place['rank']} of {place['size']}, and this is rank {self.place['rank']} of"
                f" {self.place['size']}: each rank loads what it saved"
            )
        self.loads_pieces = place is not None
        if self.loads_pieces and not self.leaf_of:
            raise Error("optimizer state of a rank's pieces is loaded before the engine's first step; take that step first")
        if self.loads_pieces:
            self._swap_in()

    def _cut_loaded(self, _: object) -> None:
        self._swap_out()
        self.loaded.clear()
        if not self.loads_pieces:
            self._cut_whole()
        _state.watch(self.optimizer, self)

    def _cut_whole(self) -> None:
        for group in self.optimizer.param_groups:  # of whole parameters: each rank keeps its pieces
            for parameter in group["params"]:
                leaf = self.leaf_of.get(id(parameter))
                state = dict.pop(self.optimizer.state, parameter, None)
                if leaf is not None and state is not None:
                    self._put(leaf, state, parameter, self.begin_of[id(parameter)])
                elif state is not None:
                    dict.__setitem__(self.optimizer.state, parameter, state)

    # ---- checkpoints

    @property
    def has_owners(self) -> bool:
        """Whether one rank alone knows what the optimizer keeps of a parameter."""
        return self.whole and self.cuts

    def state_of(self, parameter: torch.Tensor) -> tuple[dict[str, Any], int | None]:
        """The optimizer's state of this rank's piece, and where it begins; of all of it (None) before the first step."""
        leaf = self.leaf_of.get(id(parameter))
        if leaf is None:
            if id(parameter) in self.loaded:
                return self.loaded[id(parameter)]
            return dict(self.optimizer.state.get(parameter, {})), None
        state = dict(self.optimizer.state.get(leaf, {}))
        if self.whole:  # as pieces: all elements, in the order of their memory, or none
            state = {key: self._flat(value, parameter) for key, value in state.items()}
        return state, max(0, self.begin_of[id(parameter)])

    @staticmethod
    def _flat(value: Any, parameter: torch.Tensor) -> Any:
        if not torch.is_tensor(value) or value.dim() == 0 or value.shape != parameter.shape:
            return value
        flat = torch.empty(parameter.numel(), dtype=value.dtype, device=value.device)
        flat.as_strided(parameter.shape, parameter.stride()).copy_(value)
        return flat

    def is_piece(self, parameter: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether this state, beside where the piece begins, is of its elements; otherwise it is of the parameter as a whole."""
        leaf = self.leaf_of.get(id(parameter))
        if leaf is not None and value.dim() == 1:
            return value.numel() == leaf.numel()
        return value.dim() == 1 and (not self.whole or value.numel() in (0, parameter.numel()))

    def speaks_for(self, parameter: torch.Tensor, rank: int) -> bool:
        """Whether this rank gives what the optimizer keeps of the parameter as a whole."""
        leaf = self.leaf_of.get(id(parameter))
        if self.has_owners and leaf is not None and parameter.numel() > 0:
            return leaf.numel() == parameter.numel()
        return rank == 0

    def set_state(self, parameter: torch.Tensor, state: dict[str, Any], begin: int | None) -> None:
        if begin is None:  # nobody steps it, and its state is whole on every rank
            self._drop(parameter)
            dict.__setitem__(self.optimizer.state, parameter, state)
            return
        if self.whole:
            per_element = [v for v in state.values() if torch.is_tensor(v) and v.dim() == 1 and v.numel() != 1]
            if per_element and all(v.numel() == 0 for v in per_element) and parameter.numel() > 0:
                state = {}  # another rank's
            state = {
                key: value.as_strided(parameter.shape, parameter.stride())
                if torch.is_tensor(value) and value.dim() == 1 and value.numel() == parameter.numel()
                else value
                for key, value in state.items()
            }
        leaf = self.leaf_of.get(id(parameter))
        self._drop(parameter)
        if leaf is not None:
            if state:
                self.optimizer.state[leaf] = state
        else:
            self.loaded[id(parameter)] = (state, begin)

    def _drop(self, parameter: Any) -> dict[str, Any]:
        of_whole = dict.pop(self.optimizer.state, parameter, {})
        leaf = self.leaf_of.get(id(parameter))
        of_leaf: dict[str, Any] = {} if leaf is None else dict.pop(self.optimizer.state, leaf, {})
        return self.loaded.pop(id(parameter), ({}, 0))[0] or of_leaf or of_whole

    # ---- what a user does to it by parameter (see `State`)

    def keeps(self, parameter: Any) -> bool:
        leaf = self.leaf_of.get(id(parameter))
        if leaf is None:
            return bool(self.loaded.get(id(parameter), ({}, 0))[0])
        # Another rank's has some if ours have.
        is_others = self.whole and leaf.numel() != parameter.numel()
        return any(dict.get(self.optimizer.state, one) for one in (self.leaf_of.values() if is_others else [leaf]))

    def forget(self, parameter: Any) -> dict[str, Any] | None:
        return self._drop(parameter) if id(parameter) in self.leaf_of or id(parameter) in self.loaded else None

    def put(self, parameter: Any, state: dict[str, Any]) -> None:
        leaf = self.leaf_of.get(id(parameter))
        if leaf is None:
            dict.__setitem__(self.optimizer.state, parameter, state)
        else:
            self._put(leaf, state, parameter, self.begin_of[id(parameter)])

    def close(self) -> None:
        _state.leave(self.optimizer)
        for handle in self.handles:
            handle.remove()
        if self.leaf_of:
            self.optimizer.register_step_pre_hook(_refuse)
            self.optimizer.register_state_dict_pre_hook(_refuse)
            setattr(self.optimizer, _CLOSED, True)


def _refuse(*_: object) -> None:
    raise Error(
        "this optimizer's state is in pieces that its engine held, and the engine was closed: save optimizer.state_dict() before"
        " close(), and build a new optimizer after it"
    )
