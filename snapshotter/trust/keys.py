"""Keys that sign artifacts: ed25519, in PEM files as other tools write them (PKCS #8, SubjectPublicKeyInfo).

A key's name is the first 16 hex digits of the sha256 of its 32 public bytes. A name says which key to try, no more:
what counts is that a key of the ring verifies the signature.

A secret key's file that others may read is refused, and so is a public key's file, or directory of them, that everybody
may write: whoever writes there decides what runs here. Secret bytes never reach a message.
"""

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from snapshotter.artifacts.model import Artifact, Signature
from snapshotter.errors import UserError

from .statement import statement

__all__ = ["KeyRing", "PublicKey", "SecretKey", "TrustedKey", "sign"]

_NAME_DIGITS = 16
_MOST = 64 << 10
_SUFFIXES = (".pub", ".pem")


class PublicKey:
    """One that verifies."""

    def __init__(self, key: Ed25519PublicKey) -> None:
        self._key = key
        raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        self.name = hashlib.sha256(raw).hexdigest()[:_NAME_DIGITS]

    def __repr__(self) -> str:
        return f"<PublicKey {self.name}>"

    @classmethod
    def load(cls, path: Path) -> "PublicKey":
        """The key in a PEM file; UserError in one line for whatever is wrong with it."""
        data, mode = _read(path)
        if mode & stat.S_IWOTH:
            raise UserError(f"{path}: everybody may write this key (mode {mode:04o}): chmod o-w {path}")
        if b"PRIVATE KEY" in data:
            raise UserError(f"{path}: is a secret key; what is trusted is its public half, the file ending in .pub")
        try:
            key = serialization.load_pem_public_key(data)
        except (ValueError, UnsupportedAlgorithm):
            raise UserError(f"{path}: is not a public key in PEM: {_HOW}") from None
        if not isinstance(key, Ed25519PublicKey):
            raise UserError(f"{path}: is a public key, but not an ed25519 one: {_HOW}")
        return cls(key)

    def save(self, path: Path) -> None:
        """Write a new PEM file of mode 0644; UserError where there is one, or the disk refuses."""
        pem = self._key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        _write(path, pem, 0o644)

    def verify(self, message: bytes, signature: bytes) -> bool:
        """Whether the signature of `message` is this key's."""
        try:
            self._key.verify(signature, message)
        except InvalidSignature:
            return False
        return True


class SecretKey:
    """One that signs."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = PublicKey(key.public_key())

    def __repr__(self) -> str:
        return f"<SecretKey {self.public.name}>"

    @classmethod
    def generate(cls) -> "SecretKey":
        """A new one."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path) -> "SecretKey":
        """The key in a PEM file; UserError in one line for whatever is wrong with it."""
        data, mode = _read(path)
        if mode & 0o077:
            raise UserError(
                f"{path}: others may read or change this secret key (mode {mode:04o}): chmod 600 {path}, and make a new"
                " one if somebody can have read it"
            )
        try:
            key = serialization.load_pem_private_key(data, None)
        except TypeError:
            raise UserError(f"{path}: the key is encrypted: decrypt it first (`openssl pkey -in FILE`)") from None
        except (ValueError, UnsupportedAlgorithm):
            raise UserError(f"{path}: is not a secret key in PEM: {_HOW}") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise UserError(f"{path}: is a secret key, but not an ed25519 one: {_HOW}")
        return cls(key)

    def save(self, path: Path) -> None:
        """Write a new PEM file of mode 0600; UserError where there is one, or the disk refuses."""
        pem = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        _write(path, pem, 0o600)

    def sign(self, message: bytes) -> Signature:
        """A signature of `message`."""
        return Signature(self.public.name, self._key.sign(message))


_HOW = "`bootseer key generate` makes both halves"


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A key and the file that it came from."""

    key: PublicKey
    path: Path


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The keys that are trusted, by name; `refused` says in one line each which files are not taken, and why."""

    keys: dict[str, TrustedKey]
    refused: tuple[str, ...] = ()

    @classmethod
    def load(cls, paths: Iterable[Path]) -> "KeyRing":
        """The keys of these files, and of the files ending in .pub or .pem in these directories. What is missing is
        passed over; a file that is not sound takes no other one with it."""
        keys: dict[str, TrustedKey] = {}
        refused = []
        for path in paths:
            try:
                for file in _files(path):
                    try:
                        key = PublicKey.load(file)
                    except UserError as error:
                        refused.append(str(error))
                    else:
                        keys.setdefault(key.name, TrustedKey(key, file))
            except UserError as error:
                refused.append(str(error))
        return cls(keys, tuple(refused))

    def verify(self, message: bytes, signature: Signature) -> bool:
        """Whether the signature is by a key of the ring."""
        trusted = self.keys.get(signature.key)
        return trusted is not None and trusted.key.verify(message, signature.value)


def sign(artifact: Artifact, key: SecretKey) -> Artifact:
    """The artifact with a signature by this key, in place of one that this key has made before."""
    others = tuple(it for it in artifact.signatures if it.key != key.public.name)
    return replace(artifact, signatures=(*others, key.sign(statement(artifact))))


def _files(path: Path) -> Iterator[Path]:
    """The files that a path of the configuration means."""
    try:
        status = path.stat()
        if not stat.S_ISDIR(status.st_mode):
            yield path
            return
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            raise UserError(f"{path}: everybody may write this directory of keys: chmod o-w {path}")
        names = sorted(os.listdir(path))
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path}: cannot read the keys: {error.strerror}") from error
    yield from (path / name for name in names if name.endswith(_SUFFIXES) and not name.startswith("."))


def _read(path: Path) -> tuple[bytes, int]:
    """The file's bytes and mode."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UserError(f"{path}: is not a file")
            data = file.read(_MOST + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot read the key: {error.strerror}") from error
    if len(data) > _MOST:
        raise UserError(f"{path}: is not a key: it is longer than {_MOST >> 10} KiB")
    return data, stat.S_IMODE(status.st_mode)


def _write(path: Path, data: bytes, mode: int) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(fd, "wb") as file:
            os.fchmod(fd, mode)  # whatever the umask
            file.write(data)
    except FileExistsError:
        raise UserError(f"{path}: exists already; a key is never written over") from None
    except OSError as error:
        raise UserError(f"{path}: cannot write the key: {error.strerror}") from error
