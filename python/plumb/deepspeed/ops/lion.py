"""``deepspeed.ops.lion``."""

from ..optimizers import Lion as DeepSpeedCPULion
from ..optimizers import Lion as FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
