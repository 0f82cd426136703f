"""Compiled graphs: deliveries inside the backwards that ``torch.compile`` makes, and what it must know of an engine.

A compiled backward returns all its gradients at its end. Here each call of ``plumb::deliver`` hands one over right behind the
node that makes it, so that reductions begin while the rest computes; the graph returns nothing for it. With inductor this
happens by itself; ``explain()`` says what was inserted.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch._subclasses.meta_utils as _descriptions
from torch._compile import _disable_dynamo

from .. import _C
from . import units

F = TypeVar("F", bound=Callable[..., Any])

#: Whether gradients are delivered inside of the backwards that are compiled from now on.
deliver_inside = True


@dataclasses.dataclass(frozen=True)
class Delivery:
    """One gradient that a compiled backward hands over."""

    argument: int  #: of the compiled function: whose gradient it is
    node: str  #: that makes it
    dtype: torch.dtype  #: as it is handed over
    looked_through: torch.dtype | None  #: what a last cast would have made of it
    at: float  #: the fraction of the graph's nodes before it


@dataclasses.dataclass(frozen=True)
class Backward:
    """A compiled backward graph."""

    deliveries: tuple[Delivery, ...]
    nodes: int
    why_none: str = ""  #: why nothing was inserted
    code: str = dataclasses.field(default="", repr=False)


@dataclasses.dataclass(frozen=True)
class Counts:
    """What the compiled backwards that ran in this process did with gradients of parameters."""

    delivered: int  #: handed over inside of them
    handed_back: int  #: returned to autograd: no engine's, watched by hooks of others, or asked for by ``autograd.grad``


@dataclasses.dataclass(frozen=True)
class Gathers:
    """What whole graphs of sharded models did in this process."""

    times: int  #: units gathered inside of graphs
    bytes: int  #: of whole parameters that graphs have right now
    most_bytes: int  #: that they had at once
    ahead: int  #: units (one for each dtype) that were whole or on their way when a graph asked for them


_made: list[Backward] = []


def explain() -> list[Backward]:
    """The backwards that were compiled in this process so far, with what is delivered inside of each.

    A backward that came from a compilation cache is not among them; ``TORCHINDUCTOR_FORCE_DISABLE_CACHES=1`` compiles anew.
    """
    return list(_made)


def counts() -> Counts:
    """How many gradients compiled backwards have delivered so far."""
    return Counts(*_C.output_counts())


def gathers() -> Gathers:
    """What graphs gathered so far that were compiled with ``fullgraph=True``."""
    return Gathers(*_C.graph_gathers())


# ---- the pass over a backward graph


def insert_deliveries(graph: torch.fx.Graph) -> None:
    """Hands over the gradients of a backward graph's parameters where they are made. Other graphs stay as they are."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    if not any("tangents" in str(node.target) for node in inputs):
        return
    found: list[Delivery] = []
    why = _why_not(graph)
    if not why:
        found = _insert(graph, inputs)
        why = "" if found else "it has no gradient of a parameter"
    _made.append(Backward(tuple(found), len(graph.nodes), why, str(graph)))
    _dump(_made[-1])


def _why_not(graph: torch.fx.Graph) -> str:
    if not deliver_inside:
        return "plumb.compiled.deliver_inside is False"
    inductor = sys.modules.get("torch._inductor.config")
    if inductor is not None and inductor.triton.cudagraphs and _on_a_gpu(graph):
        return "it may be captured into a CUDA graph, whose replays the host does not see"
    context = torch._guards.TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return "its arguments are not known"
    metadata = context.fw_metadata
    if metadata.tokens or metadata.num_backward_tokens:
        return "its arguments are not those of the compiled function: it has effects of other operators"
    if metadata.is_rng_op_functionalized:
        return "its arguments are not those of the compiled function: it is given the state of a random generator"
    if any(type(one).__name__ == "SubclassCreationMeta" for one in metadata.subclass_inp_meta):
        return "its arguments are not those of the compiled function: some are tensor subclasses"
    return ""


