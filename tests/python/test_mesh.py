"""Meshes and groups of torch.distributed as worlds: who takes part, in which order, and over which axes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import plumb
from plumb.world import of_mesh


def said(call: Any) -> str:
    try:
        call()
    except plumb.Error as error:
        return str(error)
    return "nothing"


def worlds_of_meshes() -> dict[str, Any]:
    dist.init_process_group("gloo")
    me = dist.get_rank()
    found: dict[str, Any] = {}

    def ask(name: str, ranks: Any) -> None:
        mesh = DeviceMesh("cpu", torch.tensor(ranks))
        try:
            world, axes = of_mesh(mesh)
        except plumb.Error as error:
            found[name] = str(error)
            return
        again, _ = of_mesh(mesh)
        assert again is world or world.size == 1
        found[name] = (world.rank, world.size, axes.replicate, axes.shard, world is plumb.world())
        if world.size > 1:
            world.barrier()

    ask("all in a row", [0, 1, 2, 3])
    ask("all in two rows", [[0, 1], [2, 3]])
    ask("in columns", [[0, 2], [1, 3]])
    ask("some in a row", [1, 3])
    ask("two rows of one", [[0], [2]])
    ask("other rows of one", [[0], [3]])
    ask("one", [2])
    ask("one of two dimensions", [[1]])
    ask("three dimensions", [[[0, 1], [2, 3]]])
    ask("not in their order", [[0, 1], [3, 2]])
    ask("rows not in their order", [[2, 3], [0, 1]])

    # Groups of torch.distributed.
    alone = [dist.new_group([rank]) for rank in range(4)]
    pair = dist.new_group([1, 2])
    assert (plumb.world(alone[me]).rank, plumb.world(alone[me]).size) == (0, 1)
    if me in (1, 2):
        world = plumb.world(pair)
        assert (world.rank, world.size) == (me - 1, 2)
        assert plumb.world(pair) is world and world is not plumb.world()
    else:
        assert "none of its ranks" in said(lambda: plumb.world(pair))
    assert plumb.world(dist.group.WORLD) is plumb.world()
    return found


def test_a_mesh_says_who_takes_part_and_over_which_axes() -> None:
    for me, found in enumerate(plumb.spawn(worlds_of_meshes, 4, timeout=300)):
        assert found["all in a row"] == (me, 4, 1, 4, True)
        assert found["all in two rows"] == (me, 4, 2, 2, True)
        # The ranks of the world are those of the mesh, row by row.
        assert found["in columns"] == ([0, 2, 1, 3].index(me), 4, 2, 2, False)
        for name, ranks, axes in ("some in a row", [1, 3], (1, 2)), ("two rows of one", [0, 2], (2, 1)), ("other rows of one", [0, 3], (2, 1)):
            if me in ranks:
                assert found[name] == (ranks.index(me), 2, *axes, False), name
            else:
                assert f"this process, rank {me}, is none of the mesh's ranks {ranks}" in found[name]
        for name, rank in ("one", 2), ("one of two dimensions", 1):
            assert found[name] == (0, 1, 1, 1, False) if me == rank else "is none of the mesh's ranks" in found[name]
        assert "the mesh has 3 dimensions; expected one" in found["three dimensions"]
        assert "[[0, 1], [3, 2]] do not ascend" in found["not in their order"]
        assert "[[2, 3], [0, 1]] do not ascend" in found["rows not in their order"]


def timeouts() -> list[Any]:
    """What our connections are told of how long they may wait."""
    import sys

    module, told = sys.modules["plumb.world"], []

    class Stub:
        @staticmethod
        def join(**words: Any) -> str:
            told.append(words["timeout"])
            return "world"

        @staticmethod
        def meet(*_: Any, **words: Any) -> str:
            told.append(words["timeout"])
            return "world"

    real, module.World = module.World, Stub  # type: ignore[attr-defined]
    plumb.world(timeout=7.0)
    dist.init_process_group("gloo")
    plumb.world(timeout=8.0)
    module.World = real  # type: ignore[attr-defined]
    module._worlds.clear()
    return told


def test_a_world_waits_as_long_as_it_is_told() -> None:
    assert plumb.spawn(timeouts, 2) == [[7.0, 8.0]] * 2


def test_our_connections_go_through_shared_memory_beside_gloo_alone() -> None:
    from plumb.world import _ours

    assert [_ours(backend, device) for backend, device in (("gloo", "cpu"), ("gloo", "cuda"), ("nccl", "cuda"), ("nccl", "cpu"))] == [
        "", "gloo", "nccl", "nccl",
    ]  # fmt: skip
