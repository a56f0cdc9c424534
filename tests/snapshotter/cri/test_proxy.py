"""The image service's proxy over true sockets: bytes, errors, deadlines, cancellations pass; credentials are kept."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from proto import cri_pb2
from snapshotter.cri import ImageServiceProxy, Pulls
from snapshotter.listening import bind
from snapshotter.registry.passed import PassedCredentials
from snapshotter.supervise.memory import PassedMemory
from tests.snapshotter.cri.conftest import Fetch, Upstream

SECRET = "s3cr:t"
AUTH = cri_pb2.AuthConfig(username="me", password=SECRET)
STRANGE = b"\xff\xff not a message"


class Kubelet:
    """A client of the proxy, and what the proxy keeps."""

    def __init__(self, proxy: ImageServiceProxy, socket: Path, pulls: Pulls, passed: PassedCredentials) -> None:
        self.proxy, self.pulls, self.passed = proxy, pulls, passed
        self.used: list[str] = []
        self.channel = grpc.insecure_channel(f"unix://{socket}")

    def ask(self, method: str, request: bytes = b"", timeout_s: float | None = 10) -> list[bytes]:
        """All answers to one call; `method` may be of another service."""
        name = method if "/" in method else f"/runtime.v1.ImageService/{method}"
        call = self.channel.unary_stream(name, bytes, bytes)
        return list(call(request, timeout=timeout_s, metadata=(("traceparent", "00-1-2-01"),)))

    def ask_one(self, method: str, request: bytes = b"") -> bytes:
        """As every client does with methods that have one answer."""
        call = self.channel.unary_unary(f"/runtime.v1.ImageService/{method}", bytes, bytes)
        answer: bytes = call(request, timeout=10)
        return answer


@pytest.fixture
def kubelet(short: Path, upstream: Upstream, fetch: Fetch, memory: PassedMemory) -> Iterator[Kubelet]:
    passed = PassedCredentials()
    made: list[Kubelet] = []
    pulls = Pulls(passed, memory, fetch.path, lambda: made[0].used)
    proxy = ImageServiceProxy(bind(short / "k.sock"), upstream.path, pulls)
    made.append(Kubelet(proxy, short / "k.sock", pulls, passed))
    yield made[0]
    made[0].channel.close()
    proxy.close()


def pull(image: str = "r.io/team/app:1", auth: cri_pb2.AuthConfig | None = AUTH) -> bytes:
    """A PullImage request with fields that we do not know."""
    unknown = b"\x9a\x01\x05weird"  # field 19, as `runtime_handler` once was new
    return cri_pb2.PullImageRequest(image=cri_pb2.ImageSpec(image=image), auth=auth).SerializeToString() + unknown


@pytest.mark.parametrize("method", ["ListImages", "ImageStatus", "RemoveImage", "ImageFsInfo", "PullImage", "NewOne"])
def test_bytes_pass_untouched(kubelet: Kubelet, upstream: Upstream, method: str) -> None:
    upstream.answers[method] = lambda request, context: iter([b"\x00answer"])
    for request in (b"", STRANGE, pull()):
        assert kubelet.ask_one(method, request) == b"\x00answer"
    assert upstream.asked == [(f"/runtime.v1.ImageService/{method}", sent) for sent in (b"", STRANGE, pull())]


def test_many_answers_and_a_large_one(kubelet: Kubelet, upstream: Upstream) -> None:
    answers = [b"a", b"", b"c" * (20 << 20)]
    upstream.answers["StreamImages"] = lambda request, context: iter(answers)
    options = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"unix://{upstream.path.parent}/k.sock", options=options) as channel:
        call = channel.unary_stream("/runtime.v1.ImageService/StreamImages", bytes, bytes)
        assert list(call(b"", timeout=20)) == answers


def test_metadata_and_deadline_pass(kubelet: Kubelet, upstream: Upstream) -> None:
    left: list[float | None] = []

    def answer(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        left.append(context.time_remaining())
        yield b""

    upstream.answers["ListImages"] = answer
    kubelet.ask("ListImages", timeout_s=7)
    kubelet.ask("ListImages", timeout_s=None)
    assert left[0] is not None and 5 < left[0] <= 7
    assert left[1] is None or left[1] > 1e6
    assert ("traceparent", "00-1-2-01") in upstream.metadata
    assert [key for key, _ in upstream.metadata].count("user-agent") == 1


def test_errors_pass_with_their_details(kubelet: Kubelet, upstream: Upstream) -> None:
    def refuse(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        context.set_trailing_metadata((("grpc-status-details-bin", b"\x08\x05"),))
        context.abort(grpc.StatusCode.NOT_FOUND, "failed to pull: 401 ünauthorized")
        yield b""

    upstream.answers["PullImage"] = refuse
    with pytest.raises(grpc.RpcError) as failed:
        kubelet.ask("PullImage", pull())
    error = failed.value
    assert isinstance(error, grpc.Call)
    assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "failed to pull: 401 ünauthorized")
    assert ("grpc-status-details-bin", b"\x08\x05") in [(it.key, it.value) for it in error.trailing_metadata() or ()]


def test_a_cancelled_call_is_cancelled_behind_us(kubelet: Kubelet, upstream: Upstream) -> None:
    begun, ended = threading.Event(), threading.Event()

    def wait(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        context.add_callback(ended.set)
        begun.set()
        assert ended.wait(10)
        yield b""

    upstream.answers["PullImage"] = wait
    call = kubelet.channel.unary_stream("/runtime.v1.ImageService/PullImage", bytes, bytes)(pull())
    assert begun.wait(10)
    assert kubelet.pulls.under_way() == ["r.io/team/app:1"]
    call.cancel()  # type: ignore[no-untyped-call]  # so are the stubs of grpc
    assert ended.wait(10)
    _until(lambda: kubelet.pulls.under_way() == [] and kubelet.passed.rows() == [])


def test_other_services_are_not_served(kubelet: Kubelet, upstream: Upstream) -> None:
    for method in ("/runtime.v1.RuntimeService/Version", "/runtime.v1alpha2.ImageService/ListImages"):
        with pytest.raises(grpc.RpcError) as failed:
            kubelet.ask(method)
        assert isinstance(failed.value, grpc.Call) and failed.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert upstream.asked == []


def test_without_containerd_and_with_it_again(short: Path, fetch: Fetch, memory: PassedMemory) -> None:
    pulls = Pulls(PassedCredentials(), memory, fetch.path, list)
    proxy = ImageServiceProxy(bind(short / "k.sock"), short / "c.sock", pulls)
    with grpc.insecure_channel(f"unix://{short}/k.sock") as channel:
        ask = channel.unary_unary("/runtime.v1.ImageService/ListImages", bytes, bytes)
        with pytest.raises(grpc.RpcError) as failed:
            ask(b"", timeout=10)
        assert isinstance(failed.value, grpc.Call) and failed.value.code() is grpc.StatusCode.UNAVAILABLE
        upstream = Upstream(short / "c.sock")
        upstream.answers["ListImages"] = lambda request, context: iter([b"here"])
        answers: list[bytes] = []

        def served() -> bool:
            try:
                answers.append(ask(b"", timeout=10))
            except grpc.RpcError:
                return False
            return True

        _until(served)
        assert answers == [b"here"]
        proxy.close()
        upstream.close()


def test_credentials_are_there_while_containerd_pulls(kubelet: Kubelet, upstream: Upstream, fetch: Fetch) -> None:
    during: list[object] = []

    def answer(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        during.extend(fetch.passed.rows())
        yield b"done"

    upstream.answers["PullImage"] = answer
    assert kubelet.ask_one("PullImage", pull()) == b"done"
    assert [(row["registry"], row["repository"], row["password"]) for row in during] == [("r.io", "team/app", SECRET)]  # type: ignore[index]  # rows
    assert fetch.passed.rows() == kubelet.passed.rows() == during


def test_those_of_a_failed_pull_are_forgotten(kubelet: Kubelet, upstream: Upstream, fetch: Fetch) -> None:
    def refuse(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        context.abort(grpc.StatusCode.UNKNOWN, "no")
        yield b""

    upstream.answers["PullImage"] = refuse
    with pytest.raises(grpc.RpcError):
        kubelet.ask("PullImage", pull())
    assert kubelet.passed.rows() == fetch.passed.rows() == []
    assert fetch.handed == 2


def test_removal_of_an_image_forgets_what_nothing_needs(kubelet: Kubelet, upstream: Upstream, fetch: Fetch) -> None:
    for method in ("PullImage", "RemoveImage"):
        upstream.answers[method] = lambda request, context: iter([b""])
    kubelet.ask_one("PullImage", pull())
    kubelet.ask_one("PullImage", pull("r.io/team/other:1"))
    kubelet.used = ["r.io/team/app@sha256:" + "a" * 64]
    kubelet.ask_one("RemoveImage", b"")
    assert [row["repository"] for row in fetch.passed.rows()] == ["team/app"]
    kubelet.used = []
    kubelet.ask_one("RemoveImage", b"")
    assert fetch.passed.rows() == kubelet.passed.rows() == []


def _until(holds: Callable[[], bool], limit_s: float = 10) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)
