"""The containerd snapshots service: containerd's contract on one side, `snapshotter.model.LayerProvider` on the other.

Only `service` knows gRPC and the generated code; everything else is plain Python. Nothing here knows how a layer is
fetched, decoded or mounted.
"""

from snapshotter.containerd.model import Counters, Kind, LazyLayer, Mount, Snapshot, Usage
from snapshotter.containerd.service import serve
from snapshotter.containerd.snapshots import Snapshots

__all__ = ["Counters", "Kind", "LazyLayer", "Mount", "Snapshot", "Snapshots", "Usage", "serve"]
