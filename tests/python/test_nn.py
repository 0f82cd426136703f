"""Fused modules from Python: whoever owns a weight's gradient, and whenever it is computed, all of them agree."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plumb

ROWS, IN, OUT, EXPERTS = 10, 6, 4, 3
SPLITS = [4, 0, 6]


def rows(rank: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, IN, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


class Plain(nn.Module):
    """The same function of the same parameters, by plain operations: expert by expert."""

    def __init__(self, fused: nn.Module) -> None:
        super().__init__()
        self.fused = fused

    def parts(self, name: str) -> list[torch.Tensor]:
        if getattr(self.fused, "weights", "one") == "separate":
            return [self.fused.get_parameter(f"{name}{e}") for e in range(EXPERTS)]
        return list(self.fused.get_parameter(name))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fused = self.fused
        if isinstance(fused, plumb.nn.Linear):
            return F.linear(x, fused.weight, fused.bias)
        if isinstance(fused, plumb.nn.GroupedLinear):
            biases = self.parts("bias") if fused.use_bias else [None] * EXPERTS
            return torch.cat([F.linear(one, w, b) for one, w, b in zip(x.split(SPLITS), self.parts("weight"), biases, strict=True)])
        if isinstance(fused, plumb.nn.GroupedMLP):
            return torch.cat([self.mlp(one, e, fused) for e, one in enumerate(x.split(SPLITS))])
        assert isinstance(fused, plumb.nn.MoE)
        chances = torch.softmax(F.linear(x.float(), fused.router.weight.float()), -1)
        best, experts = chances.topk(fused.router.top_k, -1)
        best = (best / best.sum(-1, keepdim=True)).to(x.dtype)
        inner = Plain(fused.experts)
        out = []
        for token, weights, chosen in zip(x, best, experts, strict=True):
            out.append(sum(w * inner.mlp(token[None], int(e), fused.experts)[0] for w, e in zip(weights, chosen, strict=True)))
        return torch.stack(out)

    def mlp(self, x: torch.Tensor, e: int, fused: Any) -> torch.Tensor:
        h = F.linear(x, self.parts("up")[e], self.parts("up_bias")[e] if fused.use_bias else None)
        if fused.activation == "swiglu":
            gate, value = h.chunk(2, -1)
            h = F.silu(gate) * value
        else:
            h = F.gelu(h)
        return F.linear(h, self.parts("down")[e], self.parts("down_bias")[e] if fused.use_bias else None)


BUILD: dict[str, Callable[..., Any]] = {
    "Linear": lambda **how: plumb.nn.Linear(IN, OUT, **how),
    "GroupedLinear": lambda **how: plumb.nn.GroupedLinear(EXPERTS, IN, OUT, True, **how),
    "GroupedLinear separate": lambda **how: plumb.nn.GroupedLinear(EXPERTS, IN, OUT, weights="separate", **how),
    "GroupedMLP": lambda **how: plumb.nn.GroupedMLP(EXPERTS, IN, OUT, bias=True, **how),
    "GroupedMLP separate": lambda **how: plumb.nn.GroupedMLP(EXPERTS, IN, OUT, activation="gelu", weights="separate", **how),
    "MoE": lambda **how: plumb.nn.MoE(IN, OUT, EXPERTS, 2, **how),
    "MoE inside": lambda **how: plumb.nn.MoE(IN, OUT, EXPERTS, 2, weigh="activations", **how),
}


def make(name: str, **how: Any) -> Any:
    torch.manual_seed(4)
    return BUILD[name](dtype=torch.float64, **how)


def run(fused: Any, x: torch.Tensor) -> torch.Tensor:
    return fused(x, SPLITS) if isinstance(fused, (plumb.nn.GroupedLinear, plumb.nn.GroupedMLP)) else fused(x)


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return (y * torch.arange(y.numel(), dtype=y.dtype).view_as(y).cos()).sum()


def expected(name: str) -> dict[str, torch.Tensor]:
    fused = make(name)
    loss_of(Plain(fused)(rows())).backward()
    return {key: p.grad for key, p in fused.named_parameters()}


def weights_of(fused: nn.Module) -> dict[str, nn.Parameter]:
    """Those that the operations write themselves."""
    return {
        key: p for key, p in fused.named_parameters() if "bias" not in key and not key.startswith("router")
    }  # fmt: skip


def close(found: torch.Tensor | None, wanted: torch.Tensor, times: float = 1.0) -> bool:
    return found is not None and torch.allclose(found.double(), times * wanted, atol=1e-9 if found.dtype == torch.float64 else 2e-2)


@pytest.mark.parametrize("name", BUILD)
def test_is_the_same_function_as_plain_operations(name: str) -> None:
    fused, x, twin = make(name), rows().requires_grad_(), rows().requires_grad_()
    y, z = run(fused, x), Plain(make(name))(twin)
    assert torch.allclose(y, z, atol=1e-6)
    loss_of(y).backward()
    loss_of(z).backward()
    assert torch.allclose(x.grad, twin.grad, atol=1e-6)
    for key, wanted in expected(name).items():
        assert torch.allclose(fused.get_parameter(key).grad, wanted, atol=1e-6), key


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("told", ["nothing", "by a flag"])
@pytest.mark.parametrize("name", BUILD)
def test_what_the_owner_finds_and_what_autograd_is_handed(name: str, told: str, delayed: bool) -> None:
    fused = make(name, fuse_wgrad_accumulation=True, delay_wgrad_compute=delayed)
    wanted, seen, fired = expected(name), {}, []
    for key, weight in weights_of(fused).items():
        weight.main_grad = torch.full_like(weight, 7.0)
        if told == "by a flag":
            weight.grad_added_to_main_grad = False
        weight.register_hook(lambda g, key=key: seen.update({key: None if g is None else g.clone()}))
        weight.register_post_accumulate_grad_hook(lambda p, key=key: fired.append(key))
    for number in (1, 2):
        loss_of(run(fused, rows())).backward()
        assert sorted(fired) == sorted(list(weights_of(fused)) * number)
        for key, weight in weights_of(fused).items():
            assert weight.grad is None, key
            if told == "by a flag":
                assert weight.grad_added_to_main_grad is True and not seen[key].any(), key
                weight.grad_added_to_main_grad = False
            else:
                assert not hasattr(weight, "grad_added_to_main_grad") and seen[key] is None
            if delayed:
                assert close(weight.main_grad, 0 * wanted[key] + 7 + (number - 1) * wanted[key]), key
        if delayed:
            fused.backward_dw()
        for key, weight in weights_of(fused).items():
            assert close(weight.main_grad - 7, wanted[key], number), key
    for weight in weights_of(fused).values():
        weight.overwrite_main_grad = True
    loss_of(run(fused, rows())).backward()
    if delayed:
        fused.backward_dw()
    for key, weight in weights_of(fused).items():
        assert close(weight.main_grad, wanted[key]), key
    for key, p in fused.named_parameters():  # the others come through autograd
        if key not in weights_of(fused):
            assert close(p.grad, wanted[key], 3), key


@pytest.mark.parametrize("name", BUILD)
def test_without_an_owner_they_are_plain_modules(name: str) -> None:
    wanted = expected(name)
    ignores, delays = make(name), make(name, delay_wgrad_compute=True)
    for weight in weights_of(ignores).values():
        weight.main_grad = torch.zeros_like(weight)  # not asked to fuse
    for fused in (ignores, delays):
        loss_of(run(fused, rows())).backward()
    assert all(weight.grad is None for weight in weights_of(delays).values())
    delays.backward_dw()
    for key, gradient in wanted.items():
        assert close(ignores.get_parameter(key).grad, gradient), key
        assert close(delays.get_parameter(key).grad, gradient), key
    assert all(not weight.main_grad.any() for weight in weights_of(ignores).values())
    with pytest.raises(plumb.Error, match="delays nothing"):
        ignores.backward_dw()


@pytest.mark.parametrize("name", BUILD)
def test_autograd_grad_gets_gradients_and_buffers_stay(name: str) -> None:
    fused = make(name, fuse_wgrad_accumulation=True)
    for weight in weights_of(fused).values():
        weight.main_grad = torch.zeros_like(weight)
        weight.grad_added_to_main_grad = False
    asked = weights_of(fused)
    got = torch.autograd.grad(loss_of(run(fused, rows())), list(asked.values()))
    for (key, weight), gradient in zip(asked.items(), got, strict=True):
        assert close(gradient, expected(name)[key]) and not weight.main_grad.any(), key
        assert weight.grad_added_to_main_grad is False


def test_half_precision_weights_are_summed_into_f32_buffers() -> None:
    for name in BUILD:
        if name.startswith("MoE"):  # would choose other experts
            continue
        fused = make(name, fuse_wgrad_accumulation=True).bfloat16()
        for weight in weights_of(fused).values():
            weight.main_grad = torch.zeros(weight.shape)
        loss_of(run(fused, rows().bfloat16())).backward()
        wanted = expected(name)
        for key, weight in weights_of(fused).items():
            far = (weight.main_grad.double() - wanted[key]).abs().max() / wanted[key].abs().max().clamp_min(1e-3)
            assert weight.grad is None and float(far) < 0.1, (name, key, float(far))


def test_an_owner_may_come_and_go() -> None:
    fused = make("Linear", fuse_wgrad_accumulation=True)
    loss_of(fused(rows())).backward()
    assert fused.weight.grad is not None
    fused.zero_grad()
    fused.weight.main_grad = torch.zeros_like(fused.weight)
    loss_of(fused(rows())).backward()
    assert fused.weight.grad is None and fused.weight.main_grad.any()
    del fused.weight.main_grad
    loss_of(fused(rows())).backward()
    assert fused.weight.grad is not None
    fused.zero_grad()
    fused.weight.main_grad = torch.zeros(3, 3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="gradient buffer of 'weight' has shape"):
        loss_of(fused(rows())).backward()
    fused.weight.main_grad = torch.zeros_like(fused.weight)
    y = fused(rows())
    fused.weight.main_grad = "nothing of the kind"
    with pytest.raises(RuntimeError, match="main_grad of 'weight' is no tensor"):
        loss_of(y).backward()


def test_copies_and_dtypes() -> None:
    fused = make("GroupedMLP", fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    for copied in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        loss_of(run(copied, rows())).backward()
        copied.backward_dw()
        assert close(copied.up.grad, expected("GroupedMLP")["up"]) and fused.up.grad is None
    fused.load_state_dict(make("GroupedMLP").state_dict())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer = plumb.nn.Linear(IN, OUT)
        y = layer(rows().float())
    assert y.dtype == torch.float32  # in the weight's dtype: see docs/fused.md
    y.sum().backward()
    assert layer.weight.grad is not None


def test_layers_begin_as_torchs_do_and_have_the_biases_that_are_asked_for() -> None:
    torch.manual_seed(3)
    layers = {
        plumb.nn.Linear(4, 400): {"weight": 4, "bias": 4},
        plumb.nn.GroupedLinear(2, 4, 400, bias=True): {"weight": 4, "bias": 4},
        plumb.nn.MoE(4, 400, experts=3, bias=True): {
            "router.weight": 4, "experts.up": 4, "experts.down": 400, "experts.up_bias": 4, "experts.down_bias": 400,
        },
    }  # fmt: skip
    for layer, wanted in layers.items():
        assert {name for name, _ in layer.named_parameters()} == wanted.keys()
        for name, fan_in in wanted.items():
            largest = float(layer.get_parameter(name).detach().abs().max())
            assert 0.5 * fan_in**-0.5 < largest <= fan_in**-0.5, (name, largest)


def test_a_weight_that_was_exchanged_has_its_own_owner() -> None:
    layer = plumb.nn.Linear(IN, OUT, fuse_wgrad_accumulation=True)
    first = layer.weight
    first.main_grad = torch.zeros_like(first)  # type: ignore[attr-defined]
    layer(torch.ones(1, IN)).sum().backward()
    layer.weight = nn.Parameter(first.detach().clone())
    layer.weight.main_grad = torch.zeros_like(first)  # type: ignore[attr-defined]
    layer(torch.ones(1, IN)).sum().backward()
    for weight in (first, layer.weight):
        assert weight.grad is None and weight.main_grad.eq(1).all()
    layer.weight.main_grad = None  # type: ignore[attr-defined]
    layer(torch.ones(1, IN)).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.eq(1).all() and first.grad is None


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(plumb.Error, match="expected \\[..., 6\\]"):
        make("Linear")(torch.zeros(2, 5, dtype=torch.float64))
    for splits in ([4, 0, 5], [4, -1, 7], [10]):
        with pytest.raises(plumb.Error):
            make("GroupedLinear")(rows(), splits)
    for build in (
        lambda: plumb.nn.Linear(0, 2), lambda: plumb.nn.MoE(4, 4, 2, 3), lambda: plumb.nn.GroupedMLP(2, 4, 4, activation="relu"),
        lambda: plumb.nn.GroupedLinear(2, 4, 4, weights="some"), lambda: plumb.nn.MoE(4, 4, weigh="nothing"),
    ):  # fmt: skip
        with pytest.raises(plumb.Error):
            build()


class Body(nn.Module):
    """Every one of them, one after another, inside one model."""

    def __init__(self, fuse: bool, delay: bool) -> None:
        super().__init__()
        torch.manual_seed(8)
        how = {"fuse_wgrad_accumulation": fuse, "delay_wgrad_compute": delay, "dtype": torch.float64}
        self.first = plumb.nn.Linear(IN, IN, **how)
        self.second = plumb.nn.GroupedLinear(EXPERTS, IN, IN, weights="separate", **how)
        self.third = plumb.nn.GroupedMLP(EXPERTS, IN, OUT, **how)
        self.fourth = plumb.nn.MoE(IN, OUT, EXPERTS, 2, **how)
        self.last = nn.Linear(IN, 2, dtype=torch.float64)

    def fused(self) -> list[Any]:
        return [self.first, self.second, self.third, self.fourth]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.fused():
            x = x + run(layer, x)
        return self.last(x)


def with_engine(strategy: str, fuse: bool, delay: bool) -> tuple[float, float]:
    model, twin = Body(fuse, delay), Body(False, False)
    touched = 0.0
    engine = plumb.Engine(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), strategy=strategy, bucket_bytes=512,
        units=[plumb.nn.Linear, plumb.nn.GroupedLinear, plumb.nn.GroupedMLP, plumb.nn.MoE],
    )  # fmt: skip
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    if fuse:  # somebody left these: the engine owns the gradients now
        for p in model.parameters():
            p.main_grad, p.grad_added_to_main_grad = torch.zeros(tuple(p.shape), dtype=p.dtype), False
    for step in range(3):
        for i in range(2):
            with engine.one_pass():
                engine.backward(loss_of(model(rows(10 * step + 2 * i + engine.world.rank))))
                for layer in model.fused() if delay else ():
                    layer.backward_dw()
        engine.step()
        engine.zero_grad()
        for i in range(2):
            for rank in range(2):
                (loss_of(twin(rows(10 * step + 2 * i + rank))) / 2).backward()
        other.step()
        other.zero_grad()
    if fuse:
        touched = max(float(p.main_grad.abs().max()) + float(p.grad_added_to_main_grad) for p in model.parameters())
    worst = max(
        float((engine.full_parameter(a) - b).detach().abs().max())
        for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )
    return worst, touched


@pytest.mark.parametrize(("fuse", "delay"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_an_engine_owns_their_gradients(strategy: str, fuse: bool, delay: bool) -> None:
    for far, touched in plumb.spawn(with_engine, 2, (strategy, fuse, delay)):
        assert far < 1e-9 and touched == 0


def test_counts_may_be_running_sums() -> None:
    torch.manual_seed(2)
    x, counts = torch.randn(6, 4), [1, 0, 3, 2]
    ends = torch.tensor(counts).cumsum(0)
    for layer in (plumb.nn.GroupedLinear(4, 4, 3, bias=True), plumb.nn.GroupedMLP(4, 4, 5, weights="separate")):
        assert torch.equal(layer(x, ends, ends=True), layer(x, counts))
        assert torch.equal(layer(x, ends.tolist(), ends=True), layer(x, torch.tensor(counts)))


@pytest.mark.parametrize(
    "build",
    [
        lambda **how: plumb.nn.Linear(4, 2, **how),
        lambda **how: plumb.nn.GroupedLinear(2, 4, 3, bias=True, **how),
        lambda **how: plumb.nn.GroupedMLP(2, 4, 8, bias=True, weights="separate", **how),
        lambda **how: plumb.nn.Router(4, 3, 2, **how),
        lambda **how: plumb.nn.MoE(4, 8, bias=True, **how),
    ],
)
def test_every_parameter_is_on_the_device_and_of_the_dtype_that_are_asked_for(build: Callable[..., torch.nn.Module]) -> None:
    found = {(p.device.type, p.dtype) for p in build(device="meta", dtype=torch.float64).parameters()}
    assert found == {("meta", torch.float64)}
    for parameter in build().parameters():  # uniform around 0, as torch's own
        assert parameter.min() < 0 < parameter.max() and parameter.abs().max() <= 0.5


@pytest.mark.parametrize(
    "how",
    [
        {}, {"activation": "gelu"}, {"bias": True}, {"weights": "separate"}, {"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True},
        {"device": "meta"}, {"dtype": torch.bfloat16},
    ],
    ids=str,
)  # fmt: skip
def test_the_experts_of_a_moe_are_those_that_were_asked_for(how: dict[str, Any]) -> None:
    found, wanted = plumb.nn.MoE(IN, OUT, 5, 2, **how).experts, plumb.nn.GroupedMLP(5, IN, OUT, **how)
    for one in ("num_experts", "width", "hidden", "activation", "use_bias", "weights", "fuse_wgrad_accumulation", "delay_wgrad_compute"):
        assert getattr(found, one) == getattr(wanted, one), one
    shapes = [{name: (p.shape, p.dtype, p.device) for name, p in module.named_parameters()} for module in (found, wanted)]
    assert shapes[0] == shapes[1] and (found._store is None) == (wanted._store is None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BUILD)
def test_under_autocast_they_compute_in_their_weights_dtype(name: str, dtype: torch.dtype) -> None:
    """The same bits as without; what comes before them under autocast has its dtype, and gets its gradient in it."""
    fused, twin = make(name).float(), make(name).float()
    x = rows().to(dtype)
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    z = run(twin, other.float())
    with torch.autocast("cpu", torch.bfloat16):
        y = run(fused, one)
    assert y.dtype == torch.float32 and torch.equal(y, z)
    for made in (y, z):
        loss_of(made).backward()
    assert one.grad is not None and one.grad.dtype == dtype and torch.equal(one.grad, other.grad)
    for (key, mine), theirs in zip(fused.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad), key


def test_a_factor_of_each_row_under_autocast_is_taken_in_theirs_too() -> None:
    fused = make("GroupedMLP").float()
    x, factors = rows().float(), torch.linspace(0.5, 1.5, ROWS).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        made = fused(x, SPLITS, factors)
    assert torch.equal(made, fused(x, SPLITS, factors.float()))


def test_a_router_under_autocast_chooses_as_without() -> None:
    router, x = plumb.nn.Router(IN, 64, 4), rows().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = router(x)
    assert all(torch.equal(one, other) for one, other in zip(found, router(x.float()), strict=True))


def test_every_module_with_biases_and_parameters_of_its_own_experts_is_plain_operations() -> None:
    for how in ({"bias": True}, {"bias": True, "activation": "gelu", "weights": "separate"}, {"bias": True, "weigh": "activations"}):
        torch.manual_seed(4)
        fused = plumb.nn.MoE(IN, OUT, EXPERTS, 2, dtype=torch.float64, **how)
        with torch.no_grad():
            for parameter in fused.experts.parameters():
                parameter.mul_(2.0)
        assert torch.allclose(fused(rows()), Plain(fused)(rows()), atol=1e-6), how
