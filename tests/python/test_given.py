"""What an engine may be given in several forms means the same in each; what means nothing is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import plumb


class Around(nn.Module):
    """As torch.compile leaves a module: its names go through ``_orig_mod``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._orig_mod(x)
        return result


def model() -> nn.Module:
    return Around(nn.Sequential(Around(nn.Linear(2, 2)), nn.Linear(2, 2)))


def unmoved(groups: list[dict[str, Any]]) -> set[str]:
    """The parameters that a step leaves alone."""
    one = model()
    before = [parameter.detach().clone() for parameter in one.parameters()]
    engine = plumb.Engine(one, plumb.SGD(lr=1.0), groups=groups)
    torch.stack([parameter.sum() for parameter in one.parameters()]).sum().backward()
    engine.step()
    engine.close()
    names = ("0.weight", "0.bias", "1.weight", "1.bias")
    pairs = zip(names, before, one.parameters(), strict=True)
    return {name for name, old, new in pairs if torch.equal(old, new.detach())}


MATCHES: list[tuple[Any, set[str]]] = [
    (["0.weight", "1.bias"], {"0.weight", "1.bias"}),
    (["_orig_mod.0._orig_mod.weight", "_orig_mod.1.bias"], {"0.weight", "1.bias"}),
    ("weight", {"0.weight", "1.weight"}),
    ("^1", {"1.weight", "1.bias"}),
    (lambda name: name in ("0.weight", "0.bias"), {"0.weight", "0.bias"}),
]


@pytest.mark.parametrize(("match", "expected"), MATCHES)
def test_a_group_has_what_it_matches_whether_compiled_or_not(match: Any, expected: set[str]) -> None:
    assert unmoved([{"match": match, "lr": 0.0}]) == expected


def test_the_first_group_that_matches_counts() -> None:
    assert unmoved([{"match": "^0", "lr": 0.0}, {"match": "weight", "lr": 1.0}]) == {"0.weight", "0.bias"}


@pytest.mark.parametrize(
    ("given", "expected"), [(None, None), (False, None), (True, 65536.0), (8, 8.0), (1, 1.0), (plumb.LossScale(4.0), 4.0)]
)
def test_a_loss_scale_is_a_number_a_rule_or_whether(given: Any, expected: float | None) -> None:
    engine = plumb.Engine(model(), plumb.SGD(lr=1.0), loss_scale=given)
    loss = torch.ones((), requires_grad=True)
    scaled = engine.scale(loss)
    assert float(scaled.detach()) == (1.0 if expected is None else expected)
    engine.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"groups": [{"match": "weight", "rate": 1.0}]}, "expected match, and lr or weight_decay"),
        ({"groups": [{"lr": 1.0}]}, "expected match, and lr or weight_decay"),
        ({"world": 2}, "the world is a int; expected a plumb.World or a process group"),
        ({"strategy": 3}, "strategy is 3; expected one of ddp, zero1, zero2, zero3, hsdp"),
        ({"strategy": None}, "strategy is None; expected one of ddp"),
        ({"mesh": "a"}, "mesh is 'a'; expected a plumb.Mesh, a DeviceMesh, or two numbers"),
        ({"mesh": (1, 2, 3)}, r"mesh is \(1, 2, 3\); expected a plumb.Mesh"),
        ({"mesh": (1,)}, r"mesh is \(1,\); expected a plumb.Mesh"),
        ({"mesh": ("a", 1)}, r"mesh\[0\] is 'a'; expected a whole number"),
        ({"bucket_bytes": "a"}, "bucket_bytes is 'a'; expected a whole number"),
        ({"first_bucket_bytes": 1.5}, "first_bucket_bytes is 1.5; expected a whole number"),
        ({"virtual_ranks": 2**80}, "virtual_ranks is .*; expected a whole number"),
        ({"accumulate_dtype": "f32"}, "accumulate_dtype is 'f32'; expected a torch.dtype"),
        ({"clip_norm": "a"}, "clip_norm is 'a'; expected a number"),
        ({"loss_scale": "x"}, "loss_scale is 'x'; expected a number"),
        ({"schedule": "cosine"}, "schedule is 'cosine'; expected a plumb.Schedule"),
        ({"deterministic": "yes"}, "deterministic is 'yes'; expected True or False"),
        ({"elementwise": 3}, "elementwise is 3; expected True or False"),
        ({"nonfinite": ["skip"]}, r"nonfinite is \['skip'\]; it is one of continue, skip, error"),
        ({"groups": 3}, "groups is 3; expected a list of groups"),
        ({"groups": [3]}, "a group is 3; expected a dict"),
        ({"groups": [{"match": "(", "lr": 1.0}]}, r"a group's match is '\(', which is no regular expression"),
        ({"units": 2.5}, "units=2.5; expected a list of classes"),
    ],
)
def test_what_means_nothing_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(plumb.Error, match=said):
        plumb.Engine(model(), plumb.SGD(lr=1.0), **options)


