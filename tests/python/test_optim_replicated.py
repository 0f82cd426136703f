"""Where every rank holds all state, torch's elementwise optimizers step a few long tensors; nobody can tell but by the clock."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import plumb
from stage import Play, distance, groups_of, make, step_twin
from test_optim import OPTIMIZERS


class Sizes(nn.Module):
    """Parameters of whole vectors and of awkward lengths; ``gate`` has no dimensions, and ``rare`` is used where it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 16), nn.Linear(16, 3)
        self.norm, self.rare = nn.LayerNorm(3), nn.Linear(3, 16)
        self.gate = nn.Parameter(torch.tensor(0.7))
        self.wide = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor, rare: bool = False) -> torch.Tensor:
        y = self.norm(self.second(torch.tanh(self.first(x)))) * self.gate
        y = self.rare(y)[:, :3] if rare else y
        return self.wide(y[:, :, None, None].expand(-1, -1, 3, 3)).sum()  # type: ignore[no-any-return]


def build() -> Sizes:
    torch.manual_seed(5)
    return Sizes()


def many() -> "Many":
    torch.manual_seed(5)
    return Many()


def batch(number: int) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(number))


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


class Many(nn.Module):
    """Sixteen parameters, all of whole vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))

    def forward(self, x: torch.Tensor, rare: bool = False) -> torch.Tensor:
        return self.layers(torch.cat([x, x, x, x[:, :1]], dim=1)).square().sum()  # type: ignore[no-any-return]


class Both:
    """The same training by an engine of one rank and by nobody's help, side by side."""

    def __init__(self, make_optimizer: Callable[[Any], torch.optim.Optimizer] = adamw, build: Callable[[], Any] = build) -> None:
        self.models = [build(), build()]
        self.optimizers = [make_optimizer(model.parameters()) for model in self.models]
        self.engine = plumb.Engine(self.models[0], self.optimizers[0])

    def each(self) -> Iterator[tuple[Sizes, Any]]:
        yield from zip(self.models, self.optimizers, strict=True)

    def step(self, number: int, rare: bool = False) -> None:
        for model, optimizer in self.each():
            optimizer.zero_grad()
            model(batch(number), rare).backward()
            optimizer.step()

    def check(self) -> None:
        """Bit for bit: parameters, and state in its order, shapes, strides and numbers."""
        for (name, mine), other in zip(self.models[0].named_parameters(), self.models[1].parameters(), strict=True):
            assert torch.equal(mine, other), name
            assert mine.stride() == other.stride()
        one, two = (optimizer.state_dict() for optimizer in self.optimizers)
        assert list(one["state"]) == list(two["state"])
        assert repr(one["param_groups"]) == repr(two["param_groups"])
        for index, known in two["state"].items():
            assert list(one["state"][index]) == list(known)
            for key, value in known.items():
                mine = one["state"][index][key]
                assert type(mine) is type(value)
                if torch.is_tensor(value):
                    assert mine.shape == value.shape and mine.dtype == value.dtype and mine.stride() == value.stride(), (index, key)
                    assert torch.equal(mine, value), (index, key)
                else:
                    assert mine == value


