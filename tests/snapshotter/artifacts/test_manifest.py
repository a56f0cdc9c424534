"""The manifest: written and read again by one set of rules, and what is refused says why in one line."""

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotter.artifacts.manifest import (
    CONFIG,
    HEAD_TYPE,
    INDEX_TYPE,
    INLINE_BYTES,
    MANIFEST_BYTES,
    PACK_TYPE,
    decode,
    digest_of,
    encode,
    place_tags,
    tags,
)
from snapshotter.artifacts.model import Artifact, Blob, Kind, Signature
from snapshotter.errors import InvalidArgument
from tests.snapshotter.artifacts.making import KEY, SUBJECT, digest, hot_set, layer_index

SIGNATURES = (Signature("ci@example", bytes(range(64))), Signature("other", bytes(64)))


@pytest.mark.parametrize(
    "artifact",
    [
        layer_index()[0],
        layer_index(subject=None, created=1_796_082_424)[0],
        replace(layer_index(layers=30)[0], signatures=SIGNATURES),
        hot_set()[0],
        hot_set("train.gpu-8", head_bytes=INLINE_BYTES + 1)[0],
        replace(hot_set(subject=None)[0], blobs=hot_set()[0].blobs[:1], signatures=SIGNATURES[:1]),
    ],
)
def test_round_trip(artifact: Artifact) -> None:
    assert decode(encode(artifact)) == artifact
    assert encode(decode(encode(artifact))) == encode(artifact)


def test_the_table_of_the_format() -> None:
    artifact, blobs = hot_set(created=1_796_082_424)
    head, pack = blobs.values()
    assert json.loads(encode(replace(artifact, signatures=SIGNATURES[:1]))) == {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "artifactType": "application/vnd.bootseer.hotset.v1",
        "config": {"mediaType": "application/vnd.bootseer.hotset.v1", "digest": digest_of(CONFIG), "size": 2},
        "layers": [
            {
                "mediaType": "application/vnd.bootseer.hotset.v1.head",
                "digest": digest_of(head),
                "size": len(head),
                "data": base64.b64encode(head).decode(),
            },
            {"mediaType": "application/vnd.bootseer.hotset.v1.pack", "digest": digest_of(pack), "size": len(pack)},
        ],
        "subject": {"mediaType": SUBJECT.media_type, "digest": SUBJECT.digest, "size": 1234},
        "annotations": {
            "dev.bootseer.image-key": KEY,
            "dev.bootseer.workload": "default",
            "org.opencontainers.image.created": "2026-11-30T23:47:04Z",
            "dev.bootseer.signatures": json.dumps(
                [{"key": "ci@example", "value": base64.b64encode(bytes(range(64))).decode()}], separators=(",", ":")
            ),
        },
    }
    index = json.loads(encode(layer_index()[0]))
    assert [layer["mediaType"] for layer in index["layers"]] == ["application/vnd.bootseer.layerindex.v1.bsi"] * 2
    assert index["layers"][1]["annotations"] == {"dev.bootseer.layer": digest("layer 1")}
    assert index["annotations"] == {"dev.bootseer.image-key": KEY}


def test_the_format_names_all_that_is_written() -> None:
    text = (Path(__file__).parents[3] / "docs" / "format.md").read_text().split("## Artifact")[1]
    written = [json.loads(encode(replace(one, signatures=SIGNATURES, created=1))) for one in (INDEX, SET)]
    names = {name for document in written for name in document if name not in ("schemaVersion", "annotations")}
    for document in written:
        names |= {document["mediaType"], document["artifactType"], *document["annotations"]}
        for layer in document["layers"]:
            names |= {layer["mediaType"], *layer.get("annotations", {})}
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []


def test_tags() -> None:
    hex_digits = KEY.removeprefix("sha256:")
    assert tags(Kind.LAYER_INDEX, hex_digits) == f"sha256-{hex_digits}.bootseer-layerindex"
    assert place_tags(hot_set("train")[0]) == (
        f"sha256-{hex_digits}.bootseer-hotset-train",
        f"sha256-{SUBJECT.digest.removeprefix('sha256:')}.bootseer-hotset-train",
    )
    assert place_tags(layer_index(subject=None)[0]) == (f"sha256-{hex_digits}.bootseer-layerindex",)
    fits, too_long, other = "w" * 40, "w" * 41, "w" * 40 + "x"
    assert tags(Kind.HOT_SET, hex_digits, fits).endswith(f"-{fits}")
    assert len(tags(Kind.HOT_SET, hex_digits, fits)) == 128
    assert len({tags(Kind.HOT_SET, hex_digits, name) for name in (fits, too_long, other)}) == 3
    assert all(len(tags(Kind.HOT_SET, hex_digits, "w" * count)) <= 128 for count in range(1, 65))


def _changed(artifact: Artifact, *path: str | int, to: Any) -> bytes:
    """The manifest with the value at `path` replaced; `to` is ... to take it away."""
    document = json.loads(encode(artifact))
    at = document
    for step in path[:-1]:
        at = at[step]
    if to is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = to
    return json.dumps(document).encode()


