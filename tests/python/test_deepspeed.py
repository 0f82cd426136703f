"""DeepSpeed's face: its configs train as one process would, its words mean what they mean there, its keys are known."""

from __future__ import annotations

import copy
import doctest
import importlib
import json
import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import plumb
import plumb.deepspeed as deepspeed
from plumb.deepspeed import utils, zero
from plumb.deepspeed.config import Config
from deepspeeds import HIDDEN, batch, config_of, engine_of, make


def one_process(dtype: torch.dtype, gas: int, clip: float, steps: int, size: int, rates: list[float]) -> list[torch.Tensor]:
    """Masters in f32, gradients summed in f32, losses of f16 multiplied by 128."""
    model = make(dtype)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2, betas=(0.8, 0.99), weight_decay=0.1)
    scale = 128.0 if dtype == torch.float16 else 1.0
    for step in range(steps):
        for master in masters:
            master.grad = None
        for i in range(step * gas, (step + 1) * gas):
            for rank in range(size):
                model.zero_grad()
                (model(*batch(rank, i, dtype)) / gas * scale).backward()
                for p, master in zip(model.parameters(), masters, strict=True):
                    if p.grad is not None:
                        share = p.grad.float() / size / scale
                        master.grad = share if master.grad is None else master.grad + share
        if clip:
            torch.nn.utils.clip_grad_norm_(masters, clip)
        optimizer.param_groups[0]["lr"] = rates[step]
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)
    return [p.detach().float() for p in model.parameters()]


def far(engine: Any, twins: list[torch.Tensor]) -> float:
    parameters = list(engine.module.parameters())
    values = [engine.engine.full_parameter(p).float() for p in parameters]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(values, twins, strict=True))


STEPS = 3
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.002, "warmup_num_steps": 3, "warmup_type": "linear"}}
KINDS = {
    "fp32": (torch.float32, {}, 1e-5),
    "bf16": (torch.bfloat16, {"bf16": {"enabled": True}}, 5e-3),
    "fp16": (torch.float16, {"fp16": {"enabled": True, "loss_scale": 128}}, 1e-3),
}


def trains(stage: int) -> dict[str, float]:
    result = {}
    for kind, (dtype, section, _) in KINDS.items():
        for gas, clip, schedule in ((1, 0.0, None), (2, 0.05, WARMUP), (3, 1.0, None)):
            more = {"gradient_clipping": clip, **section, **({"scheduler": schedule} if schedule else {})}
            engine, _, _, _ = deepspeed.initialize(model=make(), config=config_of(stage, gas, **more))
            rates = []
            for i in range(STEPS * gas):
                rates.append(engine.get_lr()[0])
                engine.backward(engine(*batch(engine.global_rank, i, dtype)))
                engine.step()
            assert engine.global_steps == STEPS and engine.micro_steps == STEPS * gas
            twins = one_process(dtype, gas, clip, STEPS, engine.world_size, rates[::gas])
            result[f"{kind} {gas} {clip}"] = far(engine, twins)
            assert far(engine, [p.detach().float() for p in make(dtype).parameters()]) > 1e-3
            engine.destroy()
    return result


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_trains_as_one_process_would(stage: int) -> None:
    for by_case in plumb.spawn(trains, 2, (stage,)):
        assert {case: one for case, one in by_case.items() if one > KINDS[case.split()[0]][2]} == {}


def runs_out(stage: int, op: str) -> float:
    """Rank 0 has one batch of each step, the others three."""
    engine, _, _, _ = deepspeed.initialize(
        model=make(), config=config_of(stage, 3, gradient_clipping=0.0, gradient_allreduce_op=op)
    )
    twin = make()
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, betas=(0.8, 0.99), weight_decay=0.1)
    for i in range(2 * 3):
        engine.backward(engine(*batch(engine.global_rank, i)) if engine.global_rank or i % 3 == 0 else None)
        engine.step()
        for rank in range(2):
            if rank or i % 3 == 0:
                (twin(*batch(rank, i)) / 3 / (2 if op == "mean" else 1)).backward()
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    assert engine.global_steps == 2
    return far(engine, list(twin.parameters()))


@pytest.mark.parametrize(("stage", "op"), [(0, "mean"), (0, "sum"), (1, "mean"), (2, "sum"), (3, "mean")])
def test_a_rank_that_ran_out_of_batches_takes_part_with_nothing(stage: int, op: str) -> None:
    assert max(plumb.spawn(runs_out, 2, (stage, op))) < 1e-5


