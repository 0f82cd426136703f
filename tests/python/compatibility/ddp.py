"""torch.nn.parallel.DistributedDataParallel, as of torch 2.13."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import pickle
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as Torchs
from torch.nn.parallel.distributed import _BufferCommHookLocation, _MixedPrecision

import plumb

from . import Entry, State, Table

WORKS, NO_OP, RAISES = State.WORKS, State.NO_OP, State.RAISES


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.spare = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def data(rank: int | None = None, i: int = 0) -> torch.Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * rank + i))


def mean_of_ranks(ranks: Iterable[int] = (0, 1), by: int = 2, i: int = 0) -> list[torch.Tensor | None]:
    """One process's gradients."""
    model = net()
    for rank in ranks:
        (model(data(rank, i)).pow(2).sum() / by).backward()
    return [parameter.grad for parameter in model.parameters()]


def agrees(model: nn.Module, expected: list[torch.Tensor | None] | None = None, limit: float = 1e-6) -> None:
    for (name, parameter), twin in zip(model.named_parameters(), expected or mean_of_ranks(), strict=True):
        assert (parameter.grad is None) == (twin is None), name
        if twin is not None:
            assert float((parameter.grad - twin).abs().max()) <= limit * max(1.0, float(twin.abs().max())), name


@contextlib.contextmanager
def wrapped(module: nn.Module | None = None, **arguments: Any) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = plumb.DistributedDataParallel(net() if module is None else module, **arguments)
    yield model
    model.engine.close()


def reduces(**arguments: Any) -> None:
    """With these arguments, two backwards give the mean."""
    with wrapped(**arguments) as model:
        for _ in range(2):
            model.zero_grad()
            model(data()).pow(2).sum().backward()
            agrees(model.module)


def refuses(**arguments: Any) -> None:
    """As torch does, with torch's words, on every rank alike."""
    said = []
    for kind in (Torchs, plumb.DistributedDataParallel):
        with pytest.raises((ValueError, RuntimeError)) as error, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind(net(), **arguments)
        said.append(str(error.value))
    assert said[0] == said[1]


# ---- arguments


def module() -> None:
    reduces()
    with wrapped() as model:
        assert isinstance(model, Torchs) and list(model.state_dict())[0] == "module.seen"
    with pytest.raises(RuntimeError, match="doesn't have any parameter that requires a gradient"):
        plumb.DistributedDataParallel(net().requires_grad_(False))


def device_ids() -> None:
    reduces(device_ids=None)
    refuses(device_ids=[0, 1])


def output_device() -> None:
    refuses(output_device=1)


def dim() -> None:
    reduces(dim=0)


def buffers(name: str, at_start: bool) -> None:
    for how in ({name: True}, {name: False}, {}):
        module, wanted = net(), how.get(name, True)
        module.seen.fill_(dist.get_rank() + 1.0)
        with wrapped(module, **how) as model:
            started = 1.0 if wanted or at_start else dist.get_rank() + 1.0
            assert float(module.seen[0]) == started
            module.seen.fill_(dist.get_rank() + 5.0)
            model(data()).sum().backward()
            assert float(module.seen[0]) == (5.0 if wanted else dist.get_rank() + 5.0)


def init_sync() -> None:
    for wanted in (True, False):
        module = net()
        with torch.no_grad():
            module.first.bias.fill_(float(dist.get_rank()))
        with wrapped(module, init_sync=wanted):
            assert float(module.first.bias[0]) == (0.0 if wanted else float(dist.get_rank()))


def process_group() -> None:
    both, alone = dist.new_group([0, 1]), [dist.new_group([rank]) for rank in range(2)]
    reduces(process_group=both)
    with wrapped(process_group=alone[dist.get_rank()]) as model:
        model(data()).pow(2).sum().backward()
        agrees(model.module, mean_of_ranks([dist.get_rank()], 1))


