"""Certificates made by the ``openssl`` program for one test run."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Authority:
    folder: Path

    @property
    def certificate(self) -> Path:
        return self.folder / "ca.crt"

    @classmethod
    def new(cls, folder: Path) -> Authority:
        folder.mkdir()
        subject = ("-subj", f"/CN=delayq test authority {folder.name}")
        _openssl(folder, f"req -x509 {_NEW_KEY} -keyout ca.key -out ca.crt {_SIGNS}", *subject)
        return cls(folder)

    def server_options(self, host: str, port: int) -> tuple[str, ...]:
        """Return options for TLS, with a certificate for ``IP:1.2.3.4`` or ``DNS:a.test``."""
        (self.folder / "names").write_text(f"subjectAltName={host}\nauthorityKeyIdentifier=keyid\n")
        _openssl(self.folder, f"req {_NEW_KEY} -keyout server.key -out server.csr -subj /CN=server")
        signed = "-CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -extfile names"
        _openssl(self.folder, f"x509 -req -in server.csr -out server.crt {signed}")
        files = {"cert": "server.crt", "key": "server.key", "ca-cert": "ca.crt"}
        options = [(f"--tls-{name}-file", str(self.folder / file)) for name, file in files.items()]
        return ("--tls-port", str(port), "--tls-auth-clients", "no", *chain(*options))


_NEW_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
# Python 3.13 does not trust an authority whose certificate does not state the usage of its key.
_SIGNS = "-days 2 -addext keyUsage=critical,keyCertSign,cRLSign"


def _openssl(folder: Path, command: str, *arguments: str) -> None:
    words = ["openssl", *command.split(), *arguments]
    subprocess.run(words, cwd=folder, check=True, capture_output=True, timeout=30)