def test_so_it_does_between_machines_where_the_environment_lets_ranks_ask() -> None:
    asks = {"PLUMB_SHM": "0", "PLUMB_ASK_BEFORE_GATHERS": "1"}
    assert max(plumb.spawn(runs_out, 2, (3, "mean"), env=asks)) < 1e-5


# ---- the meaning of its words


def test_scripted_modules_stay_whole_under_stage_3() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 4))  # type: ignore[no-untyped-call]
    assert zero.units_of(model, Config(config_of(stage=3), 1)) == [model[1]]


def test_what_a_forward_returns_may_be_changed_in_place() -> None:
    """As transformers' Trainer multiplies its loss; under accumulation the output is a tensor of ours."""
    grads = []
    for by_hand in (True, False):
        engine = engine_of(stage=0, gas=2)
        loss = engine(*batch(0, 0, torch.float32))
        loss *= 3.0
        loss.backward() if by_hand else engine.backward(loss)
        grads.append(engine.module.get_parameter(next(iter(dict(engine.module.named_parameters())))).grad.clone())
    plain = make()
    (plain(*batch(0, 0, torch.float32)) * 1.5).backward()
    first = next(plain.parameters()).grad
    assert first is not None
    for gradient in grads:
        torch.testing.assert_close(gradient, first)


def test_steps_are_counted_as_deepspeed_counts_them() -> None:
    engine = engine_of(gas=2)
    seen = []
    for i in range(4):
        boundary = engine.is_gradient_accumulation_boundary()
        engine.backward(engine(*batch(0, i)))
        engine.step()
        seen.append((boundary, engine.was_step_applied(), engine.micro_steps, engine.global_steps, engine.global_samples))
    assert seen == [(False, False, 1, 0, 0), (True, True, 2, 1, 4), (False, False, 3, 1, 4), (True, True, 4, 2, 8)]
    assert all(p.grad is None for p in engine.module.parameters())
    engine.set_train_batch_size(2)
    assert engine.gradient_accumulation_steps() == 1 and engine.is_gradient_accumulation_boundary()
    with pytest.raises(ValueError, match="divisible"):
        engine.set_train_batch_size(3)
    engine.set_train_micro_batch_size(6)
    assert engine.train_batch_size() == 6


def test_the_boundary_may_be_the_callers() -> None:
    engine, twin = engine_of(gas=3), make()
    engine.set_gradient_accumulation_boundary(False)
    for i in range(2):
        engine.backward(engine(*batch(0, i)))
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(*batch(0, 2)))
    engine.step()
    assert engine.global_steps == 1 and engine.was_step_applied()
    unmanaged = engine_of(gas=3, managed_gradient_accumulation=False)
    for i in range(3):
        unmanaged.backward(unmanaged(*batch(0, i)))
    unmanaged.step()
    assert unmanaged.global_samples == 6
    for a, b, c in zip(engine.module.parameters(), unmanaged.module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c) or a.shape == twin.spare.weight.shape or a.shape == twin.spare.bias.shape


def test_a_backward_of_the_users_own_is_divided_as_ours_is() -> None:
    ours, theirs, scaled = (engine_of(gas=2) for _ in range(3))
    assert float(ours.backward(ours(*batch(0, 0)))) == pytest.approx(float(theirs(*batch(0, 0))) / 2)
    theirs(*batch(0, 0)).backward()
    scaled.scale(scaled(*batch(0, 0))).backward()
    for a, b, c in zip(*(one.module.parameters() for one in (ours, theirs, scaled)), strict=True):
        assert (a.grad is None) == (b.grad is None) == (c.grad is None)
        assert a.grad is None or (torch.allclose(a.grad, b.grad) and torch.allclose(a.grad, c.grad))
    whole = engine_of(gas=2)
    whole.backward(whole(*batch(0, 0)), scale_wrt_gas=False)
    assert torch.allclose(whole.module.head.weight.grad, 2 * ours.module.head.weight.grad)


