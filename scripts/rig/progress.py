"""Says what is being done, with the seconds since the beginning."""

import time

__all__ = ["Progress"]


class Progress:
    """Prints each text as a line, at once."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"[{time.monotonic() - self._started:6.1f} s] {text}", flush=True)
