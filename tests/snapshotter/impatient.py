"""`bootseer` with hearts that may stand still for `STUCK_S` only: `python -m tests.snapshotter.impatient serve …`."""

import sys

from snapshotter import supervisor
from snapshotter.cli import main

STUCK_S = 3.0
"""A block server with nothing to do, and the sweep, beat about once a second."""

if __name__ == "__main__":
    supervisor._STUCK_S.update(dict.fromkeys(supervisor._STUCK_S, STUCK_S))
    sys.exit(main(sys.argv[1:]))