def test_errors_are_those_that_deepspeed_asserts() -> None:
    with pytest.raises(AssertionError, match="incompatible with gradient partitioning"), engine_of(stage=2).no_sync():
        pass
    engine = engine_of()
    with engine.no_sync():
        with pytest.raises(AssertionError, match="illegal to call Engine.step"):
            engine.step()
        with pytest.raises(plumb.Error, match="reentry"), engine.no_sync():
            pass
    with pytest.raises(AssertionError, match="scalar"):
        engine.backward(torch.ones(3, requires_grad=True))
    bare = deepspeed.initialize(model=make(), config={"train_batch_size": 2})[0]
    assert float(bare(*batch(0, 0))) > 0
    for call in (lambda: bare.backward(bare(*batch(0, 0))), bare.step):
        with pytest.raises(AssertionError, match="must provide optimizer during init"):
            call()
    engine.destroy()
    with pytest.raises(plumb.Error, match="destroyed"):
        engine.step()
    with pytest.raises(plumb.Error, match="torch.utils.flop_counter"):
        engine.flops_profiler_top_modules()
    assert not hasattr(engine, "flops_profiler_top_modules")


def stepped_with(engine: Any, values: list[float]) -> list[float]:
    scales = []
    for value in values:
        for p in engine.module.parameters():
            p.grad = torch.full_like(p, value)
        engine.step()
        scales.append(engine.optimizer.loss_scale_config.cur_scale)
        assert engine.optimizer.loss_scaler.loss_scale == scales[-1]
    return scales


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_loss_scale_moves_as_deepspeeds_does(stage: int) -> None:
    inf, nan = float("inf"), float("nan")

    def of(**fp16: Any) -> Any:
        return engine_of(stage=stage, fp16={"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, **fp16})

    assert stepped_with(of(), [0.1] * 6) == [256, 256, 512, 512, 1024, 1024]
    assert stepped_with(of(hysteresis=1), [inf, nan, 0.1, 0.1, 0.1, inf]) == [128, 64, 64, 64, 128, 64]
    # Without ZeRO, DeepSpeed halves at every skipped step.
    assert stepped_with(of(hysteresis=2), [inf, inf, inf]) == ([256, 128, 64] if stage else [128, 64, 32])
    assert stepped_with(of(hysteresis=2, consecutive_hysteresis=True), [inf, 0.1, inf, 0.1]) == (
        [256] * 4 if stage else [128, 128, 64, 64]
    )
    engine = of(hysteresis=1, min_loss_scale=128)
    before = copy.deepcopy(engine.module.state_dict())
    assert stepped_with(engine, [inf]) == [128]
    assert engine.skipped_steps == 1 and engine.optimizer.overflow and not engine.was_step_applied()
    assert all(torch.equal(before[name], value) for name, value in engine.module.state_dict().items())
    if stage == 0:
        assert stepped_with(engine, [nan]) == [128]
    else:
        with pytest.raises(plumb.Error, match="already at minimum"):
            stepped_with(engine, [nan])
    assert engine.optimizer.cur_iter == 2
    fixed = engine_of(stage=stage, fp16={"enabled": True, "loss_scale": 32})
    assert stepped_with(fixed, [0.1, inf, 0.1]) == [32, 32, 32] and fixed.skipped_steps == 1


def test_bf16_skips_a_step_that_is_not_finite_unless_told_otherwise() -> None:
    engine = engine_of(bf16={"enabled": True})
    stepped_with(engine, [float("nan"), 0.1])
    assert engine.skipped_steps == 1 and engine.global_steps == 2
    assert all(torch.isfinite(p).all() for p in engine.module.parameters())
    careless = engine_of(bf16={"enabled": True, "check_grad_overflow": False})
    stepped_with(careless, [float("nan")])
    assert careless.skipped_steps == 0 and not torch.isfinite(careless.module.head.weight).all()


def test_arguments_are_taken_as_deepspeed_takes_them(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}))
    parser = deepspeed.add_config_arguments(__import__("argparse").ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(file)])
    data = [batch(0, i) for i in range(8)]
    engine, optimizer, loader, schedule = deepspeed.initialize(args=args, model=make(), training_data=data)
    assert isinstance(optimizer, torch.optim.SGD) and engine.get_mom() == [0.9] and schedule is None
    assert engine.optimizer_name() == "SGD" and engine_of().optimizer_name() == "adamw"  # as DeepSpeed writes its own
    assert len(loader) == 2 and next(iter(loader))[0].shape[0] == 4
    mine = torch.optim.Adam(engine.module.parameters())
    engine.destroy()
    engine, optimizer, _, schedule = deepspeed.initialize(
        model=engine.module, optimizer=mine, config=str(file), lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: 0.5)
    )
    assert optimizer is mine and isinstance(schedule, torch.optim.lr_scheduler.LambdaLR)
    with pytest.raises(AssertionError, match="both|Not sure"):
        deepspeed.initialize(args=args, model=make(), config={"train_batch_size": 4})
    with pytest.raises(AssertionError, match="over an optimizer"):
        deepspeed.initialize(model=make(), config=str(file), lr_scheduler=schedule)
    with pytest.raises(AssertionError):
        deepspeed.initialize(config=str(file))


