"""Units that are compiled by themselves, and what a compiler meets before it has learnt of them."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

# In a process that has compiled nothing, and has not even imported the compiler, when its engine is built.
FIRST = """
import sys, torch, plumb
from stage import Block, Net, distance, make, one_step, reference, trained

def first(what):
    kind = Net if what in ("model", "called") else Block
    how = "in place" if what in ("blocks", "model") else "call"
    torch.set_num_threads(1)
    assert "torch._dynamo" not in sys.modules, "the test does not test what it should"
    model, twin = make(), make()
    with plumb.Engine(model, plumb.SGD(lr=0.1), strategy="zero3", units=[kind]) as engine:
        options = {"backend": "aot_eager", "fullgraph": True}
        if how == "call":
            seen = torch.compile(model, **options)
        else:
            seen = model
            for module in model.modules():
                if isinstance(module, kind):
                    module.compile(**options)
        trained(seen, one_step(0), engine)
        reference(twin, one_step(0), 2, torch.optim.SGD(twin.parameters(), lr=0.1))
        assert engine.gathered_bytes == 0
        return distance(engine, model, twin)

if __name__ == "__main__":
    for what in ("blocks", "model", "called"):  # each by processes of their own
        sys.stdout.write("%s is %g away\\n" % (what, max(plumb.spawn(first, 2, (what,), timeout=200))))
"""


def test_the_first_thing_that_is_compiled_may_be_a_unit(tmp_path: pathlib.Path) -> None:
    place = tmp_path / "first.py"
    place.write_text(FIRST)
    paths = os.pathsep.join([str(pathlib.Path(__file__).parent), *sys.path])  # the package, and the stage
    ended = subprocess.run(
        [sys.executable, str(place)], capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONPATH": paths}
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    away = dict(line.split(" is ") for line in ended.stdout.splitlines() if " is " in line)
    assert away.keys() == {"blocks", "model", "called"}, ended.stdout
    assert max(float(far.split()[0]) for far in away.values()) < 1e-12, ended.stdout
