"""What the package says about itself is true: examples in docstrings, programs of examples/, and types."""

from __future__ import annotations

import doctest
import pathlib
import runpy
import sys

import pytest

import plumb

ROOT = pathlib.Path(__file__).resolve().parents[2]
#: Values and errors, modules with names of their own, and fully_shard, whose example starts torch.distributed in this process.
NO_EXAMPLE = {
    "Error", "LoadInfo", "SaveError", "StepInfo", "nn", "fully_shard", "FSDPModule", "register_fsdp_forward_method", "share_comm_ctx",
}


@pytest.mark.parametrize("name", [name for name in plumb.__all__ if name not in NO_EXAMPLE])
def test_the_example_of(name: str) -> None:
    text = getattr(plumb, name).__doc__ or ""
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    assert example.examples, f"plumb.{name} has no example"
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example).failed == 0


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
