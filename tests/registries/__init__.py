"""Real registries for tests, and what stands before them: TLS, tokens, faults.

    with docker_registry(tmp_path) as host:            # Debian's: no referrers API
    with go_registry(announce=True, page=2) as host:   # go-containerregistry's: with it (main.go here)
        with Front(host, tls=…, tokens=Tokens({"me": "pw"})) as front:   # front.host is what clients talk to

All listen on loopback, on ports of their own, and are gone after the `with`.
"""

from tests.registries.front import Front, Tokens
from tests.registries.servers import docker_registry, go_registry

__all__ = ["Front", "Tokens", "docker_registry", "go_registry"]
