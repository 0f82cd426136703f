"""A DeepSpeed config as a dictionary, from what people give: one, a file, a text in base64."""

from __future__ import annotations

import base64
import importlib
import json
import os
from collections.abc import Mapping
from typing import Any

from .errors import ConfigError


def load(given: Any) -> dict[str, Any]:
    """A dictionary, a file's path, or the text of one in base64, as launchers hand it on."""
    if isinstance(given, Mapping):
        return dict(given)
    if not isinstance(given, (str, os.PathLike)):
        raise ConfigError(f"the DeepSpeed config is a {type(given).__name__}; expected a dictionary or the path of a JSON file")
    try:
        with open(given, encoding="utf-8") as file:
            text, what = file.read(), f"the DeepSpeed config '{given}'"
    except OSError as error:
        text, what = _decoded(given), "the DeepSpeed config in base64"
        if not text:
            raise ConfigError(f"the DeepSpeed config '{given}' cannot be read: {error.strerror}") from None
    found = _parse(text, what)
    if not isinstance(found, dict):
        raise ConfigError(f"{what} is a {type(found).__name__}; expected a dictionary")
    return found


def _decoded(given: str | os.PathLike[str]) -> str:
    """Nothing where it is no base64 of a text."""
    try:
        return base64.urlsafe_b64decode(os.fspath(given)).decode("utf-8")
    except ValueError:
        return ""


def _parse(text: str, what: str) -> Any:
    """JSON; or HJSON, which has comments and bare names, where its package is installed (it is where DeepSpeed is)."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise ConfigError(f"the DeepSpeed config has the key '{twice[0]}' twice")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        wrong = ConfigError(f"{what} is no JSON: {error}")
    try:
        hjson: Any = importlib.import_module("hjson")
    except ImportError:
        raise ConfigError(f"{wrong}; for HJSON, install the package hjson") from None
    try:
        return hjson.loads(text, object_pairs_hook=once)
    except hjson.HjsonDecodeError:
        raise wrong from None
