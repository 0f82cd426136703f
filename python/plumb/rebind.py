"""torch's names (and DeepSpeed's, where it is installed) rebound to Plumb's, and unchanged programs run so."""

from __future__ import annotations

import functools
import importlib
import os
import runpy
import subprocess
import sys
from typing import Any

from .deepspeed import rebound as deepspeed

#: A name of torch's, where it is found, and Plumb's in its place. The first place is the one that is spoken of.
REBOUND: dict[str, tuple[str, ...]] = {
    "plumb.ddp.DistributedDataParallel": (
        "torch.nn.parallel.DistributedDataParallel",
        "torch.nn.parallel.distributed.DistributedDataParallel",
        "torch.distributed._composable.replicate.DistributedDataParallel",  # which took it when it was imported
    ),
    "plumb.fsdp.fully_shard": (
        "torch.distributed.fsdp.fully_shard",
        "torch.distributed.fsdp._fully_shard.fully_shard",
        "torch.distributed._composable.fsdp.fully_shard",
        "torch.distributed._composable.fsdp.fully_shard.fully_shard",  # a module of that name
    ),
    "plumb.fsdp.module.register_fsdp_forward_method": (
        "torch.distributed.fsdp.register_fsdp_forward_method",
        "torch.distributed.fsdp._fully_shard.register_fsdp_forward_method",
        "torch.distributed._composable.fsdp.register_fsdp_forward_method",
        "torch.distributed._composable.fsdp.fully_shard.register_fsdp_forward_method",
    ),
}

USAGE = "usage: python -m plumb PROGRAM.py [ARGUMENT]…\n       python -m plumb -m MODULE [ARGUMENT]…\n       (also as torchrun … -m plumb …)\n       python -m plumb checkpoint convert --help"


def rebind() -> list[tuple[str, str]]:
    """Puts Plumb's names in the place of torch's and DeepSpeed's, for every import from now on. The pairs of (theirs, Plumb's)."""
    said = []
    for ours, places in REBOUND.items():
        module, _, name = ours.rpartition(".")
        value = getattr(importlib.import_module(module), name)
        for place in places:
            theirs, _, attribute = place.rpartition(".")
            setattr(importlib.import_module(theirs), attribute, value)
        said.append((places[0], f"plumb.{name}"))
    if deepspeed.rebind():
        said.append(deepspeed.SPOKEN)
    return said


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:2] == ["checkpoint", "convert"]:
        from .formats import command

        sys.exit(command.main(arguments[2:]))
    as_module = bool(arguments) and arguments[0] == "-m"
    if as_module:
        arguments = arguments[1:]
    if not arguments or arguments[0].startswith("-"):
        sys.exit(USAGE)
    program = arguments[0]
    if not as_module and not os.path.exists(program):
        sys.exit(f"plumb: there is no program '{program}'\n{USAGE}")
    said = rebind()
    if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
        print("plumb: " + ", ".join(f"{theirs} is {ours}" for theirs, ours in said), file=sys.stderr, flush=True)
    sys.argv = arguments
    _follow_into_started(["-m", program] if as_module else [os.path.abspath(program)])
    if as_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(program))
        _run(os.path.abspath(program))


def _run(program: str) -> None:
    """As ``python program`` does: ``__main__`` is the program's module, so that pickles and spawned processes find its names."""
    main_module = sys.modules["__main__"]
    with open(program, "rb") as file:
        code = compile(file.read(), program, "exec")
    _follow_into_spawned(program)
    for name in [name for name in vars(main_module) if not name.startswith("__")]:
        delattr(main_module, name)
    vars(main_module).update(__file__=program, __doc__=None, __package__=None, __spec__=None, __cached__=None, __loader__=None)
    exec(code, vars(main_module))


def _follow_into_spawned(program: str) -> None:
    """Processes that the program spawns begin by running it again as ``__mp_main__``: with the names rebound there, too."""
    from multiprocessing import spawn

    from . import spawned

    plain = spawn.get_preparation_data

    def prepared(name: str) -> dict[str, object]:
        data = plain(name)
        path = data.get("init_main_from_path")
        if isinstance(path, str) and os.path.abspath(path) == os.path.abspath(program):
            os.environ[spawned.PROGRAM] = path
            data["init_main_from_path"] = spawned.__file__
        return data

    spawn.get_preparation_data = prepared


def _follow_into_started(program: list[str]) -> None:
    """Processes that the program starts by running itself again (launchers do, of one rank each) run it so, too."""
    plain = subprocess.Popen.__init__
    itself = [[sys.executable, *program], [sys.executable, *program[:-1], f"{program[-1]}.__main__"]]

    @functools.wraps(plain)
    def started(self: subprocess.Popen[Any], args: Any, *rest: Any, **options: Any) -> None:
        if isinstance(args, (list, tuple)) and list(args[: 1 + len(program)]) in itself:
            args = [sys.executable, "-m", "plumb", *args[1:]]
        plain(self, args, *rest, **options)

    subprocess.Popen.__init__ = started  # type: ignore[method-assign]
