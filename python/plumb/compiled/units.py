"""Sharded parameters inside of compiled graphs: what a unit is while it is traced, and the pass that puts gathers into graphs.

With ``fullgraph=True`` a unit leaves a mark where it is entered (``plumb::unit``). Every use of its parameters behind that
becomes a use of what ``plumb::gather`` returns there: plain tensors of the graph, which the compiler frees behind their last
use, and which it makes again in the backward instead of saving them. So shards are saved, and nothing is released by hand.
Where graphs may break, they break around units, which are then gathered outside.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from .. import _C, replaced, units

_REASON = (
    "plumb gathers and releases a unit's sharded parameters around its forward, outside of compiled graphs:"
    " compile without fullgraph=True, or each unit by itself (module.compile())"
)


def insert_gathers(graph: torch.fx.Graph) -> int:
    """Replaces the marks of units by gathers, before anything is partitioned or scheduled; how many there were."""
    mark, gather = torch.ops.plumb.unit.default, torch.ops.plumb.gather.default
    marks = [node for node in graph.nodes if node.op == "call_function" and node.target is mark]
    if not marks:
        return 0
    order = {node: position for position, node in enumerate(graph.nodes)}
    by_parameter: dict[torch.fx.Node, list[tuple[int, torch.fx.Node]]] = {}
    for one in marks:
        listed: Any = one.args[0]
        used = [p for p in dict.fromkeys(listed) if any(user.target is not mark for user in p.users)]
        _refuse_changes(used)
        if used:
            with graph.inserting_before(_first_use(one, used, by_parameter, order)):
                call = graph.call_function(gather, (used, order[one]))
                call.meta["val"] = _described(used)
                items = [graph.call_function(operator.getitem, (call, i)) for i in range(len(used))]
            for i, (parameter, item) in enumerate(zip(used, items, strict=True)):
                item.meta["val"] = call.meta["val"][i]
                by_parameter.setdefault(parameter, []).append((order[one], item))
            for node in (call, *items):
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    backward = _backward_of(graph)
    for parameter, items_at in by_parameter.items():
        by_operation: dict[Any, torch.fx.Node] = {}
        for user in sorted((user for user in parameter.users if user in order and user.target is not mark), key=order.__getitem__):
            which = user.meta.get("seq_nr")
            if user in backward:
                item = by_operation.get(which, items_at[-1][1])
            else:
                item = next((item for at, item in reversed(items_at) if at < order[user]), items_at[0][1])
                by_operation[which] = item
            user.replace_input_with(parameter, item)
    for one in marks:
        graph.erase_node(one)
    _make_again(graph, {item for items_at in by_parameter.values() for _, item in items_at})
    graph.lint()
    return len(marks)


def _backward_of(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """What depends on the gradients that come in. An operation's backward uses what its forward used, by torch's number of it."""
    found: set[torch.fx.Node] = set()
    for node in graph.nodes:
        comes_in = node.op == "placeholder" and "tangents" in str(node.target)
        if comes_in or any(one in found for one in node.all_input_nodes):
            found.add(node)
    return found


def _first_use(
    mark: torch.fx.Node, parameters: list[torch.fx.Node], known: dict[torch.fx.Node, Any], order: dict[torch.fx.Node, int]
) -> torch.fx.Node:
    """Where a unit is entered, or where something uses it before."""
    users = [user for parameter in parameters if parameter not in known for user in parameter.users if user in order]
    return min([mark, *users], key=order.__getitem__)


def _refuse_changes(parameters: list[torch.fx.Node]) -> None:
    for parameter in parameters:
        for user in parameter.users:
            changes = isinstance(user.target, torch._ops.OpOverload) and user.target._schema.is_mutable
            if user.op == "output" or (changes and user.args and user.args[0] is parameter):
                raise _C.Error(
                    f"a graph that was compiled with fullgraph=True {'changes' if changes else 'returns'} a sharded parameter"
                    f" ({parameter.name}, of shape {tuple(parameter.meta['val'].shape)}): do that outside of the compiled function, inside"
                    " engine.gathered(module)"
                )


def _described(parameters: list[torch.fx.Node]) -> Any:
    fakes = [parameter.meta["val"] for parameter in parameters]
    with torch.no_grad(), fakes[0].fake_mode:
        return torch.ops.plumb.gather.default([fake.detach() for fake in fakes], 0)


def _make_again(graph: torch.fx.Graph, whole: set[torch.fx.Node]) -> None:
    """A view or a cast of a whole parameter is no more to be saved than the parameter."""
    casts = (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default, torch.ops.aten.clone.default)
    for node in graph.nodes:
        target = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
            continue
        inputs = node.all_input_nodes
        if (target.is_view or target in casts) and inputs and all(one in whole for one in inputs):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            whole.add(node)


# ---- what Dynamo sees of a unit


def _skip_hooks() -> None:
    """Of a compiled model that is a unit itself, torch calls the hooks before it traces anything: nothing is compiled of them.
    (As ``skip_code`` of torch._dynamo, which takes long to import and may never be needed.)"""
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    for hook in (units._Enter, units._Leave):
        frames.set_code_exec_strategy(hook.__call__.__code__, skip)


_skip_hooks()


def _open_region(tracer: Any) -> None:
    """A region that is compiled once for many calls (``nested_compile_region``) is partitioned before any pass of ours sees it, and would
    save whole parameters. One with a unit inside becomes part of the graph around it."""
    import torch._dynamo.config as config

    while tracer is not None:
        if getattr(tracer.source_target, "_name", None) == "invoke_subgraph":
            if not hasattr(config, "inline_invoke_subgraph"):
                raise _C.Error(
                    "a unit with sharded parameters is inside of a nested_compile_region, and this torch cannot make that a part of the"
                    " graph around it: leave nested_compile_region out, or compile without fullgraph=True"
                )
            config.inline_invoke_subgraph = True
        tracer = tracer.parent


def _notice_in_graphs() -> None:
    """A module that a graph makes for itself (``self.layers[:2]`` is one) is no engine's: registering something in it says nothing."""
    disable: Any = torch._dynamo.disable
    reason = "plumb looks at what came into a model outside of compiled graphs: put modules and parameters in their places there"
    outside, module_outside = disable(replaced._notice, reason=reason), disable(replaced._notice_module, reason=reason)

    def watched() -> tuple[int, ...]:
        return replaced.watched()

    watched = torch._dynamo.assume_constant_result(watched)  # type: ignore[no-untyped-call]

    def notice(module: nn.Module, attribute: str, parameter: nn.Parameter | None) -> None:
        if module._parameters.get(attribute) is not None or id(module) in {*watched()}:
            outside(module, attribute, parameter)

    def notice_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
        if id(module) in {*watched()}:
            module_outside(module, name, child)

    torch.compiler.substitute_in_graph(replaced._notice)(notice)
    torch.compiler.substitute_in_graph(replaced._notice_module)(notice_module)


