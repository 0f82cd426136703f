"""What users put on or into the parameters of plumb.fully_shard: hooks on gradients, and other tensors in the parameters' places."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate

import plumb
from sharding import MLP, Cases, batch, mlps, plain_loss, reduce_gradients, same, shard, train_both

case = Cases(2)


@case
def a_hook_on_a_parameter_sees_and_changes_its_gradient() -> None:
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model)
    shapes = []
    for one in (model, reference):
        mask = (torch.arange(20.0, dtype=torch.float64) % 3).unsqueeze(1)
        one[0].in_proj.weight.register_hook(lambda gradient, mask=mask: gradient * mask)
        one[0].in_proj.weight.register_hook(lambda gradient: shapes.append(tuple(gradient.shape)))
        one[1].out_proj.bias.register_hook(lambda gradient: gradient + 1)
        one[1].out_proj.bias.register_hook(lambda gradient: gradient * 2)
    train_both(model, reference)
    assert set(shapes) == {(20, 5)} and len(shapes) == 8, shapes


@case
def a_hook_comes_between_a_forward_and_its_backward_and_goes() -> None:
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model)
    for i in range(3):
        for one in (model, reference):
            loss = plain_loss(one, i)
            weight = one[2].in_proj.weight
            handle = weight.register_hook(lambda gradient: gradient * 3) if i < 2 else None
            loss.backward()
            if handle is not None:
                handle.remove()
        reduce_gradients(reference)
        same(reference, model)
        for one in (model, reference):
            one.zero_grad()


@case
def a_hook_and_another_factor_compose() -> None:
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model)
    model[1].set_gradient_divide_factor(1.0)  # the sum of two ranks: twice their mean
    model[1].in_proj.weight.register_hook(lambda gradient: gradient + 1)
    for parameter in reference[1].parameters():
        parameter.register_hook(lambda gradient: gradient * 2)
    reference[1].in_proj.weight.register_hook(lambda gradient: gradient + 2)
    train_both(model, reference)


@case
def a_frozen_parameter_takes_no_hook_as_in_torch() -> None:
    model = shard(mlps())
    weight = model[0].in_proj.weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        weight.register_hook(lambda gradient: gradient)


@case
def other_tensors_in_the_parameters_places_are_an_error() -> None:
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model)
    x = batch(model, 0)
    for _ in range(2):  # before the engine is built, and after
        doubled = {name: parameter * 2 for name, parameter in model.named_parameters()}
        with pytest.raises(plumb.Error, match="functional_call"):
            torch.func.functional_call(model, doubled, (x,))
        one = {"1.in_proj.weight": model[1].in_proj.weight * 2}
        with pytest.raises(plumb.Error, match="'weight' of a Linear under fully_shard"):
            torch.func.functional_call(model, one, (x,))
        torch.testing.assert_close(model(x), reference(x))
    bias = model[0].in_proj.bias
    model[0].in_proj.bias = None
    with pytest.raises(plumb.Error, match="'bias' of a Linear under fully_shard"):
        model(x)
    model[0].in_proj.bias = bias
    train_both(model, reference)


def _halve(parameter: torch.Tensor) -> None:
    parameter.data = parameter.data * 0.5


def _halve_everywhere(parameter: torch.Tensor) -> None:
    """As it comes of an average over ranks: whole on each."""
    half = parameter.data * 0.5
    parameter.data = half.redistribute(placements=[Replicate()]) if isinstance(half, DTensor) else half


def _shrink(parameter: torch.Tensor) -> None:
    parameter.data.mul_(0.5).clamp_(-0.1, 0.1)


@case
def what_is_written_through_data_is_everybodys() -> None:
    for change in (_halve, _halve_everywhere, _shrink):
        for how in ({}, {"reshard_after_forward": False}, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float32)}):
            model = mlps()
            reference = copy.deepcopy(model)
            shard(model, **how)
            exact = "mp_policy" not in how
            for i in range(2):
                x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
                with torch.no_grad():
                    model(batch(model, i))
                dist.barrier()  # nobody runs a forward while somebody writes
                for one in (model, reference):
                    for parameter in one.parameters():
                        change(parameter)
                torch.testing.assert_close(model(x).double(), reference(x), atol=1e-9 if exact else 1e-6, rtol=1e-6)
                if exact:
                    train_both(model, reference, steps=1)


@case
def data_of_another_kind_is_an_error() -> None:
    model = shard(mlps())
    weight = model[0].in_proj.weight
    for value in (torch.zeros(20, 5, dtype=torch.float64), weight.detach().float(), model[0].out_proj.weight.detach()):
        with pytest.raises(plumb.Error, match="data of a sharded parameter"):
            weight.data = value


@case
def the_first_forward_may_be_an_inference() -> None:
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model)
    for i in range(2):
        with torch.inference_mode():
            made = model(batch(model, i))
            torch.testing.assert_close(made, reference(batch(model, i)))
        train_both(model, reference, steps=2)


@case
def a_module_that_came_after_the_first_forward_is_an_error_of_the_step() -> None:
    model = mlps()
    ignored = model[2].out_proj.bias
    for block in model:
        plumb.fully_shard(block, ignored_params={ignored})
    plumb.fully_shard(model, ignored_params={ignored})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain_loss(model, 0).backward()
    optimizer.step()
    model[0].act = nn.Tanh()  # no parameters, no question
    model.append(nn.Linear(5, 5).double())
    optimizer.add_param_group({"params": list(model[3].parameters())})
    plain_loss(model, 1).backward()
    with pytest.raises(plumb.Error, match="parameter '3.weight' came into the model after the engine was built"):
        optimizer.step()
    model[3].requires_grad_(False)
    optimizer.step()
    model[3].bias.requires_grad_(True)
    with pytest.raises(plumb.Error, match="parameter '3.bias' came into the model"):
        optimizer.step()


@case
def what_is_set_without_recursion_is_of_one_module() -> None:
    model = shard(mlps())
    model.set_reshard_after_forward(False, recurse=False)
    loss = plain_loss(model, 0)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    model.set_requires_gradient_sync(False, recurse=False)  # the others reduce, and so all do
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@case
def what_is_set_module_by_module_counts_from_the_last_one_on() -> None:
    model = shard(mlps())
    plain_loss(model, 0).backward()
    model.zero_grad()
    for one in (model, *model):
        one.set_requires_gradient_sync(False, recurse=False)
    plain_loss(model, 1).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    model.zero_grad()


@case
def what_stays_whole_does_so_from_a_forward_to_its_backward() -> None:
    model = shard(mlps(), reshard_after_forward=False)
    weight = model[1].in_proj.weight
    with torch.no_grad():
        plain_loss(model, 0)
    assert model[1].in_proj.weight is weight, "there is no backward"
    loss = plain_loss(model, 0)
    whole = model[1].in_proj.weight
    assert not isinstance(whole, DTensor) and whole.shape == weight.shape
    whole.requires_grad_(False)
    loss.backward()
    assert model[1].in_proj.weight is weight and not weight.requires_grad, "what was frozen there is"


@case
def a_post_accumulate_hook_is_called_for_the_backwards_that_touch_its_parameter() -> None:
    model = shard(mlps())
    called: list[int] = []
    model[2].in_proj.weight.register_post_accumulate_grad_hook(lambda parameter: called.append(parameter.grad.shape[0]))
    plain_loss(model, 0).backward()
    model[0](batch(model, 1)).sum().backward()
    assert len(called) == 1
    plain_loss(model, 2).backward()
    assert len(called) == 2
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    plain_loss(model, 3).backward()
    assert len(called) == 2, "there is no gradient yet"
    model.set_requires_gradient_sync(True)
    plain_loss(model, 4).backward()
    assert len(called) == 3


@case
def what_was_written_before_unshard_is_shown_by_it() -> None:
    model = shard(mlps(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True))
    plain_loss(model, 0)
    with torch.no_grad():
        model[0].in_proj.bias.fill_(3.0)
    model[0].unshard()
    assert model[0].in_proj.bias.dtype == torch.bfloat16 and model[0].in_proj.bias.eq(3.0).all()
    model[0].reshard()


@case
def what_is_written_while_whole_parameters_are_shown_by_hand_is_what_a_forward_finds() -> None:
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model)
    x = torch.ones(2, 5, dtype=torch.float64)
    rows = list(model.parameters())
    for _ in range(2):
        model[1].unshard()
        assert not isinstance(model[1].in_proj.weight, DTensor)
        with torch.no_grad():
            for parameter in (*rows, *reference.parameters()):
                parameter.mul_(0.5)
            torch.testing.assert_close(model(x), reference(x))
    train_both(model, reference, steps=1)


class Chooses(nn.Module):
    """Has a parameter that is no number, and takes a tensor by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.tensor([2, 0, 1, 1]), requires_grad=False)
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> torch.Tensor:
        assert self.table.dtype == torch.int64 and x.dtype == shift.dtype == self.layer.weight.dtype
        out: torch.Tensor = self.layer(x[:, self.table[:3]] + shift)
        return out


