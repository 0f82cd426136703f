"""The tables of compatibility/: complete against the installed originals, true when run, and what the page says."""

from __future__ import annotations

import functools
import pathlib
import traceback

import pytest
import torch
import torch.distributed as dist

import plumb
from compatibility import State, Table, page, tables

TABLES = {table.ours: table for table in tables()}
CASES = [(table.ours, entry.name) for table in TABLES.values() for entry in table.entries]


def everything(ours: str) -> dict[str, str]:
    """By name, what was wrong with it; nothing where it was right."""
    dist.init_process_group("gloo")
    wrong: dict[str, str] = {}
    for entry in TABLES[ours].entries:
        try:
            entry.check()
            if entry.state is State.RAISES:
                wrong[entry.name] = "it raised nothing"
        except plumb.Error as error:
            if entry.state is not State.RAISES:
                wrong[entry.name] = "".join(traceback.format_exception(error))
        except BaseException as error:  # noqa: BLE001
            wrong[entry.name] = "".join(traceback.format_exception(error))
    return wrong


@functools.cache
def outcome(ours: str) -> list[dict[str, str]]:
    return plumb.spawn(everything, 2, (ours,), timeout=300)


@pytest.mark.parametrize("ours", TABLES)
def test_none_is_missing(ours: str) -> None:
    table: Table = TABLES[ours]
    if table.needs is not None:
        pytest.importorskip(table.needs)
    listed = [entry.name for entry in table.entries]
    assert len(set(listed)) == len(listed)
    assert set(table.names()) <= set(listed)
    if torch.__version__.startswith("2.13"):  # what the tables describe; older ones have less
        assert set(listed) == set(table.names())


@pytest.mark.parametrize("ours,name", CASES, ids=[f"{ours}: {name}" for ours, name in CASES])
def test_is_as_the_table_says(ours: str, name: str) -> None:
    needs = TABLES[ours].needs
    if needs is not None:
        pytest.importorskip(needs)
    for rank, wrong in enumerate(outcome(ours)):
        assert name not in wrong, f"rank {rank}: {wrong[name]}"


def test_the_page_is_what_the_tables_say() -> None:
    written = pathlib.Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
    assert written.read_text() == page(), "make compatibility"
