"""Keys of DeepSpeed's config and methods of its engine do what they say, and are not only taken."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import plumb
import plumb.deepspeed as deepspeed
from plumb.deepspeed import utils
from deepspeeds import HIDDEN, batch, config_of, engine_of, make

STAGES = [0, 1, 2, 3]
SGD = {"type": "SGD", "params": {"lr": 0.1}}


def twin_step(twin: nn.Module, size: int, indices: range, clip: float = 0.0) -> float:
    """One process: the mean over the micro-batches of all ranks, and a step of SGD. The norm before it was clipped."""
    for i in indices:
        for rank in range(size):
            (twin(*batch(rank, i)) / size / len(indices)).backward()
    norm = nn.utils.clip_grad_norm_(twin.parameters(), clip or float("inf"))
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    twin.zero_grad()
    return float(norm)


def far(engine: Any, twin: nn.Module) -> float:
    pairs = zip(engine.module.parameters(), twin.parameters(), strict=True)
    return max(float((engine.engine.full_parameter(a).float() - b.detach()).abs().max()) for a, b in pairs)


# ---- the norm of all gradients


def norms(stage: int) -> dict[str, float]:
    wrong = {}
    for what, gas, more in (
        ("plain", 1, {"gradient_clipping": 0.0}), ("accumulated", 3, {"gradient_clipping": 0.0}), ("clipped", 2, {"gradient_clipping": 0.05}),
    ):  # fmt: skip
        engine, twin = engine_of(stage=stage, gas=gas, optimizer=SGD, **more), make()
        assert engine.get_global_grad_norm() is None
        for step in range(2):
            for i in range(step * gas, (step + 1) * gas):
                engine.backward(engine(*batch(engine.global_rank, i)))
                engine.step()
            expected = twin_step(twin, engine.world_size, range(step * gas, (step + 1) * gas), more["gradient_clipping"])
            assert expected > 0.05, "nothing is clipped"
            wrong[f"{what} {step}"] = abs(engine.get_global_grad_norm() - expected) / expected
        wrong[f"{what}, after"] = far(engine, twin)
        engine.destroy()
    if stage in (1, 2):
        config = config_of(stage=stage)
        config["zero_optimization"]["compute_grad_norm"] = False
        engine = deepspeed.initialize(model=make(), config=config)[0]
        engine.backward(engine(*batch(engine.global_rank, 0)))
        engine.step()
        assert engine.get_global_grad_norm() is None
    return wrong


@pytest.mark.parametrize("stage", STAGES)
def test_the_global_norm_is_that_of_the_last_step_before_clipping(stage: int) -> None:
    for wrong in plumb.spawn(norms, 2, (stage,)):
        assert {what: one for what, one in wrong.items() if one > 1e-5} == {}


def scaled_norm(stage: int) -> tuple[float, float]:
    """Of f16 with a loss scale: of the true gradients, whatever the scale."""
    seen = []
    for scale in (64, 1024):
        engine = engine_of(stage=stage, optimizer=SGD, gradient_clipping=0.01, fp16={"enabled": True, "loss_scale": scale})
        engine.backward(engine(*batch(engine.global_rank, 0, torch.float16)))
        engine.step()
        seen.append(engine.get_global_grad_norm())
        engine.destroy()
    return seen[0], seen[1]


@pytest.mark.parametrize("stage", [0, 3])
def test_the_global_norm_is_without_the_loss_scale(stage: int) -> None:
    expected = twin_step(make(), 2, range(1))
    for told in plumb.spawn(scaled_norm, 2, (stage,)):
        assert told == pytest.approx((expected, expected), rel=1e-2)


# ---- a graph that is kept


def retains(stage: int) -> float:
    engine, twin = engine_of(stage=stage, gas=2, optimizer=SGD, gradient_clipping=0.0), make()
    loss = engine(*batch(engine.global_rank, 0))
    engine.backward(loss, retain_graph=True)
    engine.step()
    engine.backward(loss.square())
    engine.step()
    assert engine.global_steps == 1
    for rank in range(engine.world_size):
        other = twin(*batch(rank, 0))
        ((other + other.square()) / 2 / engine.world_size).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    return far(engine, twin)


@pytest.mark.parametrize("stage", STAGES)
def test_a_graph_is_kept_for_a_second_loss(stage: int) -> None:
    assert max(plumb.spawn(retains, 2, (stage,))) < 1e-6


def test_a_graph_that_nobody_keeps_is_gone() -> None:
    engine = engine_of(gas=2)
    loss = engine(*batch(0, 0))
    engine.backward(loss)
    with pytest.raises(RuntimeError, match="second time"):
        engine.backward(loss)


# ---- what is computed, summed and sent in which dtype


class Seeing(nn.Module):
    """Says in which dtype its layer computed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.out = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 5)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        self.seen.append(x.dtype)
        return nn.functional.cross_entropy(self.out(torch.tanh(x)).float(), y)


