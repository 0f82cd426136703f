"""``deepspeed.ops.lamb``."""

from ..optimizers import Lamb as FusedLamb

__all__ = ["FusedLamb"]