def test_calls_that_mean_nothing_are_refused_and_the_engine_goes_on() -> None:
    one = nn.Linear(2, 2)
    for optimizer in (plumb.SGD(lr=1.0), torch.optim.SGD(one.parameters(), lr=1.0)):
        with plumb.Engine(one, optimizer) as engine:
            calls: list[tuple[Any, str]] = [
                (lambda: engine.backward(3), "the loss is a int; expected a tensor"),  # type: ignore[arg-type]
                (lambda: engine.backward(one(torch.ones(2)).sum(), weight="a"), "weight is 'a'; expected a number"),  # type: ignore[arg-type]
                (lambda: engine.scale("x"), "the loss is a str; expected a tensor"),  # type: ignore[arg-type]
                (lambda: engine.step(3), "was given a int; expected a closure"),  # type: ignore[arg-type]
                (lambda: engine.set_lr("a"), "lr is 'a'; expected a number"),  # type: ignore[arg-type]
                (lambda: engine.set_lr(-1.0), r"set_lr\(-1\); a learning rate must be finite and not negative"),
                (lambda: engine.set_lr(float("nan")), r"set_lr\(nan\); a learning rate"),
                (lambda: engine.set_lr(float("inf")), r"set_lr\(inf\); a learning rate"),
                (lambda: engine.deliver(one.weight, 3), "the gradient is a int; expected a tensor"),  # type: ignore[arg-type]
                (lambda: engine.full_gradient("weight"), "the parameter is a str; expected a tensor"),  # type: ignore[arg-type]
                (lambda: engine.full_parameter(3), "the parameter is a int; expected a tensor"),  # type: ignore[arg-type]
                (lambda: engine.gathered(3), r"gathered\(\) of a int; expected a module or parameters"),  # type: ignore[arg-type]
                (lambda: engine.gathered([3]), "parameters of gathered.. is a int; expected a tensor"),  # type: ignore[list-item]
                (lambda: engine.trace(3), "the path is 3; expected str, bytes or os.PathLike object, not int"),  # type: ignore[arg-type]
                (lambda: engine.load(3), "the path is 3; expected str, bytes or os.PathLike object, not int"),  # type: ignore[arg-type]
                (lambda: engine.load_state_dict({}), r"it has the keys \[\]; expected what state_dict\(\) of an engine has"),
                (lambda: engine.load_state_dict(3), "it is a int; expected what state_dict"),  # type: ignore[arg-type]
            ]
            for call, said in calls:
                with pytest.raises(plumb.Error, match=said):
                    call()
            before = one.weight.detach().clone()
            engine.backward(one(torch.ones(2)).sum())
            engine.step()
            assert torch.allclose(one.weight.detach(), before - 1.0)
            engine.zero_grad()
    outside: list[tuple[Any, str]] = [
        (lambda: plumb.unit(3), r"unit\(\) of a int; expected a module"),  # type: ignore[type-var]
        (lambda: plumb.unit(nn.Linear), r"unit\(\) of the class Linear; expected a module"),  # type: ignore[type-var]
        (lambda: plumb.elementwise(3), r"elementwise\(3\); expected a class of optimizers"),  # type: ignore[type-var]
        (lambda: plumb.deferred(3).__enter__(), r"deferred\(3\); expected classes of modules"),  # type: ignore[arg-type]
        (lambda: plumb.spawn(3), "spawn of a int; expected a function"),  # type: ignore[arg-type]
        (lambda: plumb.spawn(print, "a"), "ranks is 'a'; expected a whole number"),  # type: ignore[arg-type]
        (lambda: plumb.spawn(print, method="x"), "method is 'x'; expected fork"),
    ]
    for call, said in outside:
        with pytest.raises(plumb.Error, match=said):
            call()
    assert not hasattr(nn.Linear, "_plumb_unit"), "every layer would be a unit"


