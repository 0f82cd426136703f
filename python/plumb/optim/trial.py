"""A trial of somebody's optimizer, over small tensors: whether its update of a parameter looks at other parameters, too.

Where each rank steps the parameters it owns, an optimizer that clips by the norm of all gradients, say, would clip by what is here.
Nobody can tell that from outside, so it is tried: two copies of the optimizer step small stand-ins of its parameters, with the same
gradients but for every second one. What becomes of the others must be the same.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict, defaultdict
from typing import Any

import torch

#: What a copy has of its own: torch's hooks and records, and a step that a scheduler has wrapped.
_FRESH = {"step", "zero_grad", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured"}


_one_at_a_time = threading.Lock()  # ranks that are threads share torch's generator


def looks_at_others(optimizer: torch.optim.Optimizer) -> bool:
    """False, too, where it cannot be tried: it wants a closure, cannot be copied, or does something else each time."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if len(parameters) < 2:
        return False
    try:
        with _one_at_a_time, torch.random.fork_rng(devices=[]):
            (calm, stirred), (calm_again, stirred_again) = [[_stepped(optimizer, parameters, factor) for factor in (1.0, 1e4)] for _ in range(2)]
    except Exception:  # noqa: BLE001  (whatever it does not like about a trial is no verdict)
        return False
    repeats = _alike(calm, calm_again) and _alike(stirred, stirred_again)
    return repeats and not _alike(calm, stirred)


def _alike(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """In what every second gradient is none of."""
    return all(torch.allclose(one, other, rtol=1e-4, atol=0.0, equal_nan=True) for one, other in zip(some[::2], others[::2], strict=True))


def _stepped(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], factor: float) -> list[torch.Tensor]:
    """Stand-ins of the parameters after two steps; the gradient of every second one is ``factor`` times as large."""
    torch.default_generator.manual_seed(0)  # an optimizer may draw numbers, too; those of devices stay as they are
    like: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "generator": torch.Generator().manual_seed(0)}
    small = [torch.nn.Parameter(torch.rand([min(size, 2) for size in one.shape], **like) + 0.5) for one in parameters]
    copied = _copy(optimizer, {id(one): stand_in for one, stand_in in zip(parameters, small, strict=True)})
    for _ in range(2):
        for number, one in enumerate(small):
            one.grad = torch.randn(one.shape, **like) * (factor if number % 2 else 1.0) * 1e-2
        copied.step()
    return [one.detach() for one in small]


def _copy(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """With stand-ins for its parameters wherever it keeps them, and without state."""
    memo[id(optimizer.state)] = defaultdict(dict)
    copied: torch.optim.Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            setattr(copied, name, OrderedDict())
        elif name not in _FRESH:
            setattr(copied, name, copy.deepcopy(value, memo))
    return copied
