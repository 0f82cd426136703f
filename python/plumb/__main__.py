"""``python -m plumb train.py …``: runs an unchanged program with torch's DistributedDataParallel rebound to Plumb's."""

import os
import runpy
import sys

import torch.nn.parallel
import torch.nn.parallel.distributed

from .ddp import DistributedDataParallel


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m plumb PROGRAM.py [ARGUMENT]…   (also as torchrun -m plumb PROGRAM.py …)")
    torch.nn.parallel.DistributedDataParallel = DistributedDataParallel  # type: ignore[misc]
    torch.nn.parallel.distributed.DistributedDataParallel = DistributedDataParallel  # type: ignore[misc]
    if os.environ.get("RANK", "0") == "0":
        print("plumb: torch.nn.parallel.DistributedDataParallel is plumb.DistributedDataParallel", file=sys.stderr)
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
