"""``plumb.DistributedDataParallel``: torch's, with Plumb's engine where torch's reducer would be."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as _Torchs

from ._C import Error
from .engine import Engine
from .world import world


class _Reducer:
    """What others ask of torch's reducer. There is nothing to prepare or rebuild by hand."""

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name in _QUIET:
            return lambda *args, **kwargs: None
        raise AttributeError(f"plumb.DistributedDataParallel's reducer has no '{name}'")


#: Calls that tell torch's reducer what Plumb sees by itself, or log.
_QUIET = {
    "prepare_for_forward",
    "prepare_for_backward",
    "_set_static_graph",
    "_set_ddp_runtime_logging_sample_rate",
    "_check_reducer_finalized",
    "_install_post_backward_futures",
    "_reset_state",
    "set_logger",
    "set_runtime_stats_and_log",
    "set_construction_data_and_log",
}


class DistributedDataParallel(_Torchs):
    """A drop-in for ``torch.nn.parallel.DistributedDataParallel``: the same arguments, and every pattern right.

    Unused parameters need no ``find_unused_parameters``, retained graphs and several forwards before a backward no
    ``static_graph``. ``backward()`` returns with the mean over the ranks in every ``.grad``; step with any optimizer.
    Communication hooks, ``mixed_precision``, delayed all-reduces and ``join`` are errors for now.
    """

    engine: Engine

    def __init__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        for name in ("mixed_precision", "delay_all_reduce_named_params", "param_to_hook_all_reduce"):
            if kwargs.get(name) is not None:
                raise Error(f"plumb.DistributedDataParallel takes no {name} yet; leave it out, or use torch's")
        super().__init__(module, *args, **kwargs)

    def _ddp_init_helper(self, parameters: Any, expect_sparse: Any, names: Any, static_graph: bool) -> None:
        named = [(n, p) for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore]
        self.engine = Engine(
            named,
            world=world(self.process_group, device=self.device_type),
            bucket_bytes=max(1, int(self.bucket_bytes_cap)),
            first_bucket_bytes=max(1, int(self._bucket_config.first_bucket_bytes_cap)),
        )
        self.reducer: Any = _Reducer()
        self.logger: Any = _Reducer()
        self._passing_sync_batchnorm_handle(self.module)

    def _post_forward(self, output: Any) -> Any:
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep their gradients on this rank; where the forward ran does not matter."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            with self.engine.no_sync():
                yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        raise Error("plumb.DistributedDataParallel takes no communication hooks yet; use torch's")

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self.register_comm_hook(None, lambda: None)

    def join(self, *args: Any, **kwargs: Any) -> Any:
        raise Error("plumb.DistributedDataParallel has no join() yet; a rank without a batch calls engine.backward(None)")

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        raise Error("plumb.DistributedDataParallel is not pickled: it holds connections; save its state_dict() or .module")