@case
def a_policy_is_for_numbers_wherever_they_are_given() -> None:
    torch.manual_seed(2)
    reference = Chooses()
    model = plumb.fully_shard(copy.deepcopy(reference), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float64))
    x, shift = torch.randn(2, 3), torch.ones(3)
    torch.testing.assert_close(model(x, shift=shift).float(), reference(x, shift=shift))


@case
def a_method_that_fails_leaves_rows() -> None:
    class Tower(MLP):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] == 1:
                raise ValueError("on purpose")
            out: torch.Tensor = self(x)
            return out

    torch.manual_seed(5)
    model = Tower(5).double()
    reference = copy.deepcopy(model)
    plumb.fully_shard(model, reshard_after_forward=True)
    plumb.register_fsdp_forward_method(model, "encode")
    for _ in range(2):
        with pytest.raises(ValueError, match="on purpose"):
            model.encode(torch.ones(1, 5).double())
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    train_both(model, reference, loss=lambda one, step: one.encode(batch(one, step)).pow(2).mean())


@case
def a_parameter_that_is_cut_in_another_way_is_refused() -> None:
    model = shard(mlps())
    plain_loss(model, 0).backward()
    old = model[0].in_proj.weight
    model[0].in_proj.weight = nn.Parameter(old.detach().redistribute(placements=[Replicate()]))
    with pytest.raises(plumb.Error, match="became a DTensor with placements .*Replicate"):
        plain_loss(model, 1)
    model[0].in_proj.weight = old


