"""What one rank's plumb.DistributedDataParallel, or its engine, refuses before it is built is an error on every rank, at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import plumb


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


#: What rank 1 alone says, and the words of its error.
WRONG: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]], str]] = {
    "no module": (lambda: 3, dict, "wraps a module; this is a int"),  # type: ignore[arg-type, return-value]
    "one of two": (net, lambda: {"param_to_hook_all_reduce": nn.Parameter(torch.ones(1))}, "need to be set at the same time"),
    "devices": (net, lambda: {"device_ids": [0, 1]}, "device_ids can only be None or contain a single element"),
    "an output's device": (net, lambda: {"output_device": 1}, "only work with single-device"),
    "frozen": (lambda: net().requires_grad_(False), dict, "doesn't have any parameter that requires a gradient"),
    "lazy": (lambda: nn.LazyLinear(2), dict, "uninitialized parameters"),
    "a size": (net, lambda: {"bucket_cap_mb": "many"}, "many|str"),
    "a group": (net, lambda: {"process_group": 3}, ""),
    "a mesh": (net, lambda: {"device_mesh": init_device_mesh("cpu", (2, 1))}, "Only 1D device mesh is supported"),
    "a group and a mesh": (net, lambda: {"process_group": dist.group.WORLD, "device_mesh": init_device_mesh("cpu", (2,))}, "Cannot specify both"),
    "mixed precision": (net, lambda: {"mixed_precision": 3}, "mixed_precision is 3; expected"),
}


def wraps(module: Any, **arguments: Any) -> str:
    try:
        plumb.DistributedDataParallel(module, **arguments)
    except Exception as error:  # noqa: BLE001  (torch's are of several kinds)
        return str(error)
    return "nothing was said"


def wrapped_wrongly() -> dict[str, str]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    said = {}
    for what, (make, arguments, _) in WRONG.items():
        given = arguments()  # a mesh is made by all ranks together
        module = make()
        said[what] = wraps(module, **given) if rank == 1 else wraps(net())
    assert "device_ids can only be" in wraps(net(), device_ids=[0, 1]), "each rank says its own"
    others = dist.new_group([1])
    if rank == 0:  # nobody waits for it: told to all ranks, this would be the answer to what they wrap next
        assert "device_ids can only be" in wraps(net(), process_group=others, device_ids=[0, 1])
    model = plumb.DistributedDataParallel(net())  # and the processes go on
    model(torch.full((4, 2), 1.0 + rank) * torch.arange(4.0).view(4, 1)).pow(3).sum().backward()
    everywhere = [torch.empty(2, 2) for _ in range(2)]
    dist.all_gather(everywhere, model.module[0].weight.grad)
    assert torch.equal(*everywhere)
    return said


def test_what_one_rank_cannot_wrap_is_an_error_on_every_rank() -> None:
    zero, one = plumb.spawn(wrapped_wrongly, 2, timeout=100)
    for what, (_, _, words) in WRONG.items():
        assert words.split("|")[0] in one[what] or words.split("|")[-1] in one[what], (what, one[what])
        assert "rank 1 could not set up its engine" in zero[what], (what, zero[what])


def places_that_are_none() -> list[tuple[str, str]]:
    """Of an engine: ranks that one rank alone says wrongly."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    said = []
    wrong: list[dict[str, Any]] = [
        {"world": 3},
        {"world": plumb.world(), "mesh": init_device_mesh("cpu", (2,))},
        {"mesh": init_device_mesh("cpu", (1, 2, 1))},
    ]
    for options in wrong:
        with pytest.raises(plumb.Error) as refusal:
            plumb.Engine(net(), plumb.SGD(), **(options if rank == 1 else {}))
        said.append(str(refusal.value))
    return said  # type: ignore[return-value]


def test_ranks_that_one_rank_names_wrongly_are_an_error_of_every_engine() -> None:
    zero, one = plumb.spawn(places_that_are_none, 2, timeout=100)
    words = ("expected a plumb.World or a process group", "a DeviceMesh says which ranks take part", "the mesh has 3 dimensions")
    for there, here, expected in zip(zero, one, words, strict=True):
        assert expected in here and expected in there and "rank 1 could not set up its engine" in there, (there, here)
