"""One snapshotter over a fake provider for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotter.containerd.snapshots import Snapshots
from tests.snapshotter.containerd.fake_provider import FakeProvider


@pytest.fixture
def provider(tmp_path: Path) -> FakeProvider:
    return FakeProvider(tmp_path / "provider")


@pytest.fixture
def snapshots(tmp_path: Path, provider: FakeProvider) -> Iterator[Snapshots]:
    made = Snapshots(tmp_path / "root", provider)
    yield made
    made.close()
