"""``python -m plumb PROGRAM``: what a program finds is what it finds without, but for the names; and so do processes that it starts."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

import plumb
from plumb import rebind, spawned

PROGRAM = '''
"""What it is for."""
import json, os, pickle, sys
import helper

class Kept:
    pass

def found():
    names = sorted(name for name in globals() if not name.startswith("__"))
    dunders = {name: repr(globals()[name]) for name in ("__name__", "__file__", "__doc__", "__package__")}
    spec = None if __spec__ is None else __spec__.name
    kept = type(pickle.loads(pickle.dumps(Kept()))) is Kept and sys.modules["__main__"].Kept is Kept
    return [names, dunders, spec, kept, sys.argv, sys.path[0], helper.HERE]

if __name__ == "__main__":
    with open(sys.argv[1], "w") as file:
        json.dump(found(), file)
'''


def _as_plumb(arguments: list[str], folder: str) -> None:
    os.chdir(folder)
    sys.argv = ["plumb", *arguments]
    sys.path.insert(0, "where plumb is")
    rebind.main()


@pytest.mark.parametrize("how", ["train.py", "package/__main__.py", "-m package", "-m package.tool"])
def test_a_program_finds_what_it_finds_without(how: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    for name in ("train.py", "package/__main__.py", "package/tool.py"):
        (tmp_path / name).write_text(PROGRAM)
    for name in ("helper.py", "package/helper.py"):
        (tmp_path / name).write_text(f"HERE = {name!r}")
    command = [*how.split(), str(tmp_path / "found"), "--lr", "0.1"]
    subprocess.run([sys.executable, *command], cwd=tmp_path, check=True)
    plain = json.loads((tmp_path / "found").read_text())
    (tmp_path / "found").unlink()
    plumb.spawn(_as_plumb, 1, (command, str(tmp_path)))
    assert json.loads((tmp_path / "found").read_text()) == plain


def _left() -> list[str]:
    """Where the names of torch's that were rebound are still torch's, of the places that programs import them from."""
    import torch.distributed._composable.fsdp
    import torch.distributed._composable.replicate
    import torch.distributed.fsdp
    import torch.nn.parallel

    theirs = {id(torch.nn.parallel.DistributedDataParallel), id(torch.distributed.fsdp.fully_shard)}
    theirs.add(id(torch.distributed.fsdp.register_fsdp_forward_method))
    said = rebind.rebind()
    assert [pair for pair in said if pair[0].startswith("torch")] == [
        ("torch.nn.parallel.DistributedDataParallel", "plumb.DistributedDataParallel"),
        ("torch.distributed.fsdp.fully_shard", "plumb.fully_shard"),
        ("torch.distributed.fsdp.register_fsdp_forward_method", "plumb.register_fsdp_forward_method"),
    ]
    return sorted(
        f"{name}.{attribute}"
        for name, module in list(sys.modules.items())
        if name.startswith(("torch.nn.parallel", "torch.distributed.fsdp", "torch.distributed._composable"))
        for attribute, value in list(vars(module).items())
        if id(value) in theirs and not attribute.startswith("_")
    )


def test_no_public_place_of_torchs_keeps_the_old_names() -> None:
    (left,) = plumb.spawn(_left, 1)
    assert [one for one in left if not one.startswith("torch.distributed.fsdp._fully_shard._fully_shard.")] == [], "but where they are defined"


FILE, MODULE = ["/here/train.py"], ["-m", "package"]
STARTED: list[tuple[list[str], Any, Any]] = [
    (FILE, [sys.executable, "/here/train.py", "--lr", "1"], [sys.executable, "-m", "plumb", "/here/train.py", "--lr", "1"]),
    (FILE, (sys.executable, "/here/train.py"), [sys.executable, "-m", "plumb", "/here/train.py"]),
    (FILE, [sys.executable, "/here/other.py", "/here/train.py"], None),
    (FILE, [sys.executable, "-m", "package"], None),
    (FILE, ["/bin/other", "/here/train.py"], None),
    (FILE, f"{sys.executable} /here/train.py", None),
    (MODULE, [sys.executable, "-m", "package", "x"], [sys.executable, "-m", "plumb", "-m", "package", "x"]),
    (MODULE, [sys.executable, "-m", "package.__main__", "x"], [sys.executable, "-m", "plumb", "-m", "package.__main__", "x"]),
    (MODULE, [sys.executable, "-m", "packages"], None),
    (MODULE, [sys.executable, "package"], None),
]


@pytest.mark.parametrize(("program", "command", "wanted"), STARTED, ids=range(len(STARTED)))
def test_the_program_that_is_started_again_runs_so_too(program: list[str], command: Any, wanted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(subprocess.Popen, "__init__", lambda _, args, *rest, **options: told.extend([args, rest, options]))
    monkeypatch.setattr(subprocess.Popen, "__del__", lambda _: None)
    rebind._follow_into_started(program)
    subprocess.Popen(command, 7, env={"A": "1"})  # type: ignore[call-overload]
    assert told == [command if wanted is None else wanted, (7,), {"env": {"A": "1"}}]


def test_what_a_program_spawns_begins_with_its_names_rebound(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    from multiprocessing import spawn

    monkeypatch.chdir(tmp_path)
    told: dict[str, Any] = {}
    monkeypatch.setattr(spawn, "get_preparation_data", lambda name: {"name": name, **told})
    monkeypatch.delenv(spawned.PROGRAM, raising=False)
    monkeypatch.setenv(spawned.PROGRAM, "")
    rebind._follow_into_spawned("train.py")
    for path, wanted in ((None, None), (str(tmp_path / "other.py"), str(tmp_path / "other.py")), (str(tmp_path / "train.py"), spawned.__file__)):
        told = {} if path is None else {"init_main_from_path": path}
        assert spawn.get_preparation_data("one") == {"name": "one", **({} if path is None else {"init_main_from_path": wanted})}
        assert os.environ[spawned.PROGRAM] == (path if wanted == spawned.__file__ else "")
