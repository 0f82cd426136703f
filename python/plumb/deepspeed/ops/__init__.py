"""``deepspeed.ops``: the optimizers that programs import by name."""

from . import adam, lamb, lion

__all__ = ["adam", "lamb", "lion"]
