"""Stands in for the `bootseer` command where a test is about the bench: it listens, says so, and mounts."""

import argparse
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path


def main() -> None:
    """`serve` listens and mounts a tmpfs as a layer; `unmount` takes it away unless the file `keep` is beside us."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve", "unmount"])
    parser.add_argument("--config", type=Path, required=True)
    options = parser.parse_args()
    config = tomllib.loads(options.config.read_text())
    assert set(config) == {"root", "run", "index", "registry", "containerd"}, config
    assert config["registry"]["plain_http"] == ["10.77.0.2:5000"]
    layer = Path(config["root"]) / "layer"
    if options.command == "unmount":
        if not Path(__file__).with_name("keep").exists():
            subprocess.run(["umount", layer], check=True)
        return
    layer.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", layer], check=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{config['run']}/bootseer.sock")
        listener.listen()
        print("level=info service.ready socket=ours", flush=True)
        while True:
            listener.accept()[0].close()


if __name__ == "__main__":
    main()
