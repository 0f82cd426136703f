"""plumb.DistributedDataParallel in the place of torch's: the same names, every pattern right."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer

import plumb
from programs import ROWS
from stage import STEP, ZERO, Play, make, reference

LEFT_OUT = {"a submodule twice, re-entrant checkpoint", "used on one rank only"}  # which call submodules by themselves


class Wrapped(Play):
    """A play whose losses go through the wrapper."""

    def __init__(self, wrapper: Any, rank: int) -> None:
        super().__init__(wrapper.module, rank, 2, 1.0, wrapper.engine)
        self.wrapper = wrapper

    def loss(self, i: int = 0, **how: Any) -> torch.Tensor:
        return F.mse_loss(self.wrapper(self.data(i), **how), self.data(i + 50))

    def no_sync(self) -> Any:
        return self.wrapper.no_sync()


def rows() -> dict[str, float]:
    dist.init_process_group("gloo")
    result = {}
    for name, program in ROWS.items():
        if name in LEFT_OUT:
            continue
        model, twin = make(), make()
        wrapper = plumb.DistributedDataParallel(model)
        assert isinstance(wrapper, torch.nn.parallel.DistributedDataParallel)
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
        play = Wrapped(wrapper, dist.get_rank())
        for yielded in program(play):
            if yielded == STEP:
                optimizer.step()
            elif yielded == ZERO:
                optimizer.zero_grad()
            else:
                yielded(model)
        reference(twin, program, 2, torch.optim.SGD(twin.parameters(), lr=0.1))
        far = max(float((a - b).detach().abs().max()) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        result[name] = far
        wrapper.engine.close()
    return result


def test_every_row_is_right_behind_torchs_name() -> None:
    for by_row in plumb.spawn(rows, 2):
        assert {name for name, far in by_row.items() if far > 1e-10} == set()


def habits() -> None:
    dist.init_process_group("gloo")
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    wrapper = plumb.DistributedDataParallel(module, find_unused_parameters=True, gradient_as_bucket_view=True)
    assert list(wrapper.state_dict())[0] == "module.0.weight"
    values = torch.cat([p.detach().flatten() for p in wrapper.parameters()])
    others = [torch.empty_like(values) for _ in range(2)]
    dist.all_gather(others, values)
    assert torch.equal(others[0], others[1])
    assert wrapper.require_backward_grad_sync
    with wrapper.no_sync():
        assert not wrapper.require_backward_grad_sync
        wrapper(torch.randn(4, 3)).sum().backward()
    wrapper(torch.randn(4, 3)).sum().backward()
    wrapper._set_static_graph()


def test_answers_as_others_expect() -> None:
    plumb.spawn(habits, 2)


# ---- steps that not every rank takes


class Throwing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if dist.get_rank() == 1:
            raise ValueError("out of luck")
        return super().step(closure)


def apart(how: str) -> str:
    dist.init_process_group("gloo")
    wrapper = plumb.DistributedDataParallel(torch.nn.Linear(3, 3))
    kind = Throwing if how == "throws" else torch.optim.SGD
    optimizer = kind(wrapper.parameters(), lr=0.1)
    wrapper(torch.ones(2, 3)).sum().backward()
    if how == "throws" or dist.get_rank() == 0:
        with contextlib.suppress(ValueError):
            optimizer.step()
    optimizer.zero_grad()
    try:
        wrapper(torch.ones(2, 3)).sum().backward()
    except plumb.Error as error:
        return str(error)
    return "nothing was said"


@pytest.mark.parametrize("how", ["throws", "leaves it out"])
def test_a_step_that_one_rank_did_not_take_is_an_error_on_every_rank(how: str) -> None:
    for rank, said in enumerate(plumb.spawn(apart, 2, (how,))):
        assert f"rank {rank}" in said
        assert "the number of optimizer steps over the wrapped model's parameters" in said
        assert "is 0 on rank 1, where it is 1 on rank 0" in said


def differently(how: str) -> list[str]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    wrapper = plumb.DistributedDataParallel(torch.nn.Linear(3, 3))
    plain = torch.nn.Linear(3, 3)
    kept = torch.optim.SGD([*wrapper.module.parameters()][1:], lr=0.1)
    rate = torch.tensor(0.1) if how == "a rate that is a tensor" else 0.1
    parameters = [*wrapper.parameters()][: 1 if how == "fewer parameters" and rank == 1 else 2]
    optimizer = torch.optim.SGD([{"params": parameters}, {"params": plain.parameters()}], lr=rate, momentum=0.5)
    said = []
    for i in range(3):
        if i == 1 and rank == 1 and "rate" in how:
            optimizer.param_groups[0]["lr"] = rate * 0.5
        if i == 1 and rank == 1 and how == "momentum":
            optimizer.param_groups[0]["momentum"] = 0.6
        if i == 1 and rank == 1 and how == "of another model":
            optimizer.param_groups[1]["lr"] = 0.01
        try:
            wrapper(torch.ones(2, 3)).sum().backward()
            said.append("")
        except plumb.Error as error:
            said.append(str(error))
            break
        optimizer.step()
        kept.step()
        optimizer.zero_grad()
    return said


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("rate", "lr of group 0 of SGD, which stepped the wrapped model, is 0.05 on rank 1, where it is 0.1 on rank 0"),
        ("a rate that is a tensor", "lr of group 0 of SGD"),
        ("momentum", "momentum of group 0 of SGD"),
        ("fewer parameters", "the number of parameters in group 0 of SGD"),
        ("of another model", ""),
    ],
)
def test_a_step_by_other_numbers_on_one_rank_is_an_error_of_the_next_backward(how: str, expected: str) -> None:
    for rank, said in enumerate(plumb.spawn(differently, 2, (how,))):
        assert expected in said[-1] and (not expected or f"rank {rank}: " in said[-1]), said
        assert not any(said[:-1]) and len(said) == (2 if how == "fewer parameters" else 3)
        assert "at step" not in said[-1]  # of the engine, which takes none here


def alike() -> float:
    """Steps that are counted, or need not be: nested ones, of other models, in joins, of closures, a checkpoint's on one rank."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    wrapper = plumb.DistributedDataParallel(torch.nn.Linear(3, 3))
    other = torch.nn.Linear(3, 3)
    alone = torch.optim.SGD(other.parameters(), lr=0.1)
    split = ZeroRedundancyOptimizer(wrapper.parameters(), torch.optim.SGD, lr=0.1)  # type: ignore[no-untyped-call]
    plain = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    whole = torch.optim.LBFGS(wrapper.parameters(), max_iter=3)

    def loss() -> torch.Tensor:
        plain.zero_grad()
        made: torch.Tensor = wrapper(torch.full((2, 3), 1.0 + rank)).pow(2).mean()
        made.backward()
        return made

    for optimizer in (split, plain, whole, plain):
        loss()
        optimizer.step(loss) if optimizer is whole else optimizer.step()
        for _ in range(rank):
            alone.step()
    plain.zero_grad()
    if rank == 0:
        get_optimizer_state_dict(wrapper, plain)
    with wrapper.join():
        for _ in range(1 + 2 * rank):
            loss()
            plain.step()
    loss()
    plain.step()
    loss()
    return float(sum(parameter.detach().double().sum() for parameter in wrapper.parameters()))


