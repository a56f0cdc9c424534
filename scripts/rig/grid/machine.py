"""What a figure depends on beside the code: the machine, its kernel, and how busy it is."""

import os
import platform
import subprocess
from pathlib import Path

from scripts.rig.link import CHECKOUT

__all__ = ["commit", "describe", "load"]


def describe() -> dict[str, object]:
    """Processor, number of CPUs, memory in MiB, kernel, Python."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cpus": os.cpu_count() or 0,
        "memory_mib": int(_field("/proc/meminfo", "MemTotal").split()[0] or 0) >> 10,
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def load() -> float:
    """The machine's load over the last minute."""
    return round(os.getloadavg()[0], 2)


def commit() -> str:
    """The commit of the checkout, with a `+` if the product's files differ from it; empty if it is no checkout."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD").strip()
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", "blockindex", "snapshotter", "proto")
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"{head}+" if changed else head


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(CHECKOUT), *words], capture_output=True, text=True, check=True).stdout


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
