"""DeepSpeed's face: ``plumb.deepspeed.initialize`` takes the config that people have, and trains as one process would.

    import plumb.deepspeed as deepspeed

    engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds_config.json")
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

What each key and method does is in docs/compatibility.md. An unknown or unsupported key is an error that names it.
"""

from __future__ import annotations

import argparse

from . import comm, ops, utils, zero
from .config import Config as DeepSpeedConfig
from .config import ConfigError as DeepSpeedConfigError
from .engine import DeepSpeedEngine
from .optimizer import DeepSpeedOptimizer
from .start import init_distributed, initialize


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """``--deepspeed`` and ``--deepspeed_config FILE``, which ``initialize(args=…)`` reads."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="for the program itself; initialize() does not look at it")
    group.add_argument("--deepspeed_config", type=str, default=None, help="the JSON file")
    return parser


__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "DeepSpeedOptimizer",
    "add_config_arguments",
    "comm",
    "init_distributed",
    "initialize",
    "ops",
    "utils",
    "zero",
]