def bucket_cap_mb() -> None:
    reduces(bucket_cap_mb=1e-5)
    with wrapped(bucket_cap_mb=1e-5) as small, wrapped() as large:
        assert len(small.engine._engine.bucket_bytes) > len(large.engine._engine.bucket_bytes)


def unused(**arguments: Any) -> None:
    """A layer that one rank uses, and one that nobody does."""
    module = net()
    with wrapped(module, **arguments) as model:
        out = model(data())
        (out if dist.get_rank() == 0 else module.first(data())).pow(2).sum().backward()
        assert module.last.weight.grad is not None and module.spare.weight.grad is None


def delayed() -> None:
    module = net()
    reduces(delay_all_reduce_named_params=[("first.weight", module.first.weight)], param_to_hook_all_reduce=module.first.bias)
    with pytest.raises(ValueError):
        plumb.DistributedDataParallel(net(), param_to_hook_all_reduce=module.first.bias)


def mixed_precision() -> None:
    low = _MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.float64)
    with wrapped(mixed_precision=low) as model:
        assert model.module.seen.dtype == torch.float64
        out = model(data())
        assert out.dtype == torch.bfloat16
        out.float().pow(2).sum().backward()
        assert model.module.first.weight.dtype == model.module.first.weight.grad.dtype == torch.float32
        agrees(model.module, limit=5e-2)


