"""Leaving in every way: exceptions, interrupts, threads, forks, garbage collection. What stays behind: test_leaving_nothing."""

from __future__ import annotations

import gc
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import plumb
from plumb.world import leave
from programs import nested_checkpoints
from stage import Block, Net, Play, compare, make

STRATEGIES = ["ddp", "zero2", "zero3"]


# ---- patterns that are hard on threads


def nested(strategy: str) -> float:
    return compare(nested_checkpoints, strategy=strategy)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_hundred_nested_checkpoints(strategy: str) -> None:
    # In fresh processes: torch refuses deep backwards in a fork of a process that ran some.
    assert max(plumb.spawn(nested, 2, (strategy,), method="spawn")) <= 1e-10


def test_a_hundred_nested_checkpoints_in_a_fork_of_a_process_that_ran_a_backward() -> None:
    """For which torch's engine has no threads there: it crashed."""
    torch.ones(2, requires_grad=True).sum().backward()
    assert max(plumb.spawn(nested, 2, ("zero2",), method="fork")) <= 1e-10


def steps_after_a_fork(strategy: str) -> str:
    model = make()
    with plumb.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy, units=[Block]) as engine:
        try:
            Play(model, engine.world.rank, 2, 1.0).loss(0).backward()
        except RuntimeError as error:
            return str(error)
    return ""


def forks_after_nested_checkpoints() -> list[str]:
    for _ in nested_checkpoints(Play(make(), 0, 1, 1.0)):
        pass
    return plumb.spawn(steps_after_a_fork, 2, ("zero2",), method="fork")


def test_a_fork_of_a_process_whose_backward_was_nested_deeply_says_that_it_cannot() -> None:
    """Its threads are gone in the fork, and torch refuses: in words, on every rank, without a crash or a hang."""
    for said in plumb.spawn(forks_after_nested_checkpoints, 1, method="spawn")[0]:
        assert "fork" in said


class Hooked(Net):
    """A model whose parameters have hooks in Python that make garbage with cycles."""

    def __init__(self) -> None:
        super().__init__()
        self.double()
        self.calls = 0
        for parameter in self.parameters():
            parameter.register_hook(self.count)

    def count(self, gradient: torch.Tensor) -> None:
        circle: list[Any] = [gradient]
        circle.append(circle)
        self.calls += 1


def stressed(strategy: str) -> int:
    """Data-loader threads, hooks in Python, gradients that are read, and a collection at every allocation."""
    model = Hooked()
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            circle: list[Any] = [torch.randn(64), {}]
            circle.append(circle)

    loaders = [threading.Thread(target=load, daemon=True) for _ in range(2)]
    before = gc.get_threshold()
    gc.set_threshold(1)
    for loader in loaders:
        loader.start()
    try:
        with plumb.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy, units=[Block]) as engine:
            for i in range(8):
                Play(model, engine.world.rank, 2, 1.0).loss(i).backward()
                kept = [parameter.grad for parameter in model.parameters()]
                engine.step()
                engine.zero_grad()
                del kept
    finally:
        stop.set()
        for loader in loaders:
            loader.join()
        gc.set_threshold(*before)
    return model.calls


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_deadlock_with_threads_hooks_and_collections(strategy: str) -> None:
    assert min(plumb.spawn(stressed, 2, (strategy,), timeout=200)) > 50


def user_threads() -> float:
    """Backwards of a model of one's own per thread, beside each other."""
    world = plumb.World()
    far = [1.0] * 4
    models = [(make(), make()) for _ in range(4)]

    def work(i: int) -> None:
        model, twin = models[i]
        with plumb.Engine(model, plumb.SGD(lr=0.1), world=world) as engine:
            optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
            for step in range(5):
                for one in (model, twin):
                    Play(one, i, 1, 1.0).loss(step).backward()
                engine.step()
                engine.zero_grad()
                optimizer.step()
                optimizer.zero_grad()
            far[i] = max(float((a - b).abs().max().detach()) for a, b in zip(model.parameters(), twin.parameters(), strict=True))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    return max(far)


def test_backwards_in_threads_of_the_users() -> None:
    assert user_threads() <= 1e-12


# A forked process; `saves` is many threads' first use of autograd there, at the same moment.
FORKED = """
import os, sys, threading, torch, plumb
os.environ["LD_PRELOAD"] = ""

def saves(*ignored):
    x = torch.ones(2, requires_grad=True)
    go = threading.Barrier(4)
    threads = [threading.Thread(target=lambda: (go.wait(), x * x)) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()

def engine():
    plumb.Engine(torch.nn.Linear(2, 2), plumb.SGD(lr=0.1))
    saves()

def forked(function):
    child = os.fork()
    if child == 0:
        function()
        os._exit(0)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

(torch.ones(2, requires_grad=True) ** 2).sum().backward()
"""
RANKS = "lambda: torch.ones(2, requires_grad=True) ** 2"


