"""plumb.fully_shard against one process: every rank's rows, gradients and steps, as FSDP2's own suite looks at them."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, UnshardHandle
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import plumb

CASES: dict[str, Callable[[], None]] = {}
FOUR: dict[str, Callable[[], None]] = {}


def case(fn: Callable[[], None]) -> Callable[[], None]:
    CASES[fn.__name__] = fn
    return fn


def on_four(fn: Callable[[], None]) -> Callable[[], None]:
    FOUR[fn.__name__] = fn
    return fn


# ---- comparing


def same(reference: nn.Module, model: nn.Module) -> None:
    """This rank's rows of every parameter and gradient are those of the whole ones."""
    pairs = zip(reference.named_parameters(), model.named_parameters(), strict=True)
    for (name, whole), (other, mine) in pairs:
        assert name == other
        assert isinstance(mine, DTensor) and isinstance(mine, nn.Parameter), name
        rows = functools.partial(_rows, mesh=mine.device_mesh)
        torch.testing.assert_close(mine.to_local(), rows(whole.detach()), atol=1e-9, rtol=1e-7, msg=lambda m: f"{name}: {m}")
        if whole.grad is None:
            assert mine.grad is None, name
            continue
        assert isinstance(mine.grad, DTensor) and mine.grad.placements == mine.placements, name
        torch.testing.assert_close(
            mine.grad.to_local(), rows(whole.grad), atol=1e-9, rtol=1e-7, msg=lambda m: f"gradient of {name}: {m}"
        )


def _rows(whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    chunks = whole.chunk(mesh.size(mesh.ndim - 1))
    mine = mesh.get_local_rank(mesh.ndim - 1)
    return chunks[mine] if mine < len(chunks) else whole[:0]


def reduce_gradients(reference: nn.Module) -> None:
    for parameter in reference.parameters():
        used = torch.tensor(float(parameter.grad is not None))
        dist.all_reduce(used)
        if used == 0:
            continue
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(gradient)
        parameter.grad = gradient / dist.get_world_size()


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = F.relu(self.out_proj(F.relu(self.in_proj(x))))
        return out


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = MLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(x)


class Transformer(nn.Module):
    def __init__(self, tied: bool, recomputes: bool) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(17, 16), nn.Embedding(8, 16)
        self.layers = nn.ModuleList(Attention(16) for _ in range(2))
        self.norm, self.output = nn.LayerNorm(16), nn.Linear(16, 17, bias=False)
        self.register_buffer("seen", torch.zeros(()))
        self.recomputes = recomputes
        if tied:
            self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.size(1)))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        out: torch.Tensor = self.output(self.norm(x))
        return out


def mlps(width: int = 5, count: int = 3) -> nn.Module:
    torch.manual_seed(42)
    return nn.Sequential(*[MLP(width) for _ in range(count)]).double()


def transformer(tied: bool = False, recomputes: bool = False) -> nn.Module:
    torch.manual_seed(42)
    return Transformer(tied, recomputes).double()


def shard(model: nn.Module, **how: Any) -> nn.Module:
    for block in model.layers if isinstance(model, Transformer) else model:
        plumb.fully_shard(block, **how)
    plumb.fully_shard(model, **how)
    return model


