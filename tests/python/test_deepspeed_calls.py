"""Methods of DeepSpeed's engine after what went wrong, at the edges of what they count, and beside what they are usually called with."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import plumb
import plumb.deepspeed as deepspeed
from plumb.deepspeed import utils
from deepspeeds import HIDDEN, batch, config_of, engine_of, make

SGD = {"type": "SGD", "params": {"lr": 0.1}}


class Broken(Exception):
    pass


def broken(*_: Any) -> None:
    raise Broken


# ---- after an exception


def test_a_backward_after_one_that_threw_counts_as_any_other() -> None:
    engine, twin = engine_of(gas=4, gradient_clipping=0.0), make()
    loss = engine(*batch(0, 0))
    handle = engine.module.head.weight.register_hook(broken)
    with pytest.raises(Broken):
        engine.backward(loss)
    handle.remove()
    engine.zero_grad()
    engine(*batch(0, 0)).backward()  # divided by its own outputs
    (twin(*batch(0, 0)) / 4).backward()
    torch.testing.assert_close(engine.module.head.weight.grad, twin.head.weight.grad)


def test_a_step_that_threw_is_no_boundary_any_more() -> None:
    engine = engine_of(gas=2, managed_gradient_accumulation=False)
    handle = torch.optim.Optimizer.register_step_pre_hook(engine.basic_optimizer, broken)
    engine.backward(engine(*batch(0, 0)))
    with pytest.raises(Broken):
        engine.step()
    handle.remove()
    assert not engine.is_gradient_accumulation_boundary() and engine.micro_steps == 0 and not engine.was_step_applied()
    engine.step()
    assert engine.global_steps == 1 and engine.was_step_applied()
    with engine.no_sync(), pytest.raises(AssertionError):
        engine.step()
    assert engine.was_step_applied(), "what was refused did not begin"


def test_a_scope_without_reductions_ends_with_an_exception_too() -> None:
    engine = engine_of()
    with pytest.raises(Broken), engine.no_sync():
        broken()
    assert not engine.inside_no_sync_ctxt
    engine.backward(engine(*batch(0, 0)))
    engine.step()
    assert engine.global_steps == 1


def test_a_scope_of_reductions_leaves_the_callers_boundary() -> None:
    engine = engine_of(stage=1, gas=3)
    engine.set_gradient_accumulation_boundary(True)
    with engine.coalesce_grad_reduction():
        engine.backward(engine(*batch(0, 0)))
    assert engine.is_gradient_accumulation_boundary()
    engine.step()
    assert engine.global_steps == 1
    unmanaged = engine_of(managed_gradient_accumulation=False)
    with pytest.raises(plumb.Error, match="the caller owns"):
        unmanaged.set_gradient_accumulation_boundary(True)


# ---- what is counted


@pytest.mark.parametrize("backwards", [1, 2, 5])
def test_samples_are_those_of_the_backwards_where_the_caller_says_when_to_step(backwards: int) -> None:
    engine = engine_of(gas=3, managed_gradient_accumulation=False)
    for step in range(2):
        for i in range(backwards):
            engine.backward(engine(*batch(0, i)))
        engine.step()
        assert (engine.global_samples, engine.global_steps, engine.micro_steps) == ((step + 1) * 2 * backwards, step + 1, step + 1)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_unused_parameters_are_an_error_of_stage_2_alone_and_where_they_train(stage: int) -> None:
    config = config_of(stage=stage)
    config["zero_optimization"]["ignore_unused_parameters"] = False
    engine = deepspeed.initialize(model=make(), config=config)[0]
    engine.backward(engine(*batch(0, 0)))
    if stage == 2:
        with pytest.raises(AssertionError, match="'spare.weight' has no gradient"):
            engine.step()
        engine.module.spare.requires_grad_(False)
    engine.step()
    assert engine.global_steps == 1


def test_hysteresis_is_whole_again_when_the_scale_has_grown() -> None:
    engine = engine_of(stage=1, fp16={"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 3})
    scaling = engine.optimizer.loss_scale_config
    seen = []
    for value in (float("inf"), 0.1, 0.1, 0.1, float("nan"), float("inf")):
        for p in engine.module.parameters():
            p.grad = torch.full_like(p, value)
        engine.step()
        seen.append((scaling.cur_hysteresis, scaling.last_overflow_iter, scaling.cur_iter, scaling.cur_scale, engine.optimizer.overflow))
    assert seen == [(2, 0, 1, 256, True), (2, 0, 2, 256, False), (2, 0, 3, 256, False), (3, 0, 4, 512, False), (2, 4, 5, 512, True), (1, 5, 6, 512, True)]


# ---- arguments that travel


def test_the_thin_object_passes_on_what_it_is_given() -> None:
    engine = engine_of(stage=1, gas=2, optimizer=SGD, gradient_clipping=0.0)
    loss = engine(*batch(0, 0))
    engine.optimizer.backward(loss, retain_graph=True)
    engine.optimizer.backward(loss)
    engine.optimizer.zero_grad()
    assert engine.module.head.weight.grad is None
    calls: list[bool] = []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        engine.module.zero_grad()
        made: torch.Tensor = engine.module(*batch(0, 1))
        made.backward()
        return made

    twin = make()
    twin(*batch(0, 1)).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    engine.optimizer.step(closure)
    assert calls == [True]
    torch.testing.assert_close(engine.module.head.weight, twin.head.weight)
    state = engine.optimizer.state_dict()
    engine.optimizer.set_lr(0.7)
    engine.optimizer.load_state_dict(state)
    assert engine.optimizer.get_lr() == 0.1 and engine.optimizer.state is engine.basic_optimizer.state
    with pytest.raises(plumb.Error, match="safe_get_full"):
        engine.optimizer.averaged_gradients  # noqa: B018
    assert engine.optimizer.defaults is engine.basic_optimizer.defaults


def test_state_of_a_whole_parameter_is_written_where_it_is() -> None:
    engine = engine_of(stage=0, gradient_clipping=0.0)
    engine.backward(engine(*batch(0, 0)))
    engine.step()
    head = engine.module.head.weight
    for write, read in ((utils.safe_set_full_optimizer_state, utils.safe_get_full_optimizer_state), (utils.safe_set_local_optimizer_state, utils.safe_get_local_optimizer_state)):
        value = torch.randn(head.shape)
        write(head, value, "exp_avg")
        assert torch.equal(engine.basic_optimizer.state[head]["exp_avg"], value) and torch.equal(read(head, "exp_avg").view(head.shape), value)
        read(head, "exp_avg").zero_()  # a copy
        assert torch.equal(engine.basic_optimizer.state[head]["exp_avg"], value)


def test_states_are_taken_as_modules_take_them() -> None:
    engine = engine_of(stage=1)
    kept = engine.module_state_dict(keep_vars=True)
    assert kept["head.weight"] is engine.module.head.weight and kept["head.weight"].requires_grad
    assert not engine.module_state_dict()["head.weight"].requires_grad
    into: dict[str, Any] = {}
    engine.module_state_dict(destination=into)
    assert into.keys() == kept.keys()
    values = {f"module.{name}": torch.full_like(one, 2.0) for name, one in engine.module.state_dict().items()}
    engine.load_state_dict(values)
    assert float(engine.module.head.weight[0, 0]) == 2.0
    given = {name: nn.Parameter(torch.full_like(one, 3.0)) for name, one in values.items()}
    engine.load_state_dict(given, assign=True)
    assert engine.module.head.weight is given["module.head.weight"]
    engine.destroy()
    whole = engine_of(stage=3)
    whole.destroy()
    assert torch.equal(whole.module_state_dict()["head.weight"], make().head.weight), "it goes on as a plain module"


@pytest.mark.parametrize("stage", [0, 3])
def test_a_whole_model_is_made_where_the_config_says_so(stage: int) -> None:
    engine = engine_of(stage=stage)
    for call in (engine._consolidated_16bit_state_dict, engine._zero3_consolidated_16bit_state_dict):
        if stage == 0 and call == engine._consolidated_16bit_state_dict:
            assert call().keys() == engine.module.state_dict().keys()
        else:
            with pytest.raises(plumb.Error, match="requires ZeRO-3" if stage == 0 else "stage3_gather_16bit_weights_on_model_save"):
                call()


def test_what_programs_ask_of_optimizers_and_embeddings() -> None:
    moments = {"SGD": [0.9], "RMSprop": [0.8], "Adam": [(0.5, 0.6)], "Lion": [(0.5, 0.6)]}
    for kind, expected in moments.items():
        params = {"betas": [0.5, 0.6]} if kind in ("Adam", "Lion") else {"momentum": expected[0]}
        engine = engine_of(optimizer={"type": kind, "params": {"lr": 0.1, **params}})
        assert engine.get_mom() == expected and engine.get_lr() == [0.1] and engine.get_type() == [0.0], kind
        assert engine.optimizer_name() == (kind.lower() if kind in ("Adam", "Lion") else kind)
    model = nn.ModuleDict({"words": nn.Embedding(3, 2), "bags": nn.EmbeddingBag(3, 2), "rest": nn.Linear(2, 2)})
    engine = deepspeed.initialize(model=model, config=config_of(sparse_gradients=True))[0]
    assert engine.sparse_tensor_module_names == {"words.weight", "bags.weight"}
    assert deepspeed.initialize(model=make(), config=config_of())[0].sparse_tensor_module_names == set()
    bare = deepspeed.initialize(model=make(), config={"train_batch_size": 2})[0]
    assert bare.optimizer_name() is None and bare.get_lr() == [] and not bare.zero_optimization()
    with pytest.raises(AssertionError, match="in order to use set_lr"):
        bare.set_lr(0.1)
    with pytest.raises(AssertionError, match="in order to use scale"):
        bare.scale(bare(*batch(0, 0)))


def test_arguments_of_initialize_under_their_old_names_and_wrong_ones() -> None:
    config = {"train_batch_size": 6}
    assert deepspeed.initialize(model=make(), config_params=config)[0].train_batch_size() == 6
    assert deepspeed.initialize(model=make(), config=config, config_params={"train_batch_size": 8})[0].train_batch_size() == 6
    for mesh in ((1,), (1, 1)):
        deepspeed.initialize(model=make(), config=config, mesh_param=mesh)
    with pytest.raises(plumb.Error, match="sequence parallelism"):
        deepspeed.initialize(model=make(), config=config, mesh_param=(1, 2))
    with pytest.raises(plumb.Error, match="DeepSpeed requires --deepspeed_config"):
        deepspeed.initialize(model=make())
    with pytest.raises(plumb.Error, match="the model is a int"):
        deepspeed.initialize(model=3, config=config)  # type: ignore[arg-type]
    for kind in ("an object", "of none"):
        schedule = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(make().parameters(), lr=0.1), lambda step: 1.0)
        optimizer = None if kind == "of none" else lambda parameters: torch.optim.SGD(parameters, lr=0.1)
        with pytest.raises(AssertionError, match="over an optimizer"):
            deepspeed.initialize(model=make(), config=config, optimizer=optimizer, lr_scheduler=schedule)
    with pytest.raises(plumb.Error, match="names a scheduler, and there is no optimizer"):
        deepspeed.initialize(model=make(), config={**config, "scheduler": {"type": "WarmupLR", "params": {}}})
    with pytest.raises(plumb.Error, match="must be a torch Dataset"):
        deepspeed.initialize(model=make(), config=config, training_data=3)


# ---- on two ranks


def initialises() -> list[bool]:
    seen = []
    for required in (False, None, True):
        deepspeed.initialize(model=make(), config={"train_batch_size": 2}, dist_init_required=required)[0].destroy()
        seen.append(dist.is_initialized())
        if dist.is_initialized():
            dist.destroy_process_group()
    return seen


def test_torch_distributed_is_initialised_unless_it_is_not_to_be() -> None:
    assert plumb.spawn(initialises, 1) == [[False, True, True]]


def by_hand() -> float:
    """Summed over ranks, with one backward a step: the caller's own, through what the model returned."""
    engine, twin = engine_of(optimizer=SGD, gradient_clipping=0.0, gradient_allreduce_op="sum"), make()
    engine(*batch(engine.global_rank, 0)).backward()
    for rank in range(engine.world_size):
        twin(*batch(rank, 0)).backward()
    return float((engine.module.head.weight.grad - twin.head.weight.grad).abs().max())


