"""Certificates and proxies, over real TLS on loopback."""

import contextlib
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from snapshotter.config import RegistryConfig
from snapshotter.errors import Precondition, SnapshotterError, Transient
from snapshotter.registry import Registry
from snapshotter.registry.trust import TlsContexts, TlsFiles
from tests.snapshotter.certificates import Authority
from tests.snapshotter.rangeserver import RangeServer, redirect

DIGEST = "sha256:" + "ab" * 32
PATH = f"/v2/app/blobs/{DIGEST}"
DATA = bytes(range(256)) * 40
CONFIG = RegistryConfig(connect_timeout_s=2.0, read_timeout_s=2.0, docker_config="/nonexistent")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def certs_d(tmp_path: Path) -> Path:
    made = tmp_path / "certs.d"
    made.mkdir()
    return made


def write_hosts(certs_d: Path, host: str, text: str) -> Path:
    """The hosts.toml of `host`."""
    path = certs_d / host / "hosts.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def read(certs_d: Path, host: str, config: RegistryConfig = CONFIG) -> bytes:
    """The blob, by a registry of its own."""
    with contextlib.closing(Registry(replace(config, hosts_dir=str(certs_d)))) as registry:
        return b"".join(registry.blob(f"{host}/app:1", DIGEST).stream(0, None))


def test_private_ca(authority: Authority, certs_d: Path, tmp_path: Path) -> None:
    with RangeServer({PATH: DATA}, tls=authority.server("127.0.0.1")) as server:
        write_hosts(certs_d, server.host, f'server = "{server.url}"\n')
        with pytest.raises(Precondition, match="certificate not trusted: unable to get local issuer certificate"):
            read(certs_d, server.host)
        write_hosts(certs_d, server.host, f'server = "{server.url}"\nca = "{authority.ca}"\n')
        assert read(certs_d, server.host) == DATA
        other = Authority(tmp_path, "another")
        write_hosts(certs_d, server.host, f'server = "{server.url}"\nca = ["{other.ca}", "mine.crt"]\n')
        shutil.copy(authority.ca, certs_d / server.host / "mine.crt")
        assert read(certs_d, server.host) == DATA, "a list, and a path beside the file"


def test_names_are_checked_unless_skip_verify(authority: Authority, certs_d: Path) -> None:
    with RangeServer({PATH: DATA}, tls=authority.server("another.example")) as server:
        text = f'server = "{server.url}"\nca = "{authority.ca}"\n'
        write_hosts(certs_d, server.host, text)
        with pytest.raises(Precondition, match="IP address mismatch"):
            read(certs_d, server.host)
        write_hosts(certs_d, server.host, f"{text}skip_verify = true\n")
        assert read(certs_d, server.host) == DATA
        write_hosts(certs_d, server.host, f'server = "{server.url}"\nskip_verify = true\n')
        assert read(certs_d, server.host) == DATA


def test_client_certificate(authority: Authority, certs_d: Path, tmp_path: Path) -> None:
    certificate, key = authority.client("node")
    with RangeServer({PATH: DATA}, tls=authority.server("127.0.0.1", ask_client=True)) as server:
        text = f'server = "{server.url}"\nca = "{authority.ca}"\n'
        write_hosts(certs_d, server.host, text)
        with pytest.raises(Transient, match=r"certificate required|EOF|reset|Broken pipe"):  # the alert may be late
            read(certs_d, server.host)
        both = certs_d / server.host / "both.pem"
        both.write_bytes(certificate.read_bytes() + key.read_bytes())
        forms = [f'[["{certificate}", "{key}"]]', '"both.pem"', '["both.pem"]', '[["both.pem", ""]]']
        for form in forms:
            write_hosts(certs_d, server.host, f"{text}client = {form}\n")
            assert read(certs_d, server.host) == DATA, form
        other = Authority(tmp_path, "another").client("other")
        write_hosts(certs_d, server.host, f'{text}client = ["both.pem", ["{other[0]}", "{other[1]}"]]\n')
        assert read(certs_d, server.host) == DATA, "the first of two"
        write_hosts(certs_d, server.host, f'{text}client = [["{certificate}", "{authority.ca}"]]\n')
        with pytest.raises(Precondition, match=r"node\.cert with .* cannot be used as a client certificate"):
            read(certs_d, server.host)


def test_certificates_laid_out_for_docker(authority: Authority, certs_d: Path) -> None:
    """Also for a loopback host with TLS set up: https is tried before http."""
    certificate, key = authority.client("node")
    with RangeServer({PATH: DATA}, tls=authority.server("127.0.0.1", ask_client=True)) as server:
        directory = certs_d / server.host
        directory.mkdir()
        for file, name in ((authority.ca, "ca.crt"), (certificate, "client.cert"), (key, "client.key")):
            shutil.copy(file, directory / name)
        assert read(certs_d, server.host) == DATA


def test_http_url_with_tls_set_up_falls_back_to_http(certs_d: Path) -> None:
    with RangeServer({PATH: DATA}) as server:
        write_hosts(certs_d, "r.test", f'server = "{server.url}"\nskip_verify = true\n')
        assert read(certs_d, "r.test") == DATA


