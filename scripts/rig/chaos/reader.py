"""A program that reads files of a mounted layer for ever and compares them: `python -m … MOUNT LISTING SEED`.

Each time it drops the file from the page cache first, so that the daemon is asked, and reads by one of three ways. It
prints a line a file: `ok <seconds of the longest read>`, `mismatch <path>`, `error <errno> <path>`. It needs nothing of
the project, for it is run on the node.
"""

import hashlib
import json
import mmap
import os
import random
import sys
import time

_CHUNK = 1 << 17


def _direct(path: str) -> tuple[str, float]:
    """Past the page cache."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    hasher, longest_s, at = hashlib.sha256(), 0.0, 0
    with mmap.mmap(-1, _CHUNK) as buffer:
        while True:
            began = time.monotonic()
            count = os.preadv(descriptor, [buffer], at)
            longest_s = max(longest_s, time.monotonic() - began)
            hasher.update(buffer[:count])
            at += count
            if count < _CHUNK:
                break
    os.close(descriptor)
    return hasher.hexdigest(), longest_s


def _cached(path: str) -> tuple[str, float]:
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    hasher, longest_s = hashlib.sha256(), 0.0
    while True:
        began = time.monotonic()
        chunk = os.read(descriptor, _CHUNK)
        longest_s = max(longest_s, time.monotonic() - began)
        if not chunk:
            break
        hasher.update(chunk)
    os.close(descriptor)
    return hasher.hexdigest(), longest_s


def _mapped(path: str) -> tuple[str, float]:
    """A fault that fails ends this process with SIGBUS, which is seen."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.monotonic()
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as view:
        digest = hashlib.sha256(view).hexdigest()
    os.close(descriptor)
    return digest, time.monotonic() - began


def main() -> None:
    """Read until killed."""
    mount, listing, seed = sys.argv[1:]
    with open(listing, encoding="utf-8") as file:
        digests = json.load(file)
    source, names = random.Random(int(seed)), sorted(digests)
    while True:
        name = source.choice(names)
        try:
            digest, longest_s = source.choice([_direct, _cached, _mapped])(mount + name)
        except OSError as error:
            print(f"error {error.errno} {name}", flush=True)
            time.sleep(0.1)
            continue
        print(f"ok {longest_s:.4f}" if digest == digests[name] else f"mismatch {name}", flush=True)
        time.sleep(0.002)


if __name__ == "__main__":
    main()