def whole_states() -> list[Any]:
    """Of Lamb, which owns whole parameters: a skipped first step leaves none, and every rank says so."""
    engine = engine_of(stage=1, optimizer={"type": "Lamb", "params": {"lr": 0.01}}, bf16={"enabled": True})
    parameters = list(engine.module.parameters())
    for value in (float("nan"), 0.5):
        for p in parameters:
            p.grad = torch.full_like(p, value)
        engine.step()
        said = []
        for p in parameters:
            try:
                utils.safe_set_full_optimizer_state(p, torch.full(p.shape, 0.25), "exp_avg")
            except plumb.Error as error:
                said.append("it has state after its first step" in str(error))
        assert said == ([True] * len(parameters) if engine.skipped_steps == engine.global_steps else []), said
    values = [utils.safe_get_full_optimizer_state(p, "exp_avg") for p in parameters]
    assert all(one.dtype == torch.float32 and bool((one == 0.25).all()) for one in values)
    local = [utils.safe_get_local_optimizer_state(p, "exp_avg") for p in parameters]
    for one in local:
        if one is not None:
            one.zero_()  # a copy
    again = [utils.safe_get_full_optimizer_state(p, "exp_avg") for p in parameters]
    assert all(torch.equal(a, b) for a, b in zip(values, again, strict=True))
    return [sum(one.numel() for one in local if one is not None), sum(p.numel() for p in parameters)]


