"""containerd's filter language, for List.

    filter   = selector *( "," selector )            all of them must hold
    selector = path [ ( "==" | "!=" | "~=" ) value ]  without operator: the field is present
    path     = field *( "." field )                   field = letter *( letter | digit | "_" ) | quoted
    value    = quoted | run of characters other than white space and ","

Quoted text is in double quotes with Go's escapes; after "~=" (regular expression, matches anywhere) also between two
"/" or two "|". A list of filters holds when one of them does; an empty list and an empty filter hold always.

Fields: name, parent, kind, labels.<key>. name, parent and kind are always present; an absent field equals nothing.
"""

import re
from collections.abc import Callable, Iterable, Mapping

from snapshotter.containerd.model import Kind, Snapshot
from snapshotter.errors import InvalidArgument

__all__ = ["Predicate", "compile_filters"]

Predicate = Callable[[Snapshot], bool]

_KINDS: Mapping[Kind, str] = {Kind.VIEW: "view", Kind.ACTIVE: "active", Kind.COMMITTED: "committed"}

_FIELD = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_OPERATOR = re.compile(r"==|!=|~=")
_BARE = re.compile(r"[^\s,]+")
_SPACE = re.compile(r"\s*")
_QUOTED = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
_ALTERNATIVES = re.compile(r"/((?:[^/\\\n]|\\.)*)/|\|((?:[^|\\\n]|\\.)*)\|")
_ESCAPE = re.compile(r"\\(?:([abfnrtv\\\"'])|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{3})|(.))")
_SIMPLE = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


def compile_filters(filters: Iterable[str]) -> Predicate:
    """A predicate that holds when one of `filters` does. Raises InvalidArgument for one that does not parse."""
    alternatives = [_Parser(text).parse() for text in filters]
    if not alternatives or [] in alternatives:
        return lambda snapshot: True
    return lambda snapshot: any(all(test(snapshot) for test in tests) for tests in alternatives)


def _field(snapshot: Snapshot, path: tuple[str, ...]) -> str | None:
    """The value of a field, None when the snapshot has no such field."""
    match path:
        case ("name",):
            return snapshot.key
        case ("parent",):
            return snapshot.parent
        case ("kind",):
            return _KINDS[snapshot.kind]
        case ("labels", *rest):
            return snapshot.labels.get(".".join(rest))
    return None


def _selector(path: tuple[str, ...], operator: str, value: str) -> Predicate:
    """One selector as a predicate; re.error when the regular expression is wrong."""
    match operator:
        case "==":
            return lambda snapshot: _field(snapshot, path) == value
        case "!=":
            return lambda snapshot: _field(snapshot, path) != value
        case "~=":
            pattern = re.compile(value)
            return lambda snapshot: pattern.search(_field(snapshot, path) or "") is not None
    return lambda snapshot: _field(snapshot, path) is not None


class _Parser:
    """Reads one filter from left to right; `_at` is the character it looks at."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def parse(self) -> list[Predicate]:
        """The selectors, all of which must hold; empty for an empty filter."""
        if not self._text.strip():
            return []
        selectors = [self._selector()]
        while self._take(re.compile(",")) is not None:
            selectors.append(self._selector())
        if self._at != len(self._text):
            raise self._error('expected "," or the end')
        return selectors

    def _selector(self) -> Predicate:
        path = [self._field_name()]
        while self._take(re.compile(r"\.")) is not None:
            path.append(self._field_name())
        operator = self._take(_OPERATOR)
        if operator is None:
            return _selector(tuple(path), "", "")
        value = self._value(operator[0] == "~=")
        try:
            return _selector(tuple(path), operator[0], value)
        except re.error as error:
            raise self._error(f"bad regular expression {value!r}: {error}") from error

    def _field_name(self) -> str:
        quoted = self._take(_QUOTED)
        if quoted is not None:
            return self._unescape(quoted[1])
        field = self._take(_FIELD)
        if field is None:
            raise self._error("expected a field name")
        return field[0]

    def _value(self, is_pattern: bool) -> str:
        if is_pattern:
            other = self._take(_ALTERNATIVES)
            if other is not None:
                # Only the delimiter itself is escaped here; all else belongs to the regular expression.
                mark, text = other[0][0], other[1] if other[1] is not None else other[2]
                return text.replace("\\" + mark, mark)
        quoted = self._take(_QUOTED)
        if quoted is not None:
            return self._unescape(quoted[1])
        if self._text[self._at : self._at + 1] == '"':
            raise self._error("the quotation does not end")
        bare = self._take(_BARE)
        if bare is None:
            raise self._error("expected a value")
        return bare[0]

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """What matches here, after white space; None and no move when nothing does."""
        space = _SPACE.match(self._text, self._at)
        assert space is not None  # it matches the empty string
        found = pattern.match(self._text, space.end())
        if found is None:
            self._at = space.end()
            return None
        self._at = found.end()
        return found

    def _unescape(self, text: str) -> str:
        return _ESCAPE.sub(self._escape, text)

    def _escape(self, match: re.Match[str]) -> str:
        simple, *numbers, other = match.groups()
        if simple is not None:
            return _SIMPLE.get(simple, simple)
        for digits, base in zip(numbers, (16, 16, 16, 8), strict=True):
            if digits is not None:
                code = int(digits, base)
                if code > 0x10FFFF:
                    break
                return chr(code)
        raise self._error(f"unknown escape {match[0]!r} ({other or 'out of range'})")

    def _error(self, problem: str) -> InvalidArgument:
        return InvalidArgument(f"filter {self._text!r} at character {self._at}: {problem}")
