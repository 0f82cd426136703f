"""``python -m plumb checkpoint convert``."""

from __future__ import annotations

import argparse
import dataclasses
import sys

import torch

from .._C import Error
from . import dcp, native, plain, zero
from .contents import Contents

HELP = """From one format of checkpoints to another, with the optimizer's state where both have a place for it.

  plumb        a checkpoint of engine.save, or the newest of a folder of them; NEW is a folder of checkpoints
  dcp          a folder of torch.distributed.checkpoint, named as get_state_dict names things; from engines, too
  deepspeed    a folder of DeepSpeed's, of stages 0 to 3, or a universal one; NEW becomes a universal one, which DeepSpeed
               loads under any stage with "checkpoint": {"load_universal": true}
  safetensors  a file, or a folder as transformers loads and saves it: the model alone
"""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m plumb checkpoint convert", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    formats = ("plumb", "dcp", "deepspeed", "safetensors")
    parser.add_argument("--from", dest="source", choices=formats, required=True)
    parser.add_argument("--to", dest="target", choices=formats, required=True)
    parser.add_argument("path", metavar="PATH", help="what is read")
    parser.add_argument("new", metavar="NEW", help="what is written")
    parser.add_argument("--optimizer", default="AdamW", help="the class in torch.optim, where what is read does not name it (AdamW)")
    parser.add_argument("--masters", action="store_true", help="weights are their f32 masters, where there are any")
    parser.add_argument("--ranks", type=int, default=1, help="of a DeepSpeed run of stage 3 that will load it (1)")
    parser.add_argument("--bare", action="store_true", help="to plumb, for Engine.load: without what plumb.deepspeed keeps beside an engine")
    parser.add_argument(
        "--alias", action="append", default=[], metavar="OTHER=NAME", help="to dcp: another name that a tied parameter has"
    )
    words = parser.parse_args(arguments)
    try:
        contents = read(words.source, words.path, words.optimizer)
        for alias in words.alias:
            other, _, name = alias.partition("=")
            if name not in {entry.name for entry in contents.of("weight")}:
                raise Error(f"--alias {alias}: there is no weight '{name}'")
            contents.aliases[other] = name
        if words.masters:
            contents = with_masters(contents)
        keeps_deepspeeds = words.source == "deepspeed" and not words.bare
        where = write(words.target, words.new, contents, words.ranks, deepspeed=keeps_deepspeeds)
    except (Error, OSError) as error:
        print(f"plumb: {str(error).removeprefix('plumb: ')}", file=sys.stderr)
        return 1
    total = sum(entry.bytes for entry in contents.entries)
    print(f"{where}: {len(contents.entries)} tensors, {total / 1e6:.1f} MB, step {contents.step}")
    for note in [*contents.notes, *without_a_place(words.target, contents, keeps_deepspeeds)]:
        print(f"  not taken along: {note}", file=sys.stderr)
    return 0


def read(source: str, path: str, optimizer: str = "AdamW") -> Contents:
    if source == "plumb":
        return native.read(path)
    if source == "dcp":
        return dcp.read(path, optimizer)
    return zero.read(path, optimizer) if source == "deepspeed" else plain.read(path)


def write(target: str, path: str, contents: Contents, ranks: int = 1, deepspeed: bool = False) -> str:
    if target == "plumb":
        return native.write(path, contents, deepspeed)
    if target == "dcp":
        return dcp.write(path, contents)
    if target == "deepspeed":
        return zero.write(path, contents, ranks)
    plain.write(path, contents)
    return path


def without_a_place(target: str, contents: Contents, keeps_deepspeeds: bool) -> list[str]:
    """What was read and is not in what was written, for people."""
    left = []
    if target == "safetensors" and contents.optimizer is not None:
        left.append("the optimizer's state")
    if contents.optimizer is not None and contents.optimizer.general:
        left.append(f"what the optimizer keeps of no parameter: {', '.join(contents.optimizer.general)}")
    if target != "plumb":
        left += [f"the extra '{name}'" for name in sorted(contents.extras)]
    if target in ("dcp", "safetensors") and contents.samples:
        left.append(f"the cursor of the data, {contents.samples} samples")
    if target in ("dcp", "safetensors") or (target == "plumb" and not keeps_deepspeeds):
        beside = {"the schedule": contents.schedule, "client_state": contents.user, "the counters of DeepSpeed's engine": contents.counters}
        left += [what for what, value in beside.items() if value]
    return left


def with_masters(contents: Contents) -> Contents:
    """Weights in f32, which are the masters themselves."""
    masters = {entry.name: entry for entry in contents.of("state") if entry.key == "master"}
    entries = [
        dataclasses.replace(masters[entry.name], kind="weight", key="") if entry.kind == "weight" and entry.name in masters else entry
        for entry in contents.entries
        if entry.key != "master"
    ]
    assert all(entry.dtype == torch.float32 for entry in masters.values())
    return dataclasses.replace(contents, entries=entries)
