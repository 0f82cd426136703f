"""Where ranks come from, and how they leave."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

import plumb
import plumb.deepspeed
from programs import plain
from stage import compare, make

PACKAGE = str(pathlib.Path(plumb.__file__).resolve().parents[1]) if "PLUMB_INSTALLED" in os.environ else str(
    pathlib.Path(plumb._C.__file__).parents[1]
)


def test_alone_without_anything() -> None:
    world = plumb.World.join()
    assert (world.rank, world.size) == (0, 1)


def over_torch_distributed() -> tuple[int, int, str, float]:
    dist.init_process_group("gloo")
    world = plumb.world()
    assert plumb.world() is world
    other = torch.ones(1)
    dist.all_reduce(other)  # the user's own collectives go on beside ours
    # Where nothing is shared, a unit that will be used next stays gathered: compare() looks for that.
    far = compare(plain, strategy="zero3" if world.backend == "shm" else "zero2")
    dist.all_reduce(other)
    assert float(other) == 4
    return world.rank, world.size, world.backend, far


def test_takes_torch_distributed_as_it_is() -> None:
    for env, name in ({}, "shm"), ({"PLUMB_SHM": "0"}, "tcp"):
        for rank, (mine, size, backend, far) in enumerate(plumb.spawn(over_torch_distributed, 2, env=env)):
            assert (mine, size, backend) == (rank, 2, name)
            assert far < 1e-10


def _rank_that_throws() -> None:
    if plumb.world().rank == 1:
        raise ValueError("on purpose")
    compare(plain, strategy="ddp", model=_small)


def _small() -> torch.nn.Module:
    with _building:  # torch's default generator is everybody's
        return make()


_building = threading.Lock()


def _by_deepspeeds_face() -> Any:
    """Which needs no process group. The mean over the ranks of 1 and 2, at a rate of 0.1."""
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": zero}
    wrapper = plumb.deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[0]
    wrapper.backward(wrapper(torch.full((1, 2), 1.0 + plumb.world().rank)).sum())
    wrapper.step()
    return [[round(one, 6) for one in row] for row in wrapper.engine.full_parameter(model.weight).tolist()]


def ranks_as_threads() -> None:
    for strategy in ("ddp", "zero1", "zero2", "zero3"):
        far = plumb.spawn(lambda: (plumb.world().rank, compare(plain, strategy=strategy, model=_small)), 3, method="thread")
        assert [rank for rank, _ in far] == [0, 1, 2]
        assert all(one < 1e-10 for _, one in far)
    with pytest.raises(plumb.Error, match="rank 1: ValueError: on purpose"):
        plumb.spawn(_rank_that_throws, 3, method="thread")
    with pytest.raises(plumb.Error, match="ranks are threads here"):
        plumb.spawn(lambda: plumb.fully_shard(torch.nn.Linear(2, 2)), 2, method="thread")
    with pytest.raises(plumb.Error, match="ranks are threads here"):
        plumb.spawn(lambda: plumb.DistributedDataParallel(torch.nn.Linear(2, 2)), 2, method="thread")
    assert plumb.spawn(_by_deepspeeds_face, 2, method="thread") == [[[0.85, 0.85]]] * 2
    with pytest.raises(plumb.Error, match="of processes"):
        plumb.spawn(lambda: None, 2, method="thread", env={"A": "1"})
    assert plumb.spawn(lambda: plumb.world().size, 1, method="thread") == [1]


def test_ranks_as_threads() -> None:
    plumb.spawn(ranks_as_threads, 1, timeout=200)  # a process of its own: threads that ran backwards do not survive a fork


def over_a_sub_group() -> tuple[int, int, float]:
    dist.init_process_group("gloo")
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    world = plumb.world(pairs[dist.get_rank() // 2])
    return world.rank, world.size, compare(plain, strategy="zero2", world=world)


def test_takes_a_sub_group() -> None:
    for rank, (mine, size, far) in enumerate(plumb.spawn(over_a_sub_group, 4)):
        assert (mine, size) == (rank % 2, 2)
        assert far < 1e-10


def closed_group() -> str:
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1])
    dist.destroy_process_group()
    try:
        plumb.Engine(torch.nn.Linear(2, 2), plumb.SGD(), world=group)
    except plumb.Error as error:
        return str(error)
    return "nothing"


def test_says_that_a_process_group_is_closed() -> None:
    for said in plumb.spawn(closed_group, 2):
        assert "destroyed" in said, said


def test_spawn_tells_who_failed_and_why() -> None:
    def fails() -> None:
        if plumb.world().rank == 1:
            raise ValueError("no more batches")
        plumb.world().barrier()

    with pytest.raises(plumb.Error) as caught:
        plumb.spawn(fails, 2)
    assert str(caught.value).startswith("rank 1: ValueError: no more batches"), "the one that came first, and not what followed from it"


# ---- leaving

TRAIN = """
    import torch, plumb, sys
    {before}
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    engine = plumb.Engine(model, torch.optim.AdamW(model.parameters()), strategy="{strategy}", units=[torch.nn.Linear])
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
        engine.step()
        engine.zero_grad()
    {after}
