"""What of each original works behind Plumb's names: one table per drop-in, which tests run through and docs/compatibility.md shows.

A drop-in's table is a module of this folder with a ``TABLE``. Adding one adds its section to the page and its tests.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum


class State(Enum):
    WORKS = "works"
    NO_OP = "no-op by design"
    RAISES = "raises"


@dataclass(frozen=True)
class Entry:
    """One name of the original, and a check that every one of two ranks runs, with torch.distributed initialised over gloo.

    A check of what works, or of what need not do anything, asserts; one of what is refused must raise ``plumb.Error``.
    """

    name: str  # "argument bucket_cap_mb", "method no_sync", "key zero_optimization.stage"
    state: State
    note: str
    check: Callable[[], None]


@dataclass(frozen=True)
class Table:
    original: str  # whose names these are
    ours: str
    names: Callable[[], Iterable[str]]  # every name that the installed original has: the entries' must be these
    entries: tuple[Entry, ...]
    order: int = 0  # of the section in the page
    needs: str | None = None  # a module without which names() cannot be asked


def tables() -> list[Table]:
    names = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]
    return sorted((importlib.import_module(f"{__name__}.{name}").TABLE for name in names), key=lambda table: table.order)


def page() -> str:
    """docs/compatibility.md."""
    lines = [
        "# Compatibility",
        "",
        "Every argument, method and key of the originals behind Plumb's drop-ins. Made from the tables of"
        " `tests/python/compatibility` (`make compatibility`), whose every line is run by two ranks in the tests; a name that the"
        " original has and a table does not fails them.",
        "",
        "*works*: as the original, and right where the original is not. *no-op by design*: accepted; what it asks for holds"
        " anyway, or tunes what is not there. *raises*: `plumb.Error` says what to do instead.",
    ]
    for table in tables():
        count = {state: sum(entry.state is state for entry in table.entries) for state in State}
        lines += [
            "",
            f"## `{table.original}` → `{table.ours}`",
            "",
            ", ".join(f"{number} {state.value}" for state, number in count.items()) + ".",
            "",
            "| | | |",
            "|---|---|---|",
        ]
        for entry in table.entries:
            kind, _, name = entry.name.partition(" ")
            lines.append(f"| {kind} `{name}` | {entry.state.value} | {entry.note} |")
    return "\n".join(lines) + "\n"