def test_steps_that_every_rank_takes_are_none_of_our_business() -> None:
    first, second = plumb.spawn(alike, 2)
    assert first == second


# ---- backwards inside no_sync alone, and wrappers of one module


def switched_by_hand() -> list[float]:
    rank = dist.get_rank()
    wrapper = plumb.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    seen = []

    def looks(factor: float) -> None:
        wrapper(torch.full((1, 1), factor * (1.0 + rank))).sum().backward()
        assert wrapper.module.weight.grad is not None
        seen.append(wrapper.module.weight.grad.item())

    for i in range(3):
        wrapper.require_backward_grad_sync = i == 2
        looks(1.0)
    with wrapper.no_sync():
        looks(10.0)
        wrapper.require_backward_grad_sync = True
        looks(0.0)
        wrapper.require_backward_grad_sync = False
        again = plumb.DistributedDataParallel(wrapper.module)
        assert again.require_backward_grad_sync and not wrapper.require_backward_grad_sync
        looks(100.0)
    assert copy.deepcopy(again).require_backward_grad_sync
    looks(0.0)
    wrapper.require_backward_grad_sync = False
    return seen


def replicated() -> list[float]:
    """torch's composable replicate, which has a wrapper inside, as ``python -m plumb`` rebinds it."""
    from torch.distributed._composable.replicate import replicate

    from plumb.rebind import rebind

    rebind()
    rank = dist.get_rank()
    model = torch.nn.Linear(1, 1, bias=False)
    replicate(model)
    seen = []
    for syncs in (False, True):
        model.set_requires_gradient_sync(syncs)
        first, second = (model(torch.full((1, 1), factor * (1.0 + rank))).sum() for factor in (1.0, 10.0))
        first.backward()
        second.backward()  # torch's reduces nothing here, in silence
        seen.append(model.weight.grad.item())
    assert isinstance(replicate.state(model)._ddp, plumb.DistributedDataParallel)
    return seen


