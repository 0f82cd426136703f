"""plumb.fully_shard: which dimension is cut, what modules show before and between forwards, models of the meta device."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import plumb
from sharding import Cases, MLP, batch, mlps, plain_loss, shard, train_both, transformer

case = Cases(2)


def widest(parameter: nn.Parameter) -> Shard:
    even = [size if size % 2 == 0 else -1 for size in parameter.shape]
    return Shard(even.index(max(even)) if max(even) > 0 else 0)


# ---- which dimension is cut


@case
def any_dimension_can_be_cut() -> None:
    for resharded in (True, False):
        model = transformer(tied=True)
        reference = copy.deepcopy(model)
        shard(model, shard_placement_fn=widest, reshard_after_forward=resharded)
        assert {parameter.placements[0].dim for parameter in model.parameters()} == {0, 1}
        train_both(model, reference, micro=2)
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(full[name], value)


@case
def convolutions_by_channels() -> None:
    torch.manual_seed(3)
    model: nn.Module = nn.Sequential(nn.Conv2d(4, 3, 3), nn.ReLU(), nn.Conv2d(3, 1, 2)).double()
    reference = copy.deepcopy(model)
    plumb.fully_shard(model, shard_placement_fn=widest)
    assert [parameter.placements[0].dim for parameter in model.parameters()] == [1, 0, 2, 0]

    def loss(one: nn.Module, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        out: torch.Tensor = one(torch.randn(2, 4, 6, 6, dtype=torch.float64, generator=generator)).pow(2).mean()
        return out

    train_both(model, reference, loss=loss, optimizer=torch.optim.Adam)


@case
def a_cut_dimension_in_mixed_precision() -> None:
    """The optimizer's rows are not the engine's memory there, and must lie as it updates them."""
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    dist.broadcast(parameter_vector := nn.utils.parameters_to_vector(model.parameters()).detach(), 0)
    nn.utils.vector_to_parameters(parameter_vector, model.parameters())
    by_rows = copy.deepcopy(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plumb.fully_shard(model, shard_placement_fn=widest, mp_policy=policy)
    plumb.fully_shard(by_rows, mp_policy=policy)
    assert model[2].weight.placements == (Shard(1),)  # type: ignore[union-attr]
    for one in (model, by_rows):
        optimizer = torch.optim.Adam(one.parameters(), lr=1e-2)
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            one(torch.randn(4, 16, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(model.parameters(), by_rows.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs.full_tensor(), atol=2e-3, rtol=1e-2)


@case
def optimizer_state_is_cut_as_its_parameter_is() -> None:
    model = mlps(width=6)
    shard(model, shard_placement_fn=widest)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(4, 6, dtype=torch.float64)).pow(2).mean().backward()
    optimizer.step()
    parts = get_optimizer_state_dict(model, optimizer)["state"]
    first = parts["0.out_proj.weight"]["exp_avg"]
    assert isinstance(first, DTensor) and first.placements == (Shard(1),)
    state = optimizer.state_dict()
    again = torch.optim.AdamW(model.parameters(), lr=1e-2)
    again.load_state_dict(state)
    reference = torch.optim.AdamW([nn.Parameter(p.full_tensor().detach().clone()) for p in model.parameters()], lr=1e-2)
    for parameter, whole in zip(model.parameters(), reference.param_groups[0]["params"], strict=True):
        reference.state[whole] = {
            key: value.full_tensor().clone() if isinstance(value, DTensor) else value.clone()
            for key, value in again.state[parameter].items()
        }
        whole.grad = parameter.grad.full_tensor().clone()  # type: ignore[union-attr]
    again.step()
    reference.step()
    for parameter, whole in zip(model.parameters(), reference.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(parameter.full_tensor(), whole)


@case
def what_cannot_be_cut_is_said() -> None:
    with pytest.raises(AssertionError, match="Shard dim 1 is invalid for 1D tensor: parameter 'bias'"):
        plumb.fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda parameter: Shard(1))
    with pytest.raises(NotImplementedError, match="uneven sharding on dim 1: parameter 'weight'"):
        plumb.fully_shard(nn.Linear(5, 4), shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1))
    with pytest.raises(plumb.Error, match="Expected Shard, got .* for parameter 'weight'"):
        plumb.fully_shard(nn.Linear(5, 4), shard_placement_fn=lambda parameter: 1)


# ---- what modules show


@case
def an_outermost_module_stays_whole_until_its_backward() -> None:
    model = mlps()
    shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = plain_loss(model, 0)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())  # all are of units inside
    loss.backward()
    alone = MLP(4)
    plumb.fully_shard(alone)
    out = alone(torch.ones(2, 4))
    assert not any(isinstance(parameter, DTensor) for parameter in alone.parameters())
    out.sum().backward()
    assert all(isinstance(parameter, DTensor) for parameter in alone.parameters())
    released = plumb.fully_shard(MLP(4), reshard_after_forward=True)
    released(torch.ones(2, 4))
    assert all(isinstance(parameter, DTensor) for parameter in released.parameters())
    optimizer.step()


@case
def a_model_without_parameters_runs() -> None:
    model = plumb.fully_shard(nn.Sequential(nn.ReLU()), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert model(torch.ones(2)).dtype == torch.bfloat16
    assert model.unshard() is None  # type: ignore[operator]


@case
def several_outermost_modules_are_refused() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    plumb.fully_shard([first, second])
    with pytest.raises(plumb.Error, match="FSDP requires a single root module but got 2: "):
        first(torch.ones(2, 4))


@case
def frozen_weights_of_8_bits_beside_others() -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.Parameter(torch.arange(16.0).view(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
            self.large = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.small.to(torch.float32) @ self.large

    model = Quantised()
    reference = copy.deepcopy(model)
    plumb.fully_shard(model)
    for one in (model, reference):
        one(torch.ones(2, 4)).sum().backward()
    gradient = model.large.grad
    assert isinstance(gradient, DTensor) and reference.large.grad is not None
    torch.testing.assert_close(gradient.full_tensor(), reference.large.grad)


@case
def scripted_modules_are_refused_or_left_out() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 4))  # type: ignore[no-untyped-call]
    with pytest.raises(plumb.Error, match="'0.weight' is of a TorchScript module"):
        plumb.fully_shard(model)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    plumb.fully_shard(model, ignored_params=set(model[0].parameters()))
    model(torch.ones(2, 4)).sum().backward()
    assert isinstance(model[1].weight.grad, DTensor)


# ---- the meta device


@case
def ties_of_the_meta_device_are_ties() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    reference = transformer(tied=True)
    with torch.device("meta"):
        model = transformer(tied=True)
    shard(model, mesh=mesh)
    whole = reference.state_dict()
    state = {
        name: nn.Parameter(distribute_tensor(whole[name].clone(), mesh, value.placements)) if isinstance(value, DTensor) else whole[name]
        for name, value in model.state_dict().items()
    }
    model.load_state_dict(state, assign=True)
    assert model.output.weight is model.embedding.weight  # type: ignore[union-attr]
    train_both(model, reference)


@case
def what_is_put_in_a_parameters_place_counts() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).double()
    shard(model)
    torch.manual_seed(8)
    reference = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).double()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for mine, theirs in zip(model, reference, strict=True):
        for name, value in theirs.named_parameters():
            setattr(mine, name, nn.Parameter(distribute_tensor(value.detach().clone(), mesh, [Shard(0)])))
    train_both(model, reference)


@case
def meshes_of_a_model_are_one() -> None:
    model = mlps(count=2)
    plumb.fully_shard(model[0], mesh=init_device_mesh("cpu", (2, 1)))
    for other in ((1, 2), (2,)):
        with pytest.raises(plumb.Error, match="give both the same mesh"):
            plumb.fully_shard(model, mesh=init_device_mesh("cpu", other))


@case
def what_has_no_memory_is_named() -> None:
    with torch.device("meta"):
        model = mlps(count=2)
    shard(model)
    names = "['0.in_proj.weight', '0.in_proj.bias', '0.out_proj.weight', '0.out_proj.bias']"
    with pytest.raises(plumb.Error) as said:
        model(batch(model, 0))
    assert f"the following were still on meta device: {names}" in str(said.value)


@case
def arguments_of_another_kind_are_named() -> None:
    for name, kind in (("mesh", "DeviceMesh"), ("mp_policy", "MixedPrecisionPolicy"), ("offload_policy", "OffloadPolicy")):
        with pytest.raises(plumb.Error, match=f"{name} of fully_shard is 3; expected a {kind}"):
            plumb.fully_shard(nn.Linear(2, 2), **{name: 3})


@case
def a_dimension_may_be_counted_from_the_end() -> None:
    model = mlps(width=6)
    reference = copy.deepcopy(model)
    shard(model, shard_placement_fn=lambda parameter: Shard(-1))
    assert {parameter.placements for parameter in model.parameters()} == {(Shard(0),), (Shard(1),)}
    train_both(model, reference, loss=lambda one, step: one(torch.ones(2, 6, dtype=torch.float64) * (step + dist.get_rank())).pow(2).mean())


@case
def a_number_of_ranks_to_reshard_to_lets_go_after_a_forward() -> None:
    for number in (1, 2):
        model = plumb.fully_shard(MLP(4), reshard_after_forward=number)
        loss = model(torch.ones(2, 4)).sum()
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), number
        loss.backward()


@case
def parameters_may_be_neighbours_in_one_memory() -> None:
    flat = torch.randn(32)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for i in (1, 0):
        model[i].weight = nn.Parameter(flat[16 * i : 16 * i + 16].view(4, 4))  # type: ignore[assignment]
        plumb.fully_shard(model[i])
    plumb.fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()


@case
def hooks_of_before_find_whole_parameters_in_a_forward_and_rows_around_it() -> None:
    seen: list[tuple[str, bool]] = []
    model = MLP(4)
    model.register_forward_pre_hook(lambda module, _: seen.append(("before", isinstance(module.in_proj.weight, DTensor))))
    plumb.fully_shard(model, reshard_after_forward=True)
    model.register_forward_pre_hook(lambda module, _: seen.append(("later", isinstance(module.in_proj.weight, DTensor))))
    model.register_forward_hook(lambda module, *_: seen.append(("after", isinstance(module.in_proj.weight, DTensor))))
    model(torch.ones(2, 4)).sum().backward()
    assert seen == [("before", False), ("later", False), ("after", True)]


@case
def others_find_what_was_applied() -> None:
    model = nn.Sequential(MLP(4), MLP(4))
    plumb.fully_shard(model[0])
    assert "fully_shard" in _get_registry(model[0]) and not _get_registry(model[1])  # type: ignore[operator]


@case
def a_slice_of_a_sharded_container_is_a_plain_one_of_the_same_modules() -> None:
    model = shard(mlps())
    part = model[:2]
    assert type(part) is nn.Sequential and list(part) == [model[0], model[1]] and not part._forward_hooks
    x = torch.ones(2, 5, dtype=torch.float64)
    torch.testing.assert_close(part(x), model[1](model[0](x)))


@case
def forwards_are_in_the_policys_dtype_and_inputs_are_cast_where_it_says_so() -> None:
    class Sees(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((x.dtype, self.weight.dtype))
            out: torch.Tensor = super().forward(x.to(self.weight.dtype))
            return out

    for casts, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        seen: list[tuple[torch.dtype, torch.dtype]] = []
        model = plumb.fully_shard(Sees(4, 4), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=casts))
        model(torch.ones(2, 4)).sum().backward()
        assert seen == [(dtype, torch.bfloat16)]


@dataclasses.dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    more: dict[str, torch.Tensor]
    words: str = "as they are"


@case
def what_is_in_records_is_cast_too() -> None:
    class Sees(nn.Linear):
        def forward(self, batch: Batch) -> list[Batch]:  # type: ignore[override]
            assert batch.x.dtype == batch.more["shift"].dtype == torch.bfloat16 and batch.more["which"].dtype == torch.int64
            return [Batch(super().forward(batch.x), {}, batch.words)]

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    model = plumb.fully_shard(Sees(4, 4), mp_policy=policy)
    given = Batch(torch.ones(2, 4), {"shift": torch.ones(2), "which": torch.ones(2, dtype=torch.int64)}, "words")
    (made,) = model(given)
    assert made.x.dtype == torch.float64 and made.words == "words" and given.x.dtype == given.more["shift"].dtype == torch.float32
    made.x.sum().backward()
    assert model.weight.grad is not None


@case
def a_narrower_dtype_to_reduce_in_is_taken_as_the_parameters_own() -> None:
    model = mlps()
    reference = copy.deepcopy(model)
    train_both(shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)), reference, steps=2)

@pytest.mark.parametrize("name", case.all)
def test_fully_shard_init(name: str) -> None:
    case.check(name)


def without_memory_on_one_rank() -> str:
    dist.init_process_group("gloo")
    model = mlps(count=2)
    if dist.get_rank() == 1:
        model = model.to("meta")
    shard(model, mesh=init_device_mesh("cpu", (2,)))
    try:
        model._get_fsdp_state()._lazy_init()  # as programs do before a first forward
    except plumb.Error as error:
        return str(error)
    return "built"


def test_what_one_rank_cannot_build_is_said_on_every_rank() -> None:
    for said in plumb.spawn(without_memory_on_one_rank, 2):
        assert "should be materialized from meta device" in said, said
