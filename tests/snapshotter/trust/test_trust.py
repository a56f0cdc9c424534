"""Statements, signatures and the judgement of artifacts."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotter.artifacts.model import Artifact, Blob, Kind, Signature, Subject
from snapshotter.config import TrustConfig
from snapshotter.errors import InvalidArgument
from snapshotter.model import Digest
from snapshotter.trust.keys import KeyRing, SecretKey, sign
from snapshotter.trust.policy import Policy
from snapshotter.trust.quarantine import Quarantine
from snapshotter.trust.statement import statement


def digest(digit: str) -> Digest:
    return Digest("sha256:" + digit * 64)


SUBJECT = Subject(digest("b"), "application/vnd.oci.image.manifest.v1+json", 1234)
HEAD = Blob(digest("c"), 3400, "application/vnd.bootseer.hotset.v1.head")
PACK = Blob(digest("d"), 1 << 20, "application/vnd.bootseer.hotset.v1.pack")
HOT = Artifact(Kind.HOT_SET, digest("a"), "default", SUBJECT, (HEAD, PACK), created=1700000000)
INDEX = Blob(digest("e"), 5000, "application/vnd.bootseer.layerindex.v1.bsi", layer=digest("f"))
INDEXES = Artifact(Kind.LAYER_INDEX, digest("a"), "", None, (INDEX, replace(INDEX, layer=digest("0"))))


@pytest.fixture
def key(tmp_path: Path) -> SecretKey:
    """One that is trusted."""
    key = SecretKey.generate()
    (tmp_path / "trusted.d").mkdir()
    key.public.save(tmp_path / "trusted.d" / "ours.pub")
    return key


def policy(root: Path, name: str = "signed") -> Policy:
    return Policy.of(TrustConfig(policy=name, keys=(str(root / "trusted.d"),)))


# -- statements ------------------------------------------------------------------------------------------------------


def test_a_statement_is_these_lines() -> None:
    assert statement(HOT).decode().splitlines() == [
        "bootseer artifact v1",
        "type application/vnd.bootseer.hotset.v1",
        f"image-key {digest('a')}",
        f"subject {digest('b')}",
        "workload default",
        f"blob {digest('c')} 3400 application/vnd.bootseer.hotset.v1.head -",
        f"blob {digest('d')} 1048576 application/vnd.bootseer.hotset.v1.pack -",
    ]
    lines = statement(INDEXES).decode().splitlines()
    assert lines[3:6] == [
        "subject -",
        "workload -",
        f"blob {digest('e')} 5000 application/vnd.bootseer.layerindex.v1.bsi {digest('f')}",
    ]
    assert statement(INDEXES).endswith(b"\n")


def test_the_documented_lines_are_those() -> None:
    text = (Path(__file__).parents[3] / "docs" / "format.md").read_text()
    block = text.split("### Signatures")[1].split("```text\n")[1].split("```")[0]
    assert [line.split()[0] for line in block.splitlines()] == [
        line.split()[0] for line in statement(replace(HOT, blobs=(HEAD,))).decode().splitlines()
    ]


CHANGES: dict[str, Callable[[Artifact], Artifact]] = {
    "kind": lambda it: replace(it, kind=Kind.LAYER_INDEX),
    "image key": lambda it: replace(it, image_key=digest("9")),
    "subject": lambda it: replace(it, subject=replace(SUBJECT, digest=digest("9"))),
    "no subject": lambda it: replace(it, subject=None),
    "workload": lambda it: replace(it, workload="train"),
    "digest of a blob": lambda it: replace(it, blobs=(replace(HEAD, digest=digest("9")), PACK)),
    "size of a blob": lambda it: replace(it, blobs=(HEAD, replace(PACK, size=5))),
    "media type of a blob": lambda it: replace(it, blobs=(HEAD, replace(PACK, media_type="text/plain"))),
    "layer of a blob": lambda it: replace(it, blobs=(replace(HEAD, layer=digest("9")), PACK)),
    "order of blobs": lambda it: replace(it, blobs=(PACK, HEAD)),
    "a blob less": lambda it: replace(it, blobs=(HEAD,)),
    "a blob more": lambda it: replace(it, blobs=(HEAD, PACK, INDEX)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_signature_holds_for_what_was_signed_only(what: str, tmp_path: Path, key: SecretKey) -> None:
    signed = sign(HOT, key)
    assert policy(tmp_path).judge(signed).trusted
    verdict = policy(tmp_path).judge(CHANGES[what](signed))
    assert not verdict.trusted and not verdict.key
    assert verdict.reason == f"does not match its signature by the trusted key {key.public.name}"


def test_what_is_told_but_not_used_is_not_signed(tmp_path: Path, key: SecretKey) -> None:
    signed = sign(HOT, key)
    held = (replace(HEAD, data=b"the same bytes, in the manifest"), PACK)
    assert policy(tmp_path).judge(replace(signed, created=5, blobs=held)).trusted


@pytest.mark.parametrize("word", ["two words", "line\nworkload other", "tab\t", "", "käse"])
def test_no_word_can_pass_for_another_line(word: str, tmp_path: Path, key: SecretKey) -> None:
    strange = replace(HOT, blobs=(replace(HEAD, media_type=word),))
    with pytest.raises(InvalidArgument, match="cannot be signed"):
        statement(strange)
    verdict = policy(tmp_path).judge(replace(strange, signatures=(Signature(key.public.name, bytes(64)),)))
    assert not verdict.trusted and "\n" not in verdict.reason


# -- who has signed --------------------------------------------------------------------------------------------------


def test_a_signature_by_another_key_counts_for_nothing(tmp_path: Path, key: SecretKey) -> None:
    other = SecretKey.generate()
    verdict = policy(tmp_path).judge(sign(HOT, other))
    assert not verdict.trusted
    assert verdict.reason == f"is signed by {other.public.name}, which no trusted key is"


def test_another_key_cannot_borrow_a_name(tmp_path: Path, key: SecretKey) -> None:
    forged = Signature(key.public.name, SecretKey.generate().sign(statement(HOT)).value)
    assert not policy(tmp_path).judge(replace(HOT, signatures=(forged,))).trusted


@pytest.mark.parametrize("value", [b"", bytes(63), bytes(64), bytes(65), bytes(4096)])
def test_a_signature_of_a_strange_size_counts_for_nothing(value: bytes, tmp_path: Path, key: SecretKey) -> None:
    strange = replace(HOT, signatures=(Signature(key.public.name, value),))
    assert not policy(tmp_path).judge(strange).trusted


def test_one_good_signature_of_several_is_enough(tmp_path: Path, key: SecretKey) -> None:
    other = SecretKey.generate()
    both = sign(sign(HOT, other), key)
    assert [it.key for it in both.signatures] == [other.public.name, key.public.name]
    verdict = policy(tmp_path).judge(both)
    assert verdict.trusted and verdict.key == key.public.name
    broken = replace(both, signatures=(Signature(key.public.name, bytes(64)), *both.signatures))
    assert policy(tmp_path).judge(broken).trusted


def test_a_key_signs_once(key: SecretKey) -> None:
    again = sign(sign(HOT, key), key)
    assert len(again.signatures) == 1 and again == sign(HOT, key)


def test_what_is_not_signed_is_refused_in_one_line(tmp_path: Path, key: SecretKey) -> None:
    assert policy(tmp_path).judge(HOT).reason == "is not signed"
    strange = Signature("evil\nlines", bytes(64))
    verdict = policy(tmp_path).judge(replace(HOT, signatures=(strange,) * 9))
    assert not verdict.trusted and "\n" not in verdict.reason and "and 5 more" in verdict.reason


def test_without_keys_nothing_is_trusted(tmp_path: Path) -> None:
    verdict = policy(tmp_path).judge(sign(HOT, SecretKey.generate()))
    assert not verdict.trusted and "[trust] keys" in verdict.reason


def test_a_key_that_is_added_or_removed_counts_at_once(tmp_path: Path, key: SecretKey) -> None:
    """Rotation: the new key is added, artifacts are signed by both, the old key is removed."""
    new, judge = SecretKey.generate(), policy(tmp_path)
    both = sign(sign(HOT, key), new)
    new.public.save(tmp_path / "trusted.d" / "new.pem")
    assert judge.judge(sign(HOT, new)).trusted and judge.judge(both).trusted
    (tmp_path / "trusted.d" / "ours.pub").unlink()
    assert not judge.judge(sign(HOT, key)).trusted
    assert judge.judge(both).key == new.public.name


def test_any_takes_everything_and_says_why(tmp_path: Path, key: SecretKey) -> None:
    judge = policy(tmp_path, "any")
    assert judge.judge(HOT).trusted and judge.judge(HOT).reason == "is not signed; the policy is to use any"
    assert judge.judge(sign(HOT, key)).key == key.public.name
    assert judge.judge(sign(HOT, SecretKey.generate())).trusted


def test_a_bad_file_among_the_keys_is_said_once_and_takes_no_other_with_it(
    tmp_path: Path, key: SecretKey, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "trusted.d" / "broken.pub").write_text("ssh-ed25519 AAAA\n")
    judge = policy(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert judge.judge(sign(HOT, key)).trusted and judge.judge(sign(HOT, key)).trusted
    lines = [it.getMessage() for it in caplog.records]
    assert len(lines) == 1 and "trust.key_refused" in lines[0] and "broken.pub" in lines[0]
    caplog.clear()


# -- quarantine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["signed", "any"])
def test_what_is_in_quarantine_is_refused_whoever_has_signed_it(name: str, tmp_path: Path, key: SecretKey) -> None:
    quarantine = Quarantine(tmp_path)
    judge = Policy.of(TrustConfig(policy=name, keys=(str(tmp_path / "trusted.d"),)), quarantine)
    assert judge.judge(sign(HOT, key)).trusted and not quarantine.is_quarantined(HEAD.digest)
    quarantine.add(HEAD.digest, "blocks 5-9 of a layer\nwere wrong")
    quarantine.add(HEAD.digest, "a later reason")
    verdict = judge.judge(sign(HOT, key))
    assert not verdict.trusted and verdict.reason == "is in quarantine: blocks 5-9 of a layer were wrong"
    assert Quarantine(tmp_path).is_quarantined(HEAD.digest) and not quarantine.is_quarantined(PACK.digest)


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "sha256:..", "sha256:" + "A" * 64])
def test_what_is_no_digest_leads_nowhere(name: str, tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path)
    assert not quarantine.is_quarantined(name) and quarantine.reason(name) == ""


def test_a_ring_knows_its_files(tmp_path: Path, key: SecretKey) -> None:
    ring = KeyRing.load([tmp_path / "missing", tmp_path / "trusted.d", tmp_path / "trusted.d" / "ours.pub"])
    assert {name: it.path.name for name, it in ring.keys.items()} == {key.public.name: "ours.pub"}
    assert not ring.refused