def of_two_kinds() -> float:
    """One loss of an engine that sums over ranks and of one that takes the mean, whichever is asked."""
    far = []
    for asked, gas in (("sum", 1), ("mean", 1), ("sum", 2), ("mean", 2)):
        engines = {op: engine_of(gas=gas, optimizer=SGD, gradient_clipping=0.0, gradient_allreduce_op=op) for op in ("sum", "mean")}
        twin = make()
        x = batch(engines["sum"].global_rank, 0)
        engines[asked].backward(engines["sum"](*x) + engines["mean"](*x))
        for rank in range(2):
            (twin(*batch(rank, 0)) / gas).backward()
        for op, engine in engines.items():
            engine.engine.step()  # of what is held
            expected = make().head.weight - 0.1 * twin.head.weight.grad / (1 if op == "sum" else 2)
            far.append(float((engine.module.head.weight - expected).abs().max()))
            engine.destroy()
    return max(far)


def shapes_of_its_own() -> None:
    """State that is not of each element is told on every rank, also on those that have nothing of the parameter."""
    model = make()
    model.spare.requires_grad_(False)
    for optimizer, keys in ((torch.optim.Adafactor(model.parameters(), lr=0.1), ("row_var", "step")), (torch.optim.AdamW(model.parameters()), ("step",))):
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(stage=1))[0]
        engine.backward(engine(*batch(engine.global_rank, 0)))
        engine.step()
        for key in keys:
            with pytest.raises(deepspeed.DeepSpeedConfigError, match=f"'{key}' has another shape than its parameter; it is .* on rank [01]"):
                utils.safe_get_full_optimizer_state(model.head.weight, key)
    for ask in (utils.safe_get_full_fp32_param, utils.safe_get_local_fp32_param, utils.safe_get_full_grad, utils.safe_get_local_grad):
        assert ask(model.spare.weight) is None, "nobody trains it"
    engine.destroy()


