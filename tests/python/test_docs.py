"""What the package says about itself is true: examples in docstrings, programs of examples/, and types."""

from __future__ import annotations

import doctest
import operator
import pathlib
import runpy
import sys

import pytest

import plumb

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAMES = [*(name for name in plumb.__all__ if name != "nn"), *(f"nn.{name}" for name in plumb.nn.__all__)]
#: What is over torch.distributed, which an example starts.
OVER_PROCESSES = {"fully_shard", "FSDPModule", "register_fsdp_forward_method", "share_comm_ctx"}


def tried(name: str) -> tuple[int, int]:
    """How many lines the example in its docstring has, and how many are not true."""
    example = doctest.DocTestParser().get_doctest(operator.attrgetter(name)(plumb).__doc__ or "", {}, name, None, 0)
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example)
    return result.attempted, result.failed


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of(name: str) -> None:
    for attempted, failed in plumb.spawn(tried, 2, (name,)) if name in OVER_PROCESSES else [tried(name)]:
        assert attempted > 0, f"plumb.{name} has no example"
        assert failed == 0


def run_example(name: str, arguments: list[str]) -> None:
    sys.argv = [name, *arguments]
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")


@pytest.mark.parametrize("name,arguments", [("train.py", ["zero3"]), ("wrapped.py", []), ("token_mean.py", [])])
def test_examples_run(name: str, arguments: list[str]) -> None:
    plumb.spawn(run_example, 2, (name, arguments), timeout=200)


def test_mypy_is_content() -> None:
    api = pytest.importorskip("mypy.api")
    pytest.importorskip("lightning")
    cache = ROOT / "build" / "mypy-cache"
    package, examples = ROOT / "python" / "plumb", sorted(str(path) for path in (ROOT / "examples").glob("*.py"))
    said, errors, status = api.run(["--strict", "--cache-dir", str(cache), str(package), *examples])
    assert status == 0, said + errors
