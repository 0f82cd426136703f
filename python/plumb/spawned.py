"""What a process begins with that a program under ``python -m plumb`` spawned: the names rebound, and the program's own."""

import os
import runpy

PROGRAM = "PLUMB_SPAWNED_PROGRAM"

if __name__ == "__mp_main__":
    from plumb.rebind import rebind

    rebind()
    globals().update(runpy.run_path(os.environ[PROGRAM], run_name="__mp_main__"))
