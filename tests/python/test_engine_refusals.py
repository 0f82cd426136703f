"""What an engine cannot be built over is an error on every rank that says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import plumb
from programs import plain
from stage import Play, compare, make


class Unmade(nn.Module):
    """On the meta device, with nothing that could give it values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, device="meta"))


def test_says_what_is_wrong_with_its_arguments() -> None:
    model = make()
    cases: list[tuple[str, Any]] = [
        ("expected a module", lambda: plumb.Engine(42)),  # type: ignore[arg-type]
        ("expected a module", lambda: plumb.Engine(list(model.parameters()))),  # type: ignore[arg-type]
        ("zero9", lambda: plumb.Engine(model, strategy="zero9")),
        ("expected plumb.AdamW", lambda: plumb.Engine(model, "adam")),  # type: ignore[arg-type]
        ("no such module", lambda: plumb.Engine(model, units=["blocks.9"])),
        ("no such module", lambda: plumb.Engine(model, units=[nn.Conv2d])),
        ("none of the engine's", lambda: plumb.Engine(model, torch.optim.SGD(make().parameters(), lr=0.1))),
        ("plumb.World or a process group", lambda: plumb.Engine(model, world=3)),  # type: ignore[arg-type]
        ("clip_norm", lambda: plumb.Engine(model, clip_norm=-1.0)),
        ("reset_parameters", lambda: plumb.Engine(Unmade())),
        ("nothing to train", lambda: plumb.Engine(make().requires_grad_(False))),
        ("'weight' is of a lazy module", lambda: plumb.Engine(torch.nn.LazyLinear(3))),
        ("matches no parameter", lambda: plumb.Engine(model, plumb.SGD(), groups=[{"match": "xyz", "lr": 1.0}])),
        ("a torch.optim object has its own", lambda: plumb.Engine(model, torch.optim.SGD(model.parameters()), schedule=plumb.Schedule(warmup=2))),
        ("a torch.optim object has its own", lambda: plumb.Engine(model, torch.optim.SGD(model.parameters()), groups=[{"match": "w", "lr": 1.0}])),
        ("units are modules", lambda: plumb.Engine(list(model.named_parameters()), plumb.SGD(), units=[nn.Linear])),
        ("keys", lambda: plumb.Engine(model, plumb.SGD(), groups=[{"lr": 1.0}])),
        ("learning rate", lambda: plumb.Engine(model, plumb.SGD(lr=-1.0))),
    ]
    for said, build in cases:
        with pytest.raises(plumb.Error, match=said):
            build()
    engine = plumb.Engine(model, plumb.SGD(lr=0.1))  # and the process goes on
    with pytest.raises(plumb.Error, match="belongs to another engine"):
        plumb.Engine(model, plumb.SGD(lr=0.1))
    engine.close()
    with pytest.raises(plumb.Error, match="closed"):
        engine.step()
    plumb.Engine(model, plumb.SGD(lr=0.1)).close()


def refusals_are_everybodys() -> str:
    model = make()
    if plumb.world().rank == 1:
        model.requires_grad_(False)
    try:
        plumb.Engine(model, plumb.SGD())
    except plumb.Error as error:
        first = str(error)
    else:
        return "nothing"
    assert compare(plain, strategy="ddp") < 1e-10  # the process can go on
    return first


def test_what_one_rank_cannot_build_is_an_error_on_every_rank() -> None:
    zero, one = plumb.spawn(refusals_are_everybodys, 2)
    assert "rank 1" in zero and "nothing to train" in zero
    assert "nothing to train" in one


def foreign_optimizer_on_rank_1() -> str:
    model = make()
    parameters = (make() if plumb.world().rank == 1 else model).parameters()
    try:
        plumb.Engine(model, torch.optim.SGD(parameters, lr=0.1))
    except plumb.Error as error:
        return str(error)
    return "nothing"


def test_what_python_refuses_on_one_rank_is_an_error_on_every_rank() -> None:
    zero, one = plumb.spawn(foreign_optimizer_on_rank_1, 2)
    assert "rank 1 could not set up its engine" in zero and "none of the engine's" in zero
    assert "none of the engine's" in one


def on_two_devices() -> list[str]:
    """One layer of rank 1 alone was left elsewhere."""
    model = make()
    if plumb.world().rank == 1:
        model.last.to("meta")
    pairs, options = list(model.named_parameters()), plumb._C.Options()
    builds: tuple[Callable[[], Any], ...] = (
        lambda: plumb.Engine(pairs, plumb.SGD()),
        lambda: plumb._C.Engine(plumb.world(), pairs, [], [], plumb.SGD(), options),
    )
    said = []
    for build in builds:
        with pytest.raises(plumb.Error) as refusal:
            build()
        said.append(str(refusal.value))
    assert compare(plain, strategy="ddp") < 1e-10  # the process can go on
    return said


def test_a_module_on_two_devices_is_an_error_on_every_rank() -> None:
    for pairs, native in plumb.spawn(on_two_devices, 2, timeout=60):
        assert "'last.weight' is on the meta device" in pairs, pairs
        assert "'last.weight' is on meta, the ones before it are on cpu" in native, native
        assert "a rank's parameters must be on one device" in native, native


NO_MODELS: dict[str, Callable[[], Any]] = {
    "expected a module": lambda: 42,
    "or pairs of a name and a tensor": lambda: [torch.ones(2)],
    "a tuple; expected a module": lambda: ("weight", torch.ones(2)),
    "reset_parameters": Unmade,
    "lazy module": lambda: nn.LazyLinear(3),
}


