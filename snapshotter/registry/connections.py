"""Connections for `transport`: requests' HTTPAdapter with our sockets, our TLS contexts, and a sign of dead ones.

Where many requests at once are expected of a far host (`distance`), connections are opened ahead: as soon as the first
one has told how far the host is, the others are opened beside the first request, not after it. So they are there when
its answer says what to ask for.

Knows urllib3's and http.client's connections; must not know what is asked over them. All that is below the public
surface of requests lies in this file.
"""

import http.client
import logging
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection

from snapshotter.registry.distance import Distances, is_far, round_trip_s
from snapshotter.registry.places import Places

__all__ = ["Adapter", "StaleConnection"]


_log = logging.getLogger(__name__)

_WAIT_S = 5.0  # for a connection that is being opened already


class StaleConnection(Exception):
    """A kept-alive connection was closed by the other side before it answered. Deliberately no OSError: urllib3 and
    requests would wrap one."""


class _WatchedMixin:
    """Tells a dead kept-alive connection (repeat) from a fresh one that is refused or reset (do not); one that was
    opened ahead counts as kept alive. Says how far the other side is."""

    _answered = False
    _is_unused = False
    proxy: Any
    sock: socket.socket | None
    told: Callable[[float], None]  # is called with the round trip, in seconds, at once and with each answer

    def connect(self) -> None:
        self._answered = self._is_unused = False
        super().connect()  # type: ignore[misc]  # the mixin stands before an HTTPConnection

    def connect_ahead(self) -> None:
        """Connect, with no request to send yet."""
        self.connect()
        self._answered = self._is_unused = True

    @property
    def is_connected(self) -> bool:
        """urllib3 takes an idle connection that can be read from for dead. In one that was opened ahead TLS 1.3 has
        left session tickets to be read; if it is dead, `getresponse` tells."""
        return self.sock is not None if self._is_unused else super().is_connected  # type: ignore[misc]  # as above

    def _new_conn(self) -> socket.socket:
        sock: socket.socket = super()._new_conn()  # type: ignore[misc]  # as above
        self._tell(sock)
        return sock

    def _tell(self, sock: socket.socket | None) -> None:
        if self.proxy is None and sock is not None:
            self.told(round_trip_s(sock))

    def getresponse(self) -> urllib3.HTTPResponse:
        """Here a dead connection is met, also if it was dead while the request was sent: urllib3 then looks for an
        answer all the same, for a server may refuse a body before it has come to its end."""
        self._is_unused = False
        try:
            response: urllib3.HTTPResponse = super().getresponse()  # type: ignore[misc]  # as above
        except (http.client.RemoteDisconnected, ConnectionError) as exc:
            if self._answered:
                raise StaleConnection from exc
            raise
        self._answered = True
        self._tell(self.sock)
        return response


class _WatchedHTTP(_WatchedMixin, HTTPConnection):  # type: ignore[misc]  # narrower getresponse, same object
    pass


class _WatchedHTTPS(_WatchedMixin, HTTPSConnection):  # type: ignore[misc]  # as above
    pass


