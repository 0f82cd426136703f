"""The optimizers and schedules that a DeepSpeed config names: their papers' formulas once more, element by element, in f64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import plumb
import plumb.deepspeed as deepspeed
from plumb.deepspeed import build, optimizers, schedules
from plumb.deepspeed.config import Config

Numbers = list[float]


def lion(p: Numbers, gradients: list[Numbers], lr: float, betas: tuple[float, float], decay: float) -> Numbers:
    momentum = [0.0] * len(p)
    for g in gradients:
        for i in range(len(p)):
            mixed = betas[0] * momentum[i] + (1 - betas[0]) * g[i]
            p[i] = p[i] * (1 - lr * decay) - lr * math.copysign(1.0 if mixed else 0.0, mixed)
            momentum[i] = betas[1] * momentum[i] + (1 - betas[1]) * g[i]
    return p


def lamb(p: Numbers, gradients: list[Numbers], lr: float, how: dict[str, Any]) -> Numbers:
    one, two = how.get("betas", (0.9, 0.999))
    eps, mean, square = how.get("eps", 1e-8), [0.0] * len(p), [0.0] * len(p)
    for step, g in enumerate(gradients, start=1):
        update = []
        for i in range(len(p)):
            mean[i] = one * mean[i] + (1 - one) * g[i]
            square[i] = two * square[i] + (1 - two) * g[i] ** 2
            root = math.sqrt(square[i] + eps) if how.get("eps_inside_sqrt") else math.sqrt(square[i]) + eps
            update.append(mean[i] / root + how.get("weight_decay", 0.0) * p[i])
        size = lr * (math.sqrt(1 - two**step) / (1 - one**step) if how.get("bias_correction", True) else 1.0)
        weight, length = math.hypot(*p), math.hypot(*update)
        trust = min(max(weight / length, how.get("min_coeff", 0.01)), how.get("max_coeff", 10.0)) if weight and length else 1.0
        p = [value - size * trust * change for value, change in zip(p, update, strict=True)]
    return p


def drawn(seed: int, numbers: int = 5, steps: int = 3) -> tuple[Numbers, list[Numbers]]:
    values = torch.randn(steps + 1, numbers, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).tolist()
    return values[0], values[1:]


def stepped(kind: str, params: dict[str, Any], start: Numbers, gradients: list[Numbers]) -> Numbers:
    parameter = nn.Parameter(torch.tensor(start, dtype=torch.float64))
    optimizer = optimizers.build(kind, params, [parameter])
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    return parameter.tolist()


LIONS: list[dict[str, Any]] = [{}, {"betas": [0.6, 0.8]}, {"weight_decay": 0.3}, {"betas": [0.5, 0.95], "weight_decay": 0.1}]


@pytest.mark.parametrize("params", LIONS, ids=str)
def test_lion_steps_by_the_sign_of_what_its_paper_mixes(params: dict[str, Any]) -> None:
    for seed in range(5):
        start, gradients = drawn(seed)
        gradients[0][0] = 0.0  # nothing yet: no step
        expected = lion(list(start), gradients, 0.1, tuple(params.get("betas", (0.9, 0.999))), params.get("weight_decay", 0.0))
        assert stepped("Lion", {"lr": 0.1, **params}, start, gradients) == pytest.approx(expected, abs=1e-12)


LAMBS: list[dict[str, Any]] = [
    {}, {"weight_decay": 0.3}, {"bias_correction": False}, {"eps": 0.5}, {"eps": 0.5, "eps_inside_sqrt": True},
    {"betas": [0.5, 0.75]}, {"max_coeff": 0.5}, {"min_coeff": 5.0},
]  # fmt: skip


@pytest.mark.parametrize("params", LAMBS, ids=str)
def test_lamb_scales_adams_step_by_the_norms(params: dict[str, Any]) -> None:
    for seed in range(5):
        start, gradients = drawn(seed)
        start = [0.0] * 5 if seed == 4 else start  # no norm: as Adam
        expected = lamb(list(start), gradients, 0.1, params)
        assert stepped("Lamb", {"lr": 0.1, **params}, start, gradients) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "FusedAdam"])
def test_adam_decays_weights_unless_it_is_told_to_decay_gradients(name: str) -> None:
    start, gradients = drawn(1)
    for params in ({}, {"weight_decay": 0.2}, {"adam_w_mode": False, "weight_decay": 0.2}, {"amsgrad": True, "betas": [0.5, 0.7]}):
        how = {"weight_decay": 0.0, **params, "betas": tuple(params.get("betas", (0.9, 0.999)))}
        decoupled = how.pop("adam_w_mode", True) or name == "AdamW"  # a config that says AdamW means it
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        twin = nn.Parameter(torch.tensor(start, dtype=torch.float64))
        optimizer = kind([twin], lr=0.1, **how)
        for gradient in gradients:
            twin.grad = torch.tensor(gradient, dtype=torch.float64)
            optimizer.step()
        assert stepped(name, {"lr": 0.1, **params}, start, gradients) == pytest.approx(twin.tolist(), abs=1e-12)
    # Groups that come later are of the same kind.
    late = optimizers.build(name, {"lr": 0.1, "adam_w_mode": False}, [nn.Parameter(torch.zeros(1))])
    late.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert [group["decoupled_weight_decay"] for group in late.param_groups] == [name == "AdamW"] * 2


def test_torch_adam_is_torchs_with_its_own_defaults() -> None:
    def built(kind: str, **params: Any) -> torch.optim.Optimizer:
        return optimizers.build(kind, {"lr": 0.1, "torch_adam": True, **params}, [nn.Parameter(torch.zeros(1))])

    assert type(built("AdamW", foreach=False)) is torch.optim.AdamW
    assert built("AdamW").param_groups[0]["weight_decay"] == 0.01 and built("AdamW", foreach=False).param_groups[0]["foreach"] is False
    assert type(built("Adam")) is torch.optim.AdamW and type(built("Adam", adam_w_mode=False)) is torch.optim.Adam
    ours = optimizers.build("AdamW", {"lr": 0.1, "torch_adam": False}, [nn.Parameter(torch.zeros(1))])
    assert ours.param_groups[0]["weight_decay"] == 0.0


class Speaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed_tokens, self.lm_head = nn.Embedding(3, 4), nn.Linear(4, 3)
        self.layers = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 4)])


MUONS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [  # what a config says, and what it means to torch's two
    ({}, {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0}, {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}),
    (
        {"lr": 0.1, "muon_lr": 0.05, "momentum": 0.8, "weight_decay": 0.1, "betas": [0.5, 0.7], "eps": 1e-3, "ns_method": "gram", "adam_w_mode": False},
        {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.1}, {"lr": 0.1, "betas": (0.5, 0.7), "eps": 1e-3, "weight_decay": 0.1},
    ),
    ({"lr": "auto", "adam_lr": 0.3, "nesterov": False, "weight_decay": 0.2}, {"lr": 0.02, "nesterov": False, "weight_decay": 0.2}, {"lr": 0.3, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.2}),
]  # fmt: skip


@pytest.mark.parametrize(("params", "muon", "adam"), MUONS, ids=["defaults", "all", "rates"])
def test_muon_steps_matrices_inside_of_the_model_and_adam_the_rest(params: dict[str, Any], muon: dict[str, Any], adam: dict[str, Any]) -> None:
    model, twin = Speaks(), Speaks()
    config = Config({"train_batch_size": 1, "optimizer": {"type": "Muon", "params": params}}, 1)
    matrices = [layer.weight for layer in twin.layers]
    rest = [p for p in twin.parameters() if all(p is not one for one in matrices)]
    kind = torch.optim.AdamW if params.get("adam_w_mode", True) else torch.optim.Adam
    theirs = torch.optim.Muon(matrices, adjust_lr_fn="original", **muon), kind(rest, **adam)
    optimizer = build.optimizer(model, config, None, None)
    for i in range(3):
        for seed, (p, q) in enumerate(zip(model.parameters(), twin.parameters(), strict=True)):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * i + seed))
            q.grad = p.grad.clone()
        for one in (optimizer, *theirs):
            assert one is not None
            one.step()
    assert {id(p) for group in optimizer.param_groups if group["use_muon"] for p in group["params"]} == {id(layer.weight) for layer in model.layers}
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7, msg=name)


def test_muon_takes_filters_as_matrices_stacks_one_by_one_and_groups_with_what_they_say() -> None:
    filters, stack, bias = nn.Parameter(torch.zeros(4, 2, 3, 1)), nn.Parameter(torch.zeros(2, 5, 3)), nn.Parameter(torch.ones(2))
    made = optimizers.build("muon", {"lr": 0.1, "weight_decay": 0.25}, [{"params": [filters, bias], "weight_decay": 0.5}, {"params": [stack]}])
    assert [(group["use_muon"], group["weight_decay"]) for group in made.param_groups] == [(True, 0.5), (True, 0.25), (False, 0.5)]
    alone = [nn.Parameter(torch.zeros(4, 6)), nn.Parameter(torch.zeros(5, 3)), nn.Parameter(torch.zeros(5, 3))]
    twins = torch.optim.Muon(alone, lr=0.1, weight_decay=0.0, adjust_lr_fn="original")
    filters.grad, stack.grad = torch.randn(filters.shape), torch.randn(stack.shape)
    alone[0].grad, alone[1].grad, alone[2].grad = filters.grad.flatten(1), stack.grad[0], stack.grad[1]
    made.step()
    twins.step()
    assert torch.equal(bias, torch.ones(2))  # it had no gradient
    # DeepSpeed scales a filter's step by the shape of its window.
    torch.testing.assert_close(filters.flatten(1), alone[0] * 3**0.5, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(stack, torch.stack(alone[1:]), rtol=1e-5, atol=1e-7)
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="'adjust_lr_fn', which is not known; expected adam_lr,"):
        optimizers.build("Muon", {"adjust_lr_fn": "original"}, [stack])


def test_optimizers_for_the_cpu_take_deepspeeds_arguments_in_their_order() -> None:
    p = [nn.Parameter(torch.zeros(1))]
    adam = deepspeed.ops.adam.DeepSpeedCPUAdam(p, 0.1, True, (0.8, 0.9), 1e-6, 0.25, False, False, True).param_groups[0]
    assert (adam["lr"], adam["betas"], adam["eps"], adam["weight_decay"]) == (0.1, (0.8, 0.9), 1e-6, 0.25)
    assert adam["decoupled_weight_decay"] is False
    made = deepspeed.ops.adam.FusedAdam(p, 0.1, True, (0.8, 0.9), 1e-6, False, 0.25)
    fused = made.param_groups[0]
    assert made.adam_w_mode == 0 and deepspeed.ops.adam.FusedAdam(p).adam_w_mode == 1
    assert fused["weight_decay"] == 0.25 and fused["decoupled_weight_decay"] is False
    assert deepspeed.ops.adam.DeepSpeedCPUAdam(model_params=p, adamw_mode=True).param_groups[0]["decoupled_weight_decay"] is True
    lion = deepspeed.ops.lion.DeepSpeedCPULion(model_params=p, weight_decay=0.5, fp32_optimizer_states=False).param_groups[0]
    assert lion["betas"] == (0.9, 0.999) and lion["weight_decay"] == 0.5
    assert deepspeed.ops.lion.FusedLion(p, set_grad_none=False).param_groups[0]["betas"] == (0.9, 0.999)
    adagrad = deepspeed.ops.adagrad.DeepSpeedCPUAdagrad(p, 0.1, 1e-6, 0.5).param_groups[0]
    assert (adagrad["lr"], adagrad["eps"], adagrad["weight_decay"]) == (0.1, 1e-6, 0.5)


CPU = {
    "adam": lambda p: deepspeed.ops.adam.DeepSpeedCPUAdam(p, lr=0.05, weight_decay=0.1, adamw_mode=False),
    "adagrad": lambda p: deepspeed.ops.adagrad.DeepSpeedCPUAdagrad(p, lr=0.05, weight_decay=0.1),
    "lion": lambda p: deepspeed.ops.lion.DeepSpeedCPULion(p, lr=0.05, weight_decay=0.1),
}


def trained(kind: str, stage: int) -> list[float]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": kind, "params": {"lr": 0.05, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    given = None
    if kind in CPU:
        given = CPU[kind](model.parameters())
        del config["optimizer"]
    engine = deepspeed.initialize(model=model, optimizer=given, config=config)[0]
    size = 4 // engine.world_size
    for i in range(3):
        x = torch.arange(12, dtype=torch.float64).view(4, 3).sin() + i
        mine = x[engine.global_rank * size : (engine.global_rank + 1) * size]
        engine.backward(engine(mine).pow(2).mean())
        engine.step()
    whole = torch.cat([deepspeed.utils.safe_get_full_fp32_param(p).double().flatten() for p in model.parameters()])
    engine.destroy()
    return whole.tolist()


@pytest.mark.parametrize("kind", ["Lion", "Lamb", "Muon", *CPU])
def test_under_every_stage_they_step_as_in_one_process(kind: str) -> None:
    (expected,) = plumb.spawn(trained, 1, (kind, 0))
    for stage in (0, 1, 2, 3):
        for found in plumb.spawn(trained, 2, (kind, stage)):
            assert found == pytest.approx(expected, abs=1e-5), stage


def test_schedules_write_rates_that_are_tensors_in_place_and_lists_by_group() -> None:
    rates = [torch.tensor(0.5), torch.tensor(0.25)]
    optimizer = torch.optim.AdamW([{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates], lr=0.1)
    schedule = schedules.build("WarmupLR", {"warmup_min_lr": [0.0, 0.1], "warmup_max_lr": [1.0, 0.3], "warmup_num_steps": 1}, optimizer)
    seen = []
    for _ in range(4):
        seen.append([float(rate) for rate in rates])
        schedule.step()
        assert [group["lr"] for group in optimizer.param_groups] == rates and all(
            group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates, strict=True)
        )
    # One step of warmup is two to DeepSpeed: the logarithm of one is nothing to divide by.
    assert seen[0] == pytest.approx([0.0, 0.1]) and seen[1] == pytest.approx([0.0, 0.1]) and seen[2] == pytest.approx([1.0, 0.3])
    assert schedule.get_last_lr() == pytest.approx([1.0, 0.3])


SCHEDULES: dict[str, Any] = {  # what DeepSpeed 0.19's give, over AdamW with lr 0.02
    "WarmupLR": ({"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 4}, [0.001, 0.001, 0.0055, 0.008132331, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01], None),
    "WarmupLR linear": ({"warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"}, [0.0, 0.0, 0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01, 0.01, 0.01], None),
    "WarmupDecayLR": ({"total_num_steps": 8, "warmup_max_lr": 0.01, "warmup_num_steps": 3}, [0.0, 0.0, 0.006309298, 0.01, 0.01, 0.008, 0.006, 0.004, 0.002, 0.0], None),
    "WarmupCosineLR": ({"total_num_steps": 8, "warmup_min_ratio": 0.1, "warmup_num_steps": 3, "cos_min_ratio": 0.01}, [0.0, 0.002, 0.013356736, 0.02, 0.018109268, 0.013159268, 0.007040732, 0.002090732, 0.0002, 0.0002], None),
    "OneCycle": ({"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 3, "cycle_second_step_size": 2, "decay_lr_rate": 0.5, "decay_step_size": 1, "decay_mom_rate": 0.1}, [0.001, 0.004, 0.007, 0.01, 0.0055, 0.001, 0.000666667, 0.0005, 0.0004, 0.000333333], [0.8, 0.866666667, 0.833333333, 0.8, 0.85, 0.9, 0.99, 1.08, 1.17, 1.26]),
    "OneCycle stairs": ({"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 4, "cycle_first_stair_count": 2}, [0.001, 0.001, 0.0055, 0.0055, 0.01, 0.0055, 0.0055, 0.001, 0.001, 0.001], [0.8, 0.9, 0.85, 0.85, 0.8, 0.85, 0.85, 0.9, 0.9, 0.9]),
    "LRRangeTest": ({"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 2.0}, [0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.007, 0.008, 0.009, 0.01], None),
    "LRRangeTest stairs": ({"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 2, "lr_range_test_staircase": True}, [0.001, 0.001, 0.002, 0.002, 0.003, 0.003, 0.004, 0.004, 0.005, 0.005], None),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_deepspeeds(name: str) -> None:
    params, rates, momenta = SCHEDULES[name]
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=0.02)
    schedule = schedules.build(name.split()[0], params, optimizer)
    seen, moved = [], []
    for i in range(10):
        seen.append(optimizer.param_groups[0]["lr"])
        moved.append(optimizer.param_groups[0]["betas"][0])
        schedule.step()
        if i == 4:
            again = schedules.build(name.split()[0], params, torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=0.02))
            again.load_state_dict(schedule.state_dict())
            assert again.last_batch_iteration == schedule.last_batch_iteration
    assert seen == pytest.approx(rates, abs=1e-8)
    assert momenta is None or moved == pytest.approx(momenta, abs=1e-8)


def group_of(schedule: Any) -> Any:
    return schedule.optimizer.param_groups[0]


def test_a_schedule_begins_where_it_is_told() -> None:
    """Later than at its beginning it leaves the rates alone until it is stepped: the optimizer's were loaded."""
    for name, (params, rates, momenta) in SCHEDULES.items():
        optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=0.02, betas=(0.7, 0.8))
        late = schedules.build(name.split()[0], {**params, "last_batch_iteration": 3}, optimizer)
        assert (group_of(late)["lr"], group_of(late)["betas"]) == (0.02, (0.7, 0.8)), name
        late.step()
        assert group_of(late)["lr"] == pytest.approx(rates[5], abs=1e-8), name
        told = "last_batch_iteration" if name.startswith("Warmup") else "batch_iteration"  # as DeepSpeed's call it
        late.step(**{told: 7})  # and goes where it is told
        assert late.last_batch_iteration == 7 and group_of(late)["lr"] == pytest.approx(rates[8], abs=1e-8), name
        assert momenta is None or group_of(late)["betas"][0] == pytest.approx(momenta[8], abs=1e-8), name