def test_renewed_certificate_needs_no_restart(authority: Authority, tmp_path: Path) -> None:
    ca = tmp_path / "ca.crt"
    contexts, files = TlsContexts(), TlsFiles(ca=(ca,))
    with pytest.raises(Precondition, match="No such file"):
        contexts.get(files)
    shutil.copy(Authority(tmp_path, "old").ca, ca)
    old = contexts.get(files)
    assert contexts.get(files) is old
    shutil.copy(authority.ca, tmp_path / "new.crt")
    (tmp_path / "new.crt").replace(ca)
    assert contexts.get(files) is not old
    ca.write_text("no certificate")
    with pytest.raises(Precondition, match=r"ca\.crt: cannot be used as a CA certificate"):
        contexts.get(files)
    for name in map(str, range(80)):
        (tmp_path / name).mkdir()
        shutil.copy(authority.ca, tmp_path / name / "ca.crt")
        contexts.get(TlsFiles(ca=(tmp_path / name / "ca.crt",)))
    assert len(contexts._known) == 64


def test_redirect_keeps_the_trust_but_no_private_header(authority: Authority, certs_d: Path) -> None:
    tls = authority.server("127.0.0.1", "localhost")
    with RangeServer({"/signed": DATA}, tls=tls) as storage:
        away = redirect(f"https://localhost:{storage.host.split(':')[1]}/signed?signature=secret")
        with RangeServer({}, lambda request: away, tls=tls) as server:
            write_hosts(
                certs_d, server.host, f'server = "{server.url}"\nca = "{authority.ca}"\n[header]\nx-own = "private"\n'
            )
            with contextlib.closing(Registry(replace(CONFIG, hosts_dir=str(certs_d)))) as registry:
                blob = registry.blob(f"{server.host}/app:1", DIGEST)
                assert b"".join(blob.stream(0, 10)) == DATA[:10]
                assert b"".join(blob.stream(10, 20)) == DATA[10:20], "straight to the storage, with the same trust"
            assert [r.headers.get("x-own") for r in server.requests] == ["private"]
            assert len(storage.requests) == 2 and not any("x-own" in r.headers for r in storage.requests)


def test_errors_name_no_signed_url(certs_d: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        for url in (
            f"http://127.0.0.1:{port}/s?sig=hidden",
            "ftp://h/hidden",
            "http://h:99999/hidden",
            "http:///hidden",
        ):
            with RangeServer({}, lambda request, url=url: redirect(url)) as server:  # type: ignore[misc]  # a default
                with pytest.raises(SnapshotterError) as caught:
                    read(certs_d, server.host)
                assert "hidden" not in f"{caught.value}", url


# --- proxies


class Tunnel:
    """A proxy that knows CONNECT: whatever host is asked for, it leads to `target`."""

    def __init__(self, target: str) -> None:
        self.asked: list[tuple[str, str | None]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_CONNECT(self) -> None:
                outer.asked.append((self.path, self.headers.get("Proxy-Authorization")))
                host, port = target.split(":")
                with socket.create_connection((host, int(port))) as there:
                    self.send_response(200)
                    self.end_headers()
                    self.close_connection = True
                    back = threading.Thread(target=_pump, args=(there, self.connection))
                    back.start()
                    _pump(self.connection, there)
                    back.join()

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = False
        self.host = f"127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):  # either side may hang up
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@pytest.fixture
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    yield monkeypatch


def test_https_through_a_proxy(authority: Authority, certs_d: Path, no_proxies: pytest.MonkeyPatch) -> None:
    with RangeServer({PATH: DATA}, tls=authority.server("r.test")) as server:
        with contextlib.closing(Tunnel(server.host)) as tunnel:
            no_proxies.setenv("HTTPS_PROXY", f"http://me:hidden@{tunnel.host}")
            write_hosts(certs_d, "r.test", f'ca = "{authority.ca}"\n')
            assert read(certs_d, "r.test") == DATA
            assert tunnel.asked == [("r.test:443", "Basic bWU6aGlkZGVu")]
        assert server.connections == 1
        with pytest.raises(Transient) as caught:
            read(certs_d, "r.test")
        assert "hidden" not in str(caught.value)


def test_http_through_a_proxy_and_around_it(certs_d: Path, no_proxies: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG, plain_http=("r.test", "r.invalid"))
    with RangeServer({PATH: DATA}) as proxy:
        no_proxies.setenv("HTTP_PROXY", proxy.url)
        assert read(certs_d, "r.test", config) == DATA
        assert proxy.requests[-1].path == f"http://r.test{PATH}"
        no_proxies.setenv("NO_PROXY", ".invalid")
        with pytest.raises(Transient):
            read(certs_d, "r.invalid", config)
        with RangeServer({PATH: DATA}) as server:
            assert read(certs_d, server.host) == DATA
            assert len(server.requests) == 1, "nothing on this machine is asked for through a proxy"
        assert len(proxy.requests) == 1


def test_one_context_for_all_without_settings() -> None:
    contexts = TlsContexts()
    assert contexts.get(None) is contexts.get(None)
    assert contexts.get(None).verify_mode == ssl.CERT_REQUIRED and contexts.get(None).check_hostname
