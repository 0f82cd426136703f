"""What was read from a model under plumb.fully_shard (state dicts, detach, views) is its parameters ever after, as under torch's."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import plumb
from sharding import Cases

case = Cases(2)


class Tied(nn.Module):
    """Rows that ranks share unevenly, or that one has alone; one weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 3), nn.Linear(3, 4), nn.Linear(4, 1)
        self.again = nn.Linear(4, 3)
        self.again.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.second(self.again(self.second(self.first(x)))))
        return out


def built(shards: Any, **how: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Tied()
    return shards(model, reshard_after_forward=True, **how)  # type: ignore[no-any-return]


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).float().pow(2).sum().backward()
    optimizer.step()


def evaluate(model: nn.Module) -> float:
    with torch.no_grad():
        return float(model(torch.ones(2, 4)).sum())


def whole(value: Any) -> torch.Tensor:
    return value.detach().full_tensor().clone() if isinstance(value, DTensor) else value.detach().clone()


readers: dict[str, Callable[[nn.Module], list[torch.Tensor]]] = {
    "state dict": lambda model: list(model.state_dict().values()),
    "checkpoint's": lambda model: list(get_model_state_dict(model).values()),
    "detach": lambda model: [parameter.detach() for parameter in model.parameters()],
    "data": lambda model: [parameter.data for parameter in model.parameters()],
    "rows": lambda model: [parameter.detach().to_local() for parameter in model.parameters()],
    "views": lambda model: [parameter.detach().to_local().view(-1)[-1:] for parameter in model.parameters()],
}


def numbers(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [whole(tensor) for tensor in tensors]


def alike(mine: Any, theirs: Any, what: str) -> None:
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2, msg=lambda text: f"{what}: {text}")


policies = {
    "": {},
    "half": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


@case
def what_was_read_at_any_time_follows_the_training() -> None:
    for policy, how in policies.items():
        for what, read in readers.items():
            def program(shards: Any, how: Any = how, read: Any = read) -> list[torch.Tensor]:
                model = built(shards, **how)
                held = [read(model)]
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
                for _ in range(2):
                    train(model, optimizer)
                    held.append(read(model))
                    evaluate(model)
                    held.append(read(model))
                for one in held:  # each is what is read now
                    alike(numbers(one), numbers(read(model)), "held")
                train(model, optimizer)
                now = numbers(read(model))
                for one in held:
                    alike(numbers(one), now, "held after a step")
                return now

            alike(program(plumb.fully_shard), program(torchs), f"{policy} {what}")


@case
def what_is_written_into_what_was_read_is_the_model() -> None:
    for policy, how in policies.items():
        for what, read in readers.items():
            for at in range(5):
                def program(shards: Any, how: Any = how, read: Any = read, at: int = at) -> list[torch.Tensor]:
                    model = built(shards, **how)
                    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                    held: Any = None
                    seen = []

                    def write_at(now: int) -> None:
                        if now == at:
                            for tensor in held:
                                tensor.fill_(0.25)

                    held = read(model)
                    write_at(0)
                    train(model, optimizer)
                    write_at(1)
                    seen.append(evaluate(model))
                    write_at(2)
                    if at > 2:
                        held = read(model)
                    seen.append(evaluate(model))
                    write_at(3)
                    train(model, optimizer)
                    write_at(4)
                    seen.append(evaluate(model))
                    return [torch.tensor(seen), *numbers(list(model.parameters()))]

                alike(program(plumb.fully_shard), program(torchs), f"{policy} {what} at {at}")


@case
def a_state_dict_that_is_made_once_is_what_a_checkpoint_holds() -> None:
    model = built(plumb.fully_shard)
    kept = get_model_state_dict(model)  # as torchtitan's ModelWrapper has it
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        train(model, optimizer)
    folder: list[Any] = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(folder)
    dcp.save({"model": kept}, checkpoint_id=folder[0])
    trained = numbers(list(model.parameters()))
    read: dict[str, Any] = {"model": {"last.weight": torch.zeros(1, 4)}}
    dcp.load(read, checkpoint_id=folder[0])
    assert torch.equal(read["model"]["last.weight"], whole(model.get_parameter("last.weight")))
    train(model, optimizer)
    dcp.load({"model": kept}, checkpoint_id=folder[0])
    alike(numbers(list(model.parameters())), trained, "loaded in place")
    evaluate(model)
    alike(numbers(list(kept.values()))[:1], trained[:1], "kept")


@case
def a_model_that_gets_other_parameters_leaves_what_was_read_alone() -> None:
    def program(shards: Any) -> list[torch.Tensor]:
        model = built(shards)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer)
        old = model.state_dict()
        new = {name: torch.zeros_like(value) for name, value in old.items()}
        model.load_state_dict(new, assign=True)
        before = numbers(list(old.values()))
        evaluate(model)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        alike(numbers(list(old.values())), before, "old")
        alike(numbers(list(new.values())), numbers(list(model.state_dict().values())), "new")
        return before + numbers(list(new.values()))

    alike(program(plumb.fully_shard), program(torchs), "assigned")


