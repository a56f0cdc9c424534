"""Files of keys: what is written, what is read, what is refused."""

import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from snapshotter.errors import UserError
from snapshotter.trust.keys import KeyRing, PublicKey, SecretKey


def refusal(path: Path, kind: type[PublicKey] | type[SecretKey]) -> str:
    with pytest.raises(UserError) as caught:
        kind.load(path)
    line = str(caught.value)
    assert line.startswith(f"{path}: ") and "\n" not in line
    return line


def test_both_halves_come_back_from_their_files(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        key = SecretKey.generate()
        key.save(tmp_path / "k")
        key.public.save(tmp_path / "k.pub")
    finally:
        os.umask(old)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"k": 0o600, "k.pub": 0o644}
    signature = SecretKey.load(tmp_path / "k").sign(b"words")
    public = PublicKey.load(tmp_path / "k.pub")
    assert public.name == key.public.name == signature.key and len(public.name) == 16
    assert public.verify(b"words", signature.value) and not public.verify(b"word", signature.value)
    for text in (repr(key), repr(public)):
        assert public.name in text


def test_a_key_is_never_written_over(tmp_path: Path) -> None:
    SecretKey.generate().save(tmp_path / "k")
    before = (tmp_path / "k").read_bytes()
    with pytest.raises(UserError, match="never written over"):
        SecretKey.generate().save(tmp_path / "k")
    assert (tmp_path / "k").read_bytes() == before
    with pytest.raises(UserError, match="No such file or directory"):
        SecretKey.generate().save(tmp_path / "missing" / "k")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620])
def test_a_secret_key_that_others_may_read_is_refused_with_the_remedy(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "k"
    SecretKey.generate().save(path)
    path.chmod(mode)
    assert f"chmod 600 {path}" in refusal(path, SecretKey)
    path.chmod(0o400)
    SecretKey.load(path)


def test_a_public_key_that_everybody_may_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "k.pub"
    SecretKey.generate().public.save(path)
    path.chmod(0o646)
    assert f"chmod o-w {path}" in refusal(path, PublicKey)
    path.chmod(0o664)
    assert PublicKey.load(path)


def test_a_directory_of_keys_that_everybody_may_write_is_refused(tmp_path: Path) -> None:
    SecretKey.generate().public.save(tmp_path / "k.pub")
    tmp_path.chmod(0o777)
    ring = KeyRing.load([tmp_path])
    assert not ring.keys and "chmod o-w" in ring.refused[0]
    tmp_path.chmod(0o755)
    assert len(KeyRing.load([tmp_path]).keys) == 1


def test_other_files_of_a_directory_are_passed_over(tmp_path: Path) -> None:
    SecretKey.generate().save(tmp_path / "k")
    (tmp_path / "README").write_text("keys")
    (tmp_path / ".hidden.pub").write_text("no key")
    assert KeyRing.load([tmp_path]) == KeyRing({})


def _pem(key: object) -> bytes:
    return key.public_bytes(  # type: ignore[attr-defined, no-any-return]
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def test_files_that_hold_no_public_key_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "k.pub"
    assert "No such file" in refusal(path, PublicKey)
    assert "is not a file" in refusal(Path("/dev/null"), PublicKey)
    for data, words in (
        (b"", "not a public key in PEM"),
        (b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA user@host\n", "not a public key in PEM"),
        (b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "not a public key in PEM"),
        (_pem(generate_private_key(SECP256R1()).public_key()), "not an ed25519 one"),
        (b"x" * (65 << 10), "longer than 64 KiB"),
    ):
        path.write_bytes(data)
        assert words in refusal(path, PublicKey)
    SecretKey.generate().save(tmp_path / "k")
    assert "is a secret key" in refusal(tmp_path / "k", PublicKey)


def test_files_that_hold_no_secret_key_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "k"
    key = Ed25519PrivateKey.generate()
    encrypted = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"word")
    )
    other = generate_private_key(SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    for data, words in (
        (b"", "not a secret key in PEM"),
        (_pem(key.public_key()), "not a secret key in PEM"),
        (encrypted, "is encrypted"),
        (other, "not an ed25519 one"),
    ):
        path.write_bytes(data)
        path.chmod(0o600)
        assert words in refusal(path, SecretKey)