@case
def what_units_inside_ignore_is_nobodys_business_later_either() -> None:
    model = mlps()
    own = model[0].in_proj.bias
    plumb.fully_shard(model[0], ignored_params={own})
    plumb.fully_shard(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p is not own], lr=0.1)
    plain_loss(model, 0).backward()
    model.note = nn.Linear(2, 2).requires_grad_(False)
    optimizer.step()
    assert model[0].in_proj.bias is own and own.grad is not None and not isinstance(own, DTensor)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("on purpose")


@case
def a_backward_that_failed_calls_no_post_accumulate_hook_then_or_later() -> None:
    model = shard(mlps())
    plain_loss(model, 0).backward()  # there are gradients
    called: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
    with pytest.raises(ValueError, match="on purpose"):
        model[2](model[1](Fails.apply(model[0](batch(model, 1))))).sum().backward()
    assert called == []
    model[0](batch(model, 2)).sum().backward()
    assert sorted(called) == sorted(name for name, _ in model.named_parameters() if name.startswith("0."))


@case
def a_post_accumulate_hook_that_failed_ends_the_backward_of_other_models_too() -> None:
    models = [shard(mlps(count=1)) for _ in range(2)]
    reference = mlps(count=1)

    def backward() -> None:
        torch.stack([plain_loss(model, 0) for model in models]).sum().backward()

    def refuses(_: torch.Tensor) -> None:
        raise ValueError("on purpose")

    backward()
    handle = models[0][0].in_proj.weight.register_post_accumulate_grad_hook(refuses)
    with pytest.raises(ValueError, match="on purpose"):
        backward()
    handle.remove()
    for model in models:
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        model.zero_grad()
    backward()
    plain_loss(reference, 0).backward()
    reduce_gradients(reference)
    for model in models:
        same(reference, model)


@case
def post_accumulate_hooks_come_in_one_order_on_every_rank() -> None:
    """They may step optimizers, which ranks do together, whatever order the gradients came in here."""
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
    order: list[int] = []
    numbers = {parameter: i for i, parameter in enumerate(model.parameters())}

    def step(parameter: torch.Tensor) -> None:
        order.append(numbers[parameter])  # type: ignore[index]
        optimizers[parameter].step()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    blocks = [0, 1, 2] if dist.get_rank() == 0 else [2, 0, 1]
    for one in (model, reference):
        torch.stack([one[i](batch(one, i)).pow(2).mean() for i in blocks]).sum().backward()
    assert order == sorted(order) and len(order) == len(numbers)
    reduce_gradients(reference)
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    same(reference, model)

@pytest.mark.parametrize("name", case.all)
def test_on_two_ranks(name: str) -> None:
    case.check(name)
