"""What an optimizer keeps is forgotten, and set, by parameter, whatever ranks keep of it: as where a layer begins anew."""

from __future__ import annotations

import collections
import copy
import functools
import pickle
from typing import Any

import pytest
import torch

import plumb
from stage import Block, Net, Play, distance, make, step_twin


def forgets(how: str, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    state: Any = optimizer.state
    if how.startswith("pop"):
        state.pop(parameter, None)
    elif how == "del, if it is there" and parameter in state:
        del state[parameter]
    elif how == "an empty one":
        state[parameter] = {}
    elif how == "another's":
        momentum = torch.linspace(-1, 1, parameter.numel(), dtype=parameter.dtype).view_as(parameter)
        state[parameter] = {"momentum_buffer": momentum.clone(), "exp_avg": momentum, "exp_avg_sq": momentum.square(), "step": torch.tensor(3.0)}
    elif how == "all of it":
        optimizer.state = collections.defaultdict(dict)
    elif how == "clear":
        state.clear()


HOWS = ["nothing", "pop", "pop what was loaded", "del, if it is there", "an empty one", "another's", "all of it", "clear"]


def forgetful(start: Net, strategy: str, how: str, kind: Any, elementwise: bool | None) -> float:
    model, twin = copy.deepcopy(start), copy.deepcopy(start)
    mine, theirs = (kind(one.parameters()) for one in (model, twin))
    with plumb.Engine(model, mine, strategy=strategy, units=[Block], elementwise=elementwise) as engine:
        for number in range(4):
            play = Play(model, engine.world.rank, engine.world.size, 1.0, engine)
            play.backward(play.loss(number))
            mine.step()
            mine.zero_grad()
            step_twin(twin, theirs, engine.world.size, number)
            if number % 2:
                if how == "pop what was loaded":
                    mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
                for one, optimizer in ((model, mine), (twin, theirs)):
                    forgets(how, optimizer, one.blocks[1].up.weight)
                    forgets(how, optimizer, one.last.bias)
        if how == "nothing":
            copied = copy.deepcopy(mine.state)
            assert type(copied) is collections.defaultdict and len(copied) == len(mine.state)
            others = [copy.copy(mine)]
            if strategy == "zero1":  # otherwise its parameters are released
                others += [copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))]
            for other in others:
                assert type(other) is type(mine) and len(other.state) == len(mine.state)
            for read in (lambda p: mine.state[p], mine.state.get, mine.state.setdefault):
                with pytest.raises(plumb.Error, match="is in pieces, one for each rank"):
                    read(model.last.bias)
        return distance(engine, model, twin)


def every_way(start: Net, strategy: str) -> dict[str, float]:
    adam, sgd = functools.partial(torch.optim.AdamW, lr=1e-2), functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    kinds: list[tuple[Any, bool | None]] = [(adam, None), (sgd, None), (adam, False)]
    return {how: max(forgetful(start, strategy, how, *kind) for kind in kinds) for how in HOWS}


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_state_is_forgotten_and_set_by_parameter_as_in_one_process(strategy: str) -> None:
    for far in plumb.spawn(every_way, 2, (make(), strategy), method="thread"):
        assert max(far.values()) < 1e-10, far
