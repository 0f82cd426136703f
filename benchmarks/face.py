"""What a backward costs more under an engine of one rank: by itself, and for each parameter. python benchmarks/face.py

Four ways take turns: torch's own object runs a plain graph's backward; Plumb's does, which announces it (that is all of Python's
face: nobody listens to this graph); the same for a graph whose parameters are an engine's. Graphs are kept over the backwards,
and gradients are there already; the least of many turns counts, since whatever else runs only adds."""

from __future__ import annotations

import time

import torch

torchs_own = torch.autograd.Variable._execution_engine

import plumb  # noqa: E402


def graph(parameters: int) -> tuple[torch.nn.ParameterList, torch.Tensor]:
    all_of_them = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(1)) for _ in range(parameters))
    loss = torch.stack([parameter.sum() for parameter in all_of_them]).sum()
    return all_of_them, loss


def least(loss: torch.Tensor, backwards: int) -> float:
    begin = time.perf_counter()
    for _ in range(backwards):
        loss.backward(retain_graph=True)
    return (time.perf_counter() - begin) / backwards * 1e6


def compare(parameters: int, turns: int = 60, backwards: int = 40) -> tuple[float, float, float]:
    """Microseconds of a backward: torch's own, announced to nobody, under an engine."""
    _, plain = graph(parameters)
    model, loss = graph(parameters)
    engine = plumb.Engine(model, plumb.SGD(lr=0.0), units=[])
    announcing = torch.autograd.Variable._execution_engine
    assert announcing is not torchs_own
    found = [float("inf")] * 3
    for _ in range(turns):
        torch.autograd.Variable._execution_engine = torchs_own
        found[0] = min(found[0], least(plain, backwards))
        torch.autograd.Variable._execution_engine = announcing
        found[1] = min(found[1], least(plain, backwards))
        found[2] = min(found[2], least(loss, backwards))
        engine.step()
    return found[0], found[1], found[2]


def main() -> None:
    torch.set_num_threads(1)
    few, many = 1, 201
    one, several = compare(few), compare(many)
    for count, (plain, announced, engine) in ((few, one), (many, several)):
        print(f"{count} parameters: plain {plain:.1f} µs, announced {announced:.1f} µs, engine {engine:.1f} µs")
    for name, way in (("face alone", 1), ("engine and face", 2)):
        per_parameter = ((several[way] - several[0]) - (one[way] - one[0])) / (many - few)
        print(f"{name}: {one[way] - one[0] - per_parameter * few:.2f} µs per backward, {per_parameter:.2f} µs per parameter")


if __name__ == "__main__":
    main()