def install() -> None:
    """From now on a unit that is traced into a whole graph leaves its mark there; elsewhere the graph breaks around it."""
    import torch._dynamo
    import torch._functorch.config as functorch
    from torch._dynamo.eval_frame import skip_code
    from torch._dynamo.symbolic_convert import InstructionTranslator

    skip_code(replaced._notice.__code__)
    skip_code(replaced._notice_module.__code__)
    _notice_in_graphs()
    disable: Any = torch._dynamo.disable
    if not hasattr(functorch, "joint_custom_pass"):
        for hook in (units._Enter, units._Leave):
            hook.__call__ = disable(hook.__call__, reason=_REASON)  # type: ignore[method-assign]
        return

    def in_one_graph() -> bool:
        translator: Any = InstructionTranslator.current_tx()
        if translator.one_graph:
            _open_region(translator.output.current_tracer)
        return bool(translator.one_graph)

    in_one_graph = torch._dynamo.assume_constant_result(in_one_graph)  # type: ignore[no-untyped-call]
    enter_outside = disable(units._Enter.__call__, reason=_REASON)
    leave_outside = disable(units._Leave.__call__, reason=_REASON)

    # Where nothing is traced, these are frames that Dynamo skips, and a door is no Python: there is nothing to keep it out of.
    def enter(self: units._Enter, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_dynamo_compiling():
            if in_one_graph():
                torch.ops.plumb.unit(self.parameters)
            else:
                enter_outside(self, module, args)
        elif self.door is not None:
            self.door.enter()

    def leave(self: units._Leave, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if torch.compiler.is_dynamo_compiling():
            if not in_one_graph():
                leave_outside(self, module, args, output)
        elif self.door is not None:
            self.door.leave()

    for hook, function in ((units._Enter, enter), (units._Leave, leave)):
        skip_code(function.__code__)  # traced where it is called from, never by itself
        hook.__call__ = function  # type: ignore[method-assign]
    torch.fx.node.has_side_effect(torch.ops.plumb.unit.default)
    before: Callable[..., Any] | None = functorch.joint_custom_pass

    def gathers(module: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
        if before is not None:
            module = before(module, inputs)
        if insert_gathers(module.graph):
            module.recompile()
        return module

    functorch.joint_custom_pass = gathers
