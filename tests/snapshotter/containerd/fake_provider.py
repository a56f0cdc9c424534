"""A LayerProvider over ordinary directories, that tests can make fail, wait, or lose its mounts."""

import shutil
import threading
from collections import Counter
from pathlib import Path

from snapshotter.errors import NotFound
from snapshotter.model import Digest, LayerRef, MountedLayer

STARGZ = "containerd.io/snapshot/remote/stargz."
CRI = "containerd.io/snapshot/cri."
TARGET = "containerd.io/snapshot.ref"


def digest(character: str) -> Digest:
    """A digest made of one hex digit."""
    return Digest("sha256:" + character * 64)


def layer_labels(target: str, layer: Digest, image: str = "registry.test/app:1") -> dict[str, str]:
    """What a client that pulls lazily passes to Prepare."""
    return {
        TARGET: target,
        f"{STARGZ}reference": image,
        f"{STARGZ}digest": layer,
        f"{STARGZ}layers": layer,
    }


class FakeProvider:
    """Serves copies of the directories in `sources`; a layer that is not there raises NotFound.

    With `holding` cleared, `ensure` waits at its start until it is set; `entered` counts the calls that got there.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self.sources: dict[Digest, Path] = {}
        self.implied: dict[Digest, tuple[bytes, ...]] = {}
        self.failure: Exception | None = None
        self.holding = threading.Event()
        self.holding.set()
        self.entered = threading.Semaphore(0)
        self.ensured: Counter[Digest] = Counter()
        self.refs: list[LayerRef] = []
        self.released: list[Digest] = []

    def add(self, layer: Digest, files: dict[str, bytes]) -> None:
        """Have a layer of these files."""
        source = self._root / "source" / layer[-8:]
        source.mkdir(parents=True)
        for name, content in files.items():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(content)
        self.sources[layer] = source

    def mount_point(self, layer: Digest) -> Path:
        """Where the layer is while it is mounted."""
        return self._root / "m" / layer[-8:]

    def lose(self, layer: Digest) -> None:
        """Unmount it behind everybody's back."""
        shutil.rmtree(self.mount_point(layer))

    def ensure(self, ref: LayerRef) -> MountedLayer:
        """See LayerProvider."""
        self.entered.release()
        assert self.holding.wait(10)
        with self._lock:
            self.ensured[ref.digest] += 1
            self.refs.append(ref)
            if self.failure is not None:
                raise self.failure
            if ref.digest not in self.sources:
                raise NotFound(f"layer {ref.digest} is not here")
            path = self.mount_point(ref.digest)
            if not path.exists():
                shutil.copytree(self.sources[ref.digest], path)
            return MountedLayer(path, self.implied.get(ref.digest, ()))

    def release(self, layer: Digest) -> None:
        """See LayerProvider."""
        with self._lock:
            self.released.append(layer)
            shutil.rmtree(self.mount_point(layer), ignore_errors=True)
