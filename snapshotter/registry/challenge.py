"""The WWW-Authenticate header of a refusal, parsed. Sans-IO; never fails, whatever a server sends."""

import re
from dataclasses import dataclass

__all__ = ["Challenge", "parse_challenges"]

_AUTH_PARAM = re.compile(r'([A-Za-z0-9_.-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))')
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9._-]*)(?=\s|,|$)")


@dataclass(frozen=True, slots=True)
class Challenge:
    """One challenge; `scheme` and the parameters' names are lower case."""

    scheme: str
    params: dict[str, str]


def parse_challenges(text: str) -> list[Challenge]:
    """The challenges of a WWW-Authenticate header, commas and quotes minded; unreadable parts are skipped."""
    challenges: list[Challenge] = []
    at = 0
    while at < len(text):
        if text[at] in " \t,":
            at += 1
        elif (param := _AUTH_PARAM.match(text, at)) and challenges:
            quoted, plain = param[2], param[3]
            value = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else plain
            challenges[-1].params.setdefault(param[1].lower(), value)
            at = param.end()
        elif scheme := _SCHEME.match(text, at):
            challenges.append(Challenge(scheme[1].lower(), {}))
            at = scheme.end()
        else:
            at += 1
    return challenges