class _PoolMixin:
    """Opens connections ahead when many requests are expected of a far host. Nothing of this is done for a proxy's."""

    QueueCls = Places
    scheme: str
    host: str
    port: int | None
    pool: Places | None

    def __init__(self, *args: Any, distances: Distances, **kwargs: Any) -> None:
        self._distances = distances
        self._expected = 0
        self._connect_timeout_s = _WAIT_S
        super().__init__(*args, **kwargs)

    @property
    def _origin(self) -> tuple[str, str | None, int]:
        return self.scheme, self.host, self.port or (443 if self.scheme == "https" else 80)

    def expect(self, requests: int, connect_timeout_s: float) -> None:
        """So many requests are about to be made at once: see the module."""
        self._connect_timeout_s = connect_timeout_s
        self._expected = requests
        if self._distances.is_known(self._origin):
            self._open_ahead()

    def _told(self, round_trip_s: float) -> None:
        self._distances.note(self._origin, round_trip_s)
        self._open_ahead()

    def _open_ahead(self) -> None:
        requests, self._expected = self._expected, 0
        places = self.pool
        if places is None or not requests or not is_far(self._distances.round_trip_s(self._origin)):
            return
        count = places.reserve(requests)
        for _ in range(count):
            thread = threading.Thread(target=self._open, args=(places,), name=f"connect-{self.host}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no thread: whoever needs a connection opens it
                places.opened(None)

    def _open(self, places: Places) -> None:
        connection = self._new_conn()
        connection.timeout = self._connect_timeout_s
        try:
            connection.connect_ahead()
        except Exception as error:  # whatever it is: who needs a connection will open one, and meet it
            _log.debug("connection.failed host=%s error=%r", self.host, str(error))
            connection.close()
            connection = None
        places.opened(connection)
        if self.pool is None and connection is not None:  # closed meanwhile
            connection.close()

    def _new_conn(self) -> Any:
        connection = super()._new_conn()  # type: ignore[misc]  # the mixin stands before an HTTPConnectionPool
        connection.told = self._told
        return connection

    def _get_conn(self, timeout: float | None = None) -> Any:
        places = self.pool
        if places is not None:
            places.wait(self._connect_timeout_s)
        return super()._get_conn(timeout)  # type: ignore[misc]  # as above


class _HTTPPool(_PoolMixin, urllib3.HTTPConnectionPool):  # type: ignore[misc]  # narrower types, same objects
    ConnectionCls = _WatchedHTTP


class _HTTPSPool(_PoolMixin, urllib3.HTTPSConnectionPool):  # type: ignore[misc]  # as above
    ConnectionCls = _WatchedHTTPS

    def _validate_conn(self, conn: Any) -> None:
        """Connect, and no more: whoever set `skip_verify` needs no warning for each connection."""
        if conn.is_closed:
            conn.connect()


class Adapter(HTTPAdapter):
    """requests' adapter with our socket options. What is given to `send` as `verify` is the SSLContext to use.

    requests would load the certificate bundle anew for each connection: 10-20 ms before the first byte. Connections
    with different contexts are in different pools.
    """

    def __init__(self, connections: int) -> None:
        self.distances = Distances()
        self._socket_options: list[tuple[int, int, int]] = [
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        ]
        super().__init__(pool_connections=64, pool_maxsize=connections, max_retries=0, pool_block=False)

    def init_poolmanager(self, connections: int, maxsize: int, block: bool = False, **kwargs: Any) -> None:
        kwargs["socket_options"] = self._socket_options
        super().init_poolmanager(connections, maxsize, block, **kwargs)
        self._watch_pools(self.poolmanager)

    def proxy_manager_for(self, proxy: str, **kwargs: Any) -> Any:
        kwargs["socket_options"] = self._socket_options
        return self._watch_pools(super().proxy_manager_for(proxy, **kwargs))

    def expect(self, request: requests.PreparedRequest, verify: Any, count: int, connect_timeout_s: float) -> None:
        """About `count` requests like this one are to be made at once, to nobody's proxy: see the module."""
        pool: Any = self.get_connection_with_tls_context(request, verify)
        pool.expect(count, connect_timeout_s)

    def _watch_pools(self, manager: Any) -> Any:
        classes = {"http": _HTTPPool, "https": _HTTPSPool}
        manager.pool_classes_by_scheme = {
            scheme: partial(pool, distances=self.distances) for scheme, pool in classes.items()
        }
        return manager

    def close(self) -> None:
        """Close all idle connections now; urllib3 by itself waits until nobody refers to the pool any more."""
        for manager in (self.poolmanager, *self.proxy_manager.values()):
            for key in manager.pools.keys():  # noqa: SIM118  # no mapping: it refuses to be iterated, for threads' sake
                manager.pools[key].close()
        super().close()

    def build_connection_pool_key_attributes(  # type: ignore[override]  # their TypedDicts are private
        self, request: requests.PreparedRequest, verify: Any, cert: Any = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        parts = urlsplit(request.url or "")
        host = {"scheme": str(parts.scheme), "host": str(parts.hostname), "port": parts.port}
        return host, {"ssl_context": verify} if parts.scheme == "https" else {}

    def cert_verify(self, conn: Any, url: Any, verify: Any, cert: Any) -> None:
        """Nothing to do: the TLS context holds the trust."""
