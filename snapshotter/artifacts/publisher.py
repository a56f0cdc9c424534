"""Bringing an artifact into a repository: its blobs, its manifest under its tags, its place among the referrers.

Protocol: look what is there; upload the blobs that are missing; put the manifest under each of its tags; see that it is
found from its subject; delete what it supersedes. Each step leaves the repository as it should be, so one that was cut
short is finished by the next publisher, and equal content (`created` aside) is not written again. Nothing locks: each
artifact has tags of its own, so publishers of different workloads never meet there. They meet in the fallback tag,
which is read, changed and written whole, and looked at again: best effort, nobody of ours depends on it.

What is signed is not displaced by just anybody (`displacement`): that is looked at before anything is written, among
all that is there at the tags or listed. A signed artifact that comes in after that look is not seen.

Superseded is what was there *before* we wrote, listed before the tags were read. Publishers of the same at the same
time do not see each other so: each looks once more when it has written (`_settle`). Whose manifest is at the first tag
then has won; the others' go, by whoever sees it. That tag is the first thing that each writes, and the list is read
before it: whoever has won is deleted by nobody.
"""

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from urllib.parse import urlencode

from snapshotter.artifacts.displacement import refusal, refuse_displacing
from snapshotter.artifacts.manifest import (
    CONFIG,
    MANIFEST_TYPE,
    config_blob,
    decode,
    digest_of,
    encode,
    place_tags,
)
from snapshotter.artifacts.model import Artifact, Blob, Kind
from snapshotter.artifacts.place import is_same
from snapshotter.artifacts.referrers import (
    REFERRERS_TYPE,
    Referrer,
    digests,
    fallback_tag,
    parse_referrers,
    referrer_of,
    rewritten,
    without,
)
from snapshotter.errors import InvalidArgument, NotFound, SnapshotterError
from snapshotter.log import fields
from snapshotter.model import Digest
from snapshotter.registry.manifest import ACCEPT
from snapshotter.registry.push import Pusher
from snapshotter.registry.reference import ImageRef

__all__ = ["Published", "publish"]

_FALLBACK_TRIES = 6  # 20 publishers at once lose each other's entries about twice
_FALLBACK_PAUSE_S = 0.3  # at most, times the number of the try
_TAG_TRIES = 4
_PAGES = 64  # of a list of referrers
_MOST_JUDGED = 32  # entries of a list that do not say what they are, and are looked at one by one

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Published:
    """`existed`: equal content was there, and `digest` is that of what was there. `referrers`: the registry lists the
    artifact by its referrers API; else it is, where it has a subject, in the fallback tag."""

    digest: Digest
    existed: bool
    tags: tuple[str, ...]
    referrers: bool


@dataclass(frozen=True, slots=True)
class _Before:
    """What was there: the manifest at each tag, and what the registry lists for the subject."""

    tagged: dict[str, tuple[Digest, bytes, Artifact | None]]
    listed: list[Referrer]


def publish(
    pusher: Pusher,
    repository: ImageRef,
    artifact: Artifact,
    open_blob: Callable[[Blob], Iterator[bytes]],
    *,
    replace: bool = False,
) -> Published:
    """Have the artifact in the repository. `open_blob` gives a blob's bytes, and is asked for those only that are
    missing there and that the artifact does not hold itself; anew for each attempt. `replace`: also in place of
    one that another key has signed. Raises SnapshotterError, Displacement among them; what was found in the repository
    before is still found then."""
    tags = place_tags(artifact)
    before = _look(pusher, repository, artifact, tags)
    there = [(body, known) for _, body, known in before.tagged.values() if known and is_same(known, artifact)]
    existed = bool(there)
    body, ours = there[0] if there else (encode(artifact), artifact)
    digest = digest_of(body)
    old = _alike(pusher, repository, artifact, before, digest)
    for known in old.values():
        if not existed or not _is_rival(artifact, known):
            refuse_displacing(ours, known, _name(repository), replace=replace)
    if not existed:
        _put_blobs(pusher, repository, artifact, open_blob)
    told = False
    for tag in tags:
        leads, _, holder = before.tagged.get(tag, ("", b"", None))
        # Ours was there whole, and another image with equal layers has taken the key's tag since: it stays.
        stays = existed and _is_rival(artifact, holder)
        if leads != digest and not stays:
            told |= "OCI-Subject" in _put_tag(pusher, repository, tag, body)
    superseded = [one for one, known in old.items() if not _is_rival(artifact, known)]
    referrers = False
    if artifact.subject is not None:
        referrers = told or _listed(pusher, repository, artifact.subject.digest, artifact.kind, digest)
        if not referrers:
            _keep_fallback(pusher, repository, artifact, body, superseded)
    for one in superseded:
        _delete(pusher, repository, one)
    if not existed:
        left = _settle(pusher, repository, (artifact, body), tags, before, referrers)
        existed, digest = left != digest, left
    log.info(
        "artifact.published %s",
        fields(repository=_name(repository), tag=tags[0], digest=digest, existed=existed),
    )
    return Published(digest, existed, tags, referrers)


