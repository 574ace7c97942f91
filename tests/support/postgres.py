"""A private PostgreSQL, of which the programs come with the distribution: Debian's ``postgresql``.

PostgreSQL refuses to run as root. Root starts it as the user ``postgres``, or ``nobody``.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from tests.support.servers import PATIENCE, PrivateServer, memory_disk

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

REQUIRED = "DELAYQ_REQUIRE_POSTGRES"
"""The environment variable that makes a missing PostgreSQL an error."""
NOT_FOUND = "POSTGRESQL NOT TESTED: no initdb, postgres and psql; on Debian: apt install postgresql"
"""Why tests are skipped that need one."""
_FOLDERS = ("/usr/lib/postgresql", "/opt/homebrew/opt", "/usr/local/opt")


def find_programs() -> Path | None:
    """Return the directory of ``initdb`` and ``postgres``, the newest; None if there is none."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    for root in map(Path, _FOLDERS):
        folders += sorted(root.glob("*/bin"), reverse=True)
    for folder in folders:
        # Debian's other programs are beside them, but a link to one of them is not.
        home = (folder / "postgres").resolve().parent
        if all(os.access(home / name, os.X_OK) for name in ("initdb", "postgres", "psql")):
            return home
    return None


class PrivatePostgres:
    """A PostgreSQL with an empty database, on a socket in its own directory."""

    def __init__(self, programs: Path) -> None:
        self.programs = programs
        self.directory = Path(tempfile.mkdtemp(prefix="dq-pg-", dir=memory_disk()))
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def url(self, driver: str) -> str:
        """Return the address for SQLAlchemy with this driver."""
        return f"postgresql+{driver}://postgres@/postgres?host={quote(str(self.directory))}"

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        data = self.directory / "data"
        user = _user()
        if not data.exists():
            if user is not None:
                os.chown(self.directory, user, -1)
            self._run(
                "initdb", "-D", str(data), "-U", "postgres", "-A", "trust", "-N", "-E", "UTF8"
            )
        command = [self.programs / "postgres", "-D", data, "-k", self.directory, "-h", ""]
        # What a crash of the machine would lose is no matter here.
        for option in ("fsync=off", "synchronous_commit=off", "max_connections=60"):
            command += ["-c", option]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                PrivateServer.tied([str(word) for word in command]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                user=user,
                extra_groups=[] if user is not None else None,
                cwd=self.directory,
            )
        deadline = time.monotonic() + PATIENCE
        while self._try("psql", *self._psql("SELECT 1")).returncode:
            if self._process.poll() is not None or time.monotonic() > deadline:
                words = (self.directory / "log").read_text(errors="replace")[-2000:]
                self.close()
                raise RuntimeError(f"PostgreSQL did not start:\n{words}")
            time.sleep(0.05)

    def sql(self, statement: str) -> str:
        """Return what a statement prints."""
        done = self._try("psql", *self._psql(statement))
        assert done.returncode == 0, done.stdout
        return done.stdout.strip()

    def close(self) -> None:
        """Kill the server and remove its directory."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        shutil.rmtree(self.directory, ignore_errors=True)
        with contextlib.suppress(Exception):
            atexit.unregister(self.close)

    def _psql(self, statement: str) -> Sequence[str]:
        return "-h", str(self.directory), "-U", "postgres", "-qAtX", "-c", statement

    def _run(self, program: str, *words: str) -> None:
        done = self._try(program, *words)
        assert done.returncode == 0, done.stdout

    def _try(self, program: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.programs / program, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            user=_user(),
            extra_groups=[] if _user() is not None else None,
            cwd=self.directory,
        )


def _user() -> int | None:
    """Return the user to run as; None for the user of this process."""
    if os.geteuid():
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_uid
    raise RuntimeError("there is neither a user postgres nor nobody")
