"""Optimizers over the rows that plumb.fully_shard shows: whatever they hold, they step as one process would."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate

import plumb
from sharding import Cases, mlps, plain_loss, reduce_gradients, same, shard, train_both

case = Cases(2)


@case
def one_optimizer_steps_two_models() -> None:
    for how in (torch.optim.SGD, functools.partial(torch.optim.AdamW, lr=1e-2)):
        models = [mlps(count=1), mlps(count=2)]
        references = [copy.deepcopy(model) for model in models]
        for model in models:
            shard(model)
        mine, theirs = (how([p for one in some for p in one.parameters()]) for some in (models, references))
        for step in range(3):
            for some in (models, references):
                for i, one in enumerate(some):
                    if some is models:
                        one.set_requires_gradient_sync(step != 2)  # type: ignore[operator]  # the last time the step itself reduces, both
                    if i == 0 or step != 1:  # in between one of them has nothing to step
                        plain_loss(one, 2 * step + i).backward()
            for reference in references:
                reduce_gradients(reference)
            mine.step()
            theirs.step()
            for model, reference in zip(models, references, strict=True):
                same(reference, model)
            for one in (mine, theirs):
                one.zero_grad()


class Forgets(torch.optim.SGD):
    """Keeps a momentum for two steps at a time."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "sum" in state:
                    p.add_(state.pop("sum") + p.grad, alpha=-0.1)
                else:
                    state["sum"] = p.grad.clone()
                    p.add_(p.grad, alpha=-0.01)
                state["count"] = state.get("count", 0) + 1


plumb.elementwise(Forgets)


@case
def state_that_an_optimizer_drops_is_gone() -> None:
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model)
    mine, theirs = (Forgets(one.parameters(), lr=0.1) for one in (model, reference))
    for step in range(5):
        for one in (model, reference):
            plain_loss(one, step).backward()
        reduce_gradients(reference)
        mine.step()
        theirs.step()
        same(reference, model)
        for parameter in model.parameters():
            state = mine.state[parameter]
            assert state["count"] == step + 1 and ("sum" in state) == (step % 2 == 0)
            if "sum" in state:
                assert isinstance(state["sum"], DTensor) and state["sum"].shape == parameter.shape
        for optimizer in (mine, theirs):
            optimizer.zero_grad()


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(4, 3), nn.Linear(3, 3)
        self.seen: list[torch.dtype] = []

    def forward(self, tokens: torch.Tensor, *, offsets: dict[str, Any]) -> torch.Tensor:
        self.seen = [tokens.dtype, offsets["more"][0].dtype, offsets["which"].dtype]
        out: torch.Tensor = self.layer(self.table(tokens) + offsets["more"][0])
        return out.index_select(0, offsets["which"])


@case
def inputs_by_name_are_cast_and_whole_numbers_are_not() -> None:
    model = plumb.fully_shard(Named(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64))
    out = model(torch.tensor([0, 3]), offsets={"more": [torch.ones(2, 3, dtype=torch.float64)], "which": torch.tensor([1])})
    assert model.seen == [torch.int64, torch.bfloat16, torch.int64] and out.dtype == torch.float64
    out.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@case
def frozen_models_of_any_dtype_are_sharded() -> None:
    model = nn.Module()
    model.register_parameter("numbers", nn.Parameter(torch.arange(6), requires_grad=False))
    model.register_parameter("weights", nn.Parameter(torch.ones(6), requires_grad=False))
    model.forward = lambda x: x * model.weights + model.numbers  # type: ignore[assignment]
    plumb.fully_shard(model)
    with torch.no_grad():
        assert torch.equal(model(torch.ones(6)), 1.0 + torch.arange(6))
    assert not any(p.requires_grad for p in model.parameters())
    model.weights.requires_grad_(True)
    model(torch.full((6,), 2.0)).sum().backward()
    assert model.numbers.grad is None and torch.equal(model.weights.grad.full_tensor(), torch.full((6,), 2.0))  # type: ignore[union-attr,operator]


@case
def trains_after_all_that() -> None:
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model)
    train_both(model, reference)


@case
def an_optimizer_that_throws_gets_its_groups_and_state_back() -> None:
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model)
    optimizer, other = (torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, reference))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # takes the optimizer's step for itself

    def both(i: int) -> None:
        for one, steps in ((model, optimizer), (reference, other)):
            plain_loss(one, i).backward()
            if one is reference:
                reduce_gradients(reference)
            steps.step()
            steps.zero_grad()

    both(0)
    plain_loss(model, 1).backward()
    betas = optimizer.param_groups[0]["betas"]
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    assert all(mine is stepped for mine, stepped in zip(model.parameters(), optimizer.param_groups[0]["params"], strict=True))
    assert all(isinstance(optimizer.state[parameter]["exp_avg"], DTensor) for parameter in model.parameters())
    optimizer.param_groups[0]["betas"] = betas
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    both(2)
    same(reference, model)


@case
def a_state_that_the_user_exchanges_is_the_one_that_counts() -> None:
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model)
    optimizer, other = (torch.optim.AdamW(one.parameters(), lr=1e-2, amsgrad=True) for one in (model, reference))
    seen: list[type] = []
    for step in range(5):
        for one, steps in ((model, optimizer), (reference, other)):
            plain_loss(one, step).backward()
            if one is reference:
                reduce_gradients(reference)
            steps.step()
            steps.zero_grad(set_to_none=step % 2 == 0)
            state = steps.state[next(one.parameters())]
            if step == 1:
                state["exp_avg"] = state["exp_avg"] * 2  # another tensor
            elif step == 2:
                state["exp_avg_sq"].mul_(2)  # in place
            elif step == 3:
                steps.load_state_dict(copy.deepcopy(steps.state_dict()))
        if step == 3:  # whoever looks on sees the parameters
            optimizer.register_step_pre_hook(lambda steps, *_: seen.append(type(steps.param_groups[0]["params"][0])))
        same(reference, model)
    assert seen and issubclass(seen[0], DTensor)
    for parameter in model.parameters():
        assert optimizer.state[parameter]["exp_avg"].placements == parameter.placements
        assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape


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


