"""One event per line: `time=… level=… logger=… event.name key=value …`.

Modules log with `log = logging.getLogger(__name__)` and `log.info("layer.mounted %s", fields(digest=d, ms=3))`: the
text is made only if the line is written. Knows nothing of the daemon. A line never contains a raw line break, so
that whatever a registry puts into a message cannot forge a second line.
"""

import json
import logging
import sys
import time
from typing import TextIO

__all__ = ["configure", "fields"]


class fields:  # lower case: it reads as a function at its many call sites
    """Lazily formatted `key=value` pairs; values with blanks, quotes or control characters are quoted."""

    __slots__ = ("values",)

    def __init__(self, **values: object) -> None:
        self.values = values

    def __str__(self) -> str:
        return " ".join(f"{key}={_quoted(str(value))}" for key, value in self.values.items())

    __repr__ = __str__


def configure(level: str, format: str, stream: TextIO | None = None) -> None:
    """Send every logger's events of `level` and above to `stream` (stderr), as "kv" or "json" lines; replaces what
    was configured before."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(_Json() if format == "json" else _KeyValue())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for noisy in ("urllib3", "requests", "docker"):  # a line per connection, user names; our own events say more
        logging.getLogger(noisy).setLevel(logging.WARNING)


class _KeyValue(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        head = fields(time=_stamp(record), level=record.levelname.lower(), logger=record.name)
        trace = f" {fields(trace=self.formatException(record.exc_info))}" if record.exc_info else ""
        return f"{head} {_one_line(record.getMessage())}{trace}"


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _stamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for arg in record.args if isinstance(record.args, tuple) else ():
            if isinstance(arg, fields):
                line.update({key: _plain(value) for key, value in arg.values.items() if key not in line})
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _stamp(record: logging.LogRecord) -> str:
    """UTC with milliseconds."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.msecs):03d}Z"


def _plain(value: object) -> object:
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _quoted(text: str) -> str:
    needs = not text or any(c in ' "=\\' or not c.isprintable() for c in text)
    return json.dumps(text) if needs else text


def _one_line(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
