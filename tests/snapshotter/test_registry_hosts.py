"""hosts.toml as containerd reads it: the text, the directories, and what holds without one."""

import logging
from pathlib import Path

import pytest

from snapshotter.errors import Precondition
from snapshotter.registry.endpoint import Endpoint, Line
from snapshotter.registry.hosts import Hosts
from snapshotter.registry.hostsfile import HostsFileError, parse_duration, parse_hosts
from snapshotter.registry.trust import TlsFiles

DIRECTORY = Path("/c/r.io")

EXAMPLE = """
server = "https://registry-1.docker.io"
ca = "server.crt"
[header]
  x-server = ["a", "b"]

[host."https://public.example/us"]
  capabilities = ["Pull"]
[host."http://cache.internal:5000/"]
  capabilities = ["pull", "resolve", "push", "referrers"]
  ca = ["a.pem", "/etc/certs/b.pem"]
  client = [["c.cert", "c.key"], ["/d.pem", ""]]
  skip_verify = false
  dial_timeout = "1m1.5s"
  unknown = 1
  [host."http://cache.internal:5000/".header]
    x-one = "1"
[host."https://odd.example/v2/upstream"]
  override_path = true
  client = "one.pem"
[host."plain.example/v2"]
  capabilities = ["push"]
  client = ["one.pem", "two.pem"]
"""


def test_example() -> None:
    public, cache, odd, plain, server = parse_hosts(EXAMPLE, DIRECTORY)
    assert public == Endpoint("https://public.example/us/v2", pulls=True, resolves=False, pushes=False)
    tls = TlsFiles(
        ca=(DIRECTORY / "a.pem", Path("/etc/certs/b.pem")),
        client=((DIRECTORY / "c.cert", DIRECTORY / "c.key"), (Path("/d.pem"), None)),
    )
    assert cache == Endpoint("http://cache.internal:5000/v2", line=Line(tls, 61.5), headers=(("x-one", "1"),))
    assert odd == Endpoint(
        "https://odd.example/v2/upstream", line=Line(TlsFiles(client=((DIRECTORY / "one.pem", None),))), pushes=False
    )
    assert (plain.url, plain.pulls, plain.resolves, plain.pushes) == ("https://plain.example/v2", False, False, True)
    assert plain.line.tls is not None and len(plain.line.tls.client) == 2
    assert server == Endpoint(
        "https://registry-1.docker.io/v2",
        line=Line(TlsFiles(ca=(DIRECTORY / "server.crt",))),
        headers=(("x-server", "a, b"),),
    )


def test_without_a_server_the_registry_is_meant() -> None:
    (only,) = parse_hosts('capabilities = ["push"]\nskip_verify = true\n', DIRECTORY)
    assert only == Endpoint("", line=Line(TlsFiles(skip_verify=True))), "the capabilities are then ignored"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("server =", "not valid TOML"),
        ("server = 1", "server is of a wrong type"),
        ('server = "https://"', "not an http or https URL"),
        ('server = "ftp://h"', None),  # without http in front it is taken for a host, whose name is then odd
        ('server = "https://h:99999"', "not an http or https URL"),
        ('server = "https://h/a b"', "not an http or https URL"),
        ('host = "x"', "host is of a wrong type"),
        ('[host]\na = "x"', "must be a table"),
        ('[host."https://m"]\ncapabilities = ["fly"]', "https://m: unknown capability 'fly'"),
        ('[host."https://m"]\ncapabilities = [1]', "a string or a list of strings"),
        ('[host."https://m"]\nskip_verify = "yes"', "skip_verify is of a wrong type"),
        ('[host."https://m"]\nca = 3', "ca must be a string or a list"),
        ('[host."https://m"]\nclient = 3', "client must be"),
        ('[host."https://m"]\nclient = [["a", "b", "c"]]', "client must be"),
        ('[host."https://m"]\nclient = [["a", 1]]', "client must be"),
        ('[host."https://m"]\ndial_timeout = "5"', "is not a duration"),
        ('[host."https://m"]\ndial_timeout = 5', "dial_timeout is of a wrong type"),
        ('[host."https://m"]\nheader = "x"', "header is of a wrong type"),
        ('[host."https://m"]\n[host."https://m".header]\n"x y" = "secret"', "header 'x y' cannot be sent"),
        ('[host."https://m"]\n[host."https://m".header]\nx = "secret\\r\\ny: z"', "header 'x' cannot be sent"),
        ('[host."https://m"]\n[host."https://m".header]\nx = ["secret", 1]', "header x must be a string or a list"),
    ],
)
def test_mistakes(text: str, words: str | None) -> None:
    if words is None:
        assert parse_hosts(text, DIRECTORY)[0].url.startswith("https://ftp:")
        return
    with pytest.raises(HostsFileError, match=words) as caught:
        parse_hosts(text, DIRECTORY)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5s", 5.0), ("500ms", 0.5), ("1h2m3.5s", 3723.5), (".5s", 0.5), ("0", 0.0), ("10µs", 1e-5), ("7ns", 7e-9)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "s", "-1s", "1s ", "1 s", "1d", "1e3s"])