KEY_NOTE, SIGNED_NOTE = "dev.bootseer.image-key", "dev.bootseer.signatures"
INDEX, SET = layer_index()[0], hot_set()[0]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"<html>", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "the whole: is not an object"),
        (b" " * (MANIFEST_BYTES + 1), "more than"),
        (_changed(SET, "artifactType", to="application/vnd.cncf.x"), "'application/vnd.cncf.x' is none of ours"),
        (_changed(SET, "artifactType", to=7), "none of ours"),
        (_changed(SET, "config", "mediaType", to=INDEX.kind.value), "its mediaType is not the artifactType"),
        (_changed(SET, "config", "digest", to=digest("x")), "is not the empty one"),
        (_changed(SET, "config", to=...), "config: is not an object"),
        (_changed(SET, "annotations", to=...), "annotations: is not an object"),
        (_changed(SET, "annotations", KEY_NOTE, to=...), f"{KEY_NOTE} is missing"),
        (_changed(SET, "annotations", KEY_NOTE, to="sha256:12"), "is not a digest"),
        (_changed(SET, "annotations", "dev.bootseer.workload", to="../x"), "is not a name"),
        (_changed(SET, "annotations", "dev.bootseer.workload", to=...), "is not a name"),
        (_changed(INDEX, "annotations", "dev.bootseer.workload", to="x"), "is of no workload"),
        (_changed(SET, "annotations", "org.opencontainers.image.created", to="soon"), "is no time"),
        (_changed(SET, "annotations", SIGNED_NOTE, to="x"), "signatures: is not JSON"),
        (_changed(SET, "annotations", SIGNED_NOTE, to='[{"key": "k", "value": "AAAA"}]'), "has not 64 bytes"),
        (_changed(SET, "annotations", SIGNED_NOTE, to='[{"key": "k", "value": "é"}]'), "is not base64"),
        (_changed(SET, "annotations", SIGNED_NOTE, to=json.dumps([{}] * 17)), "a list of at most 16"),
        (_changed(SET, "subject", to="x"), "subject: is not an object"),
        (_changed(SET, "subject", "size", to=-1), "subject: size: is not between"),
        (_changed(SET, "subject", "mediaType", to="a b"), "subject: mediaType: is no name"),
        (_changed(SET, "layers", to={}), "layers: is not a list"),
        (_changed(SET, "layers", to=[]), "expected the media types"),
        (_changed(SET, "layers", 1, "mediaType", to=HEAD_TYPE), "expected the media types"),
        (_changed(SET, "layers", 0, "data", to="AAAA"), "data is not what its digest says"),
        (_changed(SET, "layers", 0, "data", to="*"), "is not base64"),
        (_changed(SET, "layers", 1, "size", to=1), "the pack is shorter than its head"),
        (_changed(SET, "layers", 1, "size", to=True), "size is missing or no number"),
        (_changed(SET, "layers", 1, "size", to=1 << 50), "layers: size: is not between"),
        (_changed(SET, "layers", 1, "digest", to="md5:1"), "is not a digest"),
        (_changed(INDEX, "layers", 1, "annotations", "dev.bootseer.layer", to=digest("layer 0")), "not one index"),
        (_changed(INDEX, "layers", 1, "annotations", to=...), "is not a digest"),
        (_changed(INDEX, "layers", 1, "mediaType", to=PACK_TYPE), "expected the media types"),
        (_changed(INDEX, "layers", to=[{}] * 1025), "a list of at most 1024"),
    ],
)
def test_what_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        decode(body)
    assert words in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_what_others_may_add_is_passed_over() -> None:
    document = json.loads(encode(SET))
    document["annotations"]["org.example"] = "x"
    document["new"] = document["layers"][0]["new"] = [1]
    assert decode(json.dumps(document, indent=3).encode()) == SET
    del document["artifactType"]  # as OCI 1.0 has it
    assert decode(json.dumps(document).encode()) == SET


def test_an_artifact_that_cannot_be_one_is_not_written() -> None:
    blob = Blob(digest("x"), 5, INDEX_TYPE, digest("layer"))
    for wrong in (
        replace(INDEX, blobs=()),
        replace(INDEX, blobs=(blob, blob)),
        replace(INDEX, created=-1),
        replace(INDEX, created=1 << 60),
        replace(SET, workload=""),
        replace(SET, signatures=(Signature("", bytes(64)),)),
        replace(SET, signatures=(Signature("two words", bytes(64)),)),
        replace(SET, blobs=(replace(SET.blobs[0], layer=digest("layer")), SET.blobs[1])),
    ):
        with pytest.raises(InvalidArgument):
            encode(wrong)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(), x, max_size=3),
        max_leaves=8,
    ),
    st.data(),
)
def test_whatever_stands_anywhere_is_read_or_refused(value: object, data: st.DataObject) -> None:
    document = json.loads(encode(data.draw(st.sampled_from([INDEX, SET]))))
    places: list[tuple[Any, Any]] = [(document, key) for key in document]
    for holder, key in places:
        inner = holder[key]
        if isinstance(inner, (dict, list)):
            places += [(inner, step) for step in (inner if isinstance(inner, dict) else range(len(inner)))]
    holder, key = data.draw(st.sampled_from(places))
    holder[key] = value
    try:
        artifact = decode(json.dumps(document).encode())
    except InvalidArgument as exc:
        assert "\n" not in str(exc)
    else:
        assert decode(encode(artifact)) == artifact
