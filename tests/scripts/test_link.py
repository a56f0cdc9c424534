"""The emulated link is what it says, counts what it carries, and refuses to run when it is not."""

from collections.abc import Iterator

import pytest

from scripts.rig.delayline import wire_size
from scripts.rig.errors import RigError
from scripts.rig.link import Link
from scripts.rig.workspace import Workspace


def _packet(size: int, gso_type: int, gso_size: int, tcp_header: int = 32) -> bytes:
    """A virtio header and an IPv4 + TCP packet of `size` bytes."""
    header = bytes([1, gso_type]) + b"".join(value.to_bytes(2, "little") for value in (0, gso_size, 20, 16))
    ip_and_tcp = bytearray(size)
    ip_and_tcp[20 + 12] = (tcp_header // 4) << 4
    return header + bytes(ip_and_tcp)


def test_a_plain_packet_has_its_own_size() -> None:
    assert wire_size(_packet(40, 0, 0)) == (40, 1)


def test_a_merged_packet_counts_the_headers_of_each_segment() -> None:
    payload, headers = 10 * 1448 + 1, 52
    assert wire_size(_packet(payload + headers, 1, 1448)) == (payload + 11 * headers, 11)


@pytest.fixture(scope="module")
def link() -> Iterator[Link]:
    with Workspace() as workspace:
        link = Link(workspace, 100, 20)
        yield link
        link.close()


@pytest.mark.system
def test_self_test_measures_what_was_asked_for(link: Link) -> None:
    report = link.self_test(20_000_000)
    assert 95 <= report.rate_mbit <= 103
    assert 19.9 <= report.rtt_ms <= 21.5
    assert len(report.congestion_control) == 2


@pytest.mark.system
def test_the_counters_count_headers(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_judge", lambda report: None)
    before = link.traffic()
    link.self_test(20_000_000)
    after = link.traffic()
    segments = 20_000_000 / 1448
    carried = after.to_near - before.to_near
    # Retransmitted segments after a drop at the queue are carried twice.
    assert 20_000_000 + 52 * segments <= carried <= 1.02 * (20_000_000 + 52 * segments)
    assert after.packets_to_near - before.packets_to_near >= segments


@pytest.mark.system
@pytest.mark.parametrize(("claim", "value"), [("rtt_ms", 10.0), ("rtt_ms", 30.0), ("mbit", 150.0), ("mbit", 50.0)])
def test_self_test_refuses_a_link_that_is_not_what_it_claims(
    link: Link, monkeypatch: pytest.MonkeyPatch, claim: str, value: float
) -> None:
    monkeypatch.setattr(link, claim, value)
    with pytest.raises(RigError, match="the emulated link is not"):
        link.self_test(5_000_000, attempts=1)


@pytest.mark.system
def test_a_closed_link_leaves_nothing() -> None:
    with Workspace() as workspace:
        link = Link(workspace, 100, 20)
        link.close()
        link.close()
        assert "0 processes" in repr(workspace)
    assert not workspace.root.exists()