def _look(pusher: Pusher, repository: ImageRef, artifact: Artifact, tags: tuple[str, ...]) -> _Before:
    """First the list, then the tags: what is listed, and not at its tag any more, is superseded."""
    listed: list[Referrer] | None = None
    if artifact.subject is not None:
        listed = _referrers(pusher, repository, artifact.subject.digest, artifact.kind)
        if listed is None:
            listed = _parsed(_manifest(pusher, repository, fallback_tag(artifact.subject.digest)))
    tagged = {}
    for tag in tags:
        body = _manifest(pusher, repository, tag)
        if body is not None:
            tagged[tag] = (digest_of(body), body, _decoded(body))
    return _Before(tagged, listed or [])


def _settle(
    pusher: Pusher,
    repository: ImageRef,
    ours: tuple[Artifact, bytes],
    tags: tuple[str, ...],
    before: _Before,
    referrers: bool,
) -> Digest:
    """Have one of what several publishers wrote at the same time, and give its digest. What was there before is none of
    that: an answer that is not of now deletes nothing. Nor does what must not displace the other."""
    artifact, digest = ours[0], digest_of(ours[1])
    known = {there for there, _, _ in before.tagged.values()} | {one.digest for one in before.listed}
    after = _look(pusher, repository, artifact, tags)
    fresh = _Before(after.tagged, [one for one in after.listed if one.digest not in known])
    met = {digest: artifact, **_alike(pusher, repository, artifact, fresh, digest)}
    first, body, winner = after.tagged.get(tags[0], (digest, b"", None))
    if winner is None or first not in met or first in known:
        return digest
    signers = [it.key for it in winner.signatures]
    older = {digest, *(one.digest for one in fresh.listed)} - {
        first
    }  # what a tag alone names may be newer than `first`
    others = {one: its for one, its in met.items() if one in older and not _is_rival(winner, its)}
    lost = [one for one, its in others.items() if not refusal(signers, its, "", replace=False)]
    for tag, (there, _, _) in after.tagged.items():
        if there in lost:
            _put_tag(pusher, repository, tag, body)
    if lost and artifact.subject is not None and not referrers:
        _keep_fallback(pusher, repository, winner, body, lost)
    for one in lost:
        _delete(pusher, repository, one)
    return first if digest in lost else digest


def _put_tag(pusher: Pusher, repository: ImageRef, tag: str, body: bytes) -> Mapping[str, str]:
    """As `Pusher.put_manifest`. A registry may answer 400 to who writes a tag whose manifest another publisher has
    deleted at this moment (docker-registry does), so that is tried again."""
    for count in range(1, _TAG_TRIES):
        try:
            return pusher.put_manifest(repository, tag, body, MANIFEST_TYPE)
        except (InvalidArgument, NotFound):
            time.sleep(random.uniform(0, _FALLBACK_PAUSE_S) * count)
    return pusher.put_manifest(repository, tag, body, MANIFEST_TYPE)


def _put_blobs(
    pusher: Pusher, repository: ImageRef, artifact: Artifact, open_blob: Callable[[Blob], Iterator[bytes]]
) -> None:
    config = replace(config_blob(artifact.kind), data=CONFIG)
    for digest, blob in {blob.digest: blob for blob in (config, *artifact.blobs)}.items():
        if not pusher.has_blob(repository, digest):
            pusher.put_blob(repository, digest, blob.size, lambda blob=blob: _bytes_of(blob, open_blob))  # type: ignore[misc]


def _bytes_of(blob: Blob, open_blob: Callable[[Blob], Iterator[bytes]]) -> Iterator[bytes]:
    return iter((blob.data,)) if blob.data else open_blob(blob)