def batch(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    if isinstance(model, Transformer):
        return torch.randint(0, 17, (2, 8), generator=generator)
    return torch.randn(4, 5, dtype=torch.float64, generator=generator)


Loss = Callable[[nn.Module, int], torch.Tensor]


def plain_loss(model: nn.Module, step: int) -> torch.Tensor:
    return model(batch(model, step)).pow(2).mean()


def train_both(
    model: nn.Module,
    reference: nn.Module,
    *,
    loss: Loss = plain_loss,
    steps: int = 4,
    optimizer: Callable[..., torch.optim.Optimizer] = functools.partial(torch.optim.AdamW, lr=1e-2),
    micro: int = 1,
) -> None:
    mine, theirs = optimizer(model.parameters()), optimizer(reference.parameters())
    before = [parameter.detach().clone() for parameter in reference.parameters()]
    for step in range(steps):
        for i in range(micro):
            loss(model, step * micro + i).backward()
            loss(reference, step * micro + i).backward()
        reduce_gradients(reference)
        same(reference, model)
        mine.step()
        theirs.step()
        same(reference, model)
        for one in (mine, theirs):
            one.zero_grad(set_to_none=step % 2 == 0)
    moved = max(float((a - b).abs().max()) for a, b in zip(before, reference.parameters(), strict=True))
    assert moved > 1e-4, "nothing was trained"


# ---- training


@case
def trains_as_one_process() -> None:
    for model in (mlps(), transformer()):
        reference = copy.deepcopy(model)
        shard(model)
        assert isinstance(model, FSDPModule) and isinstance(model, plumb.FSDPModule)
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor) and isinstance(parameter, nn.Parameter)
            assert parameter.placements == (Shard(0),)
        same(reference, model)
        train_both(model, reference)


@case
def trains_with_one_unit_and_odd_shapes() -> None:
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1, bias=False), nn.Linear(1, 3)).double()
    reference = copy.deepcopy(model)
    plumb.fully_shard(model)
    rows = [parameter.to_local().size(0) for parameter in model.parameters()]
    first = [-(-parameter.size(0) // dist.get_world_size()) for parameter in reference.parameters()]
    if dist.get_rank() == 0:
        assert rows == first, rows
    train_both(model, reference)


@case
def any_optimizer_steps() -> None:
    kinds: list[Callable[..., torch.optim.Optimizer]] = [
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        functools.partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
        functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
        functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True),
        functools.partial(torch.optim.RMSprop, lr=1e-3),
    ]
    for kind in kinds:
        model = mlps()
        reference = copy.deepcopy(model)
        train_both(shard(model), reference, optimizer=kind, steps=3)


@case
def accumulates_over_micro_batches() -> None:
    for switch in (True, False):
        model = mlps()
        reference = copy.deepcopy(model)
        shard(model)

        def loss(one: nn.Module, i: int) -> torch.Tensor:
            if isinstance(one, FSDPModule) and switch:
                last = i % 3 == 2
                one.set_requires_gradient_sync(last)
                one.set_is_last_backward(last)
                one.set_reshard_after_backward(last)
            return plain_loss(one, i)

        train_both(model, reference, loss=loss, micro=3)


@case
def several_forwards_before_a_backward() -> None:
    def twice(model: nn.Module, step: int) -> torch.Tensor:
        return plain_loss(model, step) + plain_loss(model, step + 100)

    def one_block_twice(model: nn.Module, step: int) -> torch.Tensor:
        x = batch(model, step)
        return model[1](model[0](model[0](x))).pow(2).mean()

    for loss in (twice, one_block_twice):
        model = mlps()
        reference = copy.deepcopy(model)
        train_both(shard(model), reference, loss=loss)


@case
def a_block_is_run_before_the_model_is() -> None:
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model)
    model[0](batch(model, 0)).sum().backward()
    reference[0](batch(model, 0)).sum().backward()
    train_both(model, reference)


@case
def checkpoints_compose() -> None:
    for reentrant in (True, False):

        def loss(model: nn.Module, step: int) -> torch.Tensor:
            x = batch(model, step).requires_grad_()
            for block in model:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x.pow(2).mean()

        model = mlps()
        reference = copy.deepcopy(model)
        train_both(shard(model), reference, loss=loss)
    model = transformer(recomputes=True)
    reference = copy.deepcopy(model)
    train_both(shard(model), reference)


@case
def frozen_parameters_stay() -> None:
    model = mlps()
    for name, parameter in model.named_parameters():
        if "in_proj" in name:
            parameter.requires_grad_(False)
    reference = copy.deepcopy(model)
    shard(model)
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in reference.parameters()]
    train_both(model, reference)
    for one in (model, reference):  # and thaw later
        one.requires_grad_(True)
    train_both(model, reference)


