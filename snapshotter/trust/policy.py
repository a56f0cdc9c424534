"""Whether an artifact's metadata, file tables and bytes are used: the one place that decides it.

Under the policy "signed" an artifact is trusted if a key of the ring has signed its statement; one such signature is
enough, whatever others there are. Under "any" it is trusted without. What the node has in quarantine is trusted under
neither. The files of keys are read for each judgement, so that a key that is added or removed counts at once.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from snapshotter.artifacts.model import Artifact
from snapshotter.config import TrustConfig
from snapshotter.errors import InvalidArgument

from .keys import KeyRing
from .quarantine import Quarantine
from .statement import statement

__all__ = ["Policy", "Verdict"]

_log = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reason` is one line, a clause about the artifact ("is not signed"). `key`: the name of the trusted key that has
    signed it, else empty."""

    trusted: bool
    reason: str
    key: str = ""


class Policy:
    """What the configuration says about trust. Thread-safe."""

    def __init__(self, any_: bool, paths: Sequence[Path], quarantine: Quarantine | None = None) -> None:
        self._any = any_
        self._paths = tuple(paths)
        self._quarantine = quarantine
        self._said: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return f"<Policy {'any' if self._any else 'signed'} {', '.join(map(str, self._paths))}>"

    @classmethod
    def of(cls, config: TrustConfig, quarantine: Quarantine | None = None) -> "Policy":
        """That of the section [trust], and what the node has in quarantine."""
        return cls(config.policy == "any", [Path(path) for path in config.keys], quarantine)

    def keys(self) -> KeyRing:
        """The trusted keys as their files are now; a file that is refused is logged once."""
        ring = KeyRing.load(self._paths)
        for line in ring.refused:
            if line not in self._said:
                self._said |= {line}
                _log.warning("trust.key_refused reason=%r", line)
        return ring

    def judge(self, artifact: Artifact) -> Verdict:
        """Whether to use it, and why. Never raises."""
        if self._quarantine is not None:
            for blob in artifact.blobs:
                if self._quarantine.is_quarantined(blob.digest):
                    return Verdict(False, f"is in quarantine: {self._quarantine.reason(blob.digest)}")
        try:
            message = statement(artifact)
        except InvalidArgument as error:
            return Verdict(False, str(error))
        ring = self.keys()
        for signature in artifact.signatures:
            if ring.verify(message, signature):
                return Verdict(True, f"is signed by the trusted key {signature.key}", signature.key)
        reason = _why_not(artifact, ring)
        if self._any:
            return Verdict(True, f"{reason}; the policy is to use any")
        return Verdict(False, reason)


def _why_not(artifact: Artifact, ring: KeyRing) -> str:
    names = [it.key if _NAME.fullmatch(it.key) else "a key without a proper name" for it in artifact.signatures]
    if not names:
        return "is not signed"
    wrong = [name for name in names if name in ring.keys]
    if wrong:
        return f"does not match its signature by the trusted key {wrong[0]}"
    who = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"is signed by {who}, which no trusted key is" + ("" if ring.keys else " (none is: see [trust] keys)")
