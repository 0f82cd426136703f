"""Modules that write their weight gradients themselves, into the buffer of whoever owns it.

An engine's bucket, by itself; or, with ``fuse_wgrad_accumulation``, what a weight's attributes say, as TransformerEngine and
Megatron agree: ``main_grad`` is the buffer, ``overwrite_main_grad`` says not to add to it, and a ``grad_added_to_main_grad``
that is there is set to True when the gradient went into it. Without any of these they are plain modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Union

import torch
from torch import nn

from . import _C, compiled
from ._C import Error

Weights = Literal["grouped", "separate"]
Tokens = Union[torch.Tensor, Sequence[int]]

__all__ = ["GroupedLinear", "GroupedMLP", "Linear", "MoE", "Router"]


_outside = compiled.outside(
    "plumb.nn writes weight gradients itself, past autograd, and so outside of compiled graphs: compile without fullgraph=True, or with"
    " torch.nn's modules instead"
)


class _Fused(nn.Module):
    """What all of them have: where weight gradients go, and when they are computed."""

    def __init__(self, fuse_wgrad_accumulation: bool, delay_wgrad_compute: bool) -> None:
        super().__init__()
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self._store = _C.WgradStore() if delay_wgrad_compute else None
        self._sinks: dict[str, tuple[torch.Tensor, _C.FusedSink]] = {}  # of weights whose attributes are followed

    def backward_dw(self) -> None:
        """Computes the weight gradients that backwards put off, in the order of the backwards."""
        if self._store is None:
            raise Error("backward_dw() on a module that delays nothing; build it with delay_wgrad_compute")
        self._store.flush()

    def _follow(self, names: Sequence[str]) -> list[torch.Tensor]:
        """The weights. Those that have an owner by their attributes are known to have it."""
        weights: list[torch.Tensor] = [self.get_parameter(name) for name in names]
        for name, weight in zip(names, weights, strict=True):
            follows = self.fuse_wgrad_accumulation and getattr(weight, "main_grad", None) is not None
            known = self._sinks.get(name)
            if known is not None and (not follows or known[0] is not weight):
                del self._sinks[name]
            if follows:
                sink = _C.follow_attributes(weight, name)
                if sink is not None:
                    self._sinks[name] = weight, sink
        return weights

    def _add(self, name: str, shape: tuple[int, ...], fan_in: int, device: Any, dtype: torch.dtype | None) -> None:
        """Uniform in ±1/√in, as torch's own linear layers start."""
        value = torch.empty(shape, device=device, dtype=dtype)
        if not value.is_meta:
            nn.init.uniform_(value, -(fan_in**-0.5), fan_in**-0.5)
        self.register_parameter(name, nn.Parameter(value))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_store": None, "_sinks": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._store = _C.WgradStore() if self.delay_wgrad_compute else None


class Linear(_Fused):
    """y = x Wᵀ + b, as ``torch.nn.Linear``.

    >>> import plumb, torch
    >>> layer = plumb.nn.Linear(4, 2, fuse_wgrad_accumulation=True)
    >>> layer.weight.main_grad = torch.zeros(2, 4)
    >>> layer(torch.ones(3, 4)).sum().backward()
    >>> layer.weight.grad is None, float(layer.weight.main_grad.sum())
    (True, 24.0)
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(fuse_wgrad_accumulation, delay_wgrad_compute)
        _positive("a linear layer", in_features, out_features)
        self.in_features, self.out_features = in_features, out_features
        self._add("weight", (out_features, in_features), in_features, device, dtype)
        if bias:
            self._add("bias", (out_features,), in_features, device, dtype)
        else:
            self.register_parameter("bias", None)

    @_outside
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise Error(f"the input has shape {list(x.shape)}; expected [..., {self.in_features}]")
        (weight,) = self._follow(["weight"])
        return _C.linear(x, weight, self.bias, self._store)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class _Experts(_Fused):
    """Parameters of experts: one for all of them, or one each."""

    def __init__(self, experts: int, weights: Weights, fuse: bool, delay: bool) -> None:
        super().__init__(fuse, delay)
        if weights not in ("grouped", "separate"):
            raise Error(f"weights={weights!r}; expected 'grouped' (one parameter) or 'separate' (one per expert)")
        self.num_experts, self.weights = experts, weights

    def _names(self, name: str) -> list[str]:
        return [name] if self.weights == "grouped" else [f"{name}{e}" for e in range(self.num_experts)]

    def _add_experts(self, name: str, shape: tuple[int, ...], fan_in: int, device: Any, dtype: torch.dtype | None) -> None:
        for one in self._names(name):
            self._add(one, (self.num_experts, *shape) if self.weights == "grouped" else shape, fan_in, device, dtype)

    def _biases(self, name: str, there: bool) -> list[torch.Tensor]:
        return [self.get_parameter(one) for one in self._names(name)] if there else []

    def _counts(self, tokens: Tokens) -> torch.Tensor:
        return tokens if isinstance(tokens, torch.Tensor) else torch.tensor(list(tokens), dtype=torch.int64)


class GroupedLinear(_Experts):
    """Expert e's rows of x times its own weight, transposed, and its own bias.

    ``weight`` is [experts, out, in]; with ``weights="separate"`` there are ``weight0``, ``weight1``, … of [out, in] each.

    >>> import plumb, torch
    >>> layer = plumb.nn.GroupedLinear(2, 4, 3)
    >>> x = torch.ones(5, 4)
    >>> y = layer(x, m_splits=[2, 3])
    >>> torch.allclose(y[2:], x[2:] @ layer.weight[1].T)
    True
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        weights: Weights = "grouped",
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_gemms, weights, fuse_wgrad_accumulation, delay_wgrad_compute)
        _positive("a grouped linear layer", num_gemms, in_features, out_features)
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self._add_experts("weight", (out_features, in_features), in_features, device, dtype)
        if bias:
            self._add_experts("bias", (out_features,), in_features, device, dtype)

    @_outside
    def forward(self, x: torch.Tensor, m_splits: Tokens, *, ends: bool = False) -> torch.Tensor:
        """``m_splits``: rows of each expert, first expert first; with ``ends``, their running sums."""
        weights = self._follow(self._names("weight"))
        biases, counts = self._biases("bias", self.use_bias), self._counts(m_splits)
        return _C.grouped_linear(x, weights, biases, counts, ends, self.num_experts, self._store)


