"""The service's word on what runs: a container has been created, and its workload is known now."""

from collections.abc import Mapping
from typing import Any

from snapshotter.config import HotSetConfig
from snapshotter.model import Digest

from .hotsets import Prefetches

__all__ = ["WorkloadCalls"]


class WorkloadCalls:
    """What the service calls."""

    def __init__(self, config: HotSetConfig, prefetches: Prefetches) -> None:
        self._config = config
        self._prefetches = prefetches

    def promote(self, request: Mapping[str, Any]) -> dict[str, str]:
        """Have the hot blocks of `workload` come first, of the image `image` with these `layers`, from the bottom up.
        Answers at once, as the call `hot` does."""
        if not self._config.prefetch:
            return {"state": "none"}
        layers = [Digest(digest) for digest in request["layers"]]
        return {"state": self._prefetches.promote(request["image"], layers, request["workload"])}
