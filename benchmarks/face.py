"""What a backward costs more under an engine of one rank: by itself, and for each parameter. python benchmarks/face.py

Plain and engine take turns on the same graph, kept over the backwards, with gradients that are there already; the least of many
turns counts, since whatever else runs only adds."""

from __future__ import annotations

import time

import torch

import plumb


def graph(parameters: int) -> tuple[torch.nn.ParameterList, torch.Tensor]:
    all_of_them = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(1)) for _ in range(parameters))
    loss = torch.stack([parameter.sum() for parameter in all_of_them]).sum()
    return all_of_them, loss


def least(loss: torch.Tensor, backwards: int) -> float:
    begin = time.perf_counter()
    for _ in range(backwards):
        loss.backward(retain_graph=True)
    return (time.perf_counter() - begin) / backwards * 1e6


def compare(parameters: int, turns: int = 60, backwards: int = 40) -> tuple[float, float]:
    """Microseconds of a backward, plain and under an engine."""
    _, plain = graph(parameters)
    model, loss = graph(parameters)
    engine = plumb.Engine(model, plumb.SGD(lr=0.0), units=[])
    found = [float("inf"), float("inf")]
    for _ in range(turns):
        found[0] = min(found[0], least(plain, backwards))
        found[1] = min(found[1], least(loss, backwards))
        engine.step()
    return found[0], found[1]


def main() -> None:
    torch.set_num_threads(1)
    few, many = 1, 201
    one, several = compare(few), compare(many)
    print(f"{few} parameter: plain {one[0]:.1f} µs, engine {one[1]:.1f} µs; {many}: plain {several[0]:.1f}, engine {several[1]:.1f}")
    per_parameter = ((several[1] - several[0]) - (one[1] - one[0])) / (many - few)
    print(f"more: {one[1] - one[0] - per_parameter * few:.2f} µs per backward, {per_parameter:.2f} µs per parameter")


if __name__ == "__main__":
    main()
