"""containerd's stream of events, of one topic, for as long as somebody listens.

What happens while the stream is broken is missed: whoever relies on events asks as well.
"""

import contextlib
import threading
import time
from collections.abc import Callable

import grpc

from proto import events_pb2, events_pb2_grpc

__all__ = ["EventStream"]

_RETRY_S = 0.5


class EventStream:
    """Calls `take` with each event, on a thread of its own. A stream that ends is begun again."""

    def __init__(self, channel: grpc.Channel, topic: str, take: Callable[[events_pb2.Envelope], None]) -> None:
        """`channel` is closed with it."""
        self._channel = channel
        self._request = events_pb2.SubscribeRequest(filters=[f'topic=="{topic}"'])
        self._take = take
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._listen, name=topic.strip("/").replace("/", "-"), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Listen no more; returns when `take` will not be called again."""
        self._stopping.set()
        self._channel.close()
        self._thread.join()

    def _listen(self) -> None:
        stub = events_pb2_grpc.EventsStub(self._channel)  # type: ignore[no-untyped-call]  # generated
        while not self._stopping.is_set():
            began = time.monotonic()
            with contextlib.suppress(grpc.RpcError, ValueError):  # ValueError: the channel has just been closed
                for envelope in stub.Subscribe(self._request):
                    self._take(envelope)
            self._stopping.wait(max(0.0, began + _RETRY_S - time.monotonic()))