def autocasts(stage: int) -> tuple[float, float]:
    model, twins = Seeing(), (Seeing(), Seeing())
    config = config_of(stage, optimizer=SGD, gradient_clipping=0.0, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    engine = deepspeed.initialize(model=model, config=config)[0]
    assert engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == torch.bfloat16
    for i in range(2):
        engine.backward(engine(*batch(engine.global_rank, i)))
        assert not torch.is_autocast_enabled("cpu")
        engine.step()
        with torch.autocast("cpu", torch.bfloat16):
            losses = [twins[0](*batch(rank, i)) / 2 for rank in range(2)]
        for loss in losses:
            loss.backward()
        torch.optim.SGD(twins[0].parameters(), lr=0.1).step()
        twins[0].zero_grad()
        twin_step(twins[1], 2, range(i, i + 1))
    assert model.seen == [torch.bfloat16] * 2 and all(p.dtype == torch.float32 for p in model.parameters())
    return far(engine, twins[0]), far(engine, twins[1])


@pytest.mark.parametrize("stage", [0, 3])
def test_the_forward_runs_under_autocast(stage: int) -> None:
    for as_one_process, as_without in plumb.spawn(autocasts, 2, (stage,)):
        assert as_one_process < 1e-6 and as_without > 1e-5, (as_one_process, as_without)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, factor: float) -> torch.Tensor:
        return (self.weight * factor).sum()


SMALL = 2.0**-9  # which a bf16 sum of one forgets
SUMS = [  # data_types.grad_accum_dtype, communication_data_type -> whether sums are f32
    (None, None, True), ("fp32", None, True), ("bf16", None, False), ("bf16", "bf16", False), ("bf16", "fp32", True),
    (None, "bf16", True), ("fp32", "bf16", True),
]  # fmt: skip


def sums(stage: int) -> list[tuple[float, float, torch.dtype]]:
    """Gradients over micro-batches, and over ranks, of bf16 parameters."""
    result = []
    for accumulated, travels, _ in SUMS:
        config = config_of(stage, 16, gradient_clipping=0.0, bf16={"enabled": True}, optimizer=SGD)
        if accumulated is not None:
            config["data_types"] = {"grad_accum_dtype": accumulated}
        if travels is not None:
            config["communication_data_type"] = travels
        told = []
        for case in ("micro-batches", "ranks"):
            model = Scale()
            engine = deepspeed.initialize(model=model, config=config)[0]
            for i in range(16):
                first = i == 0 and (case == "micro-batches" or engine.global_rank == 0)
                small = case == "micro-batches" or i == 0
                engine.backward(engine(16.0 if first else 16.0 * SMALL if small else 0.0))
                if i < 15:
                    engine.step()
            told.append(float(engine.engine.full_gradient(model.weight)[0]))
            engine.destroy()
        result.append((told[0], told[1], engine.communication_data_type))
    return result


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_summed_in_the_widest_dtype_that_is_asked_for(stage: int) -> None:
    for by_config in plumb.spawn(sums, 2, (stage,)):
        for (accumulated, travels, wide), (micro_batches, ranks, told) in zip(SUMS, by_config, strict=True):
            exact = micro_batches == 1 + 15 * SMALL, ranks == (1 + SMALL) / 2
            assert exact == (wide, wide), (accumulated, travels, micro_batches, ranks)
            assert told == (torch.float32 if wide else torch.bfloat16), (accumulated, travels)


# ---- logs, loaders, sizes