def test_one_parameter_may_be_gathered_by_itself() -> None:
    one = model()
    engine = plumb.Engine(one, plumb.SGD(lr=1.0))
    weight = next(one.parameters())
    assert plumb.given.parameters(weight)[0] is weight and len(plumb.given.parameters(weight)) == 1
    with engine.gathered(weight, write=True), torch.no_grad():
        weight.fill_(3.0)
    engine.close()


def test_pairs_without_names_or_values_are_refused() -> None:
    with torch.device("meta"):
        hollow = model()
    with pytest.raises(plumb.Error, match="'0.weight' is on the meta device"):
        plumb.Engine(list(hollow.named_parameters()), plumb.SGD(lr=1.0))
    with pytest.raises(plumb.Error, match="are a list; expected a module, or pairs of a name and a tensor"):
        plumb.Engine([torch.ones(2)], plumb.SGD(lr=1.0))


#: What an engine is given, and which of the library's own options it becomes.
OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"strategy": "zero2"}, {"strategy": "zero2"}),
    ({"bucket_bytes": 77}, {"bucket_bytes": 77}),
    ({"first_bucket_bytes": 78}, {"first_bucket_bytes": 78}),
    ({"accumulate_dtype": torch.float64}, {"accumulate_dtype": torch.float64}),
    ({"master_weights": False}, {"master_weights": False}),
    ({"clip_norm": 0.25}, {"clip_norm": 0.25}),
    ({"nonfinite": "skip"}, {"nonfinite": plumb._C.NonFinite.skip}),
    ({"nonfinite": "error"}, {"nonfinite": plumb._C.NonFinite.error}),
    ({"hold_unsharded": True}, {"hold_unsharded": True}),
    ({"gather_ahead_bytes": 79}, {"gather_ahead_bytes": 79}),
    ({"gather_ahead_bytes": 0}, {"gather_ahead_bytes": 0}),
    ({"ask_before_gathers": True}, {"ask_before_gathers": True}),
    ({"deterministic": True}, {"deterministic": True}),
    ({"virtual_ranks": 3}, {"virtual_ranks": 3}),
    ({"ledger": False}, {"ledger": False}),
]
OBJECTS = ("mesh", "loss_scale", "schedule", "groups")


@pytest.mark.parametrize(("given", "expected"), OPTIONS, ids=str)
def test_every_option_arrives_and_no_other_changes(given: dict[str, Any], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def engine(*arguments: Any) -> None:
        seen.append(arguments[-1])
        raise plumb.Error("seen")

    monkeypatch.setattr(plumb._C, "Engine", engine)
    with pytest.raises(plumb.Error, match="seen"):
        plumb.Engine(model(), plumb.SGD(lr=1.0), **given)
    names = [name for name in dir(plumb._C.Options) if not name.startswith("_") and name not in OBJECTS]
    default = plumb._C.Options()
    assert {name: getattr(seen[0], name) for name in names} == {name: getattr(default, name) for name in names} | expected


def test_objects_among_the_options_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(plumb._C, "Engine", lambda *arguments: seen.append(arguments[-1]) or 1 / 0)
    for mesh in ((1, 1), plumb.Mesh(replicate=1, shard=1)):
        with pytest.raises(ZeroDivisionError):
            plumb.Engine(model(), plumb.SGD(lr=1.0), mesh=mesh, schedule=plumb.Schedule(warmup=3, total=9, floor=0.25))
        assert (seen[-1].mesh.replicate, seen[-1].mesh.shard) == (1, 1)
        assert (seen[-1].schedule.warmup, seen[-1].schedule.total, seen[-1].schedule.floor) == (3, 9, 0.25)


def test_a_mesh_of_two_numbers_is_replicas_and_shards() -> None:
    assert (plumb.given.mesh((2, 3)).replicate, plumb.given.mesh((2, 3)).shard) == (2, 3)


def test_whole_numbers_are_what_python_takes_for_an_index() -> None:
    numbers = (0, -7, 2**63 - 1, 1 - 2**63, torch.tensor(4))
    assert [plumb.given.whole(number, "it") for number in numbers] == [0, -7, 2**63 - 1, 1 - 2**63, 4]
    for value in (1.5, "3", None, torch.tensor(2.0)):
        with pytest.raises(plumb.Error, match="it is .*; expected a whole number"):
            plumb.given.whole(value, "it")
    for value in (2**63, -(2**63)):
        with pytest.raises(plumb.Error, match="expected less than"):
            plumb.given.whole(value, "it")


def test_what_has_no_shape_yet_is_refused_by_name() -> None:
    with pytest.raises(plumb.Error, match="'1.weight' is of a lazy module"):
        plumb.Engine(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)), plumb.SGD(lr=1.0))
    for pairs in ([("w", 3)], [(3, torch.ones(2))], [("w",)], 7):
        with pytest.raises(plumb.Error, match="expected a module, or pairs of a name and a tensor"):
            plumb.Engine(pairs, plumb.SGD(lr=1.0))


