"""What an HTTP answer means, as pure functions: status to typed error, Retry-After, Content-Range, Link.

No socket here, so every rule is tested with plain values. The one table of status codes is `status_error`.
"""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from urllib.parse import urljoin

from snapshotter.errors import Denied, InvalidArgument, NotFound, SnapshotterError, Transient

__all__ = ["BodyPlan", "next_page", "plan_body", "status_error", "total_size"]

_MAX_RETRY_AFTER_S = 3600.0
_NEXT = re.compile(r'<([^>]*)>\s*;[^,]*\brel="?next"?')
_CONTENT_RANGE = re.compile(r"bytes\s+(?:(\d+)-(\d+)|\*)/(\d+|\*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class BodyPlan:
    """How to read the body of a blob's answer: drop `skip` bytes, then give `length` (all that comes when None).

    `total` is the blob's size if the answer told it; `ranges` is false where a range was asked for and ignored.
    """

    skip: int
    length: int | None
    total: int | None
    ranges: bool


def status_error(status: int, headers: Mapping[str, str], what: str) -> SnapshotterError:
    """The error that an unwelcome status means; `what` says what was asked of whom."""
    text = f"{what}: HTTP status {status}"
    if status in (401, 403):
        return Denied(f"{text}: access denied; does it exist, and does it need credentials?")
    if status in (404, 410):
        return NotFound(text)
    if status in (408, 425, 429) or status >= 500:
        return Transient(text, _retry_after_s(headers))
    return InvalidArgument(text)


def plan_body(status: int, headers: Mapping[str, str], start: int, end: int | None, what: str) -> BodyPlan:
    """How to get `[start, end)` out of this answer; raises the typed error where that cannot be done.

    Decides on status and Content-Range only: types and encodings are often wrong, and every byte is verified later.
    A 206 that starts right but stops early is used: the reader then meets a short body.
    """
    ranged = start > 0 or end is not None
    total = total_size(status, headers)
    wanted = None if end is None else end - start
    if status == 200:
        if ranged and total is not None and start >= total:
            raise InvalidArgument(f"{what}: the blob has only {total} bytes")
        return BodyPlan(start, _to_end(start, end, total), total, not ranged)
    if status == 416:
        if total is not None and start >= total:
            raise InvalidArgument(f"{what}: the blob has only {total} bytes (HTTP status 416)")
        raise Transient(f"{what}: HTTP status 416 for a range that should exist")
    if status != 206:
        raise status_error(status, headers, what)
    match = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", "").strip())
    if match is None or match[1] is None:
        if ranged and wanted is not None and headers.get("Content-Length") == str(wanted):
            return BodyPlan(0, wanted, total, True)
        raise Transient(f"{what}: HTTP status 206 without a usable Content-Range")
    if int(match[1]) != start or (end is not None and int(match[2]) >= end):
        raise Transient(f"{what}: HTTP status 206 with another range: {headers['Content-Range']}")
    return BodyPlan(0, _to_end(start, end, total), total, True)


def total_size(status: int, headers: Mapping[str, str]) -> int | None:
    """Bytes of the whole blob as far as this answer tells, else None."""
    if status in (206, 416):
        match = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", "").strip())
        return int(match[3]) if match is not None and match[3] != "*" else None
    length = headers.get("Content-Length", "")
    return int(length) if status == 200 and length.isascii() and length.isdigit() else None


def next_page(root: str, url: str, headers: Mapping[str, str]) -> str | None:
    """The path below `root` of the page after the one at `url`, by the Link header of its answer; None where this was
    the last, or the next would be somewhere else, where our credentials are nobody's business."""
    match = _NEXT.search(headers.get("Link", ""))
    try:
        following = urljoin(url, match[1]) if match else ""
    except ValueError:
        return None
    return following.removeprefix(root) if following.startswith(root) and following != url else None


def _to_end(start: int, end: int | None, total: int | None) -> int | None:
    if end is not None:
        return end - start
    return None if total is None else total - start


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that Retry-After asks for (a number or an HTTP date), within an hour; None where it says nothing."""
    text = headers.get("Retry-After", "").strip()
    if not text:
        return None
    try:
        seconds = float(text) if text.isdigit() else parsedate_to_datetime(text).timestamp() - time.time()
    except (ValueError, OverflowError):
        return None
    return min(max(seconds, 0.0), _MAX_RETRY_AFTER_S)