@pytest.mark.parametrize(("every", "steps"), [(2, [2, 4]), (1, [1, 2, 3, 4]), (float("inf"), []), (None, [])])
def test_steps_are_printed_as_often_as_told(every: Any, steps: list[int], caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(gas=2, optimizer=SGD, steps_per_print=every)
    with caplog.at_level(logging.INFO, logger="plumb.deepspeed"):
        for i in range(8):
            engine.backward(engine(*batch(0, i)))
            engine.step()
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"step={step}, skipped=0, lr=[0.1], mom=[0]" for step in steps]


def prints() -> int:
    said: list[str] = []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger = logging.getLogger("plumb.deepspeed")
    logger.setLevel(logging.INFO)
    logger.addHandler(Keeps())
    engine = engine_of(steps_per_print=1)
    engine.backward(engine(*batch(engine.global_rank, 0)))
    engine.step()
    return len(said)


def test_rank_0_alone_prints() -> None:
    assert plumb.spawn(prints, 2) == [1, 0]


def loads(drop: bool | None) -> list[int]:
    data = [batch(0, i)[0][0] for i in range(10)]
    config = config_of(**({} if drop is None else {"dataloader_drop_last": drop}))
    loader = deepspeed.initialize(model=make(), config=config, training_data=data)[2]
    assert len(loader) == len(list(loader))
    return [len(one) for one in loader]


@pytest.mark.parametrize(("drop", "sizes"), [(None, [2, 2, 1]), (False, [2, 2, 1]), (True, [2, 2])])
def test_the_last_batch_of_a_loader_is_dropped_where_it_is_told(drop: bool | None, sizes: list[int]) -> None:
    assert plumb.spawn(loads, 2, (drop,)) == [sizes, sizes]


def test_batch_info_is_of_now() -> None:
    """DeepSpeed's returns its methods, and so does this."""
    engine = engine_of(gas=3)
    info = engine.get_batch_info()
    assert [ask() for ask in info] == [6, 2, 3]
    engine.set_train_batch_size(2)
    assert [ask() for ask in info] == [2, 2, 1]


class Point(NamedTuple):
    loss: torch.Tensor
    rest: list[Any]


