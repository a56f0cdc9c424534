"""The snapshots service alone, for containerd's test suite: `serve.py ROOT SOCKET`, until it is killed.

Its provider has no layers: the suite names none.
"""

import os
import signal
import sys
from pathlib import Path

from snapshotter.listening import POLLER, bind

os.environ |= POLLER

from snapshotter.containerd import Snapshots, serve
from snapshotter.errors import NotFound
from snapshotter.model import Digest, LayerRef, MountedLayer


class NoLayers:
    """A LayerProvider that has nothing."""

    def ensure(self, ref: LayerRef) -> MountedLayer:
        """Raises NotFound."""
        raise NotFound(f"layer {ref.digest}: there are no layers here")

    def release(self, digest: Digest) -> None:
        """Nothing to do."""


if __name__ == "__main__":
    root, socket = map(Path, sys.argv[1:])
    serve(Snapshots(root, NoLayers()), bind(socket))
    signal.pause()