def sums_and_holds(op: str) -> list[float]:
    engine = engine_of(stage=0, gas=1, gradient_clipping=0.0, gradient_allreduce_op=op)
    with engine.no_sync():
        engine.backward(engine(*batch(engine.global_rank, 0)))
    engine.backward(engine(*batch(engine.global_rank, 1)))
    twin = make()
    for rank in range(2):
        for i in range(2):
            (twin(*batch(rank, i)) / (1 if op == "sum" else 2)).backward()
    return [float((engine.module.head.weight.grad - twin.head.weight.grad).abs().max())]


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_gradients_are_the_mean_or_the_sum_over_ranks(op: str) -> None:
    assert max(one for each in plumb.spawn(sums_and_holds, 2, (op,)) for one in each) < 1e-6


def test_parameters_that_nobody_uses_are_an_error_where_stage_2_is_told_so() -> None:
    for ignore in (True, False):
        config = config_of(stage=2)
        config["zero_optimization"]["ignore_unused_parameters"] = ignore
        engine = deepspeed.initialize(model=make(), config=config)[0]
        engine.backward(engine(*batch(0, 0)))
        if ignore:
            engine.step()
        else:
            with pytest.raises(AssertionError, match="'spare.weight' has no gradient"):
                engine.step()


class Output(dict[str, torch.Tensor]):
    """As transformers' outputs are."""

    def __getattr__(self, name: str) -> torch.Tensor:
        return self[name]


