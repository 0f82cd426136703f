"""``python -m plumb train.py …``: runs an unchanged program with torch's wrappers rebound to Plumb's.

Under torchrun as well: ``torchrun --nproc-per-node=2 -m plumb train.py …``; and ``python -m plumb -m package.module …``.
"""

from .rebind import main

if __name__ == "__main__":
    main()