@pytest.mark.parametrize(
    "after",
    [f"forked(lambda: plumb.spawn({RANKS}, 4, method='thread'))", "forked(engine)", "plumb.spawn(saves, 1)"],
    ids=["ranks as threads", "an engine", "a rank"],
)
def test_threads_of_a_forked_process_meet_one_autograd_engine(after: str) -> None:
    """torch makes it anew at the first use there, without a lock: ranks as threads crashed now and then."""
    built = pathlib.Path(plumb._C.__file__).parents[1]
    slow = built.parent / "lib" / "libplumb_slow_engine.so"
    if "PLUMB_INSTALLED" in os.environ:
        pytest.skip("the slow engine is built with the tests")
    ended = subprocess.run(
        [sys.executable, "-c", FORKED + after], env={**os.environ, "LD_PRELOAD": str(slow), "PYTHONPATH": str(built)},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("an autograd engine ends") >= 2, ended.stderr


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((12,), float(i)).double()


def with_workers(strategy: str) -> float:
    model = make()
    with plumb.Engine(model, torch.optim.SGD(model.parameters(), lr=1e-3), strategy=strategy, units=[Block]) as engine:
        seen = 0.0
        for _ in range(2):
            for batch in torch.utils.data.DataLoader(Rows(), batch_size=6, num_workers=2, multiprocessing_context="fork"):
                model(batch).pow(2).mean().backward()
                engine.step()
                engine.zero_grad()
                seen += float(batch.sum())
        return seen


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_forked_workers_of_a_data_loader(strategy: str) -> None:
    assert plumb.spawn(with_workers, 2, (strategy,)) == [2 * 12.0 * sum(range(24))] * 2


# ---- the end of a process

HEAD = """
import os, signal, sys, torch, torch.distributed as dist, plumb
dist.init_process_group("gloo")
def make():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
wrapped, model = plumb.DistributedDataParallel(make()), make()
engine = plumb.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="zero3", units=[torch.nn.Linear])
"""
PASS = "for each in (wrapped, model):\n    each(torch.ones(2, 4)).sum().backward()\n"
ENDS = {
    "runs off its end": ("", 0),
    "raises inside no_sync": ("with wrapped.no_sync(), engine.no_sync():\n    raise KeyError('mine')", 1),
    "destroys its process group first": ("dist.destroy_process_group()\nsys.exit(3)", 3),
}


def run_ranks(text: str, tmp_path: pathlib.Path) -> list[subprocess.CompletedProcess[str]]:
    program = tmp_path / "program.py"
    program.write_text(text)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {
        **os.environ, "PYTHONPATH": str(pathlib.Path(plumb._C.__file__).parents[1]), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program)], env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        for rank in range(2)
    ]
    done = []
    for rank in ranks:
        out, err = rank.communicate(timeout=120)
        done.append(subprocess.CompletedProcess(rank.args, rank.returncode, out, err))
    return done


@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_as_it_would_without(end: str, tmp_path: pathlib.Path) -> None:
    what, status = ENDS[end]
    for rank in run_ranks(HEAD + PASS + PASS + what + "\n", tmp_path):
        assert rank.returncode == status, rank.stderr
        assert "terminate" not in rank.stderr and "Fatal" not in rank.stderr, rank.stderr


def test_an_interrupt_in_the_middle_of_a_backward_ends_every_rank(tmp_path: pathlib.Path) -> None:
    text = HEAD + (
        "if dist.get_rank() == 0:\n"
        "    def hook(grad):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        for _ in range(1000): pass\n"
        "    model[1].weight.register_hook(hook)\n"
    ) + PASS + "engine.step()\n"  # fmt: skip
    zero, one = run_ranks(text, tmp_path)
    assert zero.returncode in (1, -signal.SIGINT, 130) and "KeyboardInterrupt" in zero.stderr, zero.stderr
    assert one.returncode == 1 and "plumb.Error" in one.stderr, one.stderr


class ReleasedLate:
    """What is let go of a while after everybody has gone on."""

    def __del__(self) -> None:
        time.sleep(1.0)


def hooked_until_the_end() -> None:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    model = plumb.DistributedDataParallel(nn.Linear(2, 2))

    def hook(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        held = (state, ReleasedLate())  # released from the end, by the thread of the group that made the sum

        def mean(done: Any, held: Any = held) -> torch.Tensor:
            total: torch.Tensor = done.value()[0]
            return total / 2

        time.sleep(0.3 * dist.get_rank())  # so that a sum is waited for, and its future called back by that thread
        return dist.all_reduce(bucket.buffer(), group=state, async_op=True).get_future().then(mean)

    model.register_comm_hook(group, hook)
    model(torch.ones(1, 2)).sum().backward()
    del model, hook, group
    gc.collect()
    leave()
    dist.destroy_process_group()
    gc.collect()
    time.sleep(1.5)


def test_a_process_group_does_not_end_on_its_own_thread() -> None:
    # In torch it does ("Resource deadlock avoided", and the process is gone) when a hook's callback holds it last.
    plumb.spawn(hooked_until_the_end, 2)


# ---- errors


class Tired(torch.optim.SGD):
    """Throws in its second step, on rank 0."""

    tired = False

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if self.tired:
            raise ValueError("tired")
        return super().step(closure)


plumb.elementwise(Tired)


def optimizer_throws(strategy: str) -> list[str]:
    model = make()
    optimizer = Tired(model.parameters(), lr=0.1)
    engine = plumb.Engine(model, optimizer, strategy=strategy, units=[Block])
    said = []
    for i in range(3):
        Play(model, engine.world.rank, 2, 1.0).loss(i).backward()
        optimizer.tired = i == 1 and engine.world.rank == 0
        try:
            engine.step()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        engine.zero_grad()
    return said


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_optimizer_that_throws_on_one_rank_is_an_error_at_the_next_step(strategy: str) -> None:
    zero, one = plumb.spawn(optimizer_throws, 2, (strategy,))
    assert zero[0] == "ValueError: tired" and len(zero) == 2 and len(one) == 1
    for said in (zero[1], one[0]):
        assert "Error" in said and "left by an exception" in said, said


def errors_of_backwards() -> None:
    dist.init_process_group("gloo")
    model = plumb.DistributedDataParallel(make())
    rank = dist.get_rank()
    # Taken away by a hook, inside of autograd.
    handle = model.module.last.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with pytest.raises(plumb.Error, match="last.weight"):
        Play(model, rank, 2, 1.0).loss(0).backward()
    handle.remove()


def test_errors_out_of_backward_are_plumbs() -> None:
    plumb.spawn(errors_of_backwards, 2)
