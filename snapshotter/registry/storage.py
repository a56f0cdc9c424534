"""Files of a directory that no web server serves: below a local path, or at a URL that fsspec knows (s3://, gs://, …).

Reads only, and only what is asked for. OSError and whatever a storage raises become our errors. fsspec is optional, and
imported only where a URL needs it; its calls know no time-outs, so each gets a thread and is waited for so long. A call
that hangs keeps no program from ending.
"""

import os
import re
import stat
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from snapshotter.errors import InvalidArgument, NotFound, SnapshotterError, Transient

__all__ = ["LocalStorage", "Storage", "UrlStorage", "check_location", "open_storage", "shown", "storage_error"]

_CHUNK = 1 << 20
_URL_CHUNK = 8 << 20  # of a URL's file: each chunk is a request
_MIN_BYTES_PER_S = 1_000_000
_THREADS = 16

_PASSWORD = re.compile(r"(://[^/@:]*):[^/@]*@")

_T = TypeVar("_T")


class Storage(Protocol):
    """Files by names with slashes. Raises NotFound for what is not there, else other SnapshotterErrors."""

    def locate(self, name: str) -> str:
        """How messages name the file."""

    def size(self, name: str) -> int:
        """Bytes of a file."""

    def first(self, name: str, size: int) -> bytes:
        """The file's first bytes: `size`, or all where it has no more. One request."""

    def chunks(self, name: str, start: int, end: int) -> Generator[bytes]:
        """The file's bytes `[start, end)`."""

    def close(self) -> None:
        """Begin nothing more."""