"""


def run(before: str, after: str, strategy: str) -> list[subprocess.CompletedProcess[str]]:
    """Two processes that nobody cleans up after."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    code = textwrap.dedent(TRAIN).format(before=before, after=after, strategy=strategy)
    env = {
        **os.environ, "PYTHONPATH": PACKAGE, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code], env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        for rank in range(2)
    ]
    done = []
    for process in running:
        out, err = process.communicate(timeout=240)
        done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return done


GLOO = "import torch.distributed as dist; dist.init_process_group('gloo')"


@pytest.mark.parametrize("before", ["", GLOO], ids=["own", "torch.distributed"])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_leaving_without_being_told_is_clean(before: str, strategy: str) -> None:
    for process in run(before, "print('done')", strategy):
        assert process.returncode == 0, process.stderr
        assert process.stdout == "done\n"


def test_an_exception_ends_every_rank() -> None:
    after = "if engine.world.rank == 1: raise ValueError('enough')\nmodel(torch.randn(4, 8)).sum().backward()"
    first, second = run("", after, "ddp")
    assert second.returncode == 1 and "ValueError: enough" in second.stderr
    assert first.returncode == 1 and "plumb.Error" in first.stderr, first.stderr
    assert "rank 1" in first.stderr


def refusal_of(program: str, package: str) -> str:
    """The last line that an interpreter says which imports ``plumb`` and cannot."""
    ended = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": package}, capture_output=True, text=True, timeout=200
    )
    assert ended.returncode != 0
    return ended.stderr.splitlines()[-1]


def test_an_interpreter_without_the_global_lock_is_refused_in_one_line() -> None:
    said = refusal_of("import sys; sys._is_gil_enabled = lambda: False; import plumb", PACKAGE)
    assert "ImportError: plumb needs Python's global lock" in said


def test_another_minor_version_of_torch_is_refused_in_one_line() -> None:
    other = torch.__version__.split(".")[0] + ".1.0"  # which begins as 2.11 does
    said = refusal_of(f"import torch; torch.__version__ = '{other}'; import plumb", PACKAGE)
    assert said == (
        f"ImportError: plumb was built with torch {plumb._C.torch_version}, and this is torch {other}; install plumb again with it"
    )


def test_another_patch_of_the_same_torch_is_taken() -> None:
    minor = ".".join(torch.__version__.split(".")[:2])
    ended = subprocess.run(
        [sys.executable, "-c", f"import torch; torch.__version__ = '{minor}.99+other'; import plumb"],
        env={**os.environ, "PYTHONPATH": PACKAGE}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr


def test_a_library_that_does_not_load_is_refused_in_one_line(tmp_path: pathlib.Path) -> None:
    """As one that wants symbols which another torch does not have."""
    built, package = pathlib.Path(plumb._C.__file__), tmp_path / "plumb"
    package.mkdir()
    shutil.copy(pathlib.Path(plumb.__file__), package)
    (package / built.name).write_bytes(built.read_bytes()[:64])
    said = refusal_of("import plumb", str(tmp_path))
    assert said.startswith(f"ImportError: plumb was built with another torch than the one installed, {torch.__version__};"), said
    assert built.name in said, said