@case
def tied_weights_are_one() -> None:
    model = transformer(tied=True)
    assert model.embedding.weight is model.output.weight
    reference = copy.deepcopy(model)
    shard(model)
    assert model.embedding.weight is model.output.weight
    train_both(model, reference)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)).double()  # across units, and the root's own
    model[1].weight = model[0].weight
    model[2].weight = model[0].weight
    reference = copy.deepcopy(model)
    plumb.fully_shard(model[0])
    plumb.fully_shard(model[1])
    plumb.fully_shard(model)
    assert model[1].weight is model[0].weight and model[2].weight is model[0].weight
    train_both(model, reference)


@case
def what_one_rank_alone_uses_hangs_nobody() -> None:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x = model[0](batch(model, step))
        if dist.get_rank() == 0:
            x = model[1](x)
        return x.pow(2).mean()

    model = mlps()
    reference = copy.deepcopy(model)
    train_both(shard(model), reference, loss=loss, optimizer=functools.partial(torch.optim.SGD, lr=0.1))


@case
def ignored_parameters_are_left_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).double()
    extra = model[0].bias
    plumb.fully_shard(model, ignored_params={extra})
    assert model[0].bias is extra and not isinstance(extra, DTensor)
    (model(batch(model, 0)).sum() * (dist.get_rank() + 1)).backward()
    mine = extra.grad.clone()
    dist.all_reduce(mine)
    assert not torch.equal(mine / dist.get_world_size(), extra.grad), "an ignored gradient was reduced"
    assert isinstance(model[1].weight.grad, DTensor)


@case
def an_optimizer_may_be_older_than_the_shards() -> None:
    model = mlps()
    reference = copy.deepcopy(model)
    kind = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    mine, theirs = kind(model.parameters()), kind(reference.parameters())
    for i in range(4):
        if i == 1:  # with state of its own by then
            shard(model)
        plain_loss(model, i).backward()
        plain_loss(reference, i).backward()
        reduce_gradients(reference)
        if i == 0:
            for ours, whole in zip(model.parameters(), reference.parameters(), strict=True):
                ours.grad = whole.grad.clone()
        mine.step()
        theirs.step()
        mine.zero_grad()
        theirs.zero_grad()
    same(reference, model)


@case
def two_optimizers_share_a_model() -> None:
    model = mlps(count=2)
    reference = copy.deepcopy(model)
    shard(model)
    pairs = []
    for one in (model, reference):
        pairs.append([torch.optim.SGD(one[0].parameters(), lr=0.1), torch.optim.AdamW(one[1].parameters(), lr=0.01)])
    for step in range(3):
        plain_loss(model, step).backward()
        plain_loss(reference, step).backward()
        reduce_gradients(reference)
        for optimizers in pairs:
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        same(reference, model)


@case
def optimizers_run_in_hooks_after_accumulation() -> None:
    model = mlps(count=2)
    reference = copy.deepcopy(model)
    shard(model)
    by_parameter = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def hook(parameter: torch.Tensor) -> None:
        by_parameter[parameter].step()
        by_parameter[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        plain_loss(model, step).backward()
        plain_loss(reference, step).backward()
        reduce_gradients(reference)
        theirs.step()
        theirs.zero_grad()
        same(reference, model)


# ---- gradients


@case
def gradients_are_clipped_by_the_global_norm() -> None:
    model = transformer()
    reference = copy.deepcopy(model)
    shard(model)
    mine, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference))
    for step in range(3):
        plain_loss(model, step).backward()
        plain_loss(reference, step).backward()
        reduce_gradients(reference)
        for order in (2.0, float("inf")):
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=order)
            expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01, norm_type=order)
            torch.testing.assert_close(norm.full_tensor() if isinstance(norm, DTensor) else norm, expected)
        same(reference, model)
        mine.step()
        theirs.step()
        same(reference, model)
        mine.zero_grad()
        theirs.zero_grad()