def test_a_cycle_leaves_momentum_alone_where_there_is_none() -> None:
    params = {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 3}
    plain = schedules.build("OneCycle", params, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.5))
    told = schedules.build("OneCycle", {**params, "cycle_momentum": False}, torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=0.1))
    for schedule in (plain, told):
        schedule.step()
        assert group_of(schedule)["lr"] == pytest.approx(0.004) and schedule.get_mom() is None
    assert group_of(plain)["momentum"] == 0.5 and "betas" not in group_of(plain) and group_of(told)["betas"] == (0.9, 0.999)


def test_what_is_left_to_deepspeed_is_the_schedules_own_default() -> None:
    params = {"total_num_steps": 8, "warmup_num_steps": 3, "warmup_max_lr": "auto", "warmup_min_lr": "auto"}
    schedule = schedules.build("WarmupDecayLR", params, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    for _ in range(4):
        schedule.step()
    assert schedule.get_last_lr() == [0.001]


# ---- what is refused, left out, or wrapped around


def one_group(groups: int = 1, lr: float = 0.02) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(groups)], lr=lr)


def test_a_schedule_that_has_ended_stays_where_it_ended() -> None:
    for name, params, last in (
        ("WarmupDecayLR", {"total_num_steps": 8, "warmup_max_lr": 0.01, "warmup_min_lr": 0.002, "warmup_num_steps": 3}, 0.002),
        ("WarmupDecayLR", {"total_num_steps": 3, "warmup_max_lr": 0.01, "warmup_num_steps": 3}, 0.0),
        ("WarmupCosineLR", {"total_num_steps": 8, "warmup_num_steps": 3, "cos_min_ratio": 0.1}, 0.002),
        ("WarmupLR", {"warmup_num_steps": 3}, 0.02),  # the optimizer's own rate
    ):
        schedule = schedules.build(name, params, one_group())
        for _ in range(30):
            schedule.step()
        assert group_of(schedule)["lr"] == pytest.approx(last) and schedule.get_last_lr() == pytest.approx([last]), name


