"""What tests of checkpoints share."""

from __future__ import annotations

import threading
from typing import Any

seeded = threading.Lock()  # ranks are threads here, and share torch's generator


class Gives:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
