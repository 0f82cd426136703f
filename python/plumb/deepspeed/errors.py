"""The error of this face."""

from __future__ import annotations

from .._C import Error


class ConfigError(Error, ValueError, AssertionError):
    """A config that cannot be honoured. Where DeepSpeed asserts, or finds a wrong value, its own checks find it, too."""


class NotHere(Error, AttributeError):
    """Something of DeepSpeed's engine, or of its optimizers, that is not here."""
