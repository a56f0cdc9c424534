"""The image service that the kubelet talks to: every call goes to containerd as it came, and the answer back.

Requests and answers are bytes here: methods and fields that we do not know pass untouched. Only what a PullImage asks
for is looked at. An error comes back with containerd's code, text and details; a deadline and a cancellation of the
kubelet's are containerd's too. Every call has one request; answers may be many, as of StreamImages, so all are treated
as streams. Other services of CRI, and the older runtime.v1alpha2, are answered UNIMPLEMENTED: the kubelet asks its
runtime endpoint for the former, and has not used the latter since Kubernetes 1.26.
"""

import logging
import socket
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import grpc

from snapshotter.cri.pulls import Pulls
from snapshotter.cri.requests import parse_pull
from snapshotter.grpcsocket import listen

__all__ = ["ImageServiceProxy"]

_log = logging.getLogger(__name__)

_SERVICE = "/runtime.v1.ImageService/"
_WORKERS = 64  # a pull takes one until its end
_ANY_SIZE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_SOON = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000)]  # containerd restarts
_LONGEST_S = 1e8
_OWN_HEADERS = (":", "grpc-", "user-agent", "te", "content-type")  # gRPC sets them for each connection anew


class ImageServiceProxy:
    """A running proxy; `close` ends it."""

    def __init__(self, listener: socket.socket, image_service: Path, pulls: Pulls) -> None:
        """Serve on `listener`, see `grpcsocket.listen`; containerd need not run yet."""
        self._image_service = image_service
        self._pulls = pulls
        self._channel = grpc.insecure_channel(f"unix://{image_service}", options=[*_ANY_SIZE, *_SOON])
        try:
            self._server = listen(listener, self._add, "cri", _WORKERS, _ANY_SIZE)
        except BaseException:
            self._channel.close()
            raise

    def __repr__(self) -> str:
        return f"<ImageServiceProxy to {self._image_service}, {self._pulls!r}>"

    def close(self) -> None:
        """End it; calls under way are cancelled after a second."""
        self._server.stop(grace=1.0).wait()
        self._channel.close()

    def _add(self, server: grpc.Server) -> None:
        server.add_generic_rpc_handlers((_Handler(self),))

    def answer(self, method: str, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Answer one call."""
        name = method.removeprefix(_SERVICE)
        pull = parse_pull(request) if name == "PullImage" else None
        try:
            with nullcontext() if pull is None else self._pulls.pulling(pull):
                yield from self._forward(method, request, context)
        except grpc.RpcError as error:
            _log.debug("cri.failed call=%s code=%s", name, error.code().name)
            context.set_trailing_metadata(tuple((it.key, it.value) for it in error.trailing_metadata() or ()))
            context.abort(error.code(), error.details() or "")
        if name == "RemoveImage":
            self._pulls.forget_unused()

    def _forward(self, method: str, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Have containerd answer. Raises RpcError."""
        came = context.invocation_metadata()
        metadata = tuple((key, value) for key, value in came if not key.startswith(_OWN_HEADERS))
        left_s = context.time_remaining()  # centuries, where the kubelet set no deadline: more than a call may have
        timeout_s = left_s if left_s is not None and left_s < _LONGEST_S else None
        call = self._channel.unary_stream(method, bytes, bytes)(request, timeout=timeout_s, metadata=metadata)
        if not context.add_callback(call.cancel):  # the kubelet has given up already
            call.cancel()  # type: ignore[no-untyped-call]  # so are the stubs of grpc
        yield from call


class _Handler(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in its stub only
    """Takes the calls of the image service, whatever they are called."""

    def __init__(self, proxy: ImageServiceProxy) -> None:
        self._proxy = proxy

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        """How to answer a method; None: not at all."""
        method = handler_call_details.method
        if not method.startswith(_SERVICE):
            return None
        return grpc.unary_stream_rpc_method_handler(partial(self._proxy.answer, method))