def test_no_duration(text: str) -> None:
    with pytest.raises(HostsFileError):
        parse_duration(text)


def test_headers_are_in_no_repr() -> None:
    assert "secret" not in repr(Endpoint("https://m/v2", headers=(("authorization", "secret"),)))


def test_addresses() -> None:
    mirror, own = Endpoint("https://m/v2"), Endpoint("https://r.io:5000/v2")
    assert own.address("r.io:5000", "team/app", "tags") == "https://r.io:5000/v2/team/app/tags"
    assert mirror.address("r.io:5000", "app", "x") == "https://m/v2/app/x?ns=r.io%3A5000"
    docker = Endpoint("https://registry-1.docker.io/v2")
    assert docker.address("docker.io", "library/app", "x") == "https://registry-1.docker.io/v2/library/app/x"


# --- directories


def urls(hosts: Hosts, registry: str) -> list[str]:
    return [endpoint.url for endpoint in hosts.endpoints(registry)]


def write(root: Path, name: str, text: str) -> None:
    (root / name).mkdir(parents=True, exist_ok=True)
    (root / name / "hosts.toml").write_text(text)


@pytest.mark.parametrize("directory", [None, Path("/nonexistent")])
def test_https_is_spoken_unless_told_otherwise(directory: Path | None) -> None:
    hosts = Hosts(directory, frozenset({"a.example", "b.example:5000"}))
    expected = {
        "localhost:5000": "http", "127.0.0.1:1": "http", "127.3.2.1": "http", "[::1]:5000": "http", "a.example": "http",
        "a.example:80": "http", "b.example:5000": "http", "b.example": "https", "ghcr.io": "https",
        "localhost.example": "https",
    }  # fmt: skip
    assert {host: urls(hosts, host) for host in expected} == {
        host: [f"{scheme}://{host}/v2"] for host, scheme in expected.items()
    }
    assert urls(hosts, "docker.io") == ["https://registry-1.docker.io/v2"]


def test_directories_in_their_order(tmp_path: Path) -> None:
    clock = [0.0]
    hosts = Hosts(tmp_path, clock=lambda: clock[0])
    seen = []
    for name in ("_default", "r.io:5000", "r.io_5000_"):
        write(tmp_path, name, f'server = "https://{name[0]}{len(name)}.example"\n')
        clock[0] += 11
        seen.append(urls(hosts, "r.io:5000"))
    assert seen == [["https://_8.example/v2"], ["https://r9.example/v2"], ["https://r10.example/v2"]]
    assert urls(hosts, "r.io") == ["https://_8.example/v2"], "another port is another registry"