@case
def gradients_may_be_scaled_zeroed_and_assigned() -> None:
    model = mlps(count=2)
    reference = copy.deepcopy(model)
    shard(model)
    mine, theirs = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, reference))

    def change(one: nn.Module, how: str) -> None:
        for parameter in one.parameters():
            if how == "scale":
                parameter.grad *= 0.5
            elif how == "add":
                parameter.grad.add_(parameter.detach(), alpha=0.1)
            elif how == "assign":
                parameter.grad = parameter.grad * 2 + 1
            elif how == "set":
                parameter.grad = parameter.detach() * 0.25
            elif how == "clear":
                parameter.grad = None

    for step, hows in enumerate((["scale"], ["add", "scale"], ["assign"], ["clear", "set"], ["clear"])):
        plain_loss(model, step).backward()
        plain_loss(reference, step).backward()
        reduce_gradients(reference)
        for how in hows:
            change(model, how)
            change(reference, how)
        same(reference, model)
        if "set" in hows:  # what was assigned counts as accumulated
            plain_loss(model, 50).backward()
            with_more = copy.deepcopy(reference)
            with_more.zero_grad()
            plain_loss(with_more, 50).backward()
            reduce_gradients(with_more)
            for one, more in zip(reference.parameters(), with_more.parameters(), strict=True):
                one.grad += more.grad
            same(reference, model)
        mine.step()
        theirs.step()
        same(reference, model)


@case
def a_penalty_on_the_rows_themselves_counts() -> None:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        penalty: Any = sum(parameter.pow(2).sum() for parameter in model.parameters())
        if isinstance(penalty, DTensor):
            penalty = penalty.full_tensor()
        return plain_loss(model, step) + 0.1 * penalty

    model = mlps(count=2)
    reference = copy.deepcopy(model)
    train_both(shard(model), reference, loss=loss)


@case
def the_sum_is_divided_by_another_factor() -> None:
    model = mlps(count=2)
    reference = copy.deepcopy(model)
    shard(model)
    model[0].set_gradient_divide_factor(2.0 * dist.get_world_size())
    plain_loss(model, 0).backward()
    plain_loss(reference, 0).backward()
    reduce_gradients(reference)
    for parameter in reference[0].parameters():
        parameter.grad *= 0.5
    same(reference, model)


@case
def an_exception_leaves_no_trace() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MLP(5)
            self.fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.fails:
                raise ValueError("on purpose")
            out: torch.Tensor = self.inner(x)
            return out

    torch.manual_seed(5)
    model: nn.Module = nn.Sequential(MLP(5), Fails()).double()
    reference = copy.deepcopy(model)
    shard(model)
    model[1].fails = True
    with pytest.raises(ValueError, match="on purpose"):
        model(batch(model, 0))
    model[1].fails = False
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    model.reset_iter_state()
    train_both(model, reference)


# ---- state


