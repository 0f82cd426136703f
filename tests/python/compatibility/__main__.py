"""Writes docs/compatibility.md: python -m compatibility, in tests/python (make compatibility)."""

import pathlib

from compatibility import page

target = pathlib.Path(__file__).resolve().parents[3] / "docs" / "compatibility.md"
target.write_text(page())
print(f"wrote {target}")
