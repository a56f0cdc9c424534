"""The operator's rules: which fit, and what is wrong with one that is none."""

from pathlib import Path

import pytest

from snapshotter.config import Config
from snapshotter.errors import InvalidArgument, UserError
from snapshotter.workload.container import Container
from snapshotter.workload.rules import first_fitting, parse_rules

POD = Container(
    ("/usr/bin/python3", "train.py", "--rank=3"),
    {"io.kubernetes.container.name": "api-7", "empty": ""},
    {"example.com/role": "serve me", "odd=key": "x"},
)


@pytest.mark.parametrize(
    ("rule", "fits"),
    [
        (r"w argv train\.py\b", True),
        (r"w argv ^/usr/bin/python3 train\.py --rank=\d+$", True),
        ("w argv   serve", False),
        ("w argv python3 train", True),
        ("w label io.kubernetes.container.name=api-*", True),
        ("w label io.kubernetes.container.name=api", False),
        ("w label io.kubernetes.container.name=API-*", False),
        ("w label other=*", False),
        ("w label empty=", True),
        ("w annotation example.com/role=serve me", True),
        ("w annotation io.kubernetes.container.name=*", False),
        ("w label example.com/role=*", False),
    ],
)
def test_one_rule(rule: str, fits: bool) -> None:
    assert first_fitting(parse_rules([rule]), POD) == ("w" if fits else None)


def test_the_first_that_fits_counts() -> None:
    rules = parse_rules(["a argv nothing", "b argv train", "c argv train"])
    assert first_fitting(rules, POD) == "b"
    assert first_fitting((), POD) is None


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ("", "a rule is"),
        ("train", "a rule is"),
        ("train argv", "a rule is"),
        ("train image x", "a rule is"),
        ("train label x", "a rule is"),
        ("train annotation =x", "a rule is"),
        ("Train argv x", "is not a name"),
        ("../x argv x", "is not a name"),
        ("train argv (", "is no regular expression"),
    ],
)
def test_a_rule_that_is_none(rule: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        parse_rules(["fine argv x", rule])
    path = tmp_path / "config.toml"
    path.write_text(f"[workload]\nrules = ['''{rule}''']\n")
    with pytest.raises(UserError) as caught:
        Config.from_toml(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: [workload] rules: {rule!r}: ") and problem in text and "\n" not in text


def test_good_rules_are_taken_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[workload]\nrules = ['train argv train[.]py', 'serve label app=web']\n")
    assert Config.from_toml(path).workload.rules == ("train argv train[.]py", "serve label app=web")