def turned() -> None:
    """Local parts are in the order of the parameter's memory, also where that is another than its shape's."""
    torch.manual_seed(5)
    model = nn.Linear(4, 6)
    model.weight = nn.Parameter(torch.randn(4, 6).t())
    engine = deepspeed.initialize(model=model, config=config_of(stage=1, optimizer=SGD))[0]
    before = model.weight.detach().clone()
    mine = utils.safe_get_local_fp32_param(model.weight)
    assert 0 < mine.numel() < 24
    utils.safe_set_local_fp32_param(model.weight, mine * 2)
    torch.testing.assert_close(utils.safe_get_full_fp32_param(model.weight), before * 2)
    engine.backward(engine(torch.arange(4.0).view(1, 4)).pow(2).sum())
    gradient = model.weight.grad.detach().clone()
    utils.safe_set_local_grad(model.weight, utils.safe_get_local_grad(model.weight) * 2)
    torch.testing.assert_close(utils.safe_get_full_grad(model.weight), gradient * 2)
    engine.destroy()
    for half in ({}, {"bf16": {"enabled": True}}):
        lamb = {"type": "Lamb", "params": {"lr": 0.01, "betas": [0.5, 0.75]}}
        engine = deepspeed.initialize(model=model, config=config_of(stage=1, optimizer=lamb, gradient_clipping=0.0, **half))[0]
        for bring in (lambda: None, lambda: utils.safe_set_full_optimizer_state(model.weight, gradient.square(), "exp_avg")):
            model.weight.grad = gradient.to(model.weight.dtype)
            engine.step()
            bring()
        torch.testing.assert_close(utils.safe_get_full_optimizer_state(model.weight, "exp_avg"), gradient.square())
        local = utils.safe_get_local_optimizer_state(model.weight, "exp_avg")
        if local is not None:  # the owner's
            torch.testing.assert_close(local.as_strided((6, 4), (1, 6)), gradient.square())
            utils.safe_set_local_optimizer_state(model.weight, local * 3, "exp_avg")
        torch.testing.assert_close(utils.safe_get_full_optimizer_state(model.weight, "exp_avg"), gradient.square() * 3)
        value = torch.linspace(-1, 1, 24).view(6, 4)  # not of bf16
        utils.safe_set_full_fp32_param(model.weight, value)
        assert torch.equal(utils.safe_get_full_fp32_param(model.weight), value)
        engine.destroy()


def together() -> list[Any]:
    turned()
    shapes_of_its_own()
    return [max(by_hand(), of_two_kinds()), *whole_states()]


def test_sums_by_hand_states_of_owners_and_parts_in_other_orders() -> None:
    ranks = plumb.spawn(together, 2)
    assert max(far for far, _, _ in ranks) < 1e-6
    assert sum(mine for _, mine, _ in ranks) == ranks[0][2]


def test_a_copy_of_what_a_forward_takes_is_not_changed() -> None:
    engine = deepspeed.initialize(model=make(), config=config_of(bf16={"enabled": True, "auto_cast": True}))[0]
    x, y = batch(0, 0)
    before = copy.deepcopy((x, y))
    engine(x, y)
    assert torch.equal(x, before[0]) and x.dtype == torch.float32 and x.shape[1] == HIDDEN and torch.equal(y, before[1])
