"""``deepspeed.ops.adagrad``."""

from ..optimizers import DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
