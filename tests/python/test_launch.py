"""Ranks that ``plumb.spawn`` starts: what each is given, what comes back in which order, and what is said when one does not end well."""

from __future__ import annotations

import gc
import os
import pathlib
import sys
import time
import types
from typing import Any

import pytest
import torch

import plumb
import plumb.save.durable
import plumb.optim.compared


def told(word: str, number: int) -> tuple[Any, ...]:
    world = plumb.world()
    names = ("MINE", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "OMP_NUM_THREADS")
    return world.rank, world.size, word, number, torch.get_num_threads(), os.getpid(), [os.environ[name] for name in names]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_every_rank_gets_its_place_and_answers_in_their_order(method: str) -> None:
    found = plumb.spawn(told, 3, ("a", 7), method=method, threads=2, env={"MINE": "yes"})
    assert [one[:5] for one in found] == [(rank, 3, "a", 7, 2) for rank in range(3)]
    assert len({one[5] for one in found} | {os.getpid()}) == 4, "processes of their own"
    assert [one[6] for one in found] == [["yes", "3", "3", str(rank), str(rank), "2"] for rank in range(3)]
    assert "MINE" not in os.environ and "RANK" not in os.environ


def test_one_thread_and_two_ranks_unless_told_otherwise() -> None:
    assert plumb.spawn(lambda: (plumb.world().rank, plumb.world().size, torch.get_num_threads())) == [(0, 2, 1), (1, 2, 1)]


def test_a_port_of_the_callers_own_is_kept() -> None:
    assert plumb.spawn(lambda: os.environ["MASTER_PORT"], 1, env={"MASTER_PORT": "1234"}) == ["1234"]


@pytest.mark.parametrize("ranks", [0, -1])
def test_no_ranks_are_refused(ranks: int) -> None:
    with pytest.raises(plumb.Error, match=f"spawn of {ranks} ranks"):
        plumb.spawn(lambda: None, ranks)


def test_a_rank_that_ends_without_a_word_is_named_with_its_status() -> None:
    def ends() -> None:
        if plumb.world().rank == 1:
            os._exit(3)

    with pytest.raises(plumb.Error, match="rank 1: it ended with status 3"):
        plumb.spawn(ends, 2)


def test_all_that_failed_are_named_with_the_first_ones_traceback() -> None:
    def fails() -> None:
        raise ValueError(f"this is {plumb.world().rank}")

    with pytest.raises(plumb.Error) as caught:
        plumb.spawn(fails, 3)
    text = str(caught.value)
    first = text.split(":")[0].split()[-1]
    assert text.startswith(f"rank {first}: ValueError: this is {first}")
    for other in {"0", "1", "2"} - {first}:
        assert f"(then rank {other}: ValueError: this is {other})" in text
    assert "in fails" in text, "where it was raised"


def test_a_rank_that_returned_has_left_and_did_not_crash() -> None:
    def goes_on_alone() -> None:
        world = plumb.world()
        model = torch.nn.Linear(4, 4)
        engine = plumb.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if world.rank == 0:
            model(torch.ones(1, 4)).sum().backward()
            engine.step()

    with pytest.raises(plumb.Error, match="for rank 1, which has left the world") as caught:
        plumb.spawn(goes_on_alone, 2)
    assert "killed" not in str(caught.value)


def test_what_a_rank_raised_is_told_to_those_that_wait_for_it() -> None:
    def one_raises() -> None:
        if plumb.world().rank == 1:
            raise ValueError("no such corpus")
        plumb.world().barrier()

    with pytest.raises(plumb.Error, match="^rank 1: ValueError: no such corpus") as caught:
        plumb.spawn(one_raises, 2)
    assert "rank 1 failed: ValueError: no such corpus" in str(caught.value).split("(then rank 0: ")[1]


def test_a_result_that_cannot_travel_is_an_error_of_its_rank() -> None:
    with pytest.raises(plumb.Error, match="rank 0: .*[Pp]ickl"):
        plumb.spawn(lambda: (lambda: None), 1)