def test_a_schedule_over_the_thin_object_moves_the_optimizer_inside() -> None:
    class Thin:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    for name, (params, rates, _) in SCHEDULES.items():
        optimizer = one_group()
        schedule = schedules.build(name.split()[0], params, Thin(optimizer))  # type: ignore[arg-type]
        assert schedule.optimizer is optimizer
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rates[1], abs=1e-8), name


def test_schedules_of_torch_are_named_by_a_config_too() -> None:
    optimizer = one_group(lr=1.0)
    schedule = schedules.build("StepLR", {"step_size": 1, "gamma": 0.5}, optimizer)
    assert isinstance(schedule, torch.optim.lr_scheduler.StepLR) and schedule.optimizer is optimizer


PARAMS: list[tuple[str, dict[str, Any], str]] = [
    ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps must be a positive integer, got 0"),
    ("WarmupLR", {"warmup_num_steps": 2.5}, "warmup_num_steps must be a positive integer"),
    ("WarmupLR", {"warmup_num_steps": True}, "warmup_num_steps must be a positive integer"),
    ("WarmupLR", {"warmup_type": "cubic"}, "'warmup_type' is 'cubic'; expected 'log' or 'linear'"),
    ("WarmupLR", {"warmup_min_lr": [0.1]}, "'warmup_min_lr' has 1 values, and the optimizer has 2 groups"),
    ("WarmupLR", {"warmup_max_lr": (0.1, 0.2, 0.3)}, "'warmup_max_lr' has 3 values, and the optimizer has 2 groups"),
    ("WarmupLR", {"warmup_min_lr": "low"}, "'warmup_min_lr' is 'low'; expected a number"),
    ("WarmupLR", {"warmup": 1}, "'scheduler.params' of WarmupLR"),
    ("WarmupDecayLR", {"total_num_steps": 0}, "total_num_steps must be a positive integer"),
    ("WarmupCosineLR", {"total_num_steps": -1}, "total_num_steps must be a positive integer"),
    ("LRRangeTest", {"lr_range_test_step_size": 0}, "must be a positive integer"),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 0}, "cycle_first_step_size is 0"),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_second_step_size": -1}, "cycle_second_step_size -1"),
    ("OneCycle", {"cycle_min_lr": [0.1], "cycle_max_lr": 0.2}, "'cycle_min_lr' has 1 values"),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_min_mom": [0.1]}, "'cycle_min_mom' has 1 values"),
]