@case
def state_dicts_are_dtensors_and_go_both_ways() -> None:
    model = transformer()
    reference = copy.deepcopy(model)
    shard(model)
    whole = {name: value.clone() for name, value in reference.state_dict().items()}
    for ran in (False, True):
        state = model.state_dict()
        for name, value in state.items():
            if name in dict(reference.named_parameters()):
                assert isinstance(value, DTensor) and value.placements == (Shard(0),), name
                torch.testing.assert_close(value.full_tensor(), reference.state_dict()[name])
        other = shard(transformer())
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        if ran:
            other(batch(other, 0))
        other.load_state_dict(state)
        same(reference, other)
        train_both(other, copy.deepcopy(reference))
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        for name, value in full.items():
            torch.testing.assert_close(value, reference.state_dict()[name])
        doubled = {name: value * 2 if value.is_floating_point() else value for name, value in whole.items()}
        set_model_state_dict(model, dict(doubled), options=StateDictOptions(full_state_dict=True))
        reference.load_state_dict(doubled)
        same(reference, model)
        torch.testing.assert_close(model(batch(model, 3)), reference(batch(model, 3)))
    empty = dict(doubled) if dist.get_rank() == 0 else {}
    other = shard(transformer())
    set_model_state_dict(other, empty, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    same(reference, other)


@case
def checkpoints_hold_model_and_optimizer() -> None:
    def built() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = shard(mlps())
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = built()
    for step in range(2):
        plain_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(folder)
    dcp.save({"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder[0])
    other, others = built()
    plain_loss(other, 77).backward()
    others.step()
    others.zero_grad()
    state = {"model": get_model_state_dict(other), "optimizer": get_optimizer_state_dict(other, others)}
    dcp.load(state, checkpoint_id=folder[0])
    set_model_state_dict(other, state["model"])
    set_optimizer_state_dict(other, others, state["optimizer"])
    for step in range(2, 4):
        for one, steps in ((model, optimizer), (other, others)):
            plain_loss(one, step).backward()
            steps.step()
            steps.zero_grad()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local())
    plain = optimizer.state_dict()  # torch's own, as well
    others.load_state_dict(plain)
    assert all(isinstance(value, DTensor) for value in [others.state[p]["exp_avg"] for p in other.parameters()])


@case
def models_are_made_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = mlps()
    shard(model)
    assert all(parameter.is_meta for parameter in model.parameters())
    with pytest.raises(plumb.Error, match="to_empty"):
        model(torch.ones(2, 5, dtype=torch.float64))
    model.to_empty(device="cpu")
    torch.manual_seed(9)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    reference = mlps()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        whole = parameter.full_tensor()
        assert whole.abs().max() > 0
        reference.get_parameter(name).data.copy_(whole)
    train_both(model, reference)
    with torch.device("meta"):
        model = mlps()
    shard(model)
    reference.zero_grad()
    model.load_state_dict(shard(copy.deepcopy(reference)).state_dict(), assign=True)
    same(reference, model)
    train_both(model, reference)


@case
def a_model_changes_its_dtype_before_it_runs() -> None:
    model = mlps().float()
    shard(model)
    model.double()
    assert all(parameter.dtype == torch.float64 for parameter in model.parameters())
    reference = mlps()
    reference.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
    train_both(model, reference)
    with pytest.raises(plumb.Error, match="before"):
        model.half()


# ---- arguments and methods


@case
def mixed_precision_is_what_one_process_would_do() -> None:
    torch.manual_seed(4)
    model: nn.Module = nn.Sequential(*[MLP(8) for _ in range(2)])
    reference = copy.deepcopy(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    for block in model:
        plumb.fully_shard(block, mp_policy=policy)
    plumb.fully_shard(model, mp_policy=policy)
    mine, theirs = (torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, reference))
    half = copy.deepcopy(reference).bfloat16()
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        for _ in range(2):
            out = model(x)
            assert out.dtype == torch.float32
            out.sum().backward()
            with torch.no_grad():
                for low, full in zip(half.parameters(), reference.parameters(), strict=True):
                    low.copy_(full)
                    low.grad = None
            y = x.bfloat16()
            for block in half:
                y = block(y).float().bfloat16()
            y.float().sum().backward()
            for low, full in zip(half.parameters(), reference.parameters(), strict=True):
                gradient = low.grad.float()
                dist.all_reduce(gradient)
                gradient /= dist.get_world_size()
                full.grad = gradient if full.grad is None else full.grad + gradient
        for ours, full in zip(model.parameters(), reference.parameters(), strict=True):
            assert ours.dtype == torch.float32 and ours.grad.dtype == torch.float32
            torch.testing.assert_close(ours.grad.full_tensor(), full.grad, atol=1e-6, rtol=1e-5)
        mine.step()
        theirs.step()
        mine.zero_grad()
        theirs.zero_grad()
        for ours, full in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.full_tensor(), full.detach(), atol=1e-6, rtol=1e-5)


@case
def sums_are_wider_than_half_precision_parameters() -> None:
    torch.manual_seed(4)
    model = nn.Linear(3, 4, bias=False).bfloat16()
    plumb.fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    x = torch.ones(1, 3, dtype=torch.bfloat16)
    for i in range(64):
        (model(x) * (1 + i / 64)).sum().backward()
    expected = sum(float(torch.tensor(1 + i / 64).bfloat16()) for i in range(64))
    assert model.weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(model.weight.grad.full_tensor().float(), torch.full((4, 3), expected), rtol=4e-3, atol=0)
    model.weight.grad.mul_(0)
    model(x).sum().backward()
    torch.testing.assert_close(model.weight.grad.full_tensor().float(), torch.ones(4, 3))
    ahead = model(x).sum()
    model.weight.grad.mul_(3)
    ahead.backward()
    torch.testing.assert_close(model.weight.grad.full_tensor().float(), torch.full((4, 3), 4.0))
    model.zero_grad()
    assert model.weight.grad is None


@case
def whole_parameters_by_hand() -> None:
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model)
    handle = model[1].unshard(async_op=True)
    assert isinstance(handle, UnshardHandle)
    handle.wait()
    assert not isinstance(model[1].in_proj.weight, DTensor)
    assert torch.equal(model[1].in_proj.weight, reference[1].in_proj.weight)
    x = batch(model, 0)
    torch.testing.assert_close(F.linear(x, model[1].in_proj.weight), F.linear(x, reference[1].in_proj.weight))
    model[0].unshard()
    model[1].reshard()
    assert isinstance(model[1].in_proj.weight, DTensor)
    model[0].reshard()
    for block in model:
        block.unshard()  # what a forward of the model lets go
    train_both(model, reference)
    with pytest.raises(RuntimeError):
        F.linear(x, model[1].in_proj.weight)