def test_ranks_that_do_not_end_are_ended(tmp_path: pathlib.Path) -> None:
    def stays() -> None:
        (tmp_path / str(plumb.world().rank)).write_text(str(os.getpid()))
        if plumb.world().rank > 0:
            time.sleep(600)

    begin = time.monotonic()
    with pytest.raises(plumb.Error, match="rank 1 of 3 has not ended within 20 s"):
        plumb.spawn(stays, 3, timeout=20)
    assert time.monotonic() - begin < 200
    for rank in range(3):
        pid = int((tmp_path / str(rank)).read_text())
        assert not pathlib.Path(f"/proc/{pid}").exists(), "nothing outlives the call"


# ---- files


def test_a_file_is_there_whole_or_not_at_all(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    plumb.save.durable.write_text(path, "naïve")
    assert path.read_bytes() == "naïve".encode()
    with pytest.raises(ValueError, match="enough"), plumb.save.durable.whole(path) as file:
        file.write(b"half of")
        assert path.read_bytes() == "naïve".encode(), "the old one until the new one is whole"
        raise ValueError("enough")
    assert path.read_bytes() == "naïve".encode()
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    monkeypatch.chdir(tmp_path)
    plumb.save.durable.write_text("file", "")  # a name without a folder, and nothing in it
    assert path.read_bytes() == b""
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_folder_after(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(fd: int) -> None:
        target = pathlib.Path(os.readlink(f"/proc/self/fd/{fd}"))
        calls.append(f"fsync {target.name}" if target != tmp_path else "fsync the folder")
        if target != tmp_path:
            assert target.read_bytes() == b"all of it", "what is buffered would not be on the disk"
        fsync(fd)

    def replaced(old: str, new: str) -> None:
        calls.append(f"name {pathlib.Path(new).name}")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    plumb.save.durable.write_text(tmp_path / "file", "all of it")
    assert calls == ["fsync file.unfinished", "name file", "fsync the folder"]


# ---- what ranks compare of an optimizer


def test_every_number_of_an_optimizer_is_compared() -> None:
    group = {
        "params": [torch.ones(2)], "lr": torch.tensor(0.25), "betas": (0.5, 0.75), "flag": True, "count": 3, "many": torch.ones(2),
        "imaginary": torch.tensor(1j), "none": None, "name": "x", "list": [1, torch.tensor(2)],
    }  # fmt: skip
    assert plumb.optim.compared.numbers_of(group, "g") == [
        ("betas of g", 0.5), ("betas of g", 0.75), ("count of g", 3.0), ("flag of g", 1.0), ("list of g", 1.0), ("list of g", 2.0),
        ("lr of g", 0.25),
    ]  # fmt: skip


def test_the_layout_of_an_optimizer_is_compared_and_nothing_of_its_values() -> None:
    def digest(kind: type[torch.optim.Optimizer], *groups: dict[str, Any], **more: Any) -> float:
        values = dict(plumb.optim.compared.settings(kind(list(groups), **more)))
        return values["the optimizer's class, groups and parameters (as a digest)"]

    def one(*shapes: tuple[int, ...], **more: Any) -> dict[str, Any]:
        return {"params": [torch.rand(shape) for shape in shapes], **more}

    base = digest(torch.optim.SGD, one((2, 3), (4,)), lr=0.1)
    assert base == digest(torch.optim.SGD, one((2, 3), (4,)), lr=0.2, momentum=0.9)
    others = [
        digest(torch.optim.SGD, one((3, 2), (4,)), lr=0.1),
        digest(torch.optim.SGD, one((2, 3)), lr=0.1),
        digest(torch.optim.SGD, one((2, 3)), one((4,)), lr=0.1),
        digest(torch.optim.SGD, one((2, 3), (4,), mine=1), lr=0.1),
        digest(torch.optim.Rprop, one((2, 3), (4,)), lr=0.1),
    ]
    assert len({base, *others}) == 6
    # A group that comes later is seen, and so are steps that were left by an exception.
    optimizer = torch.optim.SGD([torch.rand(2)], lr=0.1)
    before = plumb.optim.compared.settings(optimizer)
    assert plumb.optim.compared.settings(optimizer) == before
    optimizer.add_param_group({"params": [torch.rand(3)], "lr": 0.5})
    after = plumb.optim.compared.settings(optimizer)
    assert after[1] != before[1]
    assert ("lr of the optimizer's group 1", 0.5) in after
    assert plumb.optim.compared.settings(optimizer, 2)[0][1] == 2.0 and after[0][1] == 0.0


# ---- what a rank inherits


class Left:
    """Garbage of the caller's that says who collects it."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path, self.me = path, self

    def __del__(self) -> None:
        with self.path.open("a") as file:
            file.write(f"{os.getpid()}\n")


def test_what_the_caller_left_as_garbage_is_no_ranks_to_collect(tmp_path: pathlib.Path) -> None:
    gc.collect()
    gc.disable()
    try:
        Left(tmp_path / "collected")
        assert all(number >= 0 for number in plumb.spawn(gc.collect, 2))
        assert not (tmp_path / "collected").exists()
    finally:
        gc.enable()
    gc.collect()
    assert (tmp_path / "collected").read_text() == f"{os.getpid()}\n"


def test_variables_of_the_callers_own_come_before_ours() -> None:
    env = {"OMP_NUM_THREADS": "3", "LOCAL_WORLD_SIZE": "7", "ANY": "thing"}
    assert plumb.spawn(lambda: [os.environ[name] for name in env], 1, env=env) == [list(env.values())]


def test_ranks_as_threads_get_arguments_answer_in_order_and_wait_as_long_as_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []

    def run(ranks: int, body: Any, timeout: float) -> None:
        told.append(timeout)
        for rank in reversed(range(ranks)):  # the last one is done first
            body(types.SimpleNamespace(rank=rank))

    monkeypatch.setattr(sys.modules["plumb.launch"], "run_threads", run)
    for timeout in (7.0, 1000.0):
        found = plumb.spawn(lambda word: (plumb.world().rank, word), 3, ("a",), method="thread", timeout=timeout)
        assert found == [(0, "a"), (1, "a"), (2, "a")]
    assert told == [7.0, 60.0]
    assert plumb.world().size == 1, "this thread is no rank of theirs"


def test_a_thread_is_a_rank_as_long_as_it_is_told_also_where_it_throws() -> None:
    world = sys.modules["plumb.world"]
    mine = plumb.World()
    with pytest.raises(KeyError), world.as_thread(mine):  # type: ignore[attr-defined]
        assert plumb.world() is mine
        raise KeyError
    assert plumb.world() is not mine
    world.check_processes()  # type: ignore[attr-defined]


def test_what_ends_threads_that_did_not_fail_themselves_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise plumb.Error("a rank left")

    monkeypatch.setattr(sys.modules["plumb.launch"], "run_threads", broken)
    with pytest.raises(plumb.Error, match="a rank left"):
        plumb.spawn(lambda: None, 2, method="thread")


def forks() -> list[bool]:
    module = sys.modules["plumb.world"]
    engine = plumb.Engine(torch.nn.Linear(2, 2), plumb.SGD(lr=0.1))
    known = module._worlds and len(module._engines)  # type: ignore[attr-defined]
    child = os.fork()
    if child == 0:
        os._exit(len(module._worlds) + len(module._engines))  # type: ignore[attr-defined]
    return [bool(known), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, not engine.closed]


def test_a_process_that_a_rank_forks_has_no_world_and_no_engine_to_leave() -> None:
    assert plumb.spawn(forks, 2) == [[True] * 3] * 2