def _on_a_gpu(graph: torch.fx.Graph) -> bool:
    """The modes that ask for CUDA graphs (``reduce-overhead``, ``max-autotune``) get none where nothing is on a GPU."""
    values = (node.meta.get("val") for node in graph.nodes)
    return any(isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta") for value in values)


def _insert(graph: torch.fx.Graph, inputs: list[torch.fx.Node]) -> list[Delivery]:
    operator = _operator()
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    returned: Any = output.args[0]
    gradients = list(returned)
    context = torch._guards.TracingContext.get()
    assert context.fw_metadata is not None
    calls: dict[torch.fx.Node, tuple[int, torch.fx.Node, torch.fx.Node]] = {}
    for argument in sorted(set(context.fw_metadata.static_input_indices)):
        gradient = gradients[argument] if argument < len(gradients) else None
        if not isinstance(gradient, torch.fx.Node):
            continue
        raw = _raw(gradient)
        with graph.inserting_after(inputs[-1] if raw.op == "placeholder" else raw):
            call = graph.call_function(operator, (raw, argument))
        call.meta["val"] = None
        calls[call] = (argument, raw, gradient)
        gradients[argument] = None
    output.args = (type(returned)(gradients),)
    if not calls:
        return []
    # Inductor looks at the nodes behind the outputs that a user sees, wherever it pads tensors (on GPUs).
    seen = "user_visible_output_idxs"
    if seen in output.meta:
        output.meta[seen] = [index for index in output.meta[seen] if isinstance(gradients[index], torch.fx.Node)]
    graph.eliminate_dead_code()
    graph.lint()
    found = []
    for position, node in enumerate(graph.nodes):
        if node in calls:
            argument, raw, gradient = calls[node]
            last = _dtype(gradient) if raw is not gradient else None
            found.append(Delivery(argument, raw.name, _dtype(raw), last, position / len(graph.nodes)))
    return found


def _raw(gradient: torch.fx.Node) -> torch.fx.Node:
    """The gradient before a last cast to a narrower dtype, which only makes it fit the leaf: the leaf's rule decides."""
    casts = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)
    if gradient.op != "call_function" or gradient.target not in casts:
        return gradient
    wider = gradient.args[0]
    if not isinstance(wider, torch.fx.Node) or "val" not in wider.meta:
        return gradient
    before, after = wider.meta["val"], gradient.meta["val"]
    narrows = before.dtype.is_floating_point and after.dtype.is_floating_point and before.dtype.itemsize > after.dtype.itemsize
    return wider if narrows and before.shape == after.shape and before.device == after.device else gradient


