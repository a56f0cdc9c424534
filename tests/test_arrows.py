"""Imports point one way: cli -> snapshotter -> blockindex; generated messages only where they are translated."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
OURS = {"blockindex", "snapshotter", "proto", "scripts", "tests"}
ALLOWED = {
    "blockindex": {"blockindex"},
    "snapshotter": {"blockindex", "snapshotter"},
    "proto": {"proto"},
    "scripts": {"scripts"},
}
"""Package -> our packages that it may import anywhere; the test bench drives the product by its commands only."""

TRANSLATORS = (
    "blockindex/codec*.py",
    "blockindex/hothead.py",
    "snapshotter/containerd/*.py",
    "snapshotter/cri/*.py",
    "snapshotter/control*.py",
    "scripts/rig/snapshotcalls.py",
)
"""The only files that may import generated messages."""

PURE = {"asyncio", "multiprocessing", "selectors", "signal", "socket", "sqlite3", "subprocess", "threading"}
"""What blockindex, which turns bytes into values, has no use for."""


def _modules(package: str) -> Iterator[tuple[Path, str]]:
    """(file, absolute dotted name it imports) for every import in the package's hand-written files."""
    for path in sorted((CHECKOUT / package).rglob("*.py")):
        file = path.relative_to(CHECKOUT)
        if file.stem.endswith(("_pb2", "_pb2_grpc")):
            continue
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Import):
                yield from ((file, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                origin = file.parent.parts[: len(file.parent.parts) + 1 - node.level] if node.level else ()
                base = ".".join([*origin, *([node.module] if node.module else [])])
                yield from ((file, f"{base}.{alias.name}") for alias in node.names)


def _is_allowed(file: Path, module: str) -> bool:
    top = module.partition(".")[0]
    package = file.parts[0]
    if top == "proto" and package != "proto":
        return any(file.match(pattern) for pattern in TRANSLATORS)
    return top not in OURS or top in ALLOWED[package]


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_point_one_way(package: str) -> None:
    wrong = [f"{file} imports {module}" for file, module in _modules(package) if not _is_allowed(file, module)]
    assert not wrong


def test_only_the_command_line_is_above_the_daemon() -> None:
    wrong = [
        f"{file} imports {module}"
        for file, module in _modules("snapshotter")
        if module.startswith("snapshotter.cli") and "cli" not in file.parts and file.name != "__main__.py"
    ]
    assert not wrong


def test_blockindex_touches_no_socket_thread_or_process() -> None:
    wrong = [f"{f} imports {m}" for f, m in _modules("blockindex") if m.partition(".")[0] in PURE]
    assert not wrong


@pytest.mark.parametrize(
    ("file", "module"),
    [
        ("blockindex/tar.py", "snapshotter.model.Digest"),
        ("blockindex/tar.py", "proto.index_pb2"),
        ("snapshotter/blockstore.py", "proto.snapshots_pb2"),
        ("snapshotter/supervisor.py", "scripts.rig.link"),
        ("scripts/rig/node.py", "snapshotter.config"),
        ("scripts/rig/node.py", "proto.snapshots_pb2"),
    ],
)
def test_a_wrong_arrow_is_seen(file: str, module: str) -> None:
    assert not _is_allowed(Path(file), module)


def test_every_package_is_known() -> None:
    found = {path.parent.name for path in CHECKOUT.glob("*/__init__.py")} - {"tests"}
    assert found <= set(ALLOWED)
    assert not OURS & set(sys.stdlib_module_names)
