"""`python -m snapshotter.publish`, with the configuration on stdin: one round, niced; says as JSON what it has done.

What the fetch process runs beside itself; whoever waits for it may have been killed, so it ends itself.
"""

import json
import os
import signal
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from snapshotter import killpoints
from snapshotter.config import Config
from snapshotter.errors import SnapshotterError
from snapshotter.publish.rounds import Round
from snapshotter.registry import Registry

_NICE = 15
_MOST_S = 900


def main() -> int:
    """See the module."""
    try:
        killpoints.use(os.environ)
        config = Config.from_toml(Path("/dev/stdin"))
        with closing(Registry(config.registry)) as registry:
            done, failed = Round(config, registry).run()
    except (SnapshotterError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps({"done": [asdict(row) for row in done], "failed": failed}))
    return 0


if __name__ == "__main__":
    os.nice(_NICE)
    signal.alarm(_MOST_S)
    sys.exit(main())