@case
def rows_that_somebody_knows_the_address_of_stay_where_they_are() -> None:
    model = built(plumb.fully_shard)
    arrays = [parameter.detach().to_local().numpy() for parameter in model.parameters()]
    before = [array.copy() for array in arrays]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    evaluate(model)
    later = [parameter.detach().to_local().numpy() for parameter in model.parameters()]
    train(model, optimizer)
    evaluate(model)
    for array, was in zip(arrays, before, strict=True):
        assert (array == was).all()
    assert all(array.shape == was.shape for array, was in zip(later, before, strict=True))
    large = torch.arange(8.0)  # rows that lie in a part of something else
    mesh = init_device_mesh("cpu", (2,))
    plain = plumb.fully_shard(nn.Linear(2, 2, bias=False), mesh=mesh)
    plain.load_state_dict({"weight": DTensor.from_local(large[2:4].view(1, 2), mesh, [Shard(0)])}, assign=True)
    plain(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    assert torch.equal(large[4:], torch.arange(4.0, 8.0)) and torch.equal(whole(plain.weight), torch.tensor([[1.0, 2.0]] * 2))


@case
def copies_and_pickles_are_of_these_rows() -> None:
    model = built(plumb.fully_shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for ran in (False, True):
        if ran:
            train(model, optimizer)
            evaluate(model)
        state = model.state_dict()
        copied = copy.deepcopy(state)
        file = io.BytesIO()
        torch.save(state, file)
        assert len(file.getvalue()) < 12_000, "a file holds the rows alone"
        file.seek(0)
        read = torch.load(file, weights_only=False)
        for one in (copied, read):
            alike(numbers(list(one.values())), numbers(list(state.values())), "copied")
        local = {name: pickle.loads(pickle.dumps(value.to_local())) for name, value in state.items()}
        before = numbers(list(copied.values()))
        train(model, optimizer)
        alike(numbers(list(copied.values())), before, "a copy stays")
        assert all(value.untyped_storage().nbytes() == value.nbytes for value in local.values())


@case
def an_optimizers_state_over_the_same_rows_follows() -> None:
    class Anchored(torch.optim.SGD):  # pulls towards what it was built with, and keeps the parameters' memory beside
        def __init__(self, parameters: list[Any]) -> None:
            super().__init__(parameters, lr=0.1)
            for parameter in parameters:
                self.state[parameter] = {"begin": parameter.detach().clone(), "same": parameter.detach()}

    model = built(plumb.fully_shard)
    optimizer = Anchored(list(model.parameters()))
    for _ in range(2):
        train(model, optimizer)
        evaluate(model)
        for parameter in model.parameters():
            assert torch.equal(whole(optimizer.state[parameter]["same"]), whole(parameter))


@case
def what_was_read_outlives_the_model() -> None:
    model = built(plumb.fully_shard)
    held, rows = model.state_dict(), [parameter.detach().to_local() for parameter in model.parameters()]
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = numbers(list(held.values()))
    del model
    other = built(plumb.fully_shard)
    train(other, torch.optim.SGD(other.parameters(), lr=0.1))
    alike(numbers(list(held.values())), before, "held")
    assert all(torch.isfinite(one).all() for one in rows)
    for one in rows:
        one.zero_()
    assert all(not whole(value).any() for value in held.values())


@case
def what_foreach_writes_is_seen_by_the_next_forward() -> None:
    """By one, by whatever is over the same rows, also where one rank has no rows, or gets the numbers it had."""

    def program(shards: Any, how: Any, read: Any, often: int) -> list[torch.Tensor]:
        model = built(shards, **how)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.25)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        kept = read(model)
        seen = []
        for i in range(4):
            train(model, optimizer)
            for _ in range(often):
                with torch.no_grad():
                    torch._foreach_mul_(kept if i % 2 == 0 else read(model), 0.5)
                seen.append(evaluate(model))
        return [torch.tensor(seen), *numbers(list(model.parameters()))]

    for policy, how in policies.items():
        for what in ("parameters", "state dict", "detach"):
            for often in (1, 2):
                read = readers.get(what, lambda model: list(model.parameters()))
                alike(*(program(shards, how, read, often) for shards in (plumb.fully_shard, torchs)), f"{policy} {what}")


@case
def ranks_whose_rows_foreach_does_not_change_wait_for_the_others() -> None:
    for how in policies.values():
        torch.manual_seed(0)
        model = plumb.fully_shard(nn.Linear(4, 2, bias=False), **how)
        with torch.no_grad():
            model.weight.copy_(DTensor.from_local(torch.full((1, 4), float(dist.get_rank())), model.weight.device_mesh, [Shard(0)]))
        evaluate(model)
        model(torch.ones(2, 4)).sum().mul(0).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        for _ in range(3):
            with torch.no_grad():
                torch._foreach_mul_([model.weight], 0.5)
            seen = evaluate(model)
        assert seen == 2 * 4 * 0.5**3


@case
def what_is_written_past_any_count_is_seen_after_an_evaluation() -> None:
    for how in policies.values():
        model = built(plumb.fully_shard, **how)
        train(model, torch.optim.SGD(model.parameters(), lr=0.01))
        evaluate(model)
        for parameter in model.parameters():
            parameter.to_local().data.zero_()
        dist.barrier()
        assert evaluate(model) == 0


@case
def foreach_counts_what_its_siblings_count() -> None:
    model = built(plumb.fully_shard)
    parameter = next(model.parameters())
    before = parameter._version
    with torch.no_grad():
        torch._foreach_mul([parameter], 2.0)
        assert parameter._version == before
        for i, write in enumerate((
            lambda: torch._foreach_mul_([parameter.detach()], 1.0),
            lambda: torch._foreach_add_([parameter], [parameter.clone()], alpha=0),
            lambda: torch._foreach_lerp_([parameter], [parameter.clone()], 0.5),
            lambda: torch._foreach_zero_([parameter]),
        )):
            write()
            assert parameter._version == before + i + 1
    plain = torch.ones(3)
    torch._foreach_mul_([plain], 2.0)
    assert plain._version == 1 and torch.equal(plain, torch.full((3,), 2.0))


@pytest.mark.parametrize("name", case.all)
def test_fully_shard_aliases(name: str) -> None:
    case.check(name)


# ---- other worlds


def program(shards: Any, how: str) -> list[torch.Tensor]:
    """What was held at every point, at the end."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    if how == "replicas":
        shards(model, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s")))
    elif how == "tensor parallel":
        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        shards(model, mesh=mesh["dp"])
    else:
        shards(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    held = [model.state_dict()]
    for _ in range(2):
        train(model, optimizer)
        held.append(model.state_dict())
        evaluate(model)
        held.append(model.state_dict())
    for parameter in held[2].values():
        parameter.mul_(0.5)
    seen = torch.tensor(evaluate(model))
    train(model, optimizer)
    return [seen, *(whole(value) for one in held for value in one.values())]


@pytest.mark.parametrize(("how", "ranks"), [("one", 1), ("replicas", 2), ("replicas", 4), ("tensor parallel", 4)])
def test_what_was_read_follows_in_every_world(how: str, ranks: int) -> None:
    mine, theirs = (plumb.spawn(program, ranks, args=(shards, how), timeout=200) for shards in (plumb.fully_shard, torchs))
    for one, other in zip(mine, theirs, strict=True):
        alike(one, other, f"{how} on {ranks}")
