"""Models built in parts: under plumb.deferred(), and on the meta device. Values are those of one process."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import plumb
from programs import plain
from stage import Block, Net, distance, reference, trained


class FilledNet(Net):
    def reset_parameters(self) -> None:
        self.seen.zero_()


def _net(tied: bool) -> Net:
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    return FilledNet(tied)


def _bytes(module: nn.Module) -> int:
    return sum(parameter.untyped_storage().nbytes() for parameter in module.parameters())


def _deferred(how: str, strategy: str, tied: bool) -> float:
    twin = _net(tied)
    if how == "classes":
        with plumb.deferred([Block]):
            model = _net(tied)
        for block in model.blocks:
            assert _bytes(block) == 0, "a unit was not cut"
        with pytest.raises(RuntimeError, match="before an engine"):
            model.blocks[0](torch.ones(1, 12))
    else:
        with torch.device("meta"):
            model = _net(tied)
        torch.manual_seed(1)
        torch.set_default_dtype(torch.float64)
    size = plumb.world().size
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with plumb.Engine(model, optimizer, strategy=strategy, units=[Block]) as engine:
        if not tied:  # one process draws a tied weight once more than it is kept
            assert distance(engine, model, twin) == 0.0, "other values than one process makes"
        else:
            for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
                other.data.copy_(engine.full_parameter(mine))
        trained(model, plain, engine)
        reference(twin, plain, size, torch.optim.SGD(twin.parameters(), lr=0.1))
        return distance(engine, model, twin)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("strategy", ["zero3", "hsdp", "ddp"])
@pytest.mark.parametrize("how", ["classes", "meta"])
def test_values_are_those_of_one_process(how: str, strategy: str, tied: bool) -> None:
    for away in plumb.spawn(_deferred, 2, (how, strategy, tied)):
        assert away <= 1e-10


def _marked() -> tuple[int, bool]:
    torch.manual_seed(3)
    whole = nn.Linear(6, 6)
    torch.manual_seed(3)
    with plumb.deferred():
        model = plumb.unit(nn.Linear(6, 6))
    held = _bytes(model)
    with plumb.Engine(model, plumb.SGD(lr=0.1), strategy="zero3") as engine:
        return held, torch.equal(engine.full_parameter(model.weight), whole.weight)


def test_units_by_hand_are_cut() -> None:
    assert plumb.spawn(_marked, 2) == [(0, True)] * 2


def _different() -> str:
    torch.manual_seed(plumb.world().rank)
    with plumb.deferred([nn.Linear]):
        model = nn.Sequential(nn.Linear(4, 4))
    try:
        plumb.Engine(model, plumb.SGD(lr=0.1), strategy="zero3", units=[nn.Linear])
    except plumb.Error as error:
        return str(error)
    return "nothing"


def test_ranks_that_drew_other_values_are_told() -> None:
    for said in plumb.spawn(_different, 2):
        assert "different values" in said and "seed" in said


@pytest.mark.parametrize("buffers_alone", [False, True])
def test_what_has_values_already_keeps_them_beside_what_is_on_the_meta_device(buffers_alone: bool) -> None:
    """As where a part of a model was loaded, and the rest is new."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    for name, buffer in list(model[1].named_buffers()):
        model[1].register_buffer(name, buffer.to("meta"))
    model[0].bias = nn.Parameter(torch.zeros(2, device="cpu" if buffers_alone else "meta"), requires_grad=False)
    with torch.no_grad():
        model[0].weight.fill_(3.0)
        model[1].weight.fill_(4.0)
    with plumb.Engine(model, plumb.SGD(lr=0.1)):
        assert model[0].weight.eq(3.0).all() and model[1].weight.eq(4.0).all()
        assert not model[0].bias.is_meta and not model[0].bias.requires_grad and model[0].bias.abs().max() < 1.0
        assert model[1].running_var.tolist() == [1.0, 1.0] and model[1].num_batches_tracked.item() == 0


def test_what_was_on_the_meta_device_has_its_dtype_and_its_order_of_elements() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(3)).bfloat16()  # type: ignore[call-overload]
    expected = [(name, one.dtype, one.stride()) for name, one in (*model.named_parameters(), *model.named_buffers())]
    with plumb.Engine(model, plumb.SGD(lr=0.1)):
        assert [(name, one.dtype, one.stride()) for name, one in (*model.named_parameters(), *model.named_buffers())] == expected
        assert {dtype for _, dtype, _ in expected} == {torch.bfloat16, torch.int64}


def test_a_model_that_is_built_later_is_whole() -> None:
    def build() -> list[int]:
        alone = plumb.World()
        with plumb.deferred([nn.Linear], world=alone):
            one = nn.Linear(6, 6)  # of a world of one rank
        with pytest.raises(KeyError), plumb.deferred([nn.Linear]):
            raise KeyError
        return [_bytes(one), _bytes(nn.Linear(6, 6)), _bytes(plumb.unit(nn.Linear(6, 6)))]

    assert plumb.spawn(build, 2) == [[4 * 42] * 3] * 2


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


