"""Log lines: one event, one line, fields that can be parsed again."""

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from snapshotter import log
from snapshotter.log import fields


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield io.StringIO()
    root.handlers[:] = before
    root.setLevel(level)


def test_key_value_line(stream: io.StringIO) -> None:
    log.configure("info", "kv", stream)
    logger = logging.getLogger("snapshotter.x")
    logger.debug("quiet")
    logger.info("layer.mounted %s", fields(digest="sha256:ab", ms=3, why='a "b"\nc', empty=""))
    line = stream.getvalue()
    assert re.match(
        r"time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z level=info logger=snapshotter\.x layer\.mounted ", line
    )
    assert line.endswith(' digest=sha256:ab ms=3 why="a \\"b\\"\\nc" empty=""\n') and line.count("\n") == 1


def test_nothing_forges_a_second_line(stream: io.StringIO) -> None:
    log.configure("info", "kv", stream)
    logging.getLogger("x").info("evil %s %s", "a\nlevel=error\u2028b", fields(v="c\r\nd\x85"))
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("x").exception("failed")
    assert len(stream.getvalue().splitlines()) == 2
    assert "ValueError" in stream.getvalue()


def test_json_line(stream: io.StringIO) -> None:
    log.configure("debug", "json", stream)
    logging.getLogger("x").debug("done %s", fields(ms=3, path=Exception("e"), time="kept"))
    line = json.loads(stream.getvalue())
    assert line["message"] == "done ms=3 path=e time=kept" and line["ms"] == 3 and line["path"] == "e"
    assert line["level"] == "debug" and line["time"] != "kept"


def test_text_is_made_only_when_written(stream: io.StringIO) -> None:
    class Bomb:
        def __str__(self) -> str:
            raise AssertionError("formatted")

    log.configure("warning", "kv", stream)
    logging.getLogger("x").info("quiet %s", fields(b=Bomb()))
    assert stream.getvalue() == ""
