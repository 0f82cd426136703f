"""Runs torch's own tests of DistributedDataParallel (torch.testing) with Plumb's class in its place, by two ranks in one world.

As a program: python torch_suite.py [PATTERN…] [--torch] prints the outcome of each test; --torch: of torch's own class.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sys
import tempfile
import traceback
import unittest
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

import plumb
from plumb.rebind import rebind
from plumb.world import leave

#: Which of them are about the wrapper.
ABOUT = re.compile(
    r"ddp|grad_div|param_to_hook|DistributedDataParallel|no_sync|join|sync_bn|SyncBatchNorm|verify_model|powerSGD|PowerSGD|stateless|unused_param|periodic_model_averager_param|post_localSGD",
    re.I,
)


def _class(ours: bool) -> Any:
    os.environ.setdefault("BACKEND", "gloo")
    os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp())
    os.environ.setdefault("INIT_METHOD", "env://")
    os.environ.setdefault("WORLD_SIZE", "2")
    if ours:
        rebind()
    from torch.testing._internal.distributed import distributed_test as suite

    suite.Barrier.sync = classmethod(lambda cls, *args, **kwargs: dist.barrier())  # type: ignore[attr-defined]

    class Suite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc,name-defined]
        @property
        def init_method(self) -> str:
            return "env://"

    return Suite


class OnTheCpu(TorchFunctionMode):
    """Tests that ask for GPUs run where none is: whatever asks for a device gets the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        name = getattr(function, "__name__", "")
        if name == "cuda":
            return args[0]
        if name == "to":
            args = tuple(one for one in args if type(one) is not int and not isinstance(one, (torch.device, str)))
            if len(args) == 1 and not kwargs:
                return args[0]
        if name == "is_cuda":
            return True
        return function(*args, **kwargs)

    def __enter__(self) -> Any:
        def moved(module: Any, *args: Any, **kwargs: Any) -> Any:
            kept = [one for one in args if isinstance(one, torch.dtype)]
            return plain_to(module, *kept, **{k: v for k, v in kwargs.items() if k == "dtype"}) if kept or kwargs else module

        plain_to = torch.nn.Module.to
        kind = torch.nn.parallel.DistributedDataParallel
        self.undo: list[Any] = []

        plain_init = kind.__init__

        def without_devices(self: Any, *args: Any, **kwargs: Any) -> None:
            plain_init(self, *args[:1], **{k: v for k, v in kwargs.items() if k not in ("device_ids", "output_device")})

        for owner, name, value in (
            (torch.nn.Module, "to", moved),
            (torch.nn.Module, "cuda", lambda module, device=None: module),
            (kind, "__init__", without_devices),
            (torch.cuda, "device_count", lambda: 2),
            (torch.cuda, "set_device", lambda *args: None),
            (torch.cuda, "synchronize", lambda *args, **kwargs: None),
            (torch.cuda, "device", lambda *args: contextlib.nullcontext()),
            (torch.cuda, "current_device", lambda: "cpu"),
            (torch.cuda, "is_available", lambda: False),
        ):
            self.undo.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)
        return super().__enter__()

    def __exit__(self, *why: Any) -> None:
        for owner, name, value in self.undo:
            setattr(owner, name, value)
        super().__exit__(*why)


def names(ours: bool = True) -> list[str]:
    suite = _class(ours)
    return [name for name in dir(suite) if name.startswith("test_") and ABOUT.search(name)]


def run(chosen: list[str], ours: bool = True) -> dict[str, str]:
    """By test: "passed", "skipped: …", or what failed."""
    suite = _class(ours)
    outcome: dict[str, str] = {}
    for number, name in enumerate(chosen):
        # Each test may break its process group: a fresh one each time.
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False
        )
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", store=dist.PrefixStore(f"test{number}", store), rank=rank, world_size=size)
        case = suite(name)
        case.rank, case.file_name, case.pid = rank, "", os.getpid()
        torch.manual_seed(1234)
        try:
            with warnings.catch_warnings(), OnTheCpu():
                warnings.simplefilter("ignore")
                # MultiProcessTestCase wraps each test so that the parent waits, others to skip it: what ranks run is inside.
                inspect.unwrap(getattr(suite, name))(case)
            outcome[name] = "passed"
        except unittest.SkipTest as skip:
            outcome[name] = f"skipped: {skip}"
        except SystemExit as left:
            outcome[name] = f"skipped: exit {left.code}"
        except BaseException as error:  # noqa: BLE001
            outcome[name] = "".join(traceback.format_exception(error))
        dist.set_debug_level(dist.DebugLevel.OFF)
        leave()
        if dist.is_initialized():
            dist.destroy_process_group()
    return outcome


def main() -> None:
    ours = "--torch" not in sys.argv
    patterns = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    chosen = [name for name in names(ours) if not patterns or any(re.search(pattern, name) for pattern in patterns)]
    for name in chosen:  # each in a pair of its own: what one breaks is no other's
        try:
            results = plumb.spawn(run, 2, ([name], ours), timeout=100)
        except plumb.Error as error:
            print(f"FAILED {name}: {str(error)[:3000]}", flush=True)
            continue
        for rank, result in enumerate(results):
            said = result[name]
            if said == "passed" or said.startswith("skipped"):
                print(f"rank {rank} {said} {name}", flush=True)
            else:
                print(f"FAILED rank {rank} {name}: {said[-3000:]}", flush=True)


if __name__ == "__main__":
    main()