def device_mesh() -> None:
    reduces(device_mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    refuses(device_mesh=dist.device_mesh.init_device_mesh("cpu", (2, 1)))


# ---- methods


def no_sync() -> None:
    with wrapped() as model:
        with model.no_sync():
            model(data()).pow(2).sum().backward()
            agrees(model.module, mean_of_ranks([dist.get_rank()], 1))
        model(data(i=1)).pow(2).sum().backward()
        twice = zip(mean_of_ranks(), mean_of_ranks(i=1), strict=True)
        agrees(model.module, [None if a is None or b is None else a + b for a, b in twice])


def step_after_no_sync() -> None:
    no_sync()
    with wrapped() as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.no_sync():
            model(data()).pow(2).sum().backward()
        optimizer.step()
        agrees(model.module)


def join(**how: Any) -> None:
    rank = dist.get_rank()
    with wrapped() as model, model.join(**how):
        for i in range(2 + rank):
            model.zero_grad()
            model(data(i=i)).pow(2).sum().backward()
            if i == 2:
                agrees(model.module, mean_of_ranks([1], 2 if how.get("divide_by_initial_world_size", True) else 1, i=2))
            else:
                agrees(model.module, mean_of_ranks(i=i))


def joins() -> None:
    join()
    join(divide_by_initial_world_size=False)


def join_hook() -> None:
    with wrapped() as one, wrapped() as two, dist.algorithms.Join([one, two]):
        for i in range(1 + dist.get_rank()):
            for model in (one, two):
                model.zero_grad()
                model(data(i=i)).pow(2).sum().backward()
                agrees(model.module, mean_of_ranks([1], 2, i=1) if i == 1 else None)


def comm_hooks() -> None:
    def own(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer() / 2, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    for state, hook, limit in (
        (None, own, 1e-6),
        (None, default_hooks.allreduce_hook, 1e-6),
        (None, default_hooks.fp16_compress_hook, 1e-2),
        (None, default_hooks.bf16_compress_hook, 5e-2),
        (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), 1e-2),
        (powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook, 0),
    ):
        with wrapped() as model:
            model.register_comm_hook(state, hook)
            for i in range(4):
                model.zero_grad()
                model(data()).pow(2).sum().backward()
                everywhere = [torch.empty_like(model.module.last.weight) for _ in range(2)]
                dist.all_gather(everywhere, model.module.last.weight.grad)
                assert torch.equal(*everywhere)
                if limit:
                    agrees(model.module, limit=limit)
            with pytest.raises(plumb.Error, match="can only be called once"):  # torch's words
                model.register_comm_hook(None, own)
    with wrapped() as model:
        model.register_comm_hook(None, lambda state, bucket: 1)
        with pytest.raises(plumb.Error, match="must return a torch.futures.Future object, but got int"):
            model(data()).pow(2).sum().backward()


def builtin_hook() -> None:
    for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        with wrapped() as model:
            model._register_builtin_comm_hook(kind)
            model(data()).pow(2).sum().backward()
            agrees(model.module, limit=1e-2)


def buffer_hook() -> None:
    def add(state: object, buffers: dict[str, torch.Tensor]) -> list[Any]:
        return [dist.all_reduce(buffer, async_op=True).get_future() for buffer in buffers.values()]

    for where in _BufferCommHookLocation:
        with wrapped() as model:
            model._register_buffer_comm_hook(None, add, where)
            model.module.seen.fill_(1.0)
            model(data()).sum().backward()
            assert float(model.module.seen[0]) == 2.0


def fused_optimizer() -> None:
    with wrapped() as model:
        model._register_fused_optim(torch.optim.SGD, lr=0.1)


def ignored() -> None:
    module = net()
    Torchs._set_params_and_buffers_to_ignore_for_model(module, ["last.bias", "seen"])
    with wrapped(module) as model:
        model(data()).pow(2).sum().backward()
        own, mean = mean_of_ranks([dist.get_rank()], 1), mean_of_ranks()
        agrees(module, [own[i] if name == "last.bias" else mean[i] for i, (name, _) in enumerate(module.named_parameters())])
        assert not any(p is module.last.bias for p in Torchs._get_data_parallel_params(module))


def logging_data() -> None:
    with wrapped(find_unused_parameters=True) as model:
        said = model._get_ddp_logging_data()
        assert said["world_size"] == 2 and said["module_name"] == "Net" and said["find_unused_parameters"] == 1


def static_graph() -> None:
    unused(static_graph=True)
    with wrapped() as model:
        model._set_static_graph()
        assert model.static_graph and model._get_ddp_logging_data()["static_graph"] == 1


def removed_hooks() -> None:
    module = net()
    model = plumb.DistributedDataParallel(module)
    model._remove_autograd_hooks()
    module(data()).pow(2).sum().backward()
    agrees(module, mean_of_ranks([dist.get_rank()], 1))


def new_group() -> None:
    both = dist.new_group([0, 1])
    with wrapped() as model:
        model._update_process_group(both)
        model(data()).pow(2).sum().backward()
        agrees(model.module)


def copies() -> None:
    with wrapped() as model:
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other(data()).pow(2).sum().backward()
            agrees(other.module)
            other.engine.close()
        if dist.get_rank() == 0:
            copy.deepcopy(model)  # need not be everybody's
        for own in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # each rank's, until it is used
            with torch.no_grad():
                own.module.first.bias.fill_(float(dist.get_rank()))
            own.engine.close()
            assert float(own.module.first.bias[0]) == dist.get_rank()
        saved = io.BytesIO()
        torch.save(model.state_dict(), saved)
        saved.seek(0)
        model.load_state_dict(torch.load(saved))


def on_reducer(name: str) -> Any:
    def check() -> None:
        with wrapped() as model:
            model(data()).sum().backward()
            getattr(model.reducer, name)

    return check


def on_logger(name: str) -> Any:
    def check() -> None:
        with wrapped() as model:
            getattr(model.logger, name)

    return check


def asked(call: str) -> Any:
    def check() -> None:
        with wrapped() as model:
            model(data()).pow(2).sum().backward()
            value = getattr(model, call)
            assert value is not None
            agrees(model.module)

    return check


def forward_and_train() -> None:
    reduces()
    with wrapped() as model:
        assert model.train() is model and model.train(False) is model and not model.module.training
        with torch.no_grad():
            assert not model(data()).requires_grad


#: Of torch's reducer: there is none, and nobody but torch's own wrapper calls these.
_ONLY_TORCHS_REDUCER = ("_get_local_used_map", "_get_zeros_like_grad_buckets", "_run_comm_hook", "get_backward_stats")


def names() -> Iterator[str]:
    """Every argument; every public method and every private one that has a description; all of the reducer and the logger."""
    yield from (f"argument {name}" for name in inspect.signature(Torchs.__init__).parameters if name != "self")
    for name, value in vars(Torchs).items():
        described = isinstance(value, (staticmethod, classmethod, property)) or inspect.isfunction(value)
        if not name.startswith("_") or (described and not name.startswith("__") and value.__doc__):
            yield f"method {name}"
    yield from ("method __getstate__", "method __setstate__", "attribute reducer", "attribute logger")
    yield "attribute require_backward_grad_sync"
    for kind, of in (("reducer", dist.Reducer), ("logger", dist.Logger)):
        yield from (f"{kind} {name}" for name in vars(of) if not name.startswith("__") and name != "_pybind11_conduit_v1_")


def _arguments() -> Iterator[Entry]:
    def line(name: str, state: State, note: str, check: Any) -> Entry:
        return Entry(f"argument {name}", state, note, check)

    yield line("module", WORKS, "parameters of any dtypes; frozen ones may be unfrozen later", module)
    yield line("device_ids", WORKS, "None, or one device; more are refused as by torch", device_ids)
    yield line("output_device", WORKS, "with `device_ids`; refused without, as by torch", output_device)
    yield line("dim", WORKS, "of `scatter` and `gather`", dim)
    yield line("broadcast_buffers", WORKS, "before each forward, and at the start", lambda: buffers("broadcast_buffers", False))
    yield line("init_sync", WORKS, "False: every rank keeps its values", init_sync)
    yield line("process_group", WORKS, "its ranks and backend, over connections of our own", process_group)
    yield line("bucket_cap_mb", WORKS, "default 25, as torch's", bucket_cap_mb)
    yield line("find_unused_parameters", NO_OP, "always right, without a search", lambda: unused(find_unused_parameters=True))
    yield line("check_reduction", NO_OP, "deprecated by torch, too", lambda: reduces(check_reduction=True))
    yield line("gradient_as_bucket_view", NO_OP, "gradients are views of buckets either way", lambda: reduces(gradient_as_bucket_view=True))
    yield line("static_graph", NO_OP, "every graph is taken as it comes", static_graph)
    yield line("delay_all_reduce_named_params", NO_OP, "they are reduced with the others, and done when `backward()` returns", delayed)
    yield line("param_to_hook_all_reduce", NO_OP, "see `delay_all_reduce_named_params`", delayed)
    yield line("mixed_precision", WORKS, "`param_dtype` and `buffer_dtype`; gradients are summed in the parameters' dtype", mixed_precision)
    yield line("device_mesh", WORKS, "one-dimensional, also a slice of a larger one", device_mesh)
    yield line("skip_all_reduce_unused_params", NO_OP, "parameters that no rank used keep no gradient", lambda: unused(skip_all_reduce_unused_params=True))
    yield line("bucket_cap_mb_list", NO_OP, "the first bucket has the list's first cap, the others its largest", lambda: reduces(bucket_cap_mb_list=[1, 2]))
    yield line("batched_grad_copy", NO_OP, "a device copies a bucket in one kernel anyway", lambda: reduces(batched_grad_copy=True))
    yield line("forward_sync_buffers", WORKS, "before each forward", lambda: buffers("forward_sync_buffers", True))


def _methods() -> Iterator[Entry]:
    def line(name: str, state: State, note: str, check: Any) -> Entry:
        return Entry(f"method {name}", state, note, check)

    yield line("forward", WORKS, "", forward_and_train)
    yield line("train", WORKS, "", forward_and_train)
    yield line("no_sync", WORKS, "of backwards, wherever the forward ran; a step without a backward outside reduces first", step_after_no_sync)
    yield line("join", WORKS, "also `divide_by_initial_world_size=False`", joins)
    yield line("join_hook", WORKS, "with others in one `Join`", join_hook)
    yield line("join_device", WORKS, "", asked("join_device"))
    yield line("join_process_group", WORKS, "", asked("join_process_group"))
    yield line("register_comm_hook", WORKS, "torch's (bf16 over any backend) and your own; one per model", comm_hooks)
    yield line("_register_builtin_comm_hook", WORKS, "", builtin_hook)
    yield line("_register_buffer_comm_hook", WORKS, "futures are waited for where the buffers are synchronised", buffer_hook)
    yield line("_register_fused_optim", RAISES, "step the optimizer after `backward()`", fused_optimizer)
    yield line("broadcast_buffers", WORKS, "", lambda: buffers("broadcast_buffers", False))
    yield line("will_sync_module_buffers", WORKS, "", asked("will_sync_module_buffers"))
    yield line("_assign_modules_buffers", WORKS, "", asked("_assign_modules_buffers"))
    yield line("_default_broadcast_coalesced", WORKS, "", asked("_default_broadcast_coalesced"))
    for name in ("scatter", "gather", "to_kwargs"):
        yield line(name, WORKS, "torch's", asked(name))
    yield line("_set_static_graph", NO_OP, "", static_graph)
    yield line("_get_ddp_logging_data", WORKS, "construction and counts; no times", logging_data)
    yield line("_set_ddp_runtime_logging_sample_rate", NO_OP, "no times are taken", asked("_set_ddp_runtime_logging_sample_rate"))
    yield line("_check_reducer_finalized", NO_OP, "it is, when `backward()` returns", asked("_check_reducer_finalized"))
    yield line("_remove_autograd_hooks", WORKS, "closes the engine", removed_hooks)
    yield line("_update_process_group", WORKS, "", new_group)
    yield line("_set_ddp_sink_clone", NO_OP, "outputs are handed on as they are", asked("_set_ddp_sink_clone"))
    yield line("_set_params_and_buffers_to_ignore_for_model", WORKS, "", ignored)
    yield line("_get_data_parallel_params", WORKS, "", ignored)
    yield line("_get_parameters", WORKS, "", asked("_get_parameters"))
    yield line("_get_active_ddp_module", WORKS, "", asked("_get_active_ddp_module"))
    yield line("_ddp_init_helper", WORKS, "builds the engine", asked("_ddp_init_helper"))
    for name in ("_fire_reducer_autograd_hook", "_root_copy_hook", "_module_wait_for_copy_hook"):
        yield line(name, NO_OP, "of torch's way of mixed precision", asked(name))
    yield line("__getstate__", WORKS, "pickle and deepcopy, by one rank alone, too", copies)
    yield line("__setstate__", WORKS, "a copy builds its engine at its first forward", copies)
    yield Entry("attribute reducer", WORKS, "answers what others ask of it", on_reducer("_rebuild_buckets"))
    yield Entry("attribute logger", WORKS, "", on_logger("_get_ddp_logging_data"))
    yield Entry("attribute require_backward_grad_sync", WORKS, "False inside `no_sync()`; set by hand, it is the same", asked("require_backward_grad_sync"))


def _parts() -> Iterator[Entry]:
    works = {"_rebuild_buckets", "_run_allreduce_hook", "_install_post_backward_futures", "_set_forward_pass_work_handle"}
    for name in (n for n in vars(dist.Reducer) if not n.startswith("__") and n != "_pybind11_conduit_v1_"):
        if name in _ONLY_TORCHS_REDUCER:
            yield Entry(f"reducer {name}", RAISES, "there is no such bookkeeping", on_reducer(name))
        else:
            yield Entry(f"reducer {name}", WORKS if name in works else NO_OP, "", on_reducer(name))
    for name in (n for n in vars(dist.Logger) if not n.startswith("__") and n != "_pybind11_conduit_v1_"):
        yield Entry(f"logger {name}", NO_OP if name.startswith("set_con") else WORKS, "", on_logger(name))


TABLE = Table(
    original="torch.nn.parallel.DistributedDataParallel",
    ours="plumb.DistributedDataParallel",
    names=names,
    entries=(*_arguments(), *_methods(), *_parts()),
    order=1,
)