def closed_inside_of_its_scopes() -> None:
    for scope in ("no_sync", "one_pass", "gathered"):
        model = torch.nn.Linear(2, 2)
        engine = plumb.Engine(model, plumb.SGD(), strategy="zero3")
        with engine.gathered(model) if scope == "gathered" else getattr(engine, scope)():
            engine.close()  # the scope's end was one of the process


def both_by_hand() -> tuple[list[float], list[float]]:
    dist.init_process_group("gloo")
    closed_inside_of_its_scopes()
    return switched_by_hand(), replicated()


@functools.cache
def by_hand() -> tuple[tuple[list[float], list[float]], ...]:
    return tuple(plumb.spawn(both_by_hand, 2))


def test_composable_replicate_is_right() -> None:
    (_, first), (_, second) = by_hand()
    assert (first, second) == ([11.0, 33.0], [22.0, 33.0])


def test_reductions_may_be_switched_by_hand() -> None:
    # Held: each rank's own sum. Then the mean over ranks, which stays one where it is reduced again.
    (first, _), (second, _) = by_hand()
    assert first == [1.0, 2.0, 4.5, 14.5, 19.5, 119.5, 169.5]
    assert second == [2.0, 4.0, 4.5, 24.5, 19.5, 219.5, 169.5]


def only_held() -> list[list[float]]:
    """Steps of optimizers over parts of the model, after backwards that were all inside no_sync: many, as looks become rarer."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    wrapper = plumb.DistributedDataParallel(torch.nn.Linear(2, 2))
    last = torch.optim.SGD([wrapper.module.bias], lr=0.1)
    first = torch.optim.SGD([wrapper.module.weight], lr=0.1)
    seen = []
    for i in range(7):
        with wrapper.no_sync():
            with wrapper.no_sync():
                wrapper(torch.full((1, 2), 1.0 + rank + i)).sum().backward()
            assert not wrapper.require_backward_grad_sync, "the outer scope has not ended"
            wrapper(torch.full((1, 2), 1.0)).sum().backward()
        assert wrapper.require_backward_grad_sync
        (last if i % 2 else first).step()
        (first if i % 2 else last).step()
        seen.append([*wrapper.module.weight.detach().flatten().tolist(), *wrapper.module.bias.detach().tolist()])
        first.zero_grad()
        last.zero_grad()
    return seen


def test_whatever_is_stepped_first_is_reduced_first_every_time() -> None:
    torch.manual_seed(3)
    twin = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    expected = []
    for i in range(7):
        optimizer.zero_grad()
        (sum(twin(torch.full((1, 2), 1.0 + rank + i)).sum() + twin(torch.full((1, 2), 1.0)).sum() for rank in range(2)) / 2).backward()
        optimizer.step()
        expected.append([*twin.weight.detach().flatten().tolist(), *twin.bias.detach().tolist()])
    for found in plumb.spawn(only_held, 2):
        assert found == [pytest.approx(one, abs=1e-5) for one in expected]


def wrapped_twice() -> list[Any]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    module = torch.nn.Linear(2, 1)
    old = plumb.DistributedDataParallel(module)
    before = old.engine
    new = plumb.DistributedDataParallel(module)
    found: list[Any] = [before.closed, old.engine is new.engine]
    for wrapper in (old, new):
        module.zero_grad()
        with wrapper.no_sync():
            wrapper(torch.full((1, 2), 1.0 + rank)).sum().backward()
        found.append(module.weight.grad.flatten().tolist())
        wrapper(torch.full((1, 2), 3.0)).sum().backward()
        found.append(module.weight.grad.flatten().tolist())
    try:
        larger = plumb.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 1), module))
        plumb.DistributedDataParallel(module)
        larger.train()
    except plumb.Error as error:
        found.append(str(error))
    return found


def test_a_module_that_is_wrapped_again_has_one_engine() -> None:
    for rank, found in enumerate(plumb.spawn(wrapped_twice, 2)):
        assert found[:2] == [True, True]
        held, mean = [1.0 + rank] * 2, [1.5 + 3.0] * 2
        assert found[2:6] == [held, mean, held, mean]
        assert "belongs to another DistributedDataParallel, which has more parameters" in found[6]


def copied_with_its_hook() -> list[Any]:
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    wrapper = plumb.DistributedDataParallel(torch.nn.Linear(64, 64))

    def doubled(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        mean = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return mean.then(lambda done: done.value()[0])  # type: ignore[no-any-return]

    wrapper.register_comm_hook(None, doubled)
    found = []
    for one in (wrapper, copy.deepcopy(wrapper)):
        one(torch.full((1, 64), 1.0 + dist.get_rank())).sum().backward()
        found.append(float(one.module.weight.grad[0, 0]))
    layers = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    sizes = [len(plumb.DistributedDataParallel(copy.deepcopy(layers), bucket_cap_mb=cap).engine._engine.bucket_bytes) for cap in (0.001, 1)]
    return [*sizes, *found]


def test_a_copy_has_the_hook_and_buckets_are_as_large_as_told() -> None:
    for found in plumb.spawn(copied_with_its_hook, 2):
        assert found == [8, 1, 3.0, 3.0], found


PROGRAM = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(2, 2))
model(torch.ones(1, 2) * (1 + dist.get_rank())).sum().backward()
print(type(model).__module__, float(model.module.weight.grad[0, 0]))
dist.destroy_process_group()
"""


