"""The file server: files of one directory, kept-alive connections, nothing else."""

import http.client
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from scripts.rig.fileserver import make_server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ThreadingHTTPServer]:
    (tmp_path / "files" / "sha256").mkdir(parents=True)
    (tmp_path / "files" / "sha256" / "aa.bsi").write_bytes(b"index" * 1000)
    (tmp_path / "secret").write_text("not for you")
    server = make_server(tmp_path / "files", "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_one_connection_serves_many_requests(server: ThreadingHTTPServer, capsys: pytest.CaptureFixture[str]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=5)
    answers = []
    sockets = set()
    for method, path in (
        ("GET", "/sha256/aa.bsi"),
        ("HEAD", "/sha256/aa.bsi"),
        ("GET", "/sha256/bb.bsi"),
        ("GET", "/sha256"),
        ("GET", "/../secret"),
        ("GET", "/%2e%2e/secret"),
    ):
        connection.request(method, path)
        sockets.add(id(connection.sock))
        response = connection.getresponse()
        answers.append((response.status, len(response.read())))
    connection.close()
    assert answers == [(200, 5000), (200, 0), (404, 0), (404, 0), (404, 0), (404, 0)]
    assert len(sockets) == 1
    assert capsys.readouterr().out.splitlines()[:2] == ["GET /sha256/aa.bsi 200 5000", "HEAD /sha256/aa.bsi 200 5000"]
