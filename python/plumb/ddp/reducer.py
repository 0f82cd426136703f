"""What others ask of torch's reducer, logger and join hook, answered for plumb.DistributedDataParallel."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch._C._distributed_c10d import Reducer as _Torchs
from torch.nn.parallel.distributed import _DDPJoinHook

from .._C import Error

#: Calls that tell torch's reducer what Plumb sees by itself.
_QUIET = {
    "_autograd_hook",
    "_check_reducer_finalized",
    "_delay_all_reduce",
    "_push_all_rebuilt_params",
    "_remove_autograd_hooks",
    "_reset_state",
    "_set_mixed_precision_param_dtype",
    "_set_optimizer_in_backward",
    "_set_sparse_metadata",
    "_set_static_graph",
    "_update_process_group",
    "prepare_for_backward",
    "prepare_for_forward",
    "set_logger",
}


class Reducer:
    """``ddp.reducer``. There is nothing to prepare or rebuild by hand."""

    def __init__(self, ddp: Any) -> None:
        self._ddp = weakref.ref(ddp)
        self._told_of_rebuild = False
        self._divisor = 0
        self._buffers: list[torch.futures.Future[Any]] = []
        self.sample_rate = 100

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name in _QUIET:
            return lambda *args, **kwargs: None
        if hasattr(_Torchs, name):
            raise Error(f"'{name}' looks into torch's reducer, and gradients are reduced by Plumb's engine: see ddp.engine")
        raise AttributeError(f"plumb.DistributedDataParallel's reducer has no '{name}'")

    @property
    def _native(self) -> Any:
        ddp = self._ddp()
        assert ddp is not None
        return ddp.engine._engine

    def _rebuild_buckets(self) -> bool:
        if torch.compiler.is_compiling() or self._told_of_rebuild or not self._native.rebuilt:
            return False
        self._told_of_rebuild = True
        return True

    def _ddp_graph_static(self) -> bool:
        return True

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        self.sample_rate = rate

    def _run_allreduce_hook(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        ddp = self._ddp()
        assert ddp is not None
        work = dist.all_reduce(bucket.buffer().div_(ddp.process_group.size()), group=ddp.process_group, async_op=True)
        assert work is not None
        mean: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
        return mean

    # ---- uneven inputs

    def _set_forward_pass_work_handle(self, work: dist.Work, use_static_world_size: bool) -> None:
        ddp = self._ddp()
        assert ddp is not None
        work.wait()
        self.divide_by(ddp.engine.world.size if use_static_world_size else int(work.get_future().value()[0].item()))

    def divide_by(self, ranks: int) -> None:
        if ranks != self._divisor:
            self._native.divide_by(ranks)
            self._divisor = ranks

    # ---- buffers

    def _install_post_backward_futures(self, futures: list[torch.futures.Future[Any]]) -> None:
        self._buffers += futures

    def wait_for_buffers(self) -> None:
        torch.futures.wait_all(self._buffers)
        self._buffers = []


class JoinHook(_DDPJoinHook):
    """What a rank does that ran out of inputs, for each forward and backward of the others."""

    ddp: Any

    def main_hook(self) -> None:
        ddp = self.ddp
        engine = ddp.engine
        ddp._check_and_sync_module_buffers()
        reduces = ddp._check_global_requires_backward_grad_sync(is_joined_rank=True)
        ddp.require_forward_param_sync = reduces
        with contextlib.nullcontext() if reduces else engine.no_sync():
            engine._engine.sit_out()

    def post_hook(self, is_last_joiner: bool) -> None:
        super().post_hook(is_last_joiner)
        self.ddp.reducer.divide_by(self.ddp.engine.world.size)
        self.ddp._steps.resume()


class Logger:
    """``ddp.logger``: what ``_get_ddp_logging_data()`` says."""

    def __init__(self, ddp: Any, static_graph: bool) -> None:
        self._ddp = weakref.ref(ddp)
        self._said: dict[str, Any] = {"static_graph": int(static_graph)}
        self._iteration = 0

    def set_construction_data_and_log(self, *args: Any) -> None:
        pass

    def set_runtime_stats_and_log(self) -> None:
        # A number that a compiled forward counts on is a guard of its graph, which would be compiled again for every step.
        if not torch.compiler.is_compiling():
            self._iteration += 1

    def set_error_and_log(self, error: str) -> None:
        self._said.update(has_error=1, error=error)

    def _set_static_graph(self) -> None:
        self._said["static_graph"] = 1

    def _set_uneven_input_join(self) -> None:
        self._said["join_uneven_inputs"] = 1

    def _set_comm_hook_name(self, name: str) -> None:
        self._said["comm_hook"] = name

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        ddp = self._ddp()
        assert ddp is not None
        group = ddp.process_group
        parameters = [parameter for parameter in ddp._module_parameters if parameter.requires_grad]
        sizes = ", ".join(str(size) for size in ddp.engine._engine.bucket_bytes)
        rebuilt = ddp.engine._engine.rebuilt
        strings = {
            "module_name": type(ddp.module).__name__,
            "device_ids": ", ".join(str(device) for device in ddp.device_ids or []),
            "backend_name": dist.get_backend(group),
            "dtypes": ", ".join(sorted({str(p.dtype).removeprefix("torch.").replace("float32", "float").replace("float64", "double") for p in parameters})),
            "bucket_sizes": sizes,
        }
        for name in ("MASTER_PORT", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES"):
            strings[name.lower()] = os.environ.get(name, "N/A")
        if strings["backend_name"] == "gloo":
            for name in ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"):
                strings[name.lower()] = os.environ.get(name, "N/A")
        if rebuilt:
            strings["rebuilt_bucket_sizes"] = sizes
        numbers = {
            "world_size": group.size(),
            "rank": group.rank(),
            "output_device": -1 if ddp.output_device is None else ddp.output_device,
            "broadcast_buffers": int(ddp.broadcast_buffers),
            "has_sync_bn": int(any(isinstance(m, torch.nn.SyncBatchNorm) for m in ddp.module.modules())),
            "bucket_cap_bytes": int(ddp.bucket_bytes_cap),
            "find_unused_parameters": int(ddp.find_unused_parameters),
            "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
            "is_multi_device_module": int(ddp.is_multi_device_module),
            "num_parameter_tensors": len(parameters),
            "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in parameters),
            "iteration": max(0, self._iteration - 1),
            "has_rebuilt_buckets": int(rebuilt),
            "can_set_static_graph": 1,
        }
        for name, value in self._said.items():
            (strings if isinstance(value, str) else numbers)[name] = value
        return SimpleNamespace(strs_map=strings, ints_map=numbers)
