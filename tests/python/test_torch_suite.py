"""torch's own tests of DistributedDataParallel, run with Plumb's class in its place (torch_suite.py)."""

from __future__ import annotations

import functools

import pytest

import plumb

pytest.importorskip("expecttest")
import torch_suite  # noqa: E402

#: What they ask for that is not so here, by design.
OTHERWISE = {
    "test_ddp_apply_optim_in_backward": "optimizers that step inside the backward are refused",
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false": "optimizers that step inside the backward are refused",
    "test_ddp_apply_optim_in_backward_ignored_params": "optimizers that step inside the backward are refused",
    "test_ddp_control_flow_different_across_ranks": "looks into torch's reducer (_get_local_used_map)",
    "test_ddp_control_flow_same_across_ranks": "looks into torch's reducer (_get_local_used_map)",
    "test_ddp_has_finalized": "wants an error for a backward that is right here",
    "test_ddp_logging_data_cpu": "times of forwards and backwards, which are not taken",
    "test_ddp_logging_data_gpu": "times of forwards and backwards, which are not taken",
    "test_ddp_multiple_nested_unused_params_err_ignore_params": "wants an error for unused parameters, which are right here",
    "test_ddp_multiple_nested_unused_params_error": "wants an error for unused parameters, which are right here",
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none": "looks into torch's way of mixed precision (_mp_param)",
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none": "looks into torch's way of mixed precision (_mp_param)",
    "test_ddp_native_mixed_precision_ignored_params": "looks into torch's way of mixed precision (_mp_param)",
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none": "looks into torch's way of mixed precision (_mp_param)",
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none": "looks into torch's way of mixed precision (_mp_param)",
    "test_ddp_profiling_autograd_profiler": "counts all-reduces of torch's process group; gradients travel over connections of our own",
    "test_ddp_profiling_torch_profiler": "counts all-reduces of torch's process group; gradients travel over connections of our own",
    "test_ddp_unused_params_rebuild_buckets_exception": "wants an error for unused parameters, which are right here",
    "test_detect_ddp_is_actually_static": "static_graph may always be set",
    "test_skip_all_reduce_unused_parameters": "counts buckets",
}

#: What the CPU has not: streams, SyncBatchNorm, NCCL, torchvision; or takes minutes there.
ELSEWHERE = (
    "SyncBatchNorm", "sync_bn", "non_default_stream", "test_ddp_device", "test_ddp_inference", "execution_trace",
    "test_ddp_uneven_inputs", "hook_pickling", "with_amp", "test_ddp_compile",
)  # fmt: skip


def chosen() -> list[str]:
    return [name for name in plumb.spawn(torch_suite.names, 1)[0] if name not in OTHERWISE and not any(w in name for w in ELSEWHERE)]


@functools.cache
def outcome() -> tuple[dict[str, str], ...]:
    names = chosen()
    return tuple(plumb.spawn(torch_suite.run, 2, (names,), timeout=500))


def test_torchs_own_tests_pass() -> None:
    assert len(outcome()[0]) >= 52  # of torch 2.11; later ones have more
    wrong = {f"rank {rank}: {name}": said for rank, by_name in enumerate(outcome()) for name, said in by_name.items() if said != "passed"}
    assert not wrong, "\n".join(f"{name}\n{said[-1500:]}" for name, said in wrong.items())


def test_what_is_otherwise_is_still_in_torchs_suite() -> None:
    assert set(OTHERWISE) <= set(plumb.spawn(torch_suite.names, 1)[0])
