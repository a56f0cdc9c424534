"""The generated code in `proto/` is what `scripts/proto` makes of the .proto files now."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]


def _generated(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / "proto").glob("*_pb2*.py*")}


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    (tmp_path / "proto").mkdir()
    (tmp_path / "scripts").mkdir()
    for source in (CHECKOUT / "proto").glob("*.proto"):
        shutil.copy(source, tmp_path / "proto")
    script = shutil.copy(CHECKOUT / "scripts" / "proto", tmp_path / "scripts")
    subprocess.run([script], check=True, env={**os.environ, "PYTHON": sys.executable})
    fresh = _generated(tmp_path)
    assert fresh, "scripts/proto wrote nothing"
    assert _generated(CHECKOUT) == fresh, "run scripts/proto and commit what it changes"
