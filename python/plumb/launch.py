"""Ranks of this machine as processes, or as threads, for notebooks and tests."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from . import given as _given
from ._C import Error, World, run_threads, settle_autograd
from .world import as_thread, fail, leave


def spawn(
    fn: Callable[..., Any],
    ranks: int = 2,
    args: tuple[Any, ...] = (),
    *,
    method: str | None = None,
    threads: int = 1,
    timeout: float = 600.0,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Runs ``fn(*args)`` in ``ranks`` processes of this machine and returns what each returned, by rank.

    In them ``plumb.world()`` (and ``torch.distributed.init_process_group``) finds the others. When one raises, the others
    are ended, and an Error has its traceback. Nothing outlives the call.

    Args:
        method: how processes are started: ``fork`` (which takes functions of a notebook, and is the default unless a GPU is
            in use here) or ``spawn``. Or ``thread``: ranks are threads of this process, for debuggers; ``plumb.Engine`` alone
            knows them (``torch.distributed`` does not), and torch's default generator is shared by all.
        threads: of torch in each.
        timeout: seconds until all must have ended.
        env: more variables for them.

    >>> import plumb
    >>> plumb.spawn(lambda: plumb.world().rank, ranks=2)
    [0, 1]
    """
    if not callable(fn):
        raise Error(f"spawn of a {type(fn).__name__}; expected a function, which each rank calls")
    if _given.whole(ranks, "ranks") < 1:
        raise Error(f"spawn of {ranks} ranks; there must be at least one")
    if method == "thread":
        if env:
            raise Error("env= is of processes; ranks as threads share this process's environment")
        return _threads(fn, ranks, args, timeout)
    if method is None:
        in_use: bool = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        method = "spawn" if in_use else "fork"
    if method not in multiprocessing.get_all_start_methods():
        raise Error(f"method is {method!r}; expected {', '.join(multiprocessing.get_all_start_methods())} or thread")
    context: Any = multiprocessing.get_context(method)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": str(threads),
        **(env or {}),
    }
    sys.stdout.flush()
    sys.stderr.flush()
    processes: list[Any] = []
    pipes: list[Connection] = []
    starts: list[Connection] = []
    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            waits, start = context.Pipe(duplex=False)
            mine = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(target=_rank, args=(theirs, waits, fn, args, mine, threads), name=f"plumb-rank-{rank}")
            process.start()
            theirs.close()
            waits.close()
            processes.append(process)
            pipes.append(ours)
            starts.append(start)
        # Served from here, at a port that the system chose: nobody else can have taken it. Not before the last fork: a
        # process forked while the store's thread holds a lock (of the resolver, say) would wait for that lock for ever.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
        for start in starts:
            with contextlib.suppress(OSError):  # one that has ended already is heard of below
                start.send_bytes(str(store.port).encode())
        return _collect(processes, pipes, timeout)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in (*pipes, *starts):
            pipe.close()


def _threads(fn: Callable[..., Any], ranks: int, args: tuple[Any, ...], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[tuple[int, str, str]] = []  # in the order of time: what comes later may be a consequence

    def body(world: World) -> None:
        with as_thread(world):
            try:
                results[world.rank] = fn(*args)
            except BaseException as error:
                failures.append((world.rank, f"{type(error).__name__}: {error}", traceback.format_exc()))
                raise

    try:
        run_threads(ranks, body, min(timeout, 60.0))
    except Error:
        if not failures:
            raise
    if failures:
        rank, what, trace = failures[0]
        raise Error(f"rank {rank}: {what}\n{trace}")
    return [results[rank] for rank in range(ranks)]


def _rank(
    pipe: Connection, start: Connection, fn: Callable[..., Any], args: tuple[Any, ...], env: dict[str, str], threads: int
) -> None:
    gc.freeze()  # what the caller left as garbage is not a rank's to collect: its threads did not come along
    os.environ.update(env)
    torch.set_num_threads(threads)
    settle_autograd()  # before the function starts threads
    status = 0
    try:
        port = start.recv_bytes().decode()
        os.environ["MASTER_PORT"] = env.get("MASTER_PORT", port)
        message = pickle.dumps((True, fn(*args)))
    except BaseException as error:  # noqa: BLE001  (whatever it is, the caller hears of it)
        status = 1
        what = f"{type(error).__name__}: {error}"
        message = pickle.dumps((False, (what, traceback.format_exc())))
        with contextlib.suppress(OSError):  # the caller has gone
            pipe.send_bytes(message)  # before the others fail over it
        fail(what)
    leave()  # as an interpreter that ends does; a forked process does not
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    try:
        if status == 0:
            pipe.send_bytes(message)
    finally:
        pipe.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _collect(processes: list[Any], pipes: list[Connection], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, tuple[str, str]] = {}
    waiting = {id(pipe): rank for rank, pipe in enumerate(pipes)}
    end = time.monotonic() + timeout
    while waiting:
        ready = wait([pipe for pipe in pipes if id(pipe) in waiting], max(0.0, end - time.monotonic()))
        if not ready and failures:
            break
        if not ready:
            late = sorted(waiting.values())
            raise Error(f"rank {late[0]} of {len(pipes)} has not ended within {timeout:g} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(id(pipe))
            try:
                good, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join()
                good, value = False, (f"it ended with status {processes[rank].exitcode}", "")
            if good:
                results[rank] = value
                continue
            failures[rank] = value
            # The others hear of it from the engine; whoever does not is not waited for long.
            end = min(end, time.monotonic() + 30.0)
    if failures:
        rank, (what, trace) = next(iter(failures.items()))
        others = "".join(f"\n(then rank {r}: {w})" for r, (w, _) in failures.items() if r != rank)
        raise Error(f"rank {rank}: {what}{others}\n{trace}")
    return [results[rank] for rank in range(len(pipes))]
