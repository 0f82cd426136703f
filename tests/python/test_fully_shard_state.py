"""plumb.fully_shard: state dicts and checkpoints both ways, models of the meta device, arguments, methods, errors."""

from __future__ import annotations

import copy
import os
import pathlib
import subprocess
import sys
import tempfile

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
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, UnshardHandle
from torch.distributed.tensor import DTensor, Shard

import plumb
from sharding import MLP, Cases, batch, mlps, plain_loss, reduce_gradients, same, shard, train_both, transformer

case = Cases(2)


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
    for by_hand in (False, True):
        if by_hand:
            model[0].unshard()
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
        with pytest.raises(TypeError):
            model.encode(batch(model, 0), scale=None)
        if register is not plumb.register_fsdp_forward_method:
            model.reset_iter_state()  # torch's says nothing of it
        model.reshard()
        assert isinstance(model.inner.weight, DTensor), "the method has ended, also where it threw"
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
    with pytest.raises(NotImplementedError, match="non-contiguous"):
        one = nn.Module()
        one.weight = nn.Parameter(torch.ones(3, 2).t())
        plumb.fully_shard(one)
    model = plumb.fully_shard(nn.Linear(4, 4))
    assert plumb.fully_shard.state(nn.Linear(2, 2)) is None  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="already been applied"):
        plumb.fully_shard(model)
    with pytest.raises(plumb.Error, match="deepcopy"):
        copy.deepcopy(model)
    with pytest.raises(plumb.Error, match="Shard"):
        plumb.fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda parameter: Shard(2))
    with pytest.raises(ValueError, match="a factor of 2, not 3"):
        plumb.fully_shard(nn.Linear(4, 4), reshard_after_forward=3)
    with pytest.raises(plumb.Error, match="dp_mesh_dims"):
        plumb.fully_shard(nn.Linear(4, 4), dp_mesh_dims=object())
    with pytest.raises(plumb.Error, match="torch.nn.Module"):
        plumb.fully_shard("model")
    model(torch.ones(1, 4)).sum().backward()
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


@case
def a_state_dict_has_rows_also_between_a_forward_and_its_backward() -> None:
    model = mlps()
    reference = copy.deepcopy(model)
    plumb.fully_shard(model)
    loss = plain_loss(model, 0)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert isinstance(value, DTensor), name
        torch.testing.assert_close(value.full_tensor(), reference.state_dict()[name])
    loss.backward()
    plain_loss(reference, 0).backward()
    reduce_gradients(reference)
    same(reference, model)


@case
def what_is_loaded_while_a_module_shows_whole_parameters_counts() -> None:
    model, other = mlps(), mlps()
    reference = copy.deepcopy(model)
    plumb.fully_shard(model)
    plumb.fully_shard(other)
    for one in (reference, other):
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.mul_(0.5)
    plain_loss(model, 0)
    model.load_state_dict(other.state_dict())
    same(reference, model)
    train_both(model, reference, steps=1)


@case
def what_is_assigned_inside_of_a_unit_is_not_seen_by_ranks_that_still_evaluate() -> None:
    model = mlps(count=4)  # of which the next one may be gathered ahead
    reference = copy.deepcopy(model)
    shard(model)
    x = torch.ones(2, 5, dtype=torch.float64)
    last = model[3].out_proj
    with torch.no_grad():
        model(x)
        dist.barrier()
        expected = reference(x)
        if dist.get_rank() == 1:
            model(x)
            doubled = {name: value.mul(2) for name, value in last.state_dict().items()}
            last.load_state_dict(doubled, assign=True)
            dist.barrier()
        else:
            handle = model[0].register_forward_hook(lambda *_: dist.barrier())
            found = model(x)
            handle.remove()
            torch.testing.assert_close(found, expected)
            last.load_state_dict({name: value.mul(2) for name, value in last.state_dict().items()}, assign=True)
        for parameter in reference[3].out_proj.parameters():
            parameter.mul_(2)
        torch.testing.assert_close(model(x), reference(x))
    train_both(model, reference, steps=2)


@case
def what_is_assigned_after_the_first_forward_counts_and_so_do_its_later_writes() -> None:
    def alike() -> None:
        same(reference, model)
        with torch.no_grad():
            torch.testing.assert_close(model(x).double(), reference(x), atol=1e-5, rtol=1e-5)

    def change(one: nn.Module, factor: float, more: float) -> None:
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.mul_(factor).add_(more)

    x = torch.ones(2, 5, dtype=torch.float64)
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.float32)):
        for how in ("a unit", "a module inside", "by hand"):
            model, other = mlps(), mlps()
            reference = copy.deepcopy(model)
            shard(model, mp_policy=policy)
            shard(other)
            model(x).sum().backward()
            model.zero_grad()
            for factor in (0.5, 1.5, 1.1):
                change(reference, factor, 0.0)
                change(other, factor, 0.0)
                state = {name: value.clone() for name, value in other.state_dict().items()}
                for name, module in model.named_modules():
                    if how == "by hand":
                        for key in module._parameters:
                            setattr(module, key, nn.Parameter(state[f"{name}.{key}"]))
                    elif how == "a unit" if module is model else how != "a unit" and isinstance(module, nn.Linear):
                        start = f"{name}." if name else ""
                        part = {key.removeprefix(start): value for key, value in state.items() if key.startswith(start)}
                        module.load_state_dict(part, assign=True)
                alike()
                for one in (model, reference, other):
                    change(one, 1.0, 0.01)
                alike()
            if policy.param_dtype is None:
                train_both(model, reference, steps=2)


# ---- running them


@pytest.mark.parametrize("name", case.all)
def test_on_two_ranks(name: str) -> None:
    case.check(name)


PROGRAM = """
import torch
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
assert isinstance(model, FSDPModule) and isinstance(model[0].weight, DTensor)
print(fully_shard.__module__, register_fsdp_forward_method.__module__)
"""


def test_an_unchanged_program_gets_it(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    package = pathlib.Path(next(path for path in sys.path if (pathlib.Path(path) / "plumb" / "__init__.py").exists()))
    run = subprocess.run(
        [sys.executable, "-m", "plumb", str(program)], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(package)},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["plumb.fsdp", "plumb.fsdp.module"]
    assert "torch.distributed.fsdp.fully_shard is plumb.fully_shard" in run.stderr