class LocalStorage:
    """A Storage below a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __repr__(self) -> str:
        return f"<LocalStorage {self._directory}>"

    def locate(self, name: str) -> str:
        """See Storage."""
        return str(self._directory / name)

    def size(self, name: str) -> int:
        """See Storage. InvalidArgument for what is no file, Transient for one that cannot be opened."""
        path = self._directory / name
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise InvalidArgument(f"{path}: is not a file")
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except (FileNotFoundError, NotADirectoryError) as exc:
            raise NotFound(f"{path}: no such file") from exc
        except OSError as exc:
            raise Transient(f"{path}: {exc.strerror}") from exc
        return status.st_size

    def first(self, name: str, size: int) -> bytes:
        """See Storage."""
        return b"".join(self.chunks(name, 0, min(size, self.size(name))))

    def chunks(self, name: str, start: int, end: int) -> Generator[bytes]:
        """See Storage."""
        path = self._directory / name
        try:
            with path.open("rb") as file:
                file.seek(start)
                while start < end:
                    chunk = file.read(min(_CHUNK, end - start))
                    if not chunk:
                        raise Transient(f"{path}: ends at {start}, not at {end}")
                    start += len(chunk)
                    yield chunk
        except OSError as exc:
            raise Transient(f"{path}: {exc.strerror}") from exc

    def close(self) -> None:
        """See Storage."""


class UrlStorage:
    """A Storage at a URL, by way of fsspec. Thread-safe."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """InvalidArgument where fsspec is missing, or knows no such storage. Connects with the first question."""
        check_location(url)
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._free = threading.Semaphore(_THREADS)
        self._closed = False

    def __repr__(self) -> str:
        return f"<UrlStorage {shown(self._url)}>"

    def locate(self, name: str) -> str:
        """See Storage."""
        return shown(f"{self._url}/{name}")

    def size(self, name: str) -> int:
        """See Storage."""
        return self._bounded(name, 0, _size)

    def first(self, name: str, size: int) -> bytes:
        """See Storage."""
        return self._bounded(name, size, _reading(0, size))

    def chunks(self, name: str, start: int, end: int) -> Generator[bytes]:
        """See Storage."""
        while start < end:
            stop = min(start + _URL_CHUNK, end)
            chunk = self._bounded(name, stop - start, _reading(start, stop))
            if len(chunk) != stop - start:
                raise Transient(f"{self.locate(name)}: {len(chunk)} bytes came instead of [{start}, {stop})")
            start = stop
            yield chunk

    def close(self) -> None:
        """See Storage."""
        self._closed = True

    def _bounded(self, name: str, size: int, call: Callable[[Any, str], _T]) -> _T:
        """What `call` gives for fsspec's storage and the file's path there, which brings `size` bytes; Transient when
        it takes too long."""
        where, url = self.locate(name), f"{self._url}/{name}"
        answer: Future[_T] = Future()

        def run() -> None:
            try:
                from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # it has no types

                storage, path = url_to_fs(url)  # fsspec keeps one storage for each set of options
                answer.set_result(call(storage, path))
            except BaseException as exc:  # whoever waits is told
                answer.set_exception(exc)
            finally:
                self._free.release()

        if self._closed:
            raise Transient(f"{where}: not asked any more")
        patience_s = self._timeout_s + size / _MIN_BYTES_PER_S
        if not self._free.acquire(timeout=patience_s):
            raise Transient(f"{where}: {_THREADS} calls are waited for already")
        try:
            threading.Thread(target=run, name="storage", daemon=True).start()
        except RuntimeError as exc:  # no thread to be had
            self._free.release()
            raise Transient(f"{where}: {exc}") from exc
        try:
            return answer.result(patience_s)
        except FutureTimeout as exc:
            raise Transient(f"{where}: no answer within {self._timeout_s} s") from exc
        except Exception as exc:  # what a storage raises is its own
            raise storage_error(where, exc) from exc


def shown(location: str) -> str:
    """How messages and logs name a location: without the password that a URL may hold."""
    return _PASSWORD.sub(r"\1:***@", location)


def storage_error(where: str, raised: Exception) -> SnapshotterError:
    """What anything that fsspec or one of its storages raises means, in one line that begins with `where`: NotFound,
    InvalidArgument where asking again is of no use, else Transient."""
    if isinstance(raised, FileNotFoundError):
        return NotFound(f"{where}: no such file")
    text = " ".join(str(raised).split()) or type(raised).__name__
    is_final = isinstance(raised, (ImportError, ValueError, TypeError, NotImplementedError))
    return InvalidArgument(f"{where}: {text}") if is_final else Transient(f"{where}: {text}")


def _size(storage: Any, path: str) -> int:
    size = storage.size(path)
    if size is None:
        raise ValueError("its storage does not tell the file's size")
    return int(size)


def _reading(start: int, end: int) -> Callable[[Any, str], bytes]:
    def read(storage: Any, path: str) -> bytes:
        data: bytes = storage.cat_file(path, start=start, end=end)
        return data

    return read


def open_storage(location: str, timeout_s: float) -> Storage | None:
    """The storage of a directory's location; None if it is on a web server. InvalidArgument for what is neither."""
    check_location(location)
    if "://" not in location:
        return LocalStorage(Path(location))
    parts = urlsplit(location)
    if parts.scheme == "file":
        return LocalStorage(Path(unquote(parts.path)))
    return None if parts.scheme in ("http", "https") else UrlStorage(location, timeout_s)


def check_location(location: str) -> None:
    """InvalidArgument, in one line, for a location of which no directory can be read here."""
    what = f"directory {shown(location)!r}"
    if "\0" in location:  # the system would refuse it at each look-up, by a ValueError
        raise InvalidArgument(f"{what}: has a byte 0")
    if "://" not in location:
        return
    try:
        parts = urlsplit(location)
    except ValueError as exc:
        raise InvalidArgument(f"{what}: {exc}") from exc
    if parts.scheme in ("http", "https") and parts.netloc:
        return
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return
    if parts.scheme in ("", "http", "https", "file"):
        raise InvalidArgument(f"{what}: expected an http, https or file URL, or a path")
    try:
        from fsspec import get_filesystem_class  # type: ignore[import-untyped]  # it has no types
    except ImportError as exc:
        raise InvalidArgument(
            f"{what}: expected an http, https or file URL, or a path; other URLs need fsspec: install "
            "bootseer[fsspec], and what fsspec needs for it"
        ) from exc
    try:
        get_filesystem_class(location[: len(parts.scheme)])  # as it is written: fsspec knows s3, and not S3
    except Exception as exc:  # the storage's module is imported, and what that raises is its own
        raise InvalidArgument(str(storage_error(what, exc))) from exc
