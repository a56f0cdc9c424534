"""What the service process learns of pulls beside their Prepares: whose layer it is that comes without labels, which
credentials the kubelet passed, which pulls are under way.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from snapshotter.config import Config
from snapshotter.cri import ImageServiceProxy, Pulls
from snapshotter.errors import UserError
from snapshotter.model import Digest, LayerRef
from snapshotter.registry.passed import PassedCredentials
from snapshotter.rpc import call
from snapshotter.supervise.memory import PassedMemory
from snapshotter.supervise.sockets import taken

from .client import Containerd
from .imagefinder import ImageFinder, Source
from .layerchoice import cannot_find

__all__ = ["PullAccess"]

_log = logging.getLogger(__name__)

_LOCATE_S = 10.0


class PullAccess:
    """`find_layer` is for `LayerChoice`."""

    def __init__(self, config: Config, memory: PassedMemory, used: Callable[[], Iterable[str]]) -> None:
        """`memory` has the credentials from before. `used()`: references of the images that lazy layers came from."""
        self._config = config
        self._fetch = Path(config.run) / "fetch.sock"
        self._proxy: ImageServiceProxy | None = None
        passed = PassedCredentials()
        passed.replace(memory.read())
        self._pulls = Pulls(passed, memory, self._fetch, used)
        self.find_layer: Callable[[str, str], LayerRef] = cannot_find
        if config.containerd.address:
            containerd = Containerd(Path(config.containerd.address))
            self.find_layer = ImageFinder(containerd, self._locate, self._pulls.under_way).find

    def __repr__(self) -> str:
        return f"<PullAccess {self._pulls!r} {self._proxy!r}>"

    def serve(self, held: Mapping[str, int]) -> None:
        """Serve the kubelet's image service, if it is to be. Where the socket cannot be had only that is not served."""
        config = self._config
        if config.cri.enabled:
            image_service = Path(config.cri.image_service or config.containerd.address)
            try:
                listener = taken(held, "socket-cri", config.cri_path)
                self._proxy = ImageServiceProxy(listener, image_service, self._pulls)
            except UserError as error:
                _log.error("cri.not_served reason=%r", str(error))

    def close(self) -> None:
        """End what `serve` began."""
        if self._proxy is not None:
            self._proxy.close()

    def _locate(self, sources: Sequence[Source], manifest: Digest) -> str:
        place: str = call(self._fetch, "locate", _LOCATE_S, sources=sources, manifest=manifest)
        return place
