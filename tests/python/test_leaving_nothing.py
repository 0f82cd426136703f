"""Engines that were built, trained and dropped leave nothing: no objects, no threads, no memory, behind any face."""

from __future__ import annotations

import ctypes
import gc
import os
import pathlib
import threading
import weakref
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import plumb

FACES = ["ddp", "zero2", "zero3", "DistributedDataParallel", "fully_shard"]


def built_and_dropped(face: str, width: int) -> list[weakref.ref[Any]]:
    """Two steps of a model of two layers; what must be gone."""
    model: Any = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    engine: Any = None
    if face == "DistributedDataParallel":
        engine = model = plumb.DistributedDataParallel(model)
    elif face == "fully_shard":
        for module in (*model, model):
            plumb.fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if face not in ("DistributedDataParallel", "fully_shard"):
        engine = plumb.Engine(model, optimizer, strategy=face, units=[nn.Linear])
    for _ in range(2):
        model(torch.ones(1, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = [model, optimizer, next(model.parameters()), *([] if engine is None else [engine])]
    return [weakref.ref(one) for one in kept]


def give_back_at_once() -> None:
    """What is freed of large tensors leaves the process, whatever was allocated before."""
    m_mmap_threshold = -3
    assert ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 16)


class Now(NamedTuple):
    objects: int
    threads: int
    files: int
    private: float  # MiB
    shared: float  # MiB that are mapped


def now() -> Now:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    resident, others = (int(pages) for pages in pathlib.Path("/proc/self/statm").read_text().split()[1:3])
    shared = 0
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        where, permissions = line.split()[:2]
        begin, end = (int(one, 16) for one in where.split("-"))
        shared += (end - begin) * (permissions[3] == "s")
    private = (resident - others) * os.sysconf("SC_PAGE_SIZE")
    files = len(os.listdir("/proc/self/fd"))
    return Now(len(gc.get_objects()), threading.active_count(), files, private / 2**20, shared / 2**20)


def left(faces: list[str], count: int, width: int) -> tuple[int, Now]:
    """How many live on, and what there is more than before."""
    give_back_at_once()
    dist.init_process_group("gloo")
    for i in range(max(8, count // 10)):
        built_and_dropped(faces[i % len(faces)], width)
    before = now()
    references = [ref for i in range(count) for ref in built_and_dropped(faces[i % len(faces)], width)]
    gc.collect()
    alive = sum(ref() is not None for ref in references)
    del references
    return alive, Now(*(b - a for a, b in zip(before, now(), strict=True)))


COUNT, WIDTH = 20, 512  # of which a layer is 1 MiB, and a rank's part of it half


@pytest.mark.parametrize("face", FACES)
def test_no_memory_is_left_of_layers_that_would_be_missed(face: str) -> None:
    """One rank's part of one layer, kept by each engine, would be 10 MiB."""
    for alive, more in plumb.spawn(left, 2, ([face], COUNT, WIDTH), timeout=200):
        assert alive == 0 and more.threads == 0 and more.files <= 0 and more.shared <= 0, more
        assert more.objects < 5 and more.private < 4, more


def test_a_thousand_engines_leave_nothing() -> None:
    for alive, more in plumb.spawn(left, 1, (["ddp", "zero3"], 1000, 8), timeout=200):
        assert alive == 0 and more.threads == 0 and more.files <= 0 and more.shared <= 0, more
        assert more.objects < 100 and more.private < 4, more  # 4 KiB an engine
