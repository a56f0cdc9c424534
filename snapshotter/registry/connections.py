"""Connections for `transport`: requests' HTTPAdapter with our sockets, our TLS contexts, and a sign of dead ones.

Knows urllib3's and http.client's connections; must not know what is asked over them. All that is below the public
surface of requests lies in this file.
"""

import http.client
import socket
from typing import Any
from urllib.parse import urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection

__all__ = ["Adapter", "StaleConnection"]


class StaleConnection(Exception):
    """A kept-alive connection was closed by the other side before it answered. Deliberately no OSError: urllib3 and
    requests would wrap one."""


class _WatchedMixin:
    """Tells a dead kept-alive connection (repeat) from a fresh one that is refused or reset (do not)."""

    _answered = False

    def connect(self) -> None:
        self._answered = False
        super().connect()  # type: ignore[misc]  # the mixin stands before an HTTPConnection

    def getresponse(self) -> urllib3.HTTPResponse:
        """Here a dead connection is met, also if it was dead while the request was sent: urllib3 then looks for an
        answer all the same, for a server may refuse a body before it has come to its end."""
        try:
            response: urllib3.HTTPResponse = super().getresponse()  # type: ignore[misc]  # as above
        except (http.client.RemoteDisconnected, ConnectionError) as exc:
            if self._answered:
                raise StaleConnection from exc
            raise
        self._answered = True
        return response


class _WatchedHTTP(_WatchedMixin, HTTPConnection):  # type: ignore[misc]  # narrower getresponse, same object
    pass


class _WatchedHTTPS(_WatchedMixin, HTTPSConnection):  # type: ignore[misc]  # as above
    pass


class _HTTPPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _WatchedHTTP


class _HTTPSPool(urllib3.HTTPSConnectionPool):
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
        self._socket_options: list[tuple[int, int, int]] = [
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        ]
        super().__init__(pool_connections=64, pool_maxsize=connections, max_retries=0, pool_block=False)

    def init_poolmanager(self, connections: int, maxsize: int, block: bool = False, **kwargs: Any) -> None:
        kwargs["socket_options"] = self._socket_options
        super().init_poolmanager(connections, maxsize, block, **kwargs)
        _watch_pools(self.poolmanager)

    def proxy_manager_for(self, proxy: str, **kwargs: Any) -> Any:
        kwargs["socket_options"] = self._socket_options
        return _watch_pools(super().proxy_manager_for(proxy, **kwargs))

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


def _watch_pools(manager: Any) -> Any:
    manager.pool_classes_by_scheme = {"http": _HTTPPool, "https": _HTTPSPool}
    return manager