def _dtype(node: torch.fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _operator() -> Any:
    """Nothing may drop a call of it."""
    operator = torch.ops.plumb.deliver.output
    torch.fx.node.has_side_effect(operator)
    return operator


def _dump(made: Backward) -> None:
    """To the folder that ``PLUMB_COMPILE_DUMP`` names."""
    folder = os.environ.get("PLUMB_COMPILE_DUMP")
    if not folder:
        return
    place = pathlib.Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    text = "\n".join([f"# {made.why_none}" if made.why_none else f"# {len(made.deliveries)} deliveries", *map(str, made.deliveries)])
    (place / f"backward-{os.getpid()}-{len(_made) - 1}.txt").write_text(f"{text}\n{made.code}\n")


# ---- backends


def backend(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
    """``torch.compile(model, backend="plumb")``: inductor, with deliveries; what ``torch.compile(model)`` is by itself."""
    from torch._inductor.compile_fx import compile_fx

    _install()
    compiled: Any = compile_fx(graph, inputs, **options)
    return compiled  # type: ignore[no-any-return]


def aot_eager_backend(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
    """``backend="plumb_aot_eager"``: graphs with deliveries, run operator by operator; for debugging."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def backward(module: torch.fx.GraphModule, inputs: Any) -> Any:
        insert_deliveries(module.graph)
        module.recompile()
        return make_boxed_func(module.forward)

    def forward(module: torch.fx.GraphModule, inputs: Any) -> Any:
        if units.insert_gathers(module.graph):  # a graph without a backward
            module.recompile()
        return make_boxed_func(module.forward)

    compiled: Any = aot_autograd(
        fw_compiler=forward, bw_compiler=backward, partition_fn=min_cut_rematerialization_partition
    )(graph, inputs)
    return compiled  # type: ignore[no-any-return]


# ---- what the compiler learns, when it is first used


_installed = False
_kept_out = False


def outside(reason: str) -> Callable[[F], F]:
    """Of what a compiled graph breaks around; where it may not break, torch's error gives this ``reason``."""

    def apart(function: F) -> F:
        run: Any = _disable_dynamo(function)
        run._torchdynamo_disable, run._torchdynamo_disable_msg = True, reason
        return run  # type: ignore[no-any-return]

    return apart


def _keep_out() -> None:
    """What steps and settles is the host's business: a compiled function that calls it breaks its graph there, once."""
    global _kept_out
    if _kept_out:
        return
    _kept_out = True
    from torch._dynamo import trace_rules

    for name in ("engine", "optim", "fsdp.optim", "fsdp.rows", "replaced"):  # a package with all that is in it
        trace_rules.add(f"{_C.__name__.removesuffix('._C')}.{name}")


def _install() -> None:
    """Inductor runs our pass over every graph from now on, behind those of others."""
    global _installed
    if _installed:
        return
    _installed = True
    _keep_out()
    if _has_units:
        _guard_hooks()
    import torch._inductor.config as config
    from torch._dynamo.backends.registry import list_backends, register_backend
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    before: Any = config.post_grad_custom_post_pass  # one, or several where torch knows of several
    others: tuple[Any, ...] = () if before is None else tuple(before) if isinstance(before, (list, tuple)) else (before,)

    class Deliveries(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for other in others:
                other(graph)
            units.insert_gathers(graph)  # of a graph without a backward
            insert_deliveries(graph)

        def uuid(self) -> Any:
            theirs = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in others]
            mine = get_hash_for_files((__file__, units.__file__))
            return None if None in theirs else (mine, deliver_inside, *theirs)

    _break_at_backwards()
    units.install()
    config.post_grad_custom_post_pass = Deliveries()
    known = list_backends(exclude_tags=())
    for name, function in (("plumb", backend), ("plumb_aot_eager", aot_eager_backend)):
        if name not in known:
            register_backend(function, name=name)


def _break_at_backwards() -> None:
    """A backward that is traced into a graph (``trace_autograd_ops``) adds to ``.grad`` past every hook, and would be reduced by nobody."""
    from torch._dynamo.exc import unimplemented
    from torch._dynamo.variables.tensor import TensorVariable

    def outside_of_graphs(*_: Any, **__: Any) -> None:
        unimplemented(
            gb_type="a backward inside of a graph",
            context="plumb",
            explanation="Gradients reach plumb's engines from autograd's own backwards; one that is part of a graph would not be reduced.",
            hints=["Call backward() outside of the compiled function, or compile it without fullgraph=True."],
        )

    TensorVariable.method_backward = outside_of_graphs  # type: ignore[method-assign]


_has_units = False


def _guard_hooks() -> None:
    """Models of one kind differ by their hooks: one has units, another none."""
    torch._dynamo.config.skip_nnmodule_hook_guards = False


def forget_graphs() -> None:
    """A model has units from now on: what was compiled before knows nothing of them, and torch's guards did not look at hooks."""
    global _has_units
    _has_units = True
    if "torch._dynamo.config" in sys.modules:
        _guard_hooks()
    if "torch._dynamo.convert_frame" in sys.modules and torch._dynamo.convert_frame.input_codes.seen:
        torch._dynamo.reset_code_caches()


_safe_grad = _descriptions.safe_grad


def _describable_grad(tensor: Any) -> Any:
    """The gradient that a compiler sees of a tensor: none that its description of the tensor cannot hold."""
    if "torch._dynamo.eval_frame" in sys.modules:
        _install()
    if type(tensor) is torch.Tensor and _C.is_piece(tensor):
        _refuse_piece()
    grad = _safe_grad(tensor)
    if grad is None or (grad.shape == tensor.shape and grad.dtype == tensor.dtype):
        return grad
    return None


def _refuse_piece() -> None:
    from torch._dynamo.exc import unimplemented

    unimplemented(
        gb_type="a piece of a sharded gradient",
        context="plumb",
        explanation="A piece answers for the whole gradient, together with the other ranks; compiled code would take it for a tensor.",
        hints=["Use engine.full_gradient(parameter), or leave what is done to gradients out of the compiled function."],
    )


def watch() -> None:
    """From now on a compiler that looks at a tensor learns what it must; until one does, this costs nothing."""
    if "torch._dynamo.trace_rules" in sys.modules:
        _keep_out()
    if _descriptions.safe_grad is _describable_grad:
        return
    if "torch._dynamo.convert_frame" in sys.modules and getattr(torch._dynamo.config, "trace_autograd_ops", False):
        torch._dynamo.reset_code_caches()  # graphs of before may have backwards inside
    _descriptions.safe_grad = _describable_grad  # type: ignore[assignment]
    builder = sys.modules.get("torch._dynamo.variables.builder")
    if builder is not None:
        builder.safe_grad = _describable_grad  # type: ignore[attr-defined]
