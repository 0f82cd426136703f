"""Checkpoints of others: read and written, one tensor in memory at a time, without running anything that stands in them.

``python -m plumb checkpoint convert --from deepspeed --to plumb FOLDER NEW``; see docs/checkpoints.md.
"""

from __future__ import annotations

from . import dcp, native, plain, zero
from .contents import Contents, Entry, Optimizer

__all__ = ["Contents", "Entry", "Optimizer", "dcp", "native", "plain", "zero"]