def test_an_unchanged_program_runs(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    package = str(pathlib.Path(plumb._C.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": package, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "plumb", str(program)], env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["plumb.ddp", "1.0"]
    assert "plumb: torch.nn.parallel.DistributedDataParallel is plumb.DistributedDataParallel" in done.stderr


def makes_state_on_one_rank() -> list[float]:
    """As checkpoints do, by a step at rate 0 that moves nothing; and a step of one rank alone that moves something."""
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = plumb.DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        assert get_optimizer_state_dict(model, optimizer)["state"]
    for _ in range(2):
        model(torch.ones(1, 2) * dist.get_rank()).sum().backward()
        optimizer.step()
    values = model.module.weight.flatten().tolist()
    if dist.get_rank() == 0:
        optimizer.step()
    with pytest.raises(plumb.Error, match="the number of optimizer steps"):
        model(torch.ones(1, 2)).sum().backward()
    return values


def test_a_step_that_moves_nothing_may_be_one_ranks_alone() -> None:
    first, second = plumb.spawn(makes_state_on_one_rank, 2)
    assert first == second


def begins_counts_on(callers: int) -> str | list[float]:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = plumb.DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if dist.get_rank() < callers:
        get_optimizer_state_dict(model, optimizer)
    try:
        for _ in range(2):
            model(torch.ones(1, 2) * (1 + dist.get_rank())).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except plumb.Error as error:
        return str(error)
    values: list[float] = model.module.weight.flatten().tolist()
    return values


@pytest.mark.parametrize("callers", [0, 1, 2])
def test_a_step_at_rate_zero_that_counts_is_every_ranks_or_an_error(callers: int) -> None:
    """torch begins an AdamW's state by a step that moves nothing, and the next ones are corrected by it: on one rank alone, that one
    would have parameters of its own."""
    first, second = plumb.spawn(begins_counts_on, 2, (callers,))
    if callers == 1:
        assert all("at rate 0 that counted as updates" in said for said in (first, second)), (first, second)
    else:
        assert first == second and isinstance(first, list)
