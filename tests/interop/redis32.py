"""A 32-bit Redis, on which Redisson's scripts write shorter records.

It comes from Debian's packages, which are unpacked into the build folder but not installed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.interop.lock import locked
from tests.support.servers import Kind

NAME = "redis-32bit"

_FOLDER = Path(__file__).parent / "build" / NAME
_TOOLS = ("apt-get", "dpkg-deb")
_TIMEOUT = 120.0
_LAUNCHER = """#!/bin/sh
# Its own loader and libraries: this machine has none of 32 bits.
root=$(dirname "$(readlink -f "$0")")/root
libraries="$root/lib/i386-linux-gnu:$root/usr/lib/i386-linux-gnu"
exec "$root/{loader}" --library-path "$libraries" "$root/usr/bin/redis-server" "$@"
"""


def fetch() -> Kind:
    """Return the server, fetching it once. Raise RuntimeError if it does not run here."""
    with locked(_FOLDER.parent):
        return _fetch()


def _fetch() -> Kind:
    launcher, stamp = _FOLDER / "redis-server", _FOLDER / "stamp"
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != digest:
        shutil.rmtree(_FOLDER, ignore_errors=True)
        root = _unpack()
        loader = next(root.rglob("ld-linux.so.2"), None)
        if loader is None:
            raise RuntimeError("the packages hold no loader for programs of 32 bits")
        launcher.write_text(_LAUNCHER.format(loader=loader.relative_to(root)))
        launcher.chmod(0o755)
    answer = _run(str(launcher), "--version")
    found = re.search(r"v=([0-9.]+) .*bits=32 ", answer)
    if found is None:
        raise RuntimeError(f"no server of 32 bits, but {answer.strip()}")
    stamp.write_text(digest)
    return Kind(NAME, launcher, found[1])


def _unpack() -> Path:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise RuntimeError(f"{platform.machine()} does not run programs for i386")
    if absent := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        raise RuntimeError(f"no {' and no '.join(absent)} on the PATH")
    root, debs = _FOLDER / "root", _FOLDER / "debs"
    kept = ("lists/partial", "cache/archives/partial", "state")
    for folder in (root, debs, *(_FOLDER / name for name in kept)):
        folder.mkdir(parents=True)
    nothing_installed = _FOLDER / "status"
    nothing_installed.touch()
    options = {
        "APT::Architecture": "i386",
        "APT::Architectures": "i386",
        "APT::Install-Recommends": "false",
        "Acquire::Languages": "none",
        "Acquire::Retries": "2",
        "Acquire::http::Timeout": "20",
        "Acquire::https::Timeout": "20",
        "Dir::State": f"{_FOLDER}/state",
        "Dir::State::Lists": f"{_FOLDER}/lists",
        "Dir::State::status": str(nothing_installed),
        "Dir::Cache": f"{_FOLDER}/cache",
    }
    apt = ["apt-get", "--quiet", *(f"--option={name}={value}" for name, value in options.items())]
    # One of several package lists may fail; the others are enough.
    _run(*apt, "update", check=False)
    # Get everything that it depends on, without the packages that only its installation needs.
    plan = _run(*apt, "--simulate", "install", "redis-server")
    packages = re.findall(r"^Inst ((?:redis|lua|lib)\S*)", plan, re.MULTILINE)
    _run(*apt, "download", *(name for name in packages if "perl" not in name), cwd=debs)
    for deb in debs.iterdir():
        _run("dpkg-deb", "--extract", str(deb), str(root))
    for done in ("debs", "lists", "cache", "state"):
        shutil.rmtree(_FOLDER / done)
    return root


def _run(*command: str, cwd: Path = _FOLDER, check: bool = True) -> str:
    # We parse apt's output, so it must not be in the user's language.
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        result = subprocess.run(  # noqa: PLW1510
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=_TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{Path(command[0]).name}: {error}") from error
    if check and result.returncode != 0:
        last = (result.stderr.strip() or result.stdout.strip() or "nothing said").splitlines()[-1]
        raise RuntimeError(f"{Path(command[0]).name} ended with {result.returncode}: {last}")
    return result.stdout