class Two(nn.Module):
    """Returns its loss and what it is computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor) -> Output:
        y = self.layer(x)
        return Output(loss=y.square().mean(), y=y)


@pytest.mark.parametrize("use", ["loss", "y", "both"])
def test_a_backward_through_several_outputs_is_divided_once(use: str) -> None:
    def loss_of(output: Output) -> torch.Tensor:
        return {"loss": output.loss, "y": output["y"].sum(), "both": output.loss + output["y"].sum()}[use]

    torch.manual_seed(2)
    model = Two()
    twin = copy.deepcopy(model)
    engine = deepspeed.initialize(model=model, config=config_of(gas=4))[0]
    loss_of(engine(batch(0, 0)[0])).backward()
    (loss_of(twin(batch(0, 0)[0])) / 4).backward()
    assert torch.allclose(model.layer.weight.grad, twin.layer.weight.grad)


# ---- whole things, wherever their parts lie


def safe(stage: int) -> dict[str, float]:
    engine = engine_of(stage=stage, gradient_clipping=0.0, bf16={"enabled": True})
    rank, wrong = engine.global_rank, {}
    twin = make(torch.bfloat16)
    engine.backward(engine(*batch(rank, 0, torch.bfloat16)))
    expected = []
    for r in range(2):
        twin.zero_grad()
        twin(*batch(r, 0, torch.bfloat16)).backward()
        expected.append(twin.head.weight.grad.float() / 2)
    head = engine.module.head.weight
    if stage < 2:
        engine.zero_grad()
        with engine.no_sync():
            engine.backward(engine(*batch(rank, 0, torch.bfloat16)))
            own = twin(*batch(rank, 0, torch.bfloat16))
            twin.zero_grad()
            own.backward()
            wrong["held"] = float((utils.safe_get_full_grad(head) - twin.head.weight.grad).abs().max())
        engine.zero_grad()
        engine.backward(engine(*batch(rank, 0, torch.bfloat16)))
    frozen = engine.module.spare.bias.requires_grad_(False)
    assert utils.safe_get_full_fp32_param(frozen) is None and utils.safe_get_full_grad(frozen) is None
    frozen.requires_grad_(True)
    assert utils.safe_get_full_grad(head).dtype == torch.bfloat16  # as the config says, although sums are f32
    wrong["grad"] = float((utils.safe_get_full_grad(head) - sum(expected)).abs().max())
    utils.safe_update_full_grad_vectorized([engine.module.spare.weight, head], lambda gradient, parameter: torch.full((5, HIDDEN), 0.125))
    wrong["update grad"] = float((utils.safe_get_full_grad(head) - 0.125).abs().max())
    utils.safe_set_full_grad(head, torch.full((5, HIDDEN), 0.25))
    wrong["set grad"] = float((utils.safe_get_full_grad(head) - 0.25).abs().max())
    local = utils.safe_get_local_grad(head)
    utils.safe_set_local_grad(head, local * 2)
    wrong["local grad"] = float((utils.safe_get_full_grad(head) - 0.5).abs().max())
    engine.step()
    first = utils.safe_get_full_fp32_param(head)
    wrong["param"] = float((first.bfloat16() != engine.module_state_dict()["head.weight"]).sum())
    assert first.dtype == torch.float32 and first.shape == (5, HIDDEN)
    wrong["state"] = float((utils.safe_get_full_optimizer_state(head, "exp_avg") - 0.5 * 0.2).abs().max())
    utils.safe_set_full_optimizer_state(head, torch.zeros(5, HIDDEN), "exp_avg")
    wrong["set state"] = float(utils.safe_get_full_optimizer_state(head, "exp_avg").abs().max())
    value = torch.linspace(-1, 1, 5 * HIDDEN).view(5, HIDDEN)  # not of bf16
    utils.safe_set_full_fp32_param(head, value)
    wrong["set param"] = float((utils.safe_get_full_fp32_param(head) - value).abs().max())
    utils.safe_set_local_fp32_param(head, utils.safe_get_local_fp32_param(head) * 2)
    wrong["local param"] = float((utils.safe_get_full_fp32_param(head) - 2 * value).abs().max())
    with deepspeed.zero.GatheredParameters([head], modifier_rank=1):
        assert head.shape == (5, HIDDEN)
        if rank == 1:
            with torch.no_grad():
                head.fill_(3.0)
    if engine.zero_optimization_stage() == 3:
        told = r"'head.weight' was changed inside zero.GatheredParameters\(modifier_rank=None\) and the change is lost; pass modifier_rank=R on"
        with pytest.raises(deepspeed.DeepSpeedConfigError, match=told), deepspeed.zero.GatheredParameters([head]), torch.no_grad():
            head.add_(1.0)
    wrong["gathered"] = float((utils.safe_get_full_fp32_param(head) - 3).abs().max())
    engine.backward(engine(*batch(rank, 1, torch.bfloat16)))
    engine.step()
    wrong["stepped"] = 0.0 if float((utils.safe_get_full_fp32_param(head) - 3).abs().max()) < 0.1 else 1.0
    state = engine.module_state_dict()
    engine.load_module_state_dict({name: torch.zeros_like(one) for name, one in state.items()})
    wrong["loaded"] = max(float(one.abs().max()) for one in engine.module_state_dict().values())
    return wrong


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_whole_parameters_gradients_and_state_are_read_and_written(stage: int) -> None:
    for wrong in plumb.spawn(safe, 2, (stage,)):
        assert {what: one for what, one in wrong.items() if one > 1e-2 * (what == "grad") + 1e-6} == {}


def saves(folder: str) -> bool:
    kept = engine_of(stage=3).save_16bit_model(folder, "none.bin")
    config = config_of(stage=3, bf16={"enabled": True})
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    model = make()
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = make()
    engine = deepspeed.initialize(model=model, config=config)[0]
    state = engine.state_dict()
    assert engine.engine.gathered_bytes == 0 and torch.equal(state["module.head.weight"], make().head.weight.bfloat16())
    return not kept and engine.save_16bit_model(folder)


def test_the_model_is_saved_whole(tmp_path: pathlib.Path) -> None:
    assert plumb.spawn(saves, 2, (str(tmp_path),)) == [True, True]
    saved = torch.load(tmp_path / "pytorch_model.bin")
    assert not (tmp_path / "none.bin").exists()
    for name, value in make().state_dict().items():
        assert torch.equal(saved[name], value.bfloat16()), name
    config = config_of(stage=3)
    config["zero_optimization"]["stage3_gather_fp16_weights_on_model_save"] = True  # the old name
    assert deepspeed.initialize(model=make(), config=config)[0].save_16bit_model(str(tmp_path), "old.bin")


def test_docstrings_are_true() -> None:
    tried = doctest.testmod(importlib.import_module("plumb.deepspeed.start"))
    assert tried.attempted > 0 and tried.failed == 0