class Sam(torch.optim.SGD):
    """Known to nobody: it may ask for its closure at any time."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


@case
def a_closure_has_gradients_wherever_the_step_is_called() -> None:
    for kind in (torch.optim.SGD, torch.optim.AdamW, Sam):
        for ran in (False, True):
            model = mlps()
            reference = copy.deepcopy(model)
            shard(model)
            if ran:
                plain_loss(model, 7)
            mine, theirs = (kind(one.parameters(), lr=0.1) for one in (model, reference))

            def closure(one: nn.Module = model) -> torch.Tensor:
                loss = plain_loss(one, 0)
                loss.backward()
                return loss

            plain_loss(reference, 0).backward()
            reduce_gradients(reference)
            with torch.no_grad():
                mine.step(closure=closure)
            (torch.optim.SGD if kind is Sam else kind).step(theirs)
            same(reference, model)


@case
def the_first_forward_may_be_in_a_closure_that_keeps_its_gradients() -> None:
    for kind in (torch.optim.SGD, Sam):
        model = mlps()
        reference = copy.deepcopy(model)
        shard(model)
        model.set_requires_gradient_sync(False)  # type: ignore[operator]
        mine, theirs = (torch.optim.SGD(reference.parameters(), lr=0.1) if one is reference else kind(one.parameters(), lr=0.1) for one in (model, reference))
        mine.step(lambda one=model: plain_loss(one, 0).backward())
        plain_loss(reference, 0).backward()
        reduce_gradients(reference)
        theirs.step()
        same(reference, model)


@case
def a_hook_after_the_step_sees_parameters_and_state_as_they_are_shown() -> None:
    model = shard(mlps())
    seen: list[bool] = []
    for register in ("register_step_post_hook", "register_step_pre_hook"):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def look(steps: torch.optim.Optimizer, *_: Any) -> None:
            known = steps.param_groups[0]["params"] + [value for state in steps.state.values() for value in state.values() if value.dim()]
            seen.append(all(isinstance(one, DTensor) for one in known) and set(steps.state) <= set(model.parameters()))

        getattr(optimizer, register)(look)
        for step in range(2):
            plain_loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert seen == [True] * 4


@case
def a_step_of_any_class_that_throws_gives_parameters_and_state_back() -> None:
    model = mlps()
    shard(model)

    class Throws(torch.optim.SGD):
        """Declared when other optimizers are known already."""

        throws = False

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                self.state[p]["momentum_buffer"] = p.grad.clone()
                p.add_(p.grad, alpha=-0.1)
            if self.throws:
                raise ValueError("on purpose")

    plumb.elementwise(Throws)
    optimizer = Throws(model.parameters(), lr=0.1)
    for throws in (False, True, False):
        optimizer.throws = throws
        plain_loss(model, 0).backward()
        if throws:
            with pytest.raises(ValueError, match="on purpose"):
                optimizer.step()
        else:
            optimizer.step()
        assert [id(one) for one in optimizer.param_groups[0]["params"]] == [id(one) for one in model.parameters()]
        assert all(isinstance(optimizer.state[one]["momentum_buffer"], DTensor) for one in model.parameters())
        optimizer.zero_grad()


class Counts(torch.optim.SGD):
    """Has state of another shape than its parameters'."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                steps = self.state[p].setdefault("steps", torch.zeros(6))
                steps += 1
                p.add_(p.grad, alpha=-0.01 * float(steps.sum()))


@case
def a_state_of_another_shape_is_each_ranks_whole() -> None:
    plumb.elementwise(Counts)
    model = mlps()
    reference = copy.deepcopy(model)
    mine, theirs = Counts(model.parameters(), lr=0.1), Counts(reference.parameters(), lr=0.1)
    for step in range(3):
        for one, optimizer in ((model, mine), (reference, theirs)):
            plain_loss(one, step).backward()
            if step == 0 or one is reference:
                reduce_gradients(one)
            optimizer.step()
            optimizer.zero_grad()
        if step == 0:
            shard(model)
        same(reference, model)


@case
def a_state_that_is_placed_in_another_way_is_cut_as_its_parameter() -> None:
    model = mlps()
    reference = copy.deepcopy(model)
    shard(model)
    mine, theirs = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, reference))
    for step in range(3):
        for one, optimizer in ((model, mine), (reference, theirs)):
            plain_loss(one, step).backward()
            if one is reference:
                reduce_gradients(one)
            optimizer.step()
            optimizer.zero_grad()
        same(reference, model)
        for parameter in model.parameters():
            state = mine.state[parameter]
            state["momentum_buffer"] = state["momentum_buffer"].redistribute(placements=[Replicate()])


@case
def another_learning_rate_on_one_rank_is_an_error_on_every_rank() -> None:
    model = shard(mlps())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + dist.get_rank()))
    plain_loss(model, 0).backward()
    with pytest.raises(plumb.Error, match="lr of the optimizer"):
        optimizer.step()

@pytest.mark.parametrize("name", case.all)
def test_on_two_ranks(name: str) -> None:
    case.check(name)
