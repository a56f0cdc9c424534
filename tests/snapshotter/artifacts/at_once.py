"""A program for tests: many processes that publish to one repository at the same moment.

    python -m tests.snapshotter.artifacts.at_once HOST/REPOSITORY COUNT

Each publishes a hot set of a workload of its own, w0, w1, …, all of one image. Exits with 0 when all have ended well.
"""

import os
import sys
from contextlib import closing

from snapshotter.artifacts.publisher import publish
from snapshotter.config import RegistryConfig
from snapshotter.registry import Registry, parse_reference
from snapshotter.registry.push import Pusher
from tests.snapshotter.artifacts.making import hot_set, opener


def main(reference: str, count: int) -> int:
    """Forks all, and lets them go when all are there: the end of a pipe that they read is closed."""
    gate, opened = os.pipe()
    children = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            os.close(opened)
            status = 1
            try:
                os.read(gate, 1)
                one(reference, number)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    os.close(opened)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


def one(reference: str, number: int) -> None:
    config = RegistryConfig(
        hosts_dir="", docker_config="/nonexistent/config.json", connect_timeout_s=60.0, read_timeout_s=60.0
    )
    artifact, blobs = hot_set(f"w{number}")
    with closing(Registry(config)) as registry:
        publish(Pusher(registry), parse_reference(reference), artifact, opener(blobs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