def no_model_on_rank_1() -> list[str]:
    said = []
    for made in NO_MODELS.values():
        with pytest.raises(plumb.Error) as refusal:
            plumb.Engine(made() if plumb.world().rank == 1 else make(), plumb.SGD())
        said.append(str(refusal.value))
    assert compare(plain, strategy="ddp") < 1e-10
    return said


def test_what_is_no_model_on_one_rank_is_an_error_on_every_rank() -> None:
    zero, one = plumb.spawn(no_model_on_rank_1, 2, timeout=60)
    for expected, there, here in zip(NO_MODELS, zero, one, strict=True):
        assert expected in here
        assert expected in there and "rank 1 could not set up its engine" in there, there


def other_units_on_rank_1() -> list[str]:
    """Of the same shapes, so that nothing but their names tells them apart."""
    said = []
    for units in (["0", "1"], ["1"], []):
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
        with pytest.raises(plumb.Error) as refusal:
            plumb.Engine(model, plumb.SGD(), strategy="zero3", units=units if plumb.world().rank == 1 else ["0"])
        said.append(str(refusal.value))
    return [*said, ends_in_units_on_rank_1()]


def ends_in_units_on_rank_1() -> str:
    def made_as_they_are_asked_for() -> Iterator[str]:
        yield "0"
        if plumb.world().rank == 1:
            raise ValueError("on purpose")

    with pytest.raises((plumb.Error, ValueError)) as refusal:
        plumb.Engine(nn.Sequential(nn.Linear(2, 2)), plumb.SGD(), strategy="zero3", units=made_as_they_are_asked_for())
    return str(refusal.value)


def test_units_that_differ_are_an_error_on_every_rank() -> None:
    for rank, (*said, last) in enumerate(plumb.spawn(other_units_on_rank_1, 2, method="thread")):
        assert "on purpose" in last and ("rank 1 could not set up its engine" in last or rank == 1), last
        assert "parameter 2 is '1.weight'" in said[0] and "of unit 1 on rank 1" in said[0], said[0]
        for one in said[1:]:
            assert "parameter 0 is '0.weight'" in one and "trained on rank 1, where" in one and "of unit 0 on rank 0" in one, one


def changes_a_parameter_alone(when: int, how: str) -> list[str]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = plumb.Engine(model, optimizer)
    said = []
    for i in range(3):
        Play(model, engine.world.rank, 2, 1.0).loss(i).backward()
        with torch.no_grad():
            model.last.weight.mul_(1.5)  # alike
            if i == when and engine.world.rank == 1:
                model.first.bias.add_(1.0)
        try:
            optimizer.step(*((lambda: 1.0,) if how == "with a closure" else ()))
            said.append("")
        except plumb.Error as error:
            said.append(str(error))
            break
        engine.zero_grad()
    return said


@pytest.mark.parametrize("how", ["without a closure", "with a closure"])
@pytest.mark.parametrize("when", [0, 2])
def test_a_parameter_that_one_rank_changed_under_torchs_optimizer_is_an_error_on_every_rank(when: int, how: str) -> None:
    for rank, said in enumerate(plumb.spawn(changes_a_parameter_alone, 2, (when, how), method="thread")):
        assert said[:-1] == [""] * when, said
        assert f"rank {rank}: parameter 'first.bias' was changed between steps, and has other values on rank 1" in said[-1], said


def embeds_within_a_norm() -> list[str]:
    """Each rank's forward writes the rows that it looks up."""
    model = nn.Sequential(nn.Embedding(8, 4, max_norm=0.5))
    engine = plumb.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.tensor([engine.world.rank])).sum().backward()
    with pytest.raises(plumb.Error) as refusal:
        engine.step()
    return [str(refusal.value)]


def test_an_embedding_that_writes_its_rows_is_refused_where_ranks_look_up_others() -> None:
    for (said,) in plumb.spawn(embeds_within_a_norm, 2, method="thread"):
        assert "parameter '0.weight' was changed between steps" in said, said


def changes_the_model() -> str:
    model = make()
    engine = plumb.Engine(model, plumb.SGD(lr=0.1))
    Play(model, engine.world.rank, 2, 1.0).loss(0).backward()
    engine.step()
    model.float()
    try:
        Play(model, engine.world.rank, 2, 1.0).loss(0).backward()
        engine.step()
    except plumb.Error as error:
        return str(error)
    return "nothing"


def test_a_model_that_changed_its_dtype_is_refused() -> None:
    for said in plumb.spawn(changes_the_model, 2):
        assert "first" in said or "last" in said or "blocks" in said, said


def steps_sparse_gradients(face: str) -> str:
    table = nn.Sequential(nn.Embedding(6, 2, sparse=True))
    torch.distributed.init_process_group("gloo")
    try:
        model: Any = table
        if face == "DistributedDataParallel":
            model = plumb.DistributedDataParallel(table)
        elif face == "fully_shard":
            plumb.fully_shard(table)
        optimizer = torch.optim.SparseAdam(list(model.parameters()))
        if face not in ("DistributedDataParallel", "fully_shard"):
            plumb.Engine(table, optimizer, strategy=face)
        model(torch.tensor([1, 4])).sum().backward()
        optimizer.step()
    except plumb.Error as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("face", ["ddp", "zero1", "DistributedDataParallel", "fully_shard"])
def test_an_optimizer_of_sparse_gradients_is_refused_by_name_on_every_rank(face: str) -> None:
    for said in plumb.spawn(steps_sparse_gradients, 2, (face,)):
        assert "SparseAdam steps sparse gradients alone" in said, said
