"""A certificate authority for tests, by the openssl command: certificates that servers and clients really check.

authority = Authority(tmp_path)
server = RangeServer(blobs, tls=authority.server("127.0.0.1"))
… trust authority.ca; show authority.client("node") to servers made with `ask_client=True`
"""

import ssl
import subprocess
from pathlib import Path

_EC = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]


class Authority:
    """Its certificate is the file `ca`; everything it makes lies in `directory`."""

    def __init__(self, directory: Path, name: str = "test authority") -> None:
        self._directory = directory
        self.ca = directory / f"{name.replace(' ', '-')}.crt"
        self._key = self.ca.with_suffix(".pem")
        _openssl(
            "req",
            "-x509",
            *_EC,
            *("-subj", f"/CN={name}", "-addext", "keyUsage=critical,keyCertSign"),
            *("-keyout", str(self._key), "-out", str(self.ca)),
        )

    def server(self, *names: str, ask_client: bool = False) -> ssl.SSLContext:
        """The context of a server with these DNS names or addresses."""
        kinds = ["IP" if name[0].isdigit() else "DNS" for name in names]
        alternatives = ",".join(f"{kind}:{name}" for kind, name in zip(kinds, names, strict=True))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self._issue("server", alternatives))
        if ask_client:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.ca)
        return context

    def client(self, name: str) -> tuple[Path, Path]:
        """A client's certificate and key."""
        return self._issue(name, f"DNS:{name}")

    def _issue(self, stem: str, alternatives: str) -> tuple[Path, Path]:
        certificate, key = self._directory / f"{stem}.cert", self._directory / f"{stem}.key"
        _openssl(
            "req",
            "-x509",
            *_EC,
            *("-CA", str(self.ca), "-CAkey", str(self._key), "-subj", f"/CN={stem}"),
            *("-addext", f"subjectAltName={alternatives}", "-addext", "basicConstraints=critical,CA:FALSE"),
            *("-keyout", str(key), "-out", str(certificate)),
        )
        return certificate, key


def _openssl(*words: str) -> None:
    done = subprocess.run(["openssl", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