def test_half_precision_is_of_two_kinds() -> None:
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int16)
    assert [plumb.given.is_half(torch.ones(1, dtype=one)) for one in kinds] == [True, True, False, False, False]


def test_a_group_may_be_one_already() -> None:
    assert unmoved([plumb.ParameterGroup({"1.bias"}, lr=0.0)]) == {"1.bias"}  # type: ignore[list-item]


def test_state_of_a_parameter_as_a_whole_is_told_from_that_of_its_elements() -> None:
    from plumb.optim import is_number

    matrix, scalar = torch.ones(2, 3), torch.ones(())
    assert is_number("step", torch.tensor(1.0), matrix) and is_number("anything", torch.tensor(1.0), matrix)
    assert is_number("step", torch.tensor(1.0), scalar) and is_number("mu_product", torch.tensor(1.0), scalar)
    assert not is_number("exp_avg", torch.tensor(1.0), scalar)
    assert not is_number("exp_avg", torch.ones(2, 3), matrix) and not is_number("step", torch.ones(1), matrix)


def test_parts_of_the_state_are_joined_in_the_order_of_memory() -> None:
    from plumb.optim.whole import _joined

    for parameter in (torch.zeros(3, 4), torch.zeros(4, 3).t(), torch.zeros(12)):
        flat = torch.arange(12.0)
        parts: list[Any] = [
            (0, {"average": flat[:5]}, {"step": 3}),
            (5, {}, {"step": 4, "late": "x"}),
            (5, {"average": flat[5:]}, {}),
        ]
        made = _joined(parameter, parts)
        assert torch.equal(made.pop("average"), flat.as_strided(parameter.shape, parameter.stride()))
        assert made == {"step": 3, "late": "x"}, "of the first rank that has it"
    assert _joined(torch.zeros(2), [(0, {}, {}), (1, {}, {})]) == {}


@pytest.mark.parametrize("around", [lambda one: one, Around])
def test_names_of_a_compiled_model_are_those_of_the_plain_one(around: Any, tmp_path: Path) -> None:
    """Units by name, buffers that files need not have, frozen parameters that are left out: under either name."""
    safetensors = pytest.importorskip("safetensors.torch")
    plain = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    plain.register_buffer("turned", torch.ones(2), persistent=False)
    plain[0].register_buffer("turned", torch.ones(2), persistent=False)
    plain[1].requires_grad_(False)
    whole = around(plain)
    for spelled in ("0.0", "_orig_mod.0.0"):
        assert plumb.units.choose(whole, [spelled]) == [plain[0][0]]
    assert plumb.units.choose(whole, lambda name, _: name.startswith("0.")) == [plain[0][0]]
    safetensors.save_file({name: torch.zeros_like(one) for name, one in plain.named_parameters()}, tmp_path / "all.safetensors")
    with plumb.Engine(whole, plumb.SGD(lr=1.0)) as engine:
        assert not engine.load_weights(tmp_path / "all.safetensors").mismatches
        safetensors.save_file({"1.weight": torch.ones(2, 2), "more": torch.ones(1)}, tmp_path / "few.safetensors")
        with pytest.raises(plumb.Error, match="do not fit this engine"):
            engine.load_weights(tmp_path / "few.safetensors")
        told = engine.load_weights(tmp_path / "few.safetensors", strict=False).mismatches
        assert {one.what for one in told} == {"weight '0.0.weight'", "weight '0.0.bias'", "weight '1.bias'", "weight 'more'"}
        assert plain[1].weight.eq(1.0).all() and plain[0][0].weight.eq(0.0).all()
        for names in ({"1.weight", "1.bias"}, {name for name, one in whole.named_parameters() if not one.requires_grad}):
            engine.save(tmp_path / "saved", leave_out=names)
            assert {one.what for one in engine.load(tmp_path / "saved", strict=False).mismatches} == {"weight '1.weight'", "weight '1.bias'"}
