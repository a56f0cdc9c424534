"""A Debian with systemd and Python, by debootstrap, from the machine's own package sources. It is built at its first
use, takes a minute or two, and stays under /var/cache/bootseer; nothing ever writes to it again.

BOOTSEER_RELEASE in the environment names the release: bookworm, the default, has systemd 252, which closes the
descriptors of a stopped service; trixie has 257, which keeps them.
"""

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["tree"]

_CACHE = Path("/var/cache/bootseer/trees")
_PACKAGES = "systemd,systemd-sysv,python3"


def tree() -> Path:
    """The root directory of the tree; whole or not there."""
    release = os.environ.get("BOOTSEER_RELEASE", "bookworm")
    target = _CACHE / f"{release}-1"
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return target
        for leftover in _CACHE.glob(".new-*"):
            shutil.rmtree(leftover)
        work = Path(tempfile.mkdtemp(prefix=".new-", dir=_CACHE))
        work.chmod(0o755)
        print(f"building {target} by debootstrap: a minute or two", flush=True)
        argv = ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", release, str(work)]
        environment = {name: text for name, text in os.environ.items() if name.lower().endswith("_proxy")}
        environment["PATH"] = "/usr/sbin:/usr/bin:/sbin:/bin"
        alone = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
        done = subprocess.run([*alone, *argv], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"debootstrap: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        shutil.rmtree(work / "var" / "cache" / "apt", ignore_errors=True)
        for unwanted in ("machine-id", "hostname", "resolv.conf"):
            (work / "etc" / unwanted).unlink(missing_ok=True)
        work.rename(target)
    return target
