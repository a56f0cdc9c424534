"""What `bootseer doctor` says of trusted keys and alarms."""

from dataclasses import replace
from pathlib import Path

import pytest

from snapshotter.alarms import Alarms
from snapshotter.config import Config, ContainerdConfig, PublishConfig, RecordConfig, WorkloadConfig
from snapshotter.doctor.model import State
from snapshotter.doctor.trust import check_publishing, check_trust
from snapshotter.trust.keys import KeyRing, SecretKey
from snapshotter.unproven import Pack

PACK = Pack("sha256:" + "c" * 64, "registry.test/app", "", "")


def test_keys_and_the_policy(tmp_path: Path) -> None:
    assert "no trusted keys" in check_trust("signed", KeyRing({}), [])[0].what
    key = SecretKey.generate()
    key.public.save(tmp_path / "ci.pub")
    ring = KeyRing.load([tmp_path])
    [check] = check_trust("signed", ring, [])
    assert check.state is State.OK and key.public.name in check.what
    assert '"any"' in check_trust("any", ring, [])[0].what


def test_a_file_that_is_no_key(tmp_path: Path) -> None:
    SecretKey.generate().save(tmp_path / "secret.pem")
    check = check_trust("signed", KeyRing.load([tmp_path]), [])[-1]
    assert check.state is State.WARN and "secret.pem" in check.what and "is a secret key" in check.fix


def test_an_alarm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    alarms = Alarms(tmp_path)
    alarms.raise_("sha256:" + "a" * 64, "a" * 14, ["registry.test/app:1"], PACK, [(0, 1)], ["/bin/sh"], True)
    check = check_trust("signed", KeyRing({}), alarms.entries())[-1]
    assert check.state is State.FAIL and "aaaaaaaaaaaa" in check.what and "bootseer alarm clear" in check.fix
    caplog.clear()


def test_publishing_is_of_use_to_others(tmp_path: Path) -> None:
    assert check_publishing(Config()) == []
    config = Config(publish=PublishConfig(enabled=True, min_records=9), workload=WorkloadConfig(records=8))
    records, key = check_publishing(config)
    assert all(check.fix.endswith("then bootseer reload") for check in (records, key))
    assert records.state is key.state is State.WARN and "never published" in records.why and "unsigned" in key.what
    config = Config(publish=PublishConfig(enabled=True, key=str(tmp_path / "key.pem")))
    assert [check.state for check in check_publishing(config)] == [State.FAIL]
    SecretKey.generate().save(tmp_path / "key.pem")
    (check,) = check_publishing(config)
    assert check.state is State.OK and "signed" in check.what


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Config(record=RecordConfig(auto=False)), "auto in [record]"),
        (Config(containerd=ContainerdConfig(address="")), "address in [containerd]"),
    ],
)
def test_publishing_needs_recordings(config: Config, words: str, tmp_path: Path) -> None:
    SecretKey.generate().save(tmp_path / "key.pem")
    publish = PublishConfig(enabled=True, key=str(tmp_path / "key.pem"))
    (check,) = check_publishing(replace(config, publish=publish))
    assert check.state is State.WARN and words in check.what
