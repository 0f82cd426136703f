"""``deepspeed.ops.lion``."""

from ..optimizers import DeepSpeedCPULion
from ..optimizers import Lion as FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