@pytest.mark.parametrize(("kind", "params", "said"), PARAMS, ids=str)
def test_arguments_of_schedules_that_mean_nothing_are_refused(kind: str, params: dict[str, Any], said: str) -> None:
    with pytest.raises(deepspeed.DeepSpeedConfigError, match=said):
        schedules.build(kind, params, one_group(2))


def test_rates_by_group_are_lists_or_tuples() -> None:
    for kind in (list, tuple):
        schedule = schedules.build("WarmupLR", {"warmup_min_lr": kind([0.1, 0.2]), "warmup_max_lr": kind([0.3, 0.5])}, one_group(2))
        assert [group["lr"] for group in schedule.optimizer.param_groups] == [0.1, 0.2] and schedule.max_lrs == [0.3, 0.5]


def test_no_rate_is_told_before_a_late_schedule_has_stepped() -> None:
    schedule = schedules.build("LRRangeTest", {"last_batch_iteration": 3}, one_group())
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="need to call step"):
        schedule.get_last_lr()


def test_settings_that_only_say_how_are_dropped_and_wrong_ones_named() -> None:
    p = [nn.Parameter(torch.zeros(2))]
    for kind in ("Adam", "AdamW", "Adagrad", "Lion", "Lamb", "SGD"):
        made = optimizers.build(kind, {"lr": 0.5, "fp32_optimizer_states": True, "weight_decay": "auto"}, p)
        assert made.param_groups[0]["lr"] == 0.5 and made.param_groups[0]["weight_decay"] == 0.0, kind
        with pytest.raises(deepspeed.DeepSpeedConfigError, match=f"'optimizer.params' of {kind} in the DeepSpeed config"):
            optimizers.build(kind, {"lr": 0.5, "no_such_thing": 1}, p)
    for kind, params in (("Adam", {"bias_correction": False}), ("Lamb", {"amsgrad": True})):
        with pytest.raises(deepspeed.DeepSpeedConfigError, match="not supported"):
            optimizers.build(kind, params, p)
    for kind in ("OneBitAdam", "muadam", "Optimizer_", "lr_scheduler"):
        with pytest.raises(deepspeed.DeepSpeedConfigError, match="which is not supported"):
            optimizers.build(kind, {}, p)
    assert isinstance(optimizers.build("RMSprop", {"lr": 0.5}, p), torch.optim.RMSprop)
    cpu = deepspeed.ops.adam.DeepSpeedCPUAdam(p, amsgrad=True, betas=[0.1, 0.2])  # type: ignore[arg-type]
    assert cpu.param_groups[0]["amsgrad"] and cpu.param_groups[0]["betas"] == (0.1, 0.2)
    assert deepspeed.ops.adam.FusedAdam(p, amsgrad=True).param_groups[0]["amsgrad"]


@pytest.mark.parametrize("kind", ["Adam", "Lion", "Lamb", "Muon", "Adagrad", "SGD"])
def test_a_closure_has_a_graph_and_its_loss_is_what_a_step_returns(kind: str) -> None:
    p = nn.Parameter(torch.ones(2, 2))
    optimizer = optimizers.build(kind, {"lr": 0.1}, [p])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        returned: Any = optimizer.step(closure)
    assert float(returned) == 4.0 and bool((p < 1).all()) and optimizer.step() is None
