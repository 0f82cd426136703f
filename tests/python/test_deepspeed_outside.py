"""Stage 3 of plumb.deepspeed with parameters that are used outside of their module, and what parameters say of themselves there."""

from __future__ import annotations

import copy
import enum
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import plumb
import plumb.deepspeed as deepspeed

WORDS, WIDTH = 30, 8


class Bias(nn.Linear):
    """Leaves its bias to whoever calls it, as layers of Megatron do."""

    def forward(self, x: torch.Tensor) -> Any:
        return {"out": F.linear(x, self.weight), "rest": [self.bias, 1]}


class Tied(nn.Module):
    """An embedding whose weight is the head as well, by its attribute; a bias that is added by another module."""

    def __init__(self, around: str) -> None:
        super().__init__()
        self.around = around
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.left = Bias(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def head(self, h: torch.Tensor) -> torch.Tensor:
        return F.linear(h + self.blocks[1].bias, self.embed.weight)

    def body(self, h: torch.Tensor) -> torch.Tensor:
        left = self.left(h)
        return torch.tanh(left["out"] + left["rest"][0])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        body, head = self.body, self.head
        if self.around:
            body, head = (
                lambda h, f=f: checkpoint(f, h, use_reentrant=self.around == "re-entrant") for f in (self.body, self.head)
            )  # type: ignore[assignment]
        h = body(h)
        for block in self.blocks:
            h = torch.tanh(block(h))
        return F.cross_entropy(head(h).flatten(0, 1), y.flatten())


def built(stage: int, model: nn.Module, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **more,
    }  # fmt: skip
    return deepspeed.initialize(model=model, config=config)[0]


def batches(rank: int, count: int) -> Any:
    g = torch.Generator().manual_seed(rank)
    for _ in range(count):
        yield torch.randint(0, WORDS, (2, 4), generator=g), torch.randint(0, WORDS, (2, 4), generator=g)


def trained(stage: int, around: str) -> tuple[dict[str, torch.Tensor], float, int]:
    """Forward, forward, backward, backward; then what it computes without gradients, and the bytes that are whole at the end."""
    torch.manual_seed(3)
    engine = built(stage, Tied(around))
    for one, two in zip(*[batches(plumb.world().rank, 6)] * 2):
        losses = engine(*one), engine(*two)
        for loss in reversed(losses):
            engine.backward(loss)
            engine.step()
    with torch.no_grad():
        seen = float(engine(*one))
    assert engine.global_steps == 3
    return engine.module_state_dict(), seen, engine.engine.gathered_bytes


@pytest.mark.parametrize("around", ["", "re-entrant", "not re-entrant"])
def test_parameters_used_outside_of_their_module(around: str) -> None:
    for whole, cut in zip(plumb.spawn(trained, 2, (0, around)), plumb.spawn(trained, 2, (3, around))):
        assert cut[2] == 0 and abs(whole[1] - cut[1]) < 1e-5
        assert whole[0].keys() == cut[0].keys()
        for name, value in whole[0].items():
            torch.testing.assert_close(cut[0][name], value, rtol=1e-5, atol=1e-6)


class Clamped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.layer.weight.clamp_(-0.1, 0.1)
        return self.layer(x).sum()


def clamps() -> str:
    engine = built(3, Clamped())
    with pytest.raises(plumb.Error) as error:
        engine(torch.ones(2, WIDTH))
    return str(error.value)


def test_a_change_in_place_that_would_be_lost_is_an_error() -> None:
    for said in plumb.spawn(clamps, 2):
        assert "'layer.weight'" in said and "modifier_rank=0" in said


class Theirs(enum.Enum):
    """Another package's enum of the same names."""

    AVAILABLE = 7
    NOT_AVAILABLE = 8


def whole_value(parameter: Any) -> torch.Tensor:
    """As programs for stage 3 write it."""
    if hasattr(parameter, "ds_id"):
        assert parameter.ds_status == Theirs.NOT_AVAILABLE and parameter.ds_status != Theirs.AVAILABLE
        with deepspeed.zero.GatheredParameters([parameter]):
            assert parameter.ds_status == Theirs.AVAILABLE
            return parameter.data.detach().cpu().clone()
    return parameter.detach().cpu().clone()


def described() -> None:
    torch.manual_seed(3)
    model = Tied("")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = built(3, model)
    total = torch.tensor([p.partition_numel() for p in model.parameters()])
    everybody = [torch.zeros_like(total) for _ in range(2)]
    torch.distributed.all_gather(everybody, total)
    assert sum(everybody).tolist() == [p.numel() for p in model.parameters()]  # type: ignore[union-attr]
    for name, parameter in model.named_parameters():
        assert torch.equal(whole_value(parameter), before[name])
        assert parameter.ds_numel == parameter.numel() and parameter.ds_shape == parameter.shape
        status = pickle.loads(pickle.dumps(parameter.ds_status))
        assert status is deepspeed.zero.ZeroParamStatus.NOT_AVAILABLE and status == parameter.ds_status
    assert len({p.ds_id for p in model.parameters()}) == len(before)
    engine.destroy()
    assert not any(hasattr(p, "ds_id") or hasattr(p, "ds_numel") for p in model.parameters())
    assert all(type(module._parameters) is dict for module in model.modules())
    assert torch.equal(copy.deepcopy(model).embed.weight, before["embed.weight"])


def persisting() -> None:
    """Between steps: the larger module is in parts, the smaller one stays."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 20},
    }
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 3))
    model[0].requires_grad_(False)
    engine = deepspeed.initialize(model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=config)[0]
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 6)).sum())
        engine.step()
        for name, parameter in model.named_parameters():
            assert parameter.ds_persist == name.startswith("1."), name
            assert parameter.ds_status == (Theirs.AVAILABLE if parameter.ds_persist else Theirs.NOT_AVAILABLE), name
            assert hasattr(parameter, "ds_id") != parameter.ds_persist
    engine.destroy()
    assert not any(hasattr(p, "ds_persist") or hasattr(p, "ds_status") for p in model.parameters())


def test_parameters_say_whether_they_stay_whole() -> None:
    plumb.spawn(persisting, 2)


def test_parameters_say_what_programs_ask_them() -> None:
    plumb.spawn(with_gloo, 2, (described,))


def with_gloo(program: Callable[[], None]) -> None:
    deepspeed.init_distributed("gloo")
    program()


# ---- several engines


def averages(first: int, second: int) -> None:
    """As programs of RLHF do: a mean of the weights, in a model of another engine, and both are gathered together."""
    deepspeed.init_distributed("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(3)
    model, mean = Tied(""), Tied("")
    before = [p.detach().clone() for p in model.parameters()], [p.detach().clone() for p in mean.parameters()]
    engines = built(first, model), built(second, mean)
    pairs = list(zip(model.parameters(), mean.parameters(), strict=True))
    with deepspeed.zero.GatheredParameters([p for pair in pairs for p in pair], modifier_rank=1), torch.no_grad():
        for one, other in pairs:
            assert one.shape == other.shape
            if rank == 1:
                other.lerp_(one, 0.25)
    for engine, expected in zip(engines, (before[0], [b.lerp(a, 0.25) for a, b in zip(*before, strict=True)]), strict=True):
        assert engine.engine.gathered_bytes == 0
        for p, value in zip(engine.module.parameters(), expected, strict=True):
            assert torch.equal(engine.engine.full_parameter(p), value)


@pytest.mark.parametrize(("first", "second"), [(3, 3), (0, 3)])
def test_parameters_of_several_engines_are_gathered_together(first: int, second: int) -> None:
    plumb.spawn(averages, 2, (first, second))


# ---- copies


def copied(kind: str) -> None:
    """As those who keep a mean of the weights do, or who save the whole module."""
    torch.manual_seed(3)
    model = Tied("")
    plain = copy.deepcopy(model)
    engine = built(3, model)
    x, y = next(batches(0, 1))
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        if kind == "deepcopy":
            twin = copy.deepcopy(model)
        else:
            twin = pickle.loads(pickle.dumps(model))
    assert all(type(module._parameters) is dict for module in twin.modules())
    for model_of_its_own in (plain, twin):
        model_of_its_own(x, y).backward()
    for (name, one), (_, other) in zip(plain.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.equal(one, other) and torch.equal(one.grad, other.grad), name  # type: ignore[arg-type]
    engine.backward(engine(x, y))
    engine.step()


@pytest.mark.parametrize("kind", ["deepcopy", "pickle"])
def test_a_copy_of_a_sharded_model_is_a_plain_one(kind: str) -> None:
    plumb.spawn(copied, 2, (kind,))


# ---- one model, one engine after another


def again(first: int, second: int) -> None:
    torch.manual_seed(3)
    model = Tied("")
    model.blocks[0].requires_grad_(False)  # whose values go along, too
    older = built(first, model)
    x, y = next(batches(0, 1))
    for _ in range(2):
        older.backward(older(x, y))
        older.step()
    value = {name: one.clone() for name, one in older.module_state_dict().items()}
    newer = built(second, model)
    assert older.destroyed and newer.global_steps == 0
    assert all(torch.equal(one, value[name]) for name, one in newer.module_state_dict().items())
    for _ in range(2):
        newer.backward(newer(x, y))
        newer.step()
    assert newer.global_steps == 1 and not torch.equal(newer.module_state_dict()["embed.weight"], value["embed.weight"])
    with pytest.raises(plumb.Error, match="destroyed"):
        older.step()
    with pytest.raises(plumb.Error, match="belongs to another engine"):
        built(1, nn.Sequential(model.blocks[0], nn.Linear(WIDTH, WIDTH)))


@pytest.mark.parametrize(("first", "second"), [(3, 3), (2, 3), (3, 0), (1, 1)])
def test_a_model_that_is_initialized_again_has_a_new_engine(first: int, second: int) -> None:
    plumb.spawn(again, 2, (first, second))


# ---- forwards that threw, and what is let go of


class Pair(NamedTuple):
    out: torch.Tensor
    bias: torch.Tensor


class Leaving(nn.Linear):
    """Leaves its bias in a tuple with names, and throws where it is told."""

    throws = False

    def forward(self, x: torch.Tensor) -> Any:
        if self.throws:
            raise KeyError("thrown")
        return Pair(F.linear(x, self.weight), self.bias)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.last = Leaving(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used = (self.last.weight * 2).sum()  # outside of its module
        pair = self.layer(x)
        assert type(pair) is Pair
        return self.last(torch.tanh(pair.out + pair.bias)).sum() + used


def threw() -> None:
    model, twin = Around(), Around()
    engine = built(3, model, gradient_accumulation_steps=1)
    hooks = engine._outside
    for _ in range(2):
        model.layer.throws = True
        with pytest.raises(KeyError, match="thrown"):
            engine(torch.ones(2, WIDTH))
        model.layer.throws = False
        here = hooks._here
        assert (here.forwards, here.given) == (0, []) and not any(here.units.values()), "as if it had not begun"
        assert model.last.weight is dict(model.named_parameters())["last.weight"], "no forward runs: it is the parameter"
        engine.backward(engine(torch.ones(2, WIDTH)))
        engine.step()
        twin(torch.ones(2, WIDTH)).backward()
        torch.optim.SGD(twin.parameters(), lr=0.5).step()
        twin.zero_grad()
    for name, one in engine.module_state_dict().items():
        torch.testing.assert_close(one, twin.state_dict()[name])
    assert any(module._forward_hooks for module in model.modules())
    engine.destroy()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def gathers() -> None:
    """What is asked of GatheredParameters and its sisters beside the usual."""
    deepspeed.init_distributed("gloo")
    rank = torch.distributed.get_rank()
    plain = nn.Linear(2, 2)
    with torch.no_grad():
        plain.weight.fill_(float(rank))
    with deepspeed.zero.Init(enabled=False), deepspeed.zero.GatheredParameters([plain.weight], modifier_rank=1):
        pass
    assert float(plain.weight[0, 0]) == rank, "nothing was built inside of Init: each rank's own"
    model = Around()
    engine = built(3, model, gradient_accumulation_steps=1)
    weight = model.layer.weight
    with deepspeed.zero.GatheredParameters([weight], enabled=False):
        assert engine.engine.gathered_bytes == 0 and weight.ds_status == Theirs.NOT_AVAILABLE
    with deepspeed.zero.unwrap_model_for_generation(model) as whole:
        assert whole is model and all(p.ds_status == Theirs.AVAILABLE for p in model.parameters())
        assert engine.engine.gathered_bytes > 0
    assert engine.engine.gathered_bytes == 0
    with deepspeed.zero.GatheredParameters((p for p in [weight, None]), modifier_rank=0), torch.no_grad():
        weight.fill_(2.0 + rank)
    assert torch.equal(engine.engine.full_parameter(weight), torch.full((WIDTH, WIDTH), 2.0))
    engine.destroy()
    assert deepspeed.zero.engine_of(weight) is None and not engine_finds(weight)
    with deepspeed.zero.Init():
        pass
    with torch.no_grad():
        plain.weight.fill_(float(rank))
    with deepspeed.zero.GatheredParameters([plain.weight], modifier_rank=1, enabled=False):
        pass
    assert float(plain.weight[0, 0]) == rank
    with deepspeed.zero.GatheredParameters(plain.weight, modifier_rank=1):
        pass
    assert float(plain.weight[0, 0]) == 1.0
    for wrong in ({"remote_device": "nvme"}, {"zero_quantized_weights": True}):
        with pytest.raises(plumb.Error, match="not supported"):
            deepspeed.zero.Init(**wrong)
    with pytest.raises(RuntimeError, match="expected a module and a parameter"):
        deepspeed.zero.register_external_parameter(plain, "weight")  # type: ignore[arg-type]


def engine_finds(parameter: torch.Tensor) -> bool:
    try:
        deepspeed.utils.safe_get_full_fp32_param(parameter)
    except plumb.Error as error:
        assert "belongs to no engine" in str(error)
        return False
    return True


@pytest.mark.parametrize("program", [threw, gathers])
def test_forwards_that_threw_and_what_is_gathered_or_not(program: Callable[[], None]) -> None:
    plumb.spawn(program, 2)