@case
def methods_may_be_forwards() -> None:
    class TwoWays(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(x)
            return out

        def encode(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return self.forward(x) * scale

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        out: torch.Tensor = model.encode(batch(model, step), scale=0.5).pow(2).mean()
        return out

    torch.manual_seed(0)
    for register in (plumb.register_fsdp_forward_method, torch.distributed.fsdp.register_fsdp_forward_method):
        model: nn.Module = TwoWays().double()
        reference = copy.deepcopy(model)
        plumb.fully_shard(model)
        register(model, "encode")
        train_both(model, reference, loss=loss)
    plumb.register_fsdp_forward_method(reference, "encode")  # of a plain module: nothing
    with pytest.raises(ValueError, match="nothing_such"):
        plumb.register_fsdp_forward_method(model, "nothing_such")


@case
def modules_are_gathered_together() -> None:
    model = mlps()
    reference = copy.deepcopy(model)
    listed = plumb.fully_shard([model[0], model[1]])
    assert listed == [model[0], model[1]] and all(isinstance(one, FSDPModule) for one in listed)
    plumb.fully_shard(model)
    train_both(model, reference)


@case
def rnns_keep_their_lists() -> None:
    torch.manual_seed(2)
    model: nn.Module = nn.LSTM(5, 5, batch_first=True).double()
    reference = copy.deepcopy(model)
    plumb.fully_shard(model)

    def loss(one: nn.Module, step: int) -> torch.Tensor:
        out: torch.Tensor = one(batch(one, step)[None])[0].pow(2).mean()
        return out

    train_both(model, reference, loss=loss)


@case
def what_is_wrong_is_said() -> None:
    with pytest.raises(ValueError, match="do not implement forward"):
        plumb.fully_shard(nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(ValueError, match="scalar parameters. Change weight"):
        one = nn.Module()
        one.weight = nn.Parameter(torch.tensor(1.0))
        plumb.fully_shard(one)
    with pytest.raises(NotImplementedError, match="noncontiguous"):
        one = nn.Module()
        one.weight = nn.Parameter(torch.ones(3, 2).t())
        plumb.fully_shard(one)
    model = plumb.fully_shard(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="already been applied"):
        plumb.fully_shard(model)
    with pytest.raises(plumb.Error, match="copied"):
        copy.deepcopy(model)
    with pytest.raises(plumb.Error, match="Shard"):
        plumb.fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda parameter: Shard(1))
    with pytest.raises(ValueError, match="reshard_after_forward=3"):
        plumb.fully_shard(nn.Linear(4, 4), reshard_after_forward=3)
    with pytest.raises(plumb.Error, match="dp_mesh_dims"):
        plumb.fully_shard(nn.Linear(4, 4), dp_mesh_dims=object())
    with pytest.raises(plumb.Error, match="torch.nn.Module"):
        plumb.fully_shard("model")
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(plumb.Error, match="closure several times"):
        torch.optim.LBFGS(model.parameters(), max_iter=3).step(lambda: model(torch.ones(1, 4)).sum())
    with pytest.raises(plumb.Error, match="DTensor"):
        model.weight.grad = torch.ones(4, 4)
    with pytest.raises(plumb.Error, match="ran already"):
        plumb.fully_shard(nn.Sequential(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()  # and the process goes on
    plumb.fully_shard(nn.Linear(4, 4), offload_policy=CPUOffloadPolicy(), reshard_after_forward=True)


@case
def an_optimizer_that_throws_can_step_again() -> None:
    model = mlps(count=1)
    reference = copy.deepcopy(model)
    shard(model)
    optimizer, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference))
    plain_loss(model, 0).backward()
    plain_loss(reference, 0).backward()
    reduce_gradients(reference)
    lr = optimizer.param_groups[0].pop("lr")
    with pytest.raises(KeyError):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = lr
    optimizer.step()
    theirs.step()
    same(reference, model)


# ---- meshes


@on_four
def replicas_of_shards() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for model in (mlps(), transformer()):
        reference = copy.deepcopy(model)
        shard(model, mesh=mesh)
        for parameter in model.parameters():
            assert parameter.placements == (Replicate(), Shard(0))
        train_both(model, reference)
        train_both(model, reference, micro=2)


@on_four
def meshes_in_another_order() -> None:
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model, mesh=DeviceMesh("cpu", [[0, 2], [1, 3]]))
    train_both(model, reference)
    with pytest.raises(plumb.Error, match="ascend"):
        shard(mlps(), mesh=DeviceMesh("cpu", [3, 1, 0, 2]))(torch.ones(1, 5, dtype=torch.float64))
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model, mesh=DeviceMesh("cpu", [[0], [1], [2], [3]]))  # four replicas of everything
    train_both(model, reference)