def _alike(
    pusher: Pusher, repository: ImageRef, artifact: Artifact, before: _Before, digest: Digest
) -> dict[Digest, Artifact]:
    """What was there before, and is of the same kind, workload and image, but not what has this digest."""
    old = {there: known for there, _, known in before.tagged.values()}
    may_be = [one for one in before.listed if one.may_be(artifact.kind, artifact.image_key, artifact.workload)]
    for entry in may_be[:_MOST_JUDGED]:
        if entry.digest not in old and entry.digest != digest:
            body = _manifest(pusher, repository, entry.digest)
            old[entry.digest] = _decoded(body) if body is not None else None
    return {
        there: known
        for there, known in old.items()
        if known is not None and there != digest and _is_alike(artifact, known)
    }


def _is_rival(new: Artifact, old: Artifact | None) -> bool:
    """Whether both claim the key's tag, and neither supersedes the other."""
    return old is not None and _is_alike(new, old) and old.subject is not None and old.subject != new.subject


def _is_alike(new: Artifact, old: Artifact) -> bool:
    return (old.kind, old.image_key, old.workload) == (new.kind, new.image_key, new.workload)


def _keep_fallback(
    pusher: Pusher, repository: ImageRef, artifact: Artifact, body: bytes, superseded: list[Digest]
) -> None:
    """Have the artifact in the fallback tag of its subject, as well as that can be had without compare-and-swap."""
    assert artifact.subject is not None
    tag = fallback_tag(artifact.subject.digest)
    entry = referrer_of(artifact, body, digest_of(body))
    try:
        for count in range(_FALLBACK_TRIES):
            there = _manifest(pusher, repository, tag)
            wanted = rewritten(there, entry, superseded)
            if wanted is None:
                return
            time.sleep(random.uniform(0, _FALLBACK_PAUSE_S) * count)
            try:
                pusher.put_manifest(repository, tag, wanted, REFERRERS_TYPE)
            except (InvalidArgument, NotFound):  # registries want every manifest of an index to be there
                gone = [one for one in digests(wanted) if _manifest(pusher, repository, one) is None]
                pusher.put_manifest(repository, tag, without(wanted, gone), REFERRERS_TYPE)
    except SnapshotterError as exc:
        log.warning(
            "artifact.unlisted %s",
            fields(repository=_name(repository), tag=tag, digest=entry["digest"], error=str(exc)),
        )


def _delete(pusher: Pusher, repository: ImageRef, digest: Digest) -> None:
    try:
        gone = pusher.delete_manifest(repository, digest)
    except SnapshotterError as exc:
        log.warning("artifact.undeleted %s", fields(repository=_name(repository), digest=digest, error=str(exc)))
        return
    log.info("artifact.superseded %s", fields(repository=_name(repository), digest=digest, deleted=gone))


def _listed(pusher: Pusher, repository: ImageRef, subject: Digest, kind: Kind, digest: Digest) -> bool:
    """Whether the referrers API has the artifact. Not every registry that has it says so when it answers a PUT."""
    return any(one.digest == digest for one in _referrers(pusher, repository, subject, kind) or ())


def _referrers(pusher: Pusher, repository: ImageRef, subject: Digest, kind: Kind) -> list[Referrer] | None:
    """What the referrers API lists; None where there is no such API."""
    what = f"referrers of {subject} in {_name(repository)}"
    path = f"referrers/{subject}?{urlencode({'artifactType': kind.value})}"
    found: list[Referrer] | None = None
    for _ in range(_PAGES):
        body, following = pusher.get(repository, path, REFERRERS_TYPE, what) or (b"", None)
        try:
            found = [*(found or ()), *parse_referrers(body)]
        except InvalidArgument:  # not even JSON, if there was no answer
            return found
        if following is None:
            return found
        path = following
    return found


def _manifest(pusher: Pusher, repository: ImageRef, target: str) -> bytes | None:
    """Whatever is there: a registry hides from us what we do not say we accept, and we would write over it."""
    answer = pusher.get(repository, f"manifests/{target}", ACCEPT, f"manifest {target} of {_name(repository)}")
    return answer[0] if answer is not None else None


def _parsed(body: bytes | None) -> list[Referrer]:
    try:
        return parse_referrers(body) if body is not None else []
    except InvalidArgument:
        return []


def _decoded(body: bytes) -> Artifact | None:
    try:
        return decode(body)
    except InvalidArgument:
        return None


def _name(repository: ImageRef) -> str:
    return f"{repository.host}/{repository.repository}"