class GroupedMLP(_Experts):
    """down(activation(up(x))) per expert, as one node; with SwiGLU, ``up`` has 2 · hidden rows, the gate's first.

    >>> import plumb, torch
    >>> experts = plumb.nn.GroupedMLP(2, width=4, hidden=8, activation="gelu")
    >>> x = torch.ones(3, 4)
    >>> y = experts(x, [1, 2])
    >>> torch.allclose(y[0], torch.nn.functional.gelu(x[0] @ experts.up[0].T) @ experts.down[0].T, atol=1e-6)
    True
    """

    def __init__(
        self,
        num_experts: int,
        width: int,
        hidden: int,
        *,
        activation: Literal["swiglu", "gelu"] = "swiglu",
        bias: bool = False,
        weights: Weights = "grouped",
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_experts, weights, fuse_wgrad_accumulation, delay_wgrad_compute)
        _positive("a grouped mlp", num_experts, width, hidden)
        if activation not in ("swiglu", "gelu"):
            raise Error(f"activation={activation!r}; expected 'swiglu' or 'gelu'")
        self.width, self.hidden, self.activation, self.use_bias = width, hidden, activation, bias
        inner = 2 * hidden if activation == "swiglu" else hidden
        self._add_experts("up", (inner, width), width, device, dtype)
        self._add_experts("down", (width, hidden), hidden, device, dtype)
        if bias:
            self._add_experts("up_bias", (inner,), width, device, dtype)
            self._add_experts("down_bias", (width,), hidden, device, dtype)

    @_outside
    def forward(
        self, x: torch.Tensor, tokens: Tokens, probabilities: torch.Tensor | None = None, *, ends: bool = False
    ) -> torch.Tensor:
        """``probabilities`` [rows]: a factor of each row's result, applied to what leaves the activation."""
        up, down = self._follow(self._names("up")), self._follow(self._names("down"))
        biases = [self._biases(name, self.use_bias) for name in ("up_bias", "down_bias")]
        return _C.grouped_mlp(
            x, up, biases[0], down, biases[1], probabilities, self.activation, self._counts(tokens), ends,
            self.num_experts, self._store,
        )  # fmt: skip


class Router(nn.Module):
    """The ``top_k`` experts of softmax(x Wᵀ), in f32, their weights scaled to sum to 1.

    >>> import plumb, torch
    >>> weights, order, sizes = plumb.nn.Router(4, experts=3, top_k=2)(torch.ones(5, 4))
    >>> weights.shape, torch.allclose(weights.sum(1), torch.ones(5)), int(sizes.sum())
    (torch.Size([5, 2]), True, 10)
    """

    weight: nn.Parameter

    def __init__(self, width: int, experts: int, top_k: int, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        _positive("a router", width, experts, top_k)
        if top_k > experts:
            raise Error(f"a router with {top_k} choices of {experts} experts")
        self.top_k = top_k
        self.weight = nn.Parameter(torch.empty(experts, width, device=device, dtype=dtype))
        if not self.weight.is_meta:
            nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)

    @_outside
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For x [tokens, width]: weights [tokens, top_k], the pairs sorted by expert, and how many each expert has."""
        return _C.route(x, self.weight, self.top_k)


class MoE(nn.Module):
    """Router, experts, and back. Every token is served: a token's result depends on that token alone.

    >>> import plumb, torch
    >>> moe = plumb.nn.MoE(4, hidden=8, experts=4, top_k=2)
    >>> x = torch.randn(2, 3, 4)
    >>> torch.allclose(moe(x)[1], moe(x[1]), atol=1e-6)
    True
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int = 8,
        top_k: int = 2,
        *,
        activation: Literal["swiglu", "gelu"] = "swiglu",
        bias: bool = False,
        weights: Weights = "grouped",
        weigh: Literal["results", "activations"] = "results",
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if weigh not in ("results", "activations"):
            raise Error(f"weigh={weigh!r}; expected 'results' or 'activations'")
        self.weigh = weigh
        self.router = Router(width, experts, top_k, device=device, dtype=dtype)
        self.experts = GroupedMLP(
            experts, width, hidden, activation=activation, bias=bias, weights=weights,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation, delay_wgrad_compute=delay_wgrad_compute,
            device=device, dtype=dtype,
        )  # fmt: skip

    @_outside
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):  # once, as each part of it would
            x = x.to(self.router.weight.dtype)
        tokens = x.reshape(-1, x.shape[-1])
        weights, order, sizes = self.router(tokens)
        inside = self.weigh == "activations"
        probabilities = _C.permuted_weights(weights, order) if inside else None
        y = self.experts(_C.permute(tokens, weights, order), sizes, probabilities)
        return _C.unpermute(y, weights, order, inside).view(x.shape)

    def backward_dw(self) -> None:
        self.experts.backward_dw()


def _positive(what: str, *sizes: int) -> None:
    for size in sizes:
        if size < 1:
            raise Error(f"{what} with a size of {size}; expected 1 or more of everything")