@pytest.fixture
def stepped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each call of the fused update is given."""
    counts: list[int] = []
    inner = torch._fused_adamw_

    def counting(tensors: Any, *others: Any, **named: Any) -> Any:
        counts.append(len(tensors))
        return inner(tensors, *others, **named)

    monkeypatch.setattr(torch, "_fused_adamw_", counting)
    return counts


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_every_elementwise_optimizer_does_bit_for_bit_what_it_does_alone(name: str) -> None:
    both = Both(OPTIMIZERS[name])
    for number in range(5):
        both.step(number, rare=number == 1)  # counts of steps differ between neighbours
    both.check()
    flat = both.engine._steps.flat  # type: ignore[union-attr]
    assert flat is not None and flat._runs and any(flat._rest)


def test_a_step_is_of_few_tensors(stepped: list[int]) -> None:
    both = Both(build=many)
    for number in range(3):
        both.step(number)
    both.check()
    assert stepped == [1, 16] * 3


def test_parameters_that_get_no_gradient_keep_their_state_and_count(stepped: list[int]) -> None:
    both = Both()
    both.step(0, rare=True)
    both.step(1)
    both.step(2)
    both.step(3, rare=True)
    both.check()
    counts = {float(state["step"]) for state in both.optimizers[0].state.values()}
    assert counts == {2.0, 4.0}


DONE_BETWEEN_STEPS = [
    "moment", "count", "count untold", "replaced", "other memory of a moment", "other memory of a count", "forgotten", "popped", "all forgotten",
    "loaded", "new group", "other rate", "frozen", "other memory",
]  # fmt: skip


@pytest.mark.parametrize("what", DONE_BETWEEN_STEPS)
def test_what_the_user_does_between_steps_is_what_the_next_one_goes_on_from(what: str) -> None:
    both = Both()
    for number in range(4):
        both.step(number, rare=True)
        if number != 1:
            continue
        for model, optimizer in both.each():
            state = optimizer.state[model.first.bias]
            if what == "moment":
                state["exp_avg"].mul_(3)
            elif what == "count":
                state["step"].add_(5)
            elif what == "count untold":
                state["step"].data.add_(5)  # which has a version of its own
            elif what == "replaced":
                state["exp_avg_sq"] = state["exp_avg_sq"] * 2
            elif what == "other memory of a moment":
                state["exp_avg"].data = state["exp_avg"].data * 2
            elif what == "other memory of a count":
                state["step"].data = state["step"].data + 5
            elif what == "forgotten":
                state.clear()
            elif what == "popped":
                del optimizer.state[model.first.bias]
            elif what == "all forgotten":
                optimizer.state.clear()
            elif what == "loaded":
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            elif what == "new group":
                moved = optimizer.param_groups[0]["params"].pop(2)
                optimizer.add_param_group({"params": [moved], "lr": 0.5})
            elif what == "other rate":
                optimizer.param_groups[0]["lr"] = 0.3
            elif what == "frozen":
                model.second.requires_grad_(False)
            elif what == "other memory":
                model.second.weight.data = model.second.weight.data * 2
    both.check()


def test_state_of_other_dtypes_beside_neighbours_keeps_its_own() -> None:
    both = Both(lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9))
    for number in range(5):
        both.step(number, rare=True)
        for model, optimizer in both.each() if number == 1 else ():
            state = optimizer.state[model.first.bias]
            state["momentum_buffer"] = state["momentum_buffer"].bfloat16()
    both.check()


def test_what_was_taken_from_the_state_is_what_later_steps_write_into() -> None:
    both = Both()
    both.step(0)
    taken = [{key: dict(value) for key, value in optimizer.state_dict()["state"].items()} for optimizer in both.optimizers]
    for number in range(1, 4):
        both.step(number, rare=number == 2)  # flat state is made again
    for mine, other in zip(*(one.values() for one in taken), strict=True):
        for key, value in other.items():
            assert torch.equal(mine[key], value), key
    both.check()


def test_state_that_was_loaded_is_stepped_where_it_is_and_loaded_again_as_it_became() -> None:
    both = Both()
    both.step(0)
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in both.optimizers]
    for number in range(1, 4):
        for optimizer, state in zip(both.optimizers, saved, strict=True):
            optimizer.load_state_dict(state)  # torch keeps the tensors that it is given
        both.step(number)
    both.check()


def test_state_that_was_saved_goes_on_under_an_engine_and_without() -> None:
    both = Both()
    both.step(0)
    both.step(1)
    for source in (0, 1):
        file = io.BytesIO()
        torch.save(both.optimizers[source].state_dict(), file)
        file.seek(0)
        saved = torch.load(file)
        for optimizer in both.optimizers:
            optimizer.load_state_dict(copy.deepcopy(saved))
        both.step(2 + source)
        both.check()


def test_gradients_that_a_hook_replaces_takes_or_scales_are_the_ones_that_count() -> None:
    both = Both()

    def change(optimizer: torch.optim.Optimizer, *_: object) -> None:
        weights = optimizer.param_groups[0]["params"]
        weights[1].grad = weights[1].grad * 2  # another tensor
        weights[2].grad = None
        weights[3].grad.mul_(0.5)

    for optimizer in both.optimizers:
        optimizer.register_step_pre_hook(change)
    for number in range(4):
        both.step(number)
    both.check()


def test_hooks_see_the_optimizer_as_the_user_knows_it_whenever_they_were_registered(stepped: list[int]) -> None:
    model = many()
    optimizer = adamw(model.parameters())
    seen: list[tuple[str, bool]] = []

    def look(when: str) -> Callable[..., None]:
        def hook(its: torch.optim.Optimizer, args: Any, _: Any) -> None:
            own = list(map(id, model.parameters()))
            known = all(list(map(id, one.param_groups[0]["params"])) == own for one in (its, args[0], optimizer))
            known = known and its is optimizer and all(isinstance(key, nn.Parameter) and id(key) in own for key in args[0].state)
            seen.append((when, known))

        return hook

    optimizer.register_step_pre_hook(look("before, early"))
    optimizer.register_step_post_hook(look("after, early"))
    engine = plumb.Engine(model, optimizer)
    for number in range(4):
        if number == 2:
            optimizer.register_step_pre_hook(look("before, late"))
            optimizer.register_step_post_hook(look("after, late"))
        model(batch(number)).backward()
        optimizer.step()
        engine.zero_grad()
    assert [when for when, _ in seen][-4:] == ["before, early", "before, late", "after, early", "after, late"]
    assert all(known for _, known in seen), seen
    assert stepped == [1, 1, 16, 1]  # the hook that came last is last once more


def test_a_closure_sees_the_optimizer_as_it_is_and_steps_few_tensors(stepped: list[int]) -> None:
    both = Both(build=many)
    for number in range(3):
        for model, optimizer in both.each():

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
                loss = model(batch(number))
                loss.backward()
                return loss  # type: ignore[no-any-return]

            assert torch.is_tensor(optimizer.step(closure))
    both.check()
    assert stepped == [1, 16] * 3


def test_an_optimizer_that_threw_is_the_users_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Both()
    both.step(0)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="in the middle"):

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("in the middle")

        patch.setattr(torch, "_fused_adamw_", fail)
        both.step(1)
    model, optimizer = both.models[0], both.optimizers[0]
    assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, model.parameters()))
    assert all(isinstance(key, nn.Parameter) for key in optimizer.state)
    assert set(optimizer.state_dict()["state"]) == set(both.optimizers[1].state_dict()["state"])


@pytest.mark.parametrize("kind", ["capturable", "differentiable"])
def test_flags_that_say_how_tensors_are_stepped_leave_them_as_they_are(kind: str) -> None:
    both = Both(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    both.step(0)
    for optimizer in both.optimizers:
        optimizer.param_groups[0][kind] = True
    flat = both.engine._steps.flat  # type: ignore[union-attr]
    assert flat is not None
    flat.begin = None  # type: ignore[assignment,method-assign]
    if kind == "capturable":  # torch has it on devices alone, and says so of the user's own parameters
        with pytest.raises(AssertionError, match="capturable"):
            both.step(1)
    else:
        both.step(1)
        both.check()


def test_whoever_knows_a_parameters_memory_goes_on_knowing_it(stepped: list[int]) -> None:
    model = many()
    layers = [model.layers[i] for i in range(8)]
    alias, array, view = layers[1].weight.detach(), layers[3].weight.detach().numpy(), layers[4].bias.data[1:]
    layers[6].weight.data.share_memory_()
    shared = layers[6].weight.data_ptr()
    optimizer = adamw(model.parameters())
    engine = plumb.Engine(model, optimizer)
    for number in range(3):
        model(batch(number)).backward()
        engine.step()
        engine.zero_grad()
    assert torch.equal(alias, layers[1].weight) and torch.equal(view, layers[4].bias[1:])
    assert torch.equal(torch.from_numpy(array), layers[3].weight)
    assert layers[6].weight.data_ptr() == shared and layers[6].weight.is_shared()
    assert set(stepped) == {9}  # four as they are, and what lies between them


def test_a_parameter_stays_the_same_tensor_over_the_same_storage_of_its_own_size() -> None:
    both = Both()
    storages = [p.untyped_storage()._cdata for p in both.models[0].parameters()]
    both.step(0)
    both.step(1)
    for parameter, storage in zip(both.models[0].parameters(), storages, strict=True):
        assert parameter.untyped_storage()._cdata == storage
        assert parameter.untyped_storage().nbytes() == parameter.numel() * 4
    parameter = both.models[0].first.weight
    kept = parameter.detach().clone()
    parameter.data.resize_(40, 5)  # memory that it lets go of is nobody else's
    parameter.data.resize_(16, 5)
    assert torch.equal(parameter, kept)
    both.step(2)
    both.check()


@pytest.mark.parametrize("fused", [False, True])
def test_a_graph_that_saved_a_parameter_learns_of_a_step_what_it_learns_without_an_engine(fused: bool) -> None:
    both = Both(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=fused), many)
    both.step(0)
    both.step(1)  # they have moved
    told = []
    for model, optimizer in both.each():
        optimizer.zero_grad()
        loss = model(batch(2))
        loss.backward(retain_graph=True)
        versions = [parameter._version for parameter in model.parameters()]
        optimizer.step()
        told.append([parameter._version > before for parameter, before in zip(model.parameters(), versions, strict=True)])
        if told[-1][0]:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
    assert told[0] == told[1] and (all(told[0]) or fused)


def test_an_optimizer_goes_on_alone_when_its_engine_is_closed_and_under_another() -> None:
    both = Both()
    both.step(0)
    both.step(1)
    both.engine.close()
    both.step(2)
    both.check()
    both.engine = plumb.Engine(both.models[0], both.optimizers[0])
    both.step(3)
    both.step(4)
    both.check()


def wrapped() -> list[int]:
    import torch.distributed as dist  # noqa: PLC0415

    counts: list[int] = []
    inner = torch._fused_adamw_
    torch._fused_adamw_ = lambda tensors, *a, **k: (counts.append(len(tensors)), inner(tensors, *a, **k))  # type: ignore[assignment]
    dist.init_process_group("gloo")
    model = many()
    face = plumb.DistributedDataParallel(model)
    optimizer = adamw(model.parameters())
    for number in range(3):
        face(batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return counts


def test_a_wrapper_of_a_model_leaves_a_plain_optimizer_plain() -> None:
    assert plumb.spawn(wrapped, 2) == [[16, 16, 16]] * 2


def beside_others(strategy: str) -> tuple[float, int]:
    model, twin = make(), make()
    optimizer, other = (torch.optim.AdamW(groups_of(one), lr=1e-2, fused=True) for one in (model, twin))
    engine = plumb.Engine(model, optimizer, strategy=strategy, bucket_bytes=2048)
    for number in range(5):
        if number == 2:  # another layer trains, and one does not any more: buckets are made anew
            for one in (model, twin):
                one.first.requires_grad_(False)
        play = Play(model, engine.world.rank, 2, 1.0)
        play.loss(number).backward()
        engine.step()
        engine.zero_grad()
        step_twin(twin, other, 2, number)
    flat = engine._steps.flat  # type: ignore[union-attr]
    assert flat is not None
    return distance(engine, model, twin), len(flat._runs)


def test_ranks_step_together_what_one_process_would() -> None:
    for far, runs in plumb.spawn(beside_others, 2, ("ddp",)):
        assert far < 1e-9
        assert 0 < runs < 16


def held_at_first() -> float:
    """The first step's backwards are all held, so that gradients lie elsewhere, in another order, from the second on."""
    model, twin = make(), make()
    optimizer, other = adamw(groups_of(model)), adamw(groups_of(twin))
    engine = plumb.Engine(model, optimizer, bucket_bytes=1 << 20)
    for number in range(4):
        play = Play(model, engine.world.rank, 2, 1.0, engine)
        with play.no_sync() if number == 0 else contextlib.nullcontext():
            play.loss(number).backward()
        engine.step()
        engine.zero_grad()
        step_twin(twin, other, 2, number)
    return distance(engine, model, twin)


def test_parameters_whose_gradients_lie_in_another_order_than_at_the_last_step_move_along() -> None:
    assert max(plumb.spawn(held_at_first, 2)) < 1e-9


def test_where_there_are_no_neighbours_the_optimizer_steps_as_it_is_and_is_asked_again(stepped: list[int]) -> None:
    both = Both(build=many)
    aliases = [parameter.detach() for parameter in both.models[0].parameters()]
    for number in range(6):
        both.step(number)
    assert stepped == [16, 16] * 6
    aliases.clear()
    both.step(6)
    assert stepped[-2:] == [1, 16]
    both.check()
