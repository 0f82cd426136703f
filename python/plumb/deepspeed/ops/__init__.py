"""``deepspeed.ops``: the optimizers that programs import by name."""

from . import adagrad, adam, lamb, lion

__all__ = ["adagrad", "adam", "lamb", "lion"]
