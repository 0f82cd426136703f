"""Finds the package that the build left (build/python), unless one is installed; one thread per rank."""

import os
import pathlib
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
_built = pathlib.Path(__file__).resolve().parents[2] / "build" / "python"
if _built.is_dir() and "PLUMB_INSTALLED" not in os.environ:
    sys.path.insert(0, str(_built))

import torch  # noqa: E402

torch.set_num_threads(1)
torch.optim.SGD([torch.zeros(1)], lr=0.1)  # imports half of torch; once, before ranks are forked
