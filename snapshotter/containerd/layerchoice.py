"""Which layer an unpacking Prepare is for, and whether it may be lazy.

The labels name the layer, or its image is looked for; then the operator has a say. What is left to containerd is logged
and counted with its reason, always.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Literal

from snapshotter.containerd import labels as labelling
from snapshotter.containerd.ordinary import OrdinaryPulls, Reason, Refusal
from snapshotter.errors import InvalidArgument, NotFound, SnapshotterError
from snapshotter.model import LayerRef

__all__ = ["LayerChoice", "cannot_find"]

_log = logging.getLogger(__name__)


def cannot_find(key: str, target: str) -> LayerRef:
    """Where no containerd is known that could be asked."""
    raise NotFound("no address of containerd is configured")


class LayerChoice:
    """Thread-safe if its functions are."""

    def __init__(
        self,
        refusal: Callable[[str], Refusal | None],
        find_layer: Callable[[str, str], LayerRef],
        counts: OrdinaryPulls,
    ) -> None:
        """`refusal(image)` tells why layers of an image are not to be lazy; None: they may be. `find_layer(key,
        target)` finds the layer whose image no label names, or raises SnapshotterError with the reason."""
        self._refusal = refusal
        self._find_layer = find_layer
        self._counts = counts

    def __repr__(self) -> str:
        return f"<LayerChoice {self._counts!r}>"

    def layer(self, key: str, labels: Mapping[str, str]) -> LayerRef | Literal["ordinary", "refused", "fallback"]:
        """The layer to serve, or as what its Prepare counts that containerd is to unpack it."""
        target = labelling.target_name(labels)
        try:
            ref = labelling.layer_ref(labels)
        except InvalidArgument as error:
            _log.warning("layer.fallback target=%s reason=%s", target, error)
            self._counts.count(Reason.BAD_LABELS, "", str(error))
            return "fallback"
        if not target:  # containerd would make an unexpected error of AlreadyExists, and the pull fail
            why = "the client fetches and unpacks by itself: it does not say which snapshot is to come of it"
            return self._ordinary(key, Reason.NO_TARGET, "" if ref is None else ref.image, why)
        if ref is None:
            try:
                ref = self._find_layer(key, target)
            except SnapshotterError as error:
                why = f"the client sent no image labels, and the image was not found in containerd: {error}"
                return self._ordinary(key, Reason.NO_LABELS, "", why)
            except Exception:  # border to containerd: it can unpack the layer all the same
                _log.exception("layer.not_found key=%s", key)
                return self._ordinary(key, Reason.NO_LABELS, "", "unexpected error, see the log")
            _log.info("layer.found key=%s layer=%s image=%s", key, ref.digest, ref.image)
        refusal = self._refusal(ref.image)
        if refusal is not None:
            _log.info("layer.refused layer=%s image=%s reason=%s", ref.digest, ref.image, refusal.detail)
            self._counts.count(refusal.reason, ref.image, refusal.detail)
            return "refused"
        return ref

    def _ordinary(self, key: str, reason: Reason, image: str, why: str) -> Literal["ordinary"]:
        _log.info("layer.ordinary key=%s reason=%s", key, why)
        self._counts.count(reason, image, why)
        return "ordinary"
