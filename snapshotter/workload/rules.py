"""The operator's rules: which containers are which workload. Pure; read once, when the configuration is loaded.

A rule is one string, `NAME KIND TEXT`:
    train argv train\\.py\\b                       a regular expression, searched in the arguments, joined by spaces
    serve label io.kubernetes.container.name=api*  a shell pattern that a label of the container matches whole
    serve annotation example.com/role=serve        the same for an annotation of its OCI specification
The first rule that fits counts.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from blockindex.errors import Corrupt
from blockindex.hotset import check_workload
from snapshotter.errors import InvalidArgument

from .container import Container

__all__ = ["Rule", "first_fitting", "parse_rules"]

_SHAPE = "a rule is 'NAME argv REGEX', 'NAME label KEY=PATTERN' or 'NAME annotation KEY=PATTERN'"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule, by its kind: `pattern` is a regular expression for "argv", else a shell pattern for the value of
    `key`."""

    name: str
    kind: Literal["argv", "label", "annotation"]
    key: str
    pattern: str

    def fits(self, container: Container) -> bool:
        """Whether the container is of this workload."""
        match self.kind:
            case "argv":
                return re.search(self.pattern, " ".join(container.argv)) is not None
            case "label":
                return self._matches(container.labels)
            case "annotation":
                return self._matches(container.annotations)

    def _matches(self, values: Mapping[str, str]) -> bool:
        return self.key in values and fnmatchcase(values[self.key], self.pattern)


def parse_rules(texts: Sequence[str]) -> tuple[Rule, ...]:
    """The rules in their order; InvalidArgument in one line for the first that is none."""
    return tuple(_parse(text) for text in texts)


def first_fitting(rules: Sequence[Rule], container: Container) -> str | None:
    """The workload that the rules name, None when none fits."""
    return next((rule.name for rule in rules if rule.fits(container)), None)


def _parse(text: str) -> Rule:
    words = text.split(maxsplit=2)
    if len(words) != 3:
        raise InvalidArgument(f"{text!r}: {_SHAPE}")
    name, kind, rest = words
    try:
        check_workload(name)
    except Corrupt as error:
        raise InvalidArgument(f"{text!r}: {error.problem}") from error
    if kind == "argv":
        try:
            re.compile(rest)
        except re.error as error:
            raise InvalidArgument(f"{text!r}: {rest!r} is no regular expression: {error}") from error
        return Rule(name, "argv", "", rest)
    key, equals, pattern = rest.partition("=")
    if kind not in ("label", "annotation") or not key or not equals:
        raise InvalidArgument(f"{text!r}: {_SHAPE}")
    return Rule(name, "label" if kind == "label" else "annotation", key, pattern)
