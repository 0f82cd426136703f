"""What programs over DeepSpeed do between its calls, beside one process that does the same with plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import plumb
import plumb.deepspeed as deepspeed
from plumb.deepspeed import share
from deepspeeds import HIDDEN, batch, config_of, engine_of, make

SGD = {"type": "SGD", "params": {"lr": 0.1}}


def thaws_late(stage: int, given: bool) -> float:
    """A layer that is frozen when the engine is built, and trains from the second step on."""
    model, twin = make(), make()
    for one in (model, twin):
        one.linears[0].requires_grad_(False)
    config = config_of(stage=stage, gradient_clipping=0.0)
    parameters: Any = {"model_parameters": model.parameters()} if given else {}
    engine = deepspeed.initialize(model=model, config=config, **parameters)[0]
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, betas=(0.8, 0.99), weight_decay=0.1)
    for i in range(3):
        if i == 1:
            for one in (model, twin):
                one.linears[0].requires_grad_(True)
        engine.backward(engine(*batch(engine.global_rank, i)))
        engine.step()
        optimizer.zero_grad()
        for rank in range(engine.world_size):
            (twin(*batch(rank, i)) / engine.world_size).backward()
        optimizer.step()
    whole = [engine.engine.full_parameter(p) for p in model.parameters()]
    return max(float((a - b).abs().max()) for a, b in zip(whole, twin.parameters(), strict=True))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_unfrozen_later_trains_although_the_config_names_the_optimizer(stage: int) -> None:
    for given in (False, True):
        assert max(plumb.spawn(thaws_late, 2, (stage, given))) < 1e-6


def generates() -> tuple[int, int]:
    engine = deepspeed.initialize(model=make(), config=config_of(stage=3))[0]
    with deepspeed.zero.unwrap_model_for_generation(engine) as model, torch.no_grad():
        whole = engine.engine.gathered_bytes
        model(*batch(0, 0))
        assert engine.engine.gathered_bytes == whole
    engine.backward(engine(*batch(engine.global_rank, 0)))
    engine.step()
    return whole, engine.engine.gathered_bytes


def test_a_model_is_unwrapped_for_generation() -> None:
    for whole, after in plumb.spawn(generates, 2):
        assert whole > 0 and after == 0


def changed_before(stage: int) -> float:
    """Weights that another rank than the first sets before the model has an engine, as loaders of checkpoints do."""
    deepspeed.init_distributed(dist_backend="gloo")
    with deepspeed.zero.Init():
        model = make()
    with deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=1), torch.no_grad():
        if torch.distributed.get_rank() == 1:
            for i, parameter in enumerate(model.parameters()):
                parameter.fill_(i + 0.5)
    engine = deepspeed.initialize(model=model, config=config_of(stage=stage))[0]
    return max(float((engine.engine.full_parameter(p) - (i + 0.5)).abs().max()) for i, p in enumerate(model.parameters()))


@pytest.mark.parametrize("stage", [0, 3])
def test_what_the_modifier_rank_sets_before_there_is_an_engine_is_everybodys(stage: int) -> None:
    assert plumb.spawn(changed_before, 3, (stage,)) == [0.0] * 3


def test_momentum_is_what_the_optimizer_calls_so() -> None:
    for kind, params, told in (
        ("SGD", {"momentum": 0.5}, 0.5), ("RMSprop", {"momentum": 0.25}, 0.25), ("Adam", {"betas": [0.5, 0.75]}, (0.5, 0.75)), ("Adagrad", {}, 0.0),
    ):  # fmt: skip
        assert engine_of(optimizer={"type": kind, "params": {"lr": 0.1, **params}}).get_mom() == [told], kind
        # The user's own counts, and not what the config says beside it.
        model = make()
        mine = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **{key: tuple(v) if key == "betas" else v for key, v in params.items()})
        engine = deepspeed.initialize(model=model, optimizer=mine, config=config_of(optimizer={"type": "Lion", "params": {"lr": 1.0}}))[0]
        assert engine.optimizer_name() == kind and engine.get_mom() == [told] and engine.get_lr() == [0.1]


def test_a_boundary_that_is_set_is_that_one() -> None:
    engine = engine_of(optimizer=SGD)  # where every backward is one by count
    engine.set_gradient_accumulation_boundary(False)
    for i in range(2):
        engine.backward(engine(*batch(0, i)))
        engine.step()
        assert not engine.was_step_applied() and engine.global_steps == 0
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    assert engine.was_step_applied() and engine.global_steps == 1 and engine.micro_steps == 3


def test_the_last_micro_batch_may_be_scaled_by_hand() -> None:
    engine, twin = engine_of(gas=2, optimizer=SGD, gradient_clipping=0.0), make()
    engine.backward(engine(*batch(0, 0)))
    engine.step()
    engine.scale(engine(*batch(0, 1))).backward()
    engine.step()
    for i in range(2):
        (twin(*batch(0, i)) / 2).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in twin.parameters() if p.grad is not None])
    assert engine.get_global_grad_norm() == pytest.approx(float(norm))
    torch.testing.assert_close(engine.module.head.weight, twin.head.weight - 0.1 * twin.head.weight.grad)


class Encoder(torch.nn.Linear):
    def __init__(self) -> None:
        torch.manual_seed(2)
        super().__init__(HIDDEN, HIDDEN)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_loss_through_several_engines_is_divided_once(stage: int) -> None:
    """One behind the other, or side by side; and by hand, where each divides what comes through its outputs."""
    x, y = batch(0, 0)
    config = config_of(stage, 4, optimizer=SGD, gradient_clipping=0.0)
    front, back = (deepspeed.initialize(model=model, config=config)[0] for model in (Encoder(), make()))
    plain = Encoder(), make()
    for way in ("behind", "beside", "of the other", "by hand"):
        if way == "behind":
            loss, other = back(front(x), y), plain[1](plain[0](x), y)
        else:
            loss, other = back(x, y) + 3 * front(x).sum(), plain[1](x, y) + 3 * plain[0](x).sum()
        loss.backward() if way == "by hand" else {"of the other": front}.get(way, back).backward(loss, retain_graph=True)
        (other / 4).backward()
        for engine, twin in zip((front, back), plain, strict=True):
            for p, q in zip(engine.module.parameters(), twin.parameters(), strict=True):
                found = engine.engine.full_gradient(p)
                assert (found is None) == (q.grad is None) and (found is None or torch.allclose(found, q.grad, rtol=1e-4, atol=1e-6)), way
            engine.zero_grad()
            twin.zero_grad()
        assert not share._begun, "and keeps no engine"
    front.destroy()
    back.destroy()


def test_gradients_of_torch_func_are_the_callers_own() -> None:
    engine, twin = engine_of(gas=4, optimizer=SGD), make()
    x, y = batch(0, 0)
    torch.testing.assert_close(torch.func.grad(lambda x: engine(x, y))(x), torch.func.grad(lambda x: twin(x, y))(x))
    engine(x, y).backward()  # and the next backward is divided as ever
    twin(x, y).backward()
    torch.testing.assert_close(engine.module.head.weight.grad * 4, twin.head.weight.grad)


def test_a_backward_that_threw_is_over() -> None:
    engine, twin = engine_of(gas=4, optimizer=SGD), make()

    def throws(gradient: torch.Tensor) -> None:
        raise KeyError("on purpose")

    handle = engine.module.head.weight.register_hook(throws)
    with pytest.raises(KeyError, match="on purpose"):
        engine.backward(engine(*batch(0, 0)))
    handle.remove()
    engine.zero_grad()
    engine(*batch(0, 0)).backward()  # the user's own, which is divided as ours is
    twin(*batch(0, 0)).backward()
    torch.testing.assert_close(engine.module.head.weight.grad * 4, twin.head.weight.grad)