def test_default_mirror_then_each_registry_itself(tmp_path: Path) -> None:
    write(tmp_path, "_default", '[host."https://m.example"]\n')
    hosts = Hosts(tmp_path, frozenset({"r.io"}))
    assert urls(hosts, "r.io") == ["https://m.example/v2", "http://r.io/v2"]
    assert urls(hosts, "docker.io") == ["https://m.example/v2", "https://registry-1.docker.io/v2"]


def test_changes_are_seen_after_a_while(tmp_path: Path) -> None:
    clock = [0.0]
    hosts = Hosts(tmp_path, clock=lambda: clock[0])
    assert urls(hosts, "r.io") == ["https://r.io/v2"]
    write(tmp_path, "r.io", 'server = "https://new.example"\n')
    assert urls(hosts, "r.io") == ["https://r.io/v2"]
    clock[0] = 10.5
    assert urls(hosts, "r.io") == ["https://new.example/v2"]


def test_invalid_file_is_passed_over_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """containerd goes on with the certificates beside it, so do we: both reach the same host."""
    clock = [0.0]
    write(tmp_path, "r.io", 'server = "https://m.example"\ncapabilities = ["fly"]\n')
    (tmp_path / "r.io" / "ca.crt").touch()
    hosts = Hosts(tmp_path, clock=lambda: clock[0])
    for _ in range(3):
        clock[0] += 11
        assert hosts.endpoints("r.io") == (
            Endpoint("https://r.io/v2", line=Line(TlsFiles(ca=(tmp_path / "r.io" / "ca.crt",)))),
        )
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and "hosts.refused" in record.getMessage()
    caplog.clear()


def test_docker_layout(tmp_path: Path) -> None:
    directory = tmp_path / "r.io"
    (directory / "d.crt").mkdir(parents=True)
    (directory / "hosts.toml").touch()
    assert Hosts(tmp_path).endpoints("r.io") == (Endpoint("https://r.io/v2"),)
    for name in ("a.crt", "b.crt", "x.cert", "x.key", "y.cert", "z.key", "note.txt"):
        (directory / name).touch()
    tls = TlsFiles(
        ca=(directory / "a.crt", directory / "b.crt"),
        client=((directory / "x.cert", directory / "x.key"), (directory / "y.cert", None)),
    )
    assert Hosts(tmp_path).endpoints("r.io") == (Endpoint("https://r.io/v2", line=Line(tls)),)


def test_tls_for_an_http_url(tmp_path: Path) -> None:
    write(tmp_path, "r.io", 'server = "http://s:5000"\nskip_verify = true\n[host."http://m:80"]\nskip_verify = true\n')
    unverified = Line(TlsFiles(skip_verify=True))
    assert Hosts(tmp_path).endpoints("r.io") == (
        Endpoint("http://m:80/v2", pushes=False),
        Endpoint("https://s:5000/v2", line=unverified),
        Endpoint("http://s:5000/v2"),
    )


def test_a_directory_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Precondition, match=r"file/r\.io: cannot read how r\.io is reached: Not a directory"):
        Hosts(tmp_path / "file").endpoints("r.io")
    (tmp_path / "r.io" / "hosts.toml").mkdir(parents=True)
    with pytest.raises(Precondition, match="Is a directory"):
        Hosts(tmp_path).endpoints("r.io")


def test_what_was_read_holds_while_the_directory_cannot_be_read(tmp_path: Path) -> None:
    clock = [0.0]
    write(tmp_path, "r.io", 'server = "https://m.example"\n')
    hosts = Hosts(tmp_path, clock=lambda: clock[0])
    assert urls(hosts, "r.io") == ["https://m.example/v2"]
    (tmp_path / "r.io" / "hosts.toml").unlink()
    (tmp_path / "r.io" / "hosts.toml").mkdir()
    clock[0] = 11.0
    assert urls(hosts, "r.io") == ["https://m.example/v2"]
