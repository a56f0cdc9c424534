"""Config: defaults, TOML in and out, and one line for every mistake."""

import dataclasses
import tomllib
from pathlib import Path

import pytest

from snapshotter.config import Config, load_config
from snapshotter.errors import UserError


def parse(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "c.toml"
    path.write_text(text)
    return Config.from_toml(path)


def test_defaults_round_trip(tmp_path: Path) -> None:
    text = Config().to_toml()
    assert parse(tmp_path, text) == Config()
    assert parse(tmp_path, "") == Config()


def test_values_round_trip(tmp_path: Path) -> None:
    config = parse(
        tmp_path,
        'root = "/r"\nrun = "/run/x"\n[registry]\nplain_http = ["a:1", "b"]\nread_timeout_s = 3\n'
        '[fetch]\nbackground = false\n[mount]\nattach = "file"\n',
    )
    assert config.registry.plain_http == ("a:1", "b") and config.registry.read_timeout_s == 3.0
    assert config.fetch.background is False and config.mount.attach == "file"
    assert str(config.socket_path) == "/run/x/bootseer.sock" and str(config.control_path) == "/run/x/control.sock"
    assert str(config.mounts_path) == "/r/m" and str(config.lock_path) == "/run/x/lock"
    assert parse(tmp_path, config.to_toml()) == config


def test_every_option_is_documented_and_shown() -> None:
    shown = tomllib.loads(Config().to_toml())
    lines = Config().to_toml().splitlines()

    def walk(values: object, table: dict[str, object]) -> None:
        for option in dataclasses.fields(values):  # type: ignore[arg-type]  # only called for dataclasses
            assert option.metadata["doc"].endswith("."), option.name
            value = getattr(values, option.name)
            if dataclasses.is_dataclass(value):
                walk(value, table[option.name])  # type: ignore[arg-type]  # a section is a table
                continue
            assert option.name in table
            if option.name.endswith(("_s", "_kib")):
                assert option.metadata["unit"] in ("s", "KiB")
                assert option.metadata["low"] is not None

    walk(Config(), shown)
    assert all(lines[at - 1].startswith("#") for at, line in enumerate(lines) if line and line[0] not in "#")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[fetch]\ndemand_thread = 3", "[fetch] unknown key 'demand_thread': did you mean 'demand_threads'?"),
        ("[regisrty]\n", "unknown key 'regisrty': did you mean 'registry'?"),
        ('url = "x"', "unknown key 'url': it belongs into [index]"),
        ('[index]\nroot = "/x"', "[index] unknown key 'root': it belongs before the first section"),
        ("[log]\nzzz = 1", "[log] unknown key 'zzz': known are level, format"),
        ("fetch = 3", "fetch is a section: write [fetch]"),
        ('[fetch]\ndemand_threads = "8"', '[fetch] demand_threads = "8": must be a whole number'),
        ("[fetch]\ndemand_threads = 2.0", "demand_threads = 2.0: must be a whole number"),
        ("[fetch]\ndemand_threads = true", "demand_threads = true: must be a whole number"),
        ("[fetch]\ndemand_threads = 0", "demand_threads = 0: must be between 1 and 128"),
        ("[fetch]\nread_timeout_s = 0.5", "read_timeout_s = 0.5: must be between 1 and 86400 s"),
        ("[index]\ntimeout_s = inf", "must be a number"),
        ("[fetch]\nbackground = 1", "background = 1: must be true or false"),
        ('[registry]\nplain_http = "a"', 'plain_http = "a": must be a list of strings'),
        ("[registry]\nplain_http = [1]", "plain_http = [1]: must be a list of strings"),
        ('[mount]\nattach = "lop"', 'attach = "lop": must be one of loop, file'),
        ('root = "var"', 'root = "var": must be an absolute path'),
        ('root = ""', "root must not be empty"),
        ("root = 1979-05-27", "must be a string"),
        (f'run = "/{"x" * 120}"', "longer than 107 bytes"),
        ("root =", "not valid TOML"),
    ],
)
def test_mistake_is_one_line_that_names_file_and_key(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(tmp_path, text)
    assert words in str(caught.value) and str(caught.value).startswith(f"{tmp_path}/c.toml: ")
    assert "\n" not in str(caught.value) and caught.value.exit_code != 0


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the configuration: No such file"):
        load_config(tmp_path / "none")
    (tmp_path / "b").write_bytes(b"\xff")
    with pytest.raises(UserError, match="not UTF-8"):
        load_config(tmp_path / "b")


def test_default_path_is_used_if_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapshotter.config.DEFAULT_PATH", tmp_path / "d.toml")
    assert load_config(None) == Config()
    (tmp_path / "d.toml").write_text('resend = "never"')
    assert load_config(None).resend == "never"
