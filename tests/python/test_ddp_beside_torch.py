"""The same calls on torch's wrapper and on plumb.DistributedDataParallel: buffers, gradients and flags are alike after each of them."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Torchs
from torch.nn.parallel.distributed import _MixedPrecision

import plumb

State = list[Any]


class Counted(nn.Module):
    """Its buffer counts each rank's own calls, in its own steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 1)
        self.register_buffer("calls", torch.full((1,), 100.0 * dist.get_rank()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1.0 + dist.get_rank()
        return self.two(torch.tanh(self.one(x)))


def look(wrapper: Any) -> State:
    grads = [None if p.grad is None else p.grad.flatten().tolist() for p in wrapper.module.parameters()]
    flags = [wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync, wrapper.module.training]
    return [float(wrapper.module.calls), flags, grads]


def data(i: int) -> torch.Tensor:
    return torch.randn(3, 2, generator=torch.Generator().manual_seed(10 * dist.get_rank() + i))


def modes(wrapper: Any) -> Iterator[State]:
    """Forwards with and without graphs, reductions and training, in turns."""
    turns = ("plain", "no graph", "plain", "no sync", "plain", "eval", "plain", "no sync", "no graph", "plain")
    for i, turn in enumerate(turns):
        wrapper.train(turn != "eval")
        with contextlib.ExitStack() as around:
            if turn == "no sync":
                around.enter_context(wrapper.no_sync())
            if turn == "no graph":
                around.enter_context(torch.no_grad())
            loss = wrapper(data(i)).pow(2).sum()
            yield look(wrapper)
            if turn != "no graph":
                loss.backward()
        yield look(wrapper)


def thrown(wrapper: Any) -> Iterator[State]:
    """Scopes that an exception leaves."""
    for i in range(2):
        with pytest.raises(KeyError), wrapper.no_sync():
            raise KeyError
        yield look(wrapper)
        wrapper(data(i)).sum().backward()
        yield look(wrapper)


def joined(wrapper: Any, **how: Any) -> Iterator[State]:
    """Batches that run out on a rank, and what comes after the join."""
    for _ in range(2):
        with wrapper.join(**how):
            for i in range(1 + 2 * dist.get_rank()):
                wrapper.zero_grad()
                wrapper(data(i)).pow(2).sum().backward()
                yield [None, None, look(wrapper)[2]]
        wrapper.zero_grad()
        wrapper(data(7)).pow(2).sum().backward()
        yield look(wrapper)


def joined_by_fewer(wrapper: Any) -> Iterator[State]:
    yield from joined(wrapper, divide_by_initial_world_size=False)


def joined_and_held(wrapper: Any) -> Iterator[State]:
    """Every second backward keeps its gradients; what is reduced is cleared, which a rank that ran out does not see."""
    with wrapper.join():
        for i in range(2 + 4 * dist.get_rank()):
            with wrapper.no_sync() if i % 2 == 0 else contextlib.nullcontext():
                wrapper(data(i)).pow(2).sum().backward()
            if i % 2:
                yield [None, None, look(wrapper)[2]]
                wrapper.zero_grad()
    wrapper.zero_grad()
    wrapper(data(7)).pow(2).sum().backward()
    yield look(wrapper)


def disabled(wrapper: Any) -> Iterator[State]:
    with wrapper.join(enable=False):
        wrapper(data(0)).pow(2).sum().backward()
        yield look(wrapper)


def group_anew(wrapper: Any) -> Iterator[State]:
    """Each rank keeps the values it has."""
    if isinstance(wrapper, plumb.DistributedDataParallel):
        with torch.no_grad():
            wrapper.module.two.bias.fill_(float(dist.get_rank()))
        wrapper._update_process_group(dist.group.WORLD)
        assert float(wrapper.module.two.bias) == dist.get_rank()
        with torch.no_grad():
            wrapper.module.two.bias.fill_(0.5)
    else:
        wrapper.module.two.bias.data.fill_(0.5)
    wrapper(data(0)).pow(2).sum().backward()
    yield look(wrapper)


def copied(wrapper: Any) -> Iterator[State]:
    """A copy has the values that it was copied from, or was given since, on each rank."""
    twin = copy.deepcopy(wrapper)
    with torch.no_grad():
        twin.module.two.bias.fill_(float(dist.get_rank()))
    for i in range(2):
        twin(data(i)).pow(2).sum().backward()
        yield [*look(twin), float(twin.module.two.bias)]
    if isinstance(twin, plumb.DistributedDataParallel):
        twin.engine.close()


SCRIPTS = [copied, modes, thrown, joined, joined_by_fewer, joined_and_held, disabled, group_anew]
WITH: list[dict[str, Any]] = [{}, {"broadcast_buffers": False}, {"bucket_cap_mb": 1e-5}]


def beside() -> list[tuple[str, list[State], list[State]]]:
    dist.init_process_group("gloo")
    found = []
    for script in SCRIPTS:
        for arguments in WITH if script is modes else WITH[:1]:
            seen = []
            for kind in (Torchs, plumb.DistributedDataParallel):
                wrapper = kind(Counted(), find_unused_parameters=kind is Torchs, **arguments)
                seen.append(list(script(wrapper)))
                if kind is not Torchs:
                    wrapper.engine.close()
            found.append((f"{script.__name__} {arguments}", *seen))
    return found


def close(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(close, one, other))
    return one == other if not isinstance(one, float) else one == pytest.approx(other, abs=1e-6)


def test_after_each_call_all_is_as_with_torchs_wrapper() -> None:
    for rank, found in enumerate(plumb.spawn(beside, 2)):
        for what, theirs, ours in found:
            for i, (one, other) in enumerate(zip(theirs, ours, strict=True)):
                assert close(one, other), f"rank {rank}, {what}, look {i}: {one} of torch's, {other} of ours"


def own_habits() -> None:
    """What torch's wrapper does not do, or does on GPUs alone."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    module = Counted()
    Torchs._set_params_and_buffers_to_ignore_for_model(module, ["one.bias"])
    seen: list[torch.dtype] = []
    module.one.register_forward_pre_hook(lambda one, _: seen.extend((one.weight.dtype, one.bias.dtype)))
    with pytest.raises((RuntimeError, TypeError)):  # its own dtype beside the others', as torch has it
        wrapper = plumb.DistributedDataParallel(module, mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
        wrapper(data(0).bfloat16())
    assert seen == [torch.bfloat16, torch.float32]
    wrapper.engine.close()

    wrapper = plumb.DistributedDataParallel(Counted(), bucket_cap_mb=1e-5)
    plain = [p.numel() * 4 for p in wrapper.module.parameters()]
    assert len(wrapper.engine._engine.bucket_bytes) == len(plain)
    optimizer = torch.optim.SGD([wrapper.module.two.bias], lr=0.1)
    for _ in range(2):  # inside of a backward a step may be of one rank alone
        handle = wrapper.module.two.bias.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        if rank:
            handle.remove()
        wrapper(data(1)).sum().backward()
        handle.remove()
    wrapper(data(1)).sum().backward()
    wrapper.engine.close()

    wrapper = plumb.DistributedDataParallel(Counted())
    for count in range(3):  # parameters that come late are noticed in one of the first forwards
        wrapper(data(count)).sum().backward()
        if count == 1:
            wrapper.module.late = nn.Parameter(torch.ones(1))
            with pytest.raises(plumb.Error, match="'late' came into the model after it was wrapped"):
                wrapper(data(count))
            del wrapper.module.late
    wrapper.engine.close()
    optimizers_go_when_they_go()
    held_by_several()
    parts_of_what_was_let_go()
    of_a_group()


def optimizers_go_when_they_go() -> None:
    """One that is gone here and not there is no difference; a rate that differed is one, however many optimizers stepped since."""
    rank = dist.get_rank()
    wrapper = plumb.DistributedDataParallel(Counted())

    def step(rate: float) -> None:
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=rate)
        known: list[Any] = [optimizer]
        known.append(known)  # as of a trainer, which somebody must find to be garbage
        optimizer.step()

    gc.disable()
    for rate in (0.1, 0.2, 0.3):
        wrapper(data(0)).sum().backward()
        step(rate)
        if rank == 0:
            gc.collect()
    gc.enable()
    step(0.5 if rank == 0 else 0.25)
    for _ in range(40):
        step(0.1)
    with pytest.raises(plumb.Error, match="numbers of optimizers that stepped the wrapped model"):
        wrapper(data(0)).sum().backward()
    wrapper.engine.close()


def held_by_several() -> None:
    """What several wrappers hold is reduced in one order on every rank, wherever their memory is."""
    rank, kind = dist.get_rank(), plumb.DistributedDataParallel
    places = [kind.__new__(kind) for _ in range(6 * rank)]
    while places:  # the next ones lie in their places, from the last to the first
        places.pop(0)
    wrappers = [kind(nn.Linear(2 + i, 1, bias=False)) for i in range(6)]
    before = [wrapper.module.weight.detach().clone() for wrapper in wrappers]
    optimizer = torch.optim.SGD([p for wrapper in wrappers for p in wrapper.parameters()], lr=0.5)
    for i, wrapper in enumerate(wrappers):
        with wrapper.no_sync():
            wrapper(torch.full((1, 2 + i), 1.0 + 2 * rank)).sum().backward()
    optimizer.step()
    for wrapper, was in zip(wrappers, before, strict=True):
        torch.testing.assert_close(wrapper.module.weight.detach(), was - 1.0)
        wrapper.engine.close()


def of_a_group() -> None:
    """Ranks are those of the wrapper's group."""
    rank = dist.get_rank()
    group = [dist.new_group([one]) for one in range(2)][rank]
    model, alone = Counted(), Counted()
    wrapper = plumb.DistributedDataParallel(model, process_group=group)
    wrapper.register_comm_hook(None, lambda _, bucket: wrapper.reducer._run_allreduce_hook(bucket))
    for around in (contextlib.nullcontext(), wrapper.join()):
        for one in (model, alone):
            one.zero_grad()
        with around:
            wrapper(data(0)).pow(2).sum().backward()
        alone(data(0)).pow(2).sum().backward()
        for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, its.grad)
    wrapper.engine.close()


def parts_of_what_was_let_go() -> None:
    """A wrapper that was closed has no parameters any more, also where it had others beside."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    whole = plumb.DistributedDataParallel(model)
    with pytest.raises(plumb.Error, match="belongs to another DistributedDataParallel"):
        plumb.DistributedDataParallel(model[1])
    whole(torch.ones(1, 2)).sum().backward()
    closed = whole.engine
    assert not closed.closed
    whole._remove_autograd_hooks()
    part = plumb.DistributedDataParallel(model[1])
    part.zero_grad()
    part(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
    assert part.module.weight.grad.eq(1.5).all() and whole.engine is closed
    part.engine.close()


def test_habits_of_ours_beside_torchs() -> None:
    plumb.spawn(own_habits, 2)
