"""containerd's filter language."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotter.containerd.filters import compile_filters
from snapshotter.containerd.model import Kind, Snapshot, Usage
from snapshotter.errors import InvalidArgument

REF = "containerd.io/snapshot.ref"


def _snapshot(key: str = "sha256:19e1", parent: str = "", **labels: str) -> Snapshot:
    given = {label.replace("__", "."): value for label, value in labels.items()}
    return Snapshot(1, key, parent, Kind.COMMITTED, 0, 0, given, Usage(0, 0), None)


SNAPSHOT = Snapshot(
    1,
    "default/1/a name",
    "sha256:p",
    Kind.ACTIVE,
    0,
    0,
    {REF: "sha256:c", "plain": "1", "a.b": "two words"},
    Usage(0, 0),
    None,
)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "name",
        "parent",
        "kind==active",
        "kind!=committed",
        'name=="default/1/a name"',
        "parent==sha256:p",
        'parent!=""',
        "labels.plain",
        "labels.plain==1",
        "labels.absent!=1",
        f'labels."{REF}"==sha256:c',
        f'labels."{REF}"==sha256:c,parent=="sha256:p"',
        'labels.a.b=="two words"',
        'labels."a.b"~="^two"',
        "name~=^default/",
        "name~=/1.a/",
        r"name~=/^default\/1/",
        "name~=|a name$|",
        "parent ~= sha256 , kind == active",
        r'name=="def\x61ult/1/\u0061\040name"',
    ],
)
def test_holds(text: str) -> None:
    assert compile_filters([text])(SNAPSHOT)


@pytest.mark.parametrize(
    "text",
    [
        "kind==committed",
        "kind==ACTIVE",
        "name==default",
        'parent==""',
        "labels.absent",
        "labels.absent==1",
        "labels",
        "unknown",
        "size==1",
        "name.more",
        "labels.plain==1,kind==view",
        "name~=^a",
        "labels.absent~=x",
    ],
)
def test_does_not_hold(text: str) -> None:
    assert not compile_filters([text])(SNAPSHOT)


def test_a_list_holds_when_one_does() -> None:
    assert compile_filters(["kind==view", "labels.plain"])(SNAPSHOT)
    assert not compile_filters(["kind==view", "kind==committed"])(SNAPSHOT)
    assert compile_filters([])(SNAPSHOT)
    assert compile_filters(["kind==view", ""])(SNAPSHOT)


def test_no_parent_equals_the_empty_text() -> None:
    assert compile_filters(['parent==""'])(_snapshot())
    assert not compile_filters(['parent!=""'])(_snapshot())


@pytest.mark.parametrize(
    "text",
    [
        ",",
        "name,",
        "name==",
        "name=x",
        "name==a b",
        "name=='a b'x y",
        'name=="open',
        '"open',
        "name~=[",
        "name==x,,kind==view",
        "labels.",
        "1name",
        r'name=="\q"',
        r'name=="\UFFFFFFFF"',
        "labels.a-b==1",
    ],
)
def test_refused_with_the_place(text: str) -> None:
    with pytest.raises(InvalidArgument, match="at character"):
        compile_filters([text])


def _go_quoted(text: str) -> str:
    return '"' + "".join(c if c.isalnum() and c.isascii() else f"\\U{ord(c):08x}" for c in text) + '"'


@given(st.text(st.characters(codec="utf-8"), max_size=20), st.text(st.characters(codec="utf-8"), max_size=20))
def test_any_text_can_be_quoted(key: str, other: str) -> None:
    matches = compile_filters([f"name=={_go_quoted(key)}"])
    assert matches(_snapshot(key))
    assert matches(_snapshot(other)) == (key == other)


@given(st.text(max_size=30))
def test_nothing_but_invalid_argument(text: str) -> None:
    try:
        compile_filters([text])(SNAPSHOT)
    except InvalidArgument as error:
        assert repr(text) in str(error)
