"""Threads share malloc's arenas once they are limited."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import ctypes, re, sys, threading
from snapshotter.kernel.heap import limit_arenas
libc = ctypes.CDLL(None)
if sys.argv[1] != "0":
    limit_arenas(int(sys.argv[1]))
everyone = threading.Barrier(6)
def work():
    kept = []
    for _ in range(20):
        everyone.wait()
        kept.append(bytes(50_000))
threads = [threading.Thread(target=work) for _ in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fopen(sys.argv[2].encode(), b"w"))
assert libc.malloc_info(0, file) == 0
libc.fclose(file)
print(len(re.findall("<heap nr=", open(sys.argv[2]).read())))
"""


def _arenas(limit: int, tmp_path: Path) -> int:
    argv = [sys.executable, "-c", SCRIPT, str(limit), str(tmp_path / "info")]
    return int(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)


def test_threads_share_one_arena(tmp_path: Path) -> None:
    assert _arenas(0, tmp_path) > 1, "the test shows nothing: threads share an arena anyway"
    assert _arenas(1, tmp_path) == 1