@on_four
def a_part_of_the_world() -> None:
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "shard"))
    mesh = halves["shard"]
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model, mesh=mesh)
    optimizer, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference))
    for step in range(3):
        plain_loss(model, step).backward()
        plain_loss(reference, step).backward()
        for parameter in reference.parameters():
            dist.all_reduce(parameter.grad, group=mesh.get_group())
            parameter.grad /= 2
        optimizer.step()
        theirs.step()
        optimizer.zero_grad()
        theirs.zero_grad()
        same(reference, model)


@on_four
def more_ranks_than_rows() -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1), nn.Linear(1, 2)).double()
    reference = copy.deepcopy(model)
    plumb.fully_shard(model)
    train_both(model, reference)


@on_four
def the_rest_on_four_ranks() -> None:
    trains_as_one_process()
    tied_weights_are_one()
    frozen_parameters_stay()
    accumulates_over_micro_batches()
    checkpoints_hold_model_and_optimizer()


# ---- running them


def everything(names: list[str]) -> dict[str, str]:
    import traceback

    dist.init_process_group("gloo")
    outcome = {}
    for name in names:
        try:
            {**CASES, **FOUR}[name]()
            outcome[name] = "good"
        except BaseException:  # the ranks may be out of step from here on
            outcome[name] = traceback.format_exc()
            break
    return outcome


@functools.cache
def outcomes(ranks: int) -> list[dict[str, str]]:
    result: list[dict[str, str]] = plumb.spawn(everything, ranks, (list(CASES if ranks == 2 else FOUR),), timeout=400)
    return result


@pytest.mark.parametrize("name", CASES)
def test_on_two_ranks(name: str) -> None:
    for rank, by_name in enumerate(outcomes(2)):
        assert by_name.get(name, "an earlier case failed") == "good", f"rank {rank}: {by_name.get(name)}"


@pytest.mark.parametrize("name", FOUR)
def test_on_four_ranks(name: str) -> None:
    for rank, by_name in enumerate(outcomes(4)):
        assert by_name.get(name, "an earlier case failed") == "good", f"rank {rank}: {by_name.get(name)}"


def _alone() -> str:
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model)
    train_both(model, reference)
    return "good"


def test_on_one_rank() -> None:
    assert plumb.spawn(_alone, 1) == ["good"]