class Nested(nn.Module):
    """Takes and returns tensors inside of other things."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor, more: Any = None) -> Point:
        y = self.layer(x + more["shift"][0])
        return Point(y.square().mean(), [y, more["count"]])


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_inputs_and_outputs_keep_their_kinds_wherever_tensors_are(half: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[half]
    engine = deepspeed.initialize(model=Nested(), config=config_of(gas=2, optimizer=SGD, **{half: {"enabled": True, "auto_cast": True}}))[0]
    more = {"shift": [torch.ones(HIDDEN)], "count": torch.tensor(3)}
    out = engine(torch.ones(2, HIDDEN), more=more)  # would not multiply f32 by half precision
    assert type(out) is Point and out.rest[0].dtype == dtype and out.rest[1] is more["count"]
    out.loss.backward()
    twin = Nested().to(dtype)
    (twin(torch.ones(2, HIDDEN, dtype=dtype), {"shift": [torch.ones(HIDDEN, dtype=dtype)], "count": 3}).loss / 2).backward()
    torch.testing.assert_close(engine.module.layer.weight.grad.float(), twin.layer.weight.grad.float())


def summed_over_ranks(by_hand: bool) -> float:
    """A sum over ranks and micro-batches, whoever calls backward()."""
    engine, twin = engine_of(gas=2, optimizer=SGD, gradient_clipping=0.0, gradient_allreduce_op="sum"), make()
    for i in range(2):
        loss = engine(*batch(engine.global_rank, i))
        loss.backward() if by_hand else engine.backward(loss)
        for rank in range(engine.world_size):
            (twin(*batch(rank, i)) / 2).backward()
        if i == 0:
            engine.step()
    return float((engine.engine.full_gradient(engine.module.head.weight) - twin.head.weight.grad).abs().max())


@pytest.mark.parametrize("by_hand", [False, True])
def test_gradients_are_the_sum_over_ranks_whoever_calls_backward(by_hand: bool) -> None:
    assert max(plumb.spawn(summed_over_ranks, 2, (by_hand,))) < 1e-6


def test_the_schedule_gets_what_step_is_given_and_no_step_that_is_skipped() -> None:
    engine = engine_of(bf16={"enabled": True}, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 100, "warmup_type": "linear"}})
    seen = []
    for i, words in enumerate(({}, {"last_batch_iteration": 40}, {}, {})):
        loss = engine(*batch(0, i, torch.bfloat16))
        engine.backward(loss * float("nan") if i == 2 else loss)
        engine.step(words)
        seen.append(engine.lr_scheduler.last_batch_iteration)
    assert seen == [0, 40, 40, 41] and engine.skipped_steps == 1 and engine.global_steps == 4


def test_a_scope_of_reductions_ends() -> None:
    engine = engine_of(stage=1, gas=2)
    with pytest.raises(KeyError), engine.coalesce_grad_reduction():
        with pytest.raises(plumb.Error, match="nested"), engine.coalesce_grad_reduction():
            pass
        raise KeyError
    for i in range(2):
        engine.backward(engine(*batch(0, i)))
        engine.step()  # which is illegal inside
    assert engine.global_steps == 1
    with pytest.raises(NotImplementedError, match="stage 0"), engine_of(stage=0).coalesce_grad_reduction():
        pass


def test_the_optimizers_own_words() -> None:
    engine = engine_of(stage=1, gas=2)
    engine.basic_optimizer.add_param_group({"params": [engine.basic_optimizer.param_groups[0]["params"].pop()]})
    engine.optimizer.set_lr(0.5)
    assert engine.get_lr() == [0.5, 0.5] and engine.optimizer.get_lr() == 0.5
    engine.optimizer.param_groups = list(reversed(engine.optimizer.param_groups))
    assert [len(group["params"]) for group in engine.basic_optimizer.param_groups] == [1, len(list(make().parameters())) - 1]
    assert engine.optimizer.param_groups is engine.basic_optimizer.param_groups and engine.optimizer_name() == "adamw"
    twin = make()
    engine.optimizer.backward(engine(*batch(0, 0)))  # as it is, not over the number of accumulation steps
    twin(*batch(0, 0)).backward()
    torch.testing.assert_close(engine.module.head.weight.grad, twin.head.weight.grad)


def parts() -> list[list[int]]:
    data = list(range(10))
    collated: list[int] = []
    engine = deepspeed.initialize(model=make(), config=config_of(), collate_fn=lambda rows: collated.append(len(rows)) or rows)[0]
    found = [[row for rows in engine.deepspeed_io(data, route=route) for row in rows] for route in ("eval", "train")]
    assert collated == [2, 2, 1] * 2
    engine.set_train_batch_size(12)
    assert [ask() for ask in engine.get_batch_info()] == [12, 2, 3]
    engine.set_train_micro_batch_size(5)
    assert [ask() for ask in engine.get_batch_info()] == [30, 5, 3]
    with pytest.raises(plumb.Error, match="divisible"):
        engine.set_train_batch_size(15)
    own = engine.deepspeed_io(data, batch_size=3, data_sampler=[5, 1, 2], collate_fn=tuple, num_local_io_workers=0)
    assert list(own) == [(5, 1, 2)]
    return found


def test_loaders_give_each_rank_its_part_in_order_unless_they_are_for_training() -> None:
    (first, one), (second, other) = plumb.spawn(parts, 2)
    assert (first, second) == ([0, 2, 4, 6, 8], [1, 3, 5, 7, 9])
    assert sorted(one + other) == list(range(10)) and one != first


def test_frozen_parameters_are_left_out_and_missing_ones_may_be_missing(tmp_path: Path) -> None:
    engine = engine_of(stage=2)
    engine.module.spare.requires_grad_(False)
    left = {name for name in engine.module.state_dict() if not name.startswith("spare.")}
    assert engine.module_state_dict(exclude_frozen_parameters=True).keys() == left
    assert engine.module_state_dict(prefix="a.", exclude_frozen_parameters=True).keys() == {f"a.{name}" for name in left}
    assert engine.save_16bit_model(str(tmp_path), exclude_frozen_parameters=True)
    state = torch.load(tmp_path / "pytorch_model.bin")
    assert state.keys() == left
    for load in (engine.load_module_state_dict, lambda state, strict=True: engine.load_state_dict({f"module.{n}": v for n, v in state.items()}, strict)):
        with pytest.raises(RuntimeError, match="spare.weight"):
            load(state)
        load({name: value + 1 for name, value in state.items()}, strict=False)
    assert torch.equal(engine.module.head.weight, state["head.weight"] + 1)


# ---- the rest of an engine's life


def compiles(stage: int) -> tuple[float, int]:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], options: dict[str, int]) -> Any:
        assert options == {"mine": 1}
        graphs.append(graph)
        return graph.forward

    engine, twin = engine_of(stage=stage, optimizer=SGD, gradient_clipping=0.0), make()
    assert not engine.is_compiled
    engine.compile(backend=backend, compile_kwargs={"dynamic": False, "options": {"mine": 1}})
    assert engine.is_compiled
    for i in range(2):
        engine.backward(engine(*batch(engine.global_rank, i)))
        engine.step()
        twin_step(twin, engine.world_size, range(i, i + 1))
    return far(engine, twin), len(graphs)


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_compiled_trains_as_one_process_would(stage: int) -> None:
    for away, graphs in plumb.spawn(compiles, 2, (stage,), timeout=200):
        assert graphs > 0 and away < 1e-6, (graphs, away)


def offloads(stage: int) -> tuple[bool, bool]:
    """Between steps, and between the backwards of one; with what programs name."""
    ends = []
    for offload in (False, True):
        engine = engine_of(stage=stage, gas=2, bf16={"enabled": True})
        for i in range(6):
            engine.backward(engine(*batch(engine.global_rank, i, torch.bfloat16)))
            if offload and i in (2, 3):
                engine.offload_states(include=["optim_states", "hp_params"], device="cpu", non_blocking=True)
                engine.reload_states(non_blocking=True)
            engine.step()
            if offload and i == 1:
                engine.offload_states()
                engine.reload_states()
        ends.append([engine.engine.full_parameter(p) for p in engine.module.parameters()])
        engine.destroy()
    same = all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    moved = any(not torch.equal(a, b.bfloat16()) for a, b in zip(ends[0], make().parameters(), strict=True))
    return same, moved


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_states_that_were_offloaded_and_came_back_are_the_same(stage: int) -> None:
    assert plumb.spawn(offloads, 2, (stage,)) == [(True, True)] * 2


# ---- shards over a part of the ranks


def shards_by_two() -> tuple[float, float, int, int]:
    """MiCS: parameters and gradients lie over pairs of ranks."""
    engine, twin = engine_of(stage=3, gas=2, optimizer=SGD, gradient_clipping=0.05, **SHARDED), make()
    for step in range(3):
        for i in (2 * step, 2 * step + 1):
            engine.backward(engine(*batch(engine.global_rank, i)))
            mine = sum(p.grad.numel() for p in engine.module.parameters() if p.grad is not None)
            engine.step()
        norm = twin_step(twin, engine.world_size, range(2 * step, 2 * step + 2), 0.05)
        assert abs(engine.get_global_grad_norm() - norm) < 1e-5 * norm
    used = sum(p.numel() for name, p in twin.named_parameters() if not name.startswith("spare"))
    read = utils.safe_get_full_fp32_param(next(engine.module.parameters()))
    assert read is not None
    return far(engine, twin), float((read - next(twin.parameters())).abs().max()), mine, used


SHARDED = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "mics_shard_size": 2}}


def test_mics_shards_over_as_many_ranks_as_it_says() -> None:
    ranks = plumb.spawn(shards_by_two, 4)
    for away, read, _, _ in ranks:
        assert away < 1e-6 and read < 1e-6
    pieces, used = [mine for _, _, mine, _ in ranks], ranks[0][3]
    assert pieces[:2] == pieces[2:] and sum(pieces[:2]) == used, (pieces, used)


@pytest.mark.parametrize("stage, shard", [(2, 1), (3, 3), (3, 0)])
def test_a_size_of_shards_that_does_not_fit_is_told(stage: int, shard: int) -> None:
    with pytest.raises(deepspeed.DeepSpeedConfigError, match=f"mics_shard_size' is {shard} in the DeepSpeed config, with stage {stage} on 2 ranks"):
        deepspeed.DeepSpeedConfig({"train_batch_size": 2, "zero_optimization": {"stage": stage, "mics_shard_size": shard}}, 2)
