"""What the compiler learns of engines when it is first used: passes behind those of others, what it stays out of, and which graphs deliver nothing."""

from __future__ import annotations

import importlib
import types
from typing import Any

import pytest
import torch

import plumb
from plumb import compiled

PLAIN: dict[str, Any] = {"tokens": {}, "num_backward_tokens": 0, "is_rng_op_functionalized": False, "subclass_inp_meta": [1, object()]}


class SubclassCreationMeta:
    """Of torch's own name, by which it is known."""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ({}, ""),
        ({"tokens": {"an effect": 1}}, "effects of other operators"),
        ({"num_backward_tokens": 1}, "effects of other operators"),
        ({"is_rng_op_functionalized": True}, "state of a random generator"),
        ({"subclass_inp_meta": [1, SubclassCreationMeta()]}, "tensor subclasses"),
        (None, "not known"),
    ],
    ids=str,
)
def test_a_graph_whose_arguments_are_not_the_functions_delivers_nothing(what: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = None if what is None else types.SimpleNamespace(**{**PLAIN, **what})
    monkeypatch.setattr(torch._guards.TracingContext, "try_get", lambda: types.SimpleNamespace(fw_metadata=metadata))
    why = compiled._why_not(torch.fx.Graph())
    assert said in why and bool(why) == bool(said)
    monkeypatch.setattr(torch._guards.TracingContext, "try_get", lambda: None)
    assert "not known" in compiled._why_not(torch.fx.Graph())
    monkeypatch.setattr(compiled, "deliver_inside", False)
    assert "deliver_inside is False" in compiled._why_not(torch.fx.Graph())


def anew() -> None:
    """As in a process that has compiled nothing."""
    import torch._dynamo

    compiled._installed = compiled._kept_out = compiled._has_units = False
    torch._dynamo.config.skip_nnmodule_hook_guards = True


def behind_others() -> dict[str, Any]:
    anew()
    import torch._functorch.config as functorch
    import torch._inductor.config as config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    told: list[Any] = []

    class Other(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            told.append(graph)

        def uuid(self) -> Any:
            return version

    def joint(module: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
        told.append((module, inputs))
        return torch.fx.GraphModule({}, torch.fx.Graph())

    version = "theirs"
    config.post_grad_custom_post_pass, functorch.joint_custom_pass = Other(), joint
    compiled._install()
    compiled._install()
    graph, module = torch.fx.Graph(), torch.fx.GraphModule({}, torch.fx.Graph())
    ours: Any = config.post_grad_custom_post_pass
    ours(graph)
    made = functorch.joint_custom_pass(module, ["inputs"])
    keys = [ours.uuid()]
    compiled.deliver_inside = False
    keys.append(ours.uuid())
    version = "newer"
    keys.append(ours.uuid())
    version = None  # says that nothing may be kept
    return {
        "told": told[0] is graph and told[1] == (module, ["inputs"]) and len(told) == 2, "theirs": made is not module,
        "keys": len(set(keys)), "none": ours.uuid() is None,
    }  # fmt: skip


def test_passes_of_others_run_before_ours_and_a_cache_knows_them_and_whether_we_deliver() -> None:
    assert plumb.spawn(behind_others, 1) == [{"told": True, "theirs": True, "keys": 3, "none": True}]


OUTSIDE = {
    "engine": "Engine.step", "optim": "check", "optim.whole": "whole_state", "optim.hooks": "swap", "fsdp.optim": "engines_of", "fsdp.rows": "begin",
    "replaced": "Replaced.check",
}  # fmt: skip


def kept_out() -> list[str]:
    import torch._dynamo.trace_rules as rules

    anew()
    compiled._keep_out()
    traced = []
    for name, within in OUTSIDE.items():
        found: Any = importlib.import_module(f"plumb.{name}")
        for part in within.split("."):
            found = getattr(found, part)
        if not rules.check(found):
            traced.append(name)
    return traced


def test_the_compiler_stays_out_of_what_steps_and_settles() -> None:
    assert plumb.spawn(kept_out, 1) == [[]]


def learns(order: str) -> list[Any]:
    """Guards look at hooks from where a model has units and the compiler is there, whichever came first."""
    anew()
    if order == "compiler":
        compiled._install()
    else:
        compiled.forget_graphs()
        torch._dynamo.config.skip_nnmodule_hook_guards = True  # whose settings come only now
    before = torch._dynamo.config.skip_nnmodule_hook_guards
    if order == "compiler":
        compiled.forget_graphs()
    else:
        compiled._install()
    return [before, torch._dynamo.config.skip_nnmodule_hook_guards]


@pytest.mark.parametrize("order", ["compiler", "units"])
def test_guards_look_at_hooks_where_a_model_has_units(order: str) -> None:
    assert plumb.spawn(learns, 1, (order,)) == [[True, False]]


def knows_no_units() -> list[int]:
    """What was compiled before an engine with units was built is compiled anew, and what has none is not."""
    seen: list[int] = []

    def count(graph: Any, inputs: Any) -> Any:
        seen[-1] += 1
        return graph.forward

    model, other = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Linear(2, 2)
    run = torch.compile(model, backend=count)
    for build in (lambda: None, lambda: None, lambda: plumb.Engine(other, plumb.SGD(lr=0.1)), compiled.forget_graphs):
        seen.append(0)
        build()
        run(torch.ones(1, 2))
    return seen


def test_what_was_compiled_before_there_were_units_is_compiled_anew() -> None:
    assert plumb.spawn(knows_no_units, 1) == [[1, 0, 0, 1]]


class Doubles(torch.nn.Linear):
    """Its gradient may be of another dtype than itself, which a compiler's description of a tensor cannot hold."""


def with_a_gradient_of_another_dtype(backend: str) -> bool:
    layer = Doubles(2, 2).bfloat16()
    layer.weight.grad_dtype = torch.float32
    with plumb.Engine(layer, None):
        x = torch.ones(1, 2, dtype=torch.bfloat16)
        for run in (layer, torch.compile(layer, backend=backend)):  # the second finds a gradient
            run(x).sum().backward()
        return layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32 and bool(layer.weight.grad.eq(2).all())


def test_a_compiler_looks_at_parameters_whose_gradients_are_of_another_dtype() -> None:
    assert plumb.spawn(with_a_gradient_of_another_dtype, 1, ("aot_eager",)) == [True]
