"""A registry as a process: `python -m tests.systemd.registry` prints its host, and answers once a line has come in.

It has the layer `served_layer()`. It ends with its standard input.
"""

import sys
import threading

from tests.snapshotter.daemon import Layer, make_layer
from tests.snapshotter.rangeserver import Hold, RangeServer

__all__ = ["served_layer"]


def served_layer() -> Layer:
    """The layer that it has; the same in every process."""
    return make_layer(files=32, size=256 << 10)


def main() -> None:
    """Serve."""
    layer, gate = served_layer(), threading.Event()
    with RangeServer({layer.path: layer.blob}, lambda request: Hold(after=-1, until=gate)) as server:
        print(server.host, flush=True)
        for _ in sys.stdin:
            gate.set()
        gate.set()


if __name__ == "__main__":
    main()