def test_a_module_that_cannot_make_its_values_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), NoReset())
    with pytest.raises(plumb.Error, match=r"'1' \(NoReset\).*reset_parameters"):
        plumb.Engine(model, plumb.SGD(lr=0.1))
    with pytest.raises(plumb.Error, match="classes of modules"):
        with plumb.deferred([3]):  # type: ignore[list-item]
            pass


def _over_a_mesh(shape: tuple[int, ...], strategy: str) -> Any:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", shape)
    torch.set_default_dtype(torch.float64)
    model = _net(False)
    twin = copy.deepcopy(model)
    with plumb.Engine(model, plumb.SGD(lr=0.1), strategy=strategy, units=[Block], mesh=mesh) as engine:
        assert engine.world.size == 4
        trained(model, plain, engine)
        reference(twin, plain, 4, torch.optim.SGD(twin.parameters(), lr=0.1))
        away = distance(engine, model, twin)
    model, twin = _net(False), _net(False)
    mine = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "shard"))["shard"]  # each half of the world on its own
    with plumb.Engine(model, plumb.SGD(lr=0.1), strategy=strategy, units=[Block], mesh=mine) as engine:
        assert engine.world.size == 2 and engine.world.rank == dist.get_rank() % 2
        trained(model, plain, engine)
        reference(twin, plain, 2, torch.optim.SGD(twin.parameters(), lr=0.1))
        away = max(away, distance(engine, model, twin))
    with pytest.raises(plumb.Error, match="leave world= out"):
        plumb.Engine(model, plumb.SGD(lr=0.1), mesh=mesh, world=plumb.world())
    return away


@pytest.mark.parametrize("shape,strategy", [((4,), "zero3"), ((2, 2), "zero3"), ((4,), "ddp")])
def test_a_device_mesh_says_who_takes_part(shape: tuple[int, ...], strategy: str) -> None:
    for away in plumb.spawn(_over_a_mesh, 4, (shape, strategy)):
        assert away <= 1e-10


class Filled(nn.Linear):
    """Goes on after the class that may be named has built it."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        nn.init.ones_(self.weight)


def built_by_a_derived_class() -> list[Any]:
    before = nn.Linear.__init__
    with plumb.deferred([nn.Linear]):
        derived, plain = Filled(6), nn.Linear(6, 6)
        with plumb.deferred([Filled], world=plumb.World()):
            alone = Filled(6)  # of a world of one rank
        with plumb.deferred([Filled]):
            both = Filled(6)
        again = nn.Linear(6, 6)
    with plumb.Engine(nn.Sequential(derived), plumb.SGD(lr=0.1), strategy="zero3", units=[nn.Linear]) as engine:
        ones = bool(engine.full_parameter(derived.weight).eq(1).all())
    return [ones, *(_bytes(one) for one in (plain, alone, both, again)), nn.Linear.__init__ is before]


def test_a_class_derived_from_a_named_one_builds_itself_to_its_end() -> None:
    assert plumb.spawn(built_by_a_derived_class, 2) == [[True, 0, 4 * 42, 0, 0, True]] * 2


class Counted(nn.Module):
    """Values that need no generator, which ranks that are threads share; and a class that leaves its building to its base."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(8.0))


class Inherits(Counted):
    pass


def built_beside(barrier: threading.Barrier) -> list[Any]:
    """The contexts of two ranks overlap, and the first that began ends first."""
    rank = plumb.world().rank
    if rank == 1:
        barrier.wait()
    with plumb.deferred([Counted, Inherits]):
        barrier.wait() if rank == 0 else None
        barrier.wait()
        model = nn.Sequential(Counted(), Inherits())
        barrier.wait()
        if rank == 1:
            barrier.wait()
            model.append(Counted())
        else:
            model.append(Inherits())
    if rank == 0:
        barrier.wait()
    barrier.wait()
    held = _bytes(model)
    with plumb.Engine(model, plumb.SGD(lr=0.1), strategy="zero3", units=[Counted]) as engine:
        return [held, *(engine.full_parameter(parameter).tolist() for parameter in model.parameters())]


def test_ranks_that_are_threads_build_their_own_parts_and_leave_classes_as_they_were() -> None:
    before = Counted.__init__
    for _ in range(2):
        assert plumb.spawn(built_beside, 2, (threading.Barrier(2),), method="thread") == [[0, *[list(range(8))] * 3]] * 2
        assert Counted.__init__ is before and "__init__" not in vars(Inherits)


def marked_on_the_meta_device() -> bool:
    with plumb.deferred(), torch.device("meta"):
        model = nn.Sequential(plumb.unit(nn.Linear(6, 6)), nn.BatchNorm1d(6, affine=False))
    with plumb.Engine(model, plumb.SGD(lr=0.1), strategy="zero3") as engine:
        model(torch.ones(2, 6)).sum().backward()
        return bool(engine.full_parameter(model[0].weight).abs().max() > 0)


def test_a_unit_of_the_meta_device_is_filled_under_deferred_too() -> None:
    assert plumb.spawn(marked_on_the_meta_device, 2) == [True] * 2
