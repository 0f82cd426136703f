"""``deepspeed.comm``: torch.distributed under DeepSpeed's name."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from .start import init_distributed

__all__ = ["init_distributed"]


def __getattr__(name: str) -> Any:
    return getattr(dist, name)
