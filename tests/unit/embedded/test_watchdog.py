"""The path of an embedded server's socket. Any file may take the socket's place here."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from delayq._embedded.watchdog import LINK, ServerSocket

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(params=["data", "own"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the socket of the server in the working directory: there, or elsewhere."""
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path / "data")
    path = tmp_path / str(request.param) / "s"
    path.parent.mkdir(exist_ok=True)
    path.write_text("the socket")
    return path


def test_a_path_that_was_removed_is_restored_and_never_looks_old(path: Path) -> None:
    # A second name of another socket is replaced.
    path.with_name(LINK).write_text("of a server that was killed")
    socket = ServerSocket(str(path))
    assert socket.look_after()
    assert socket.was_there
    path.unlink()
    assert socket.look_after()
    assert path.read_text() == "the socket"
    os.utime(path, (0, 0))
    assert socket.look_after()
    assert path.stat().st_mtime > 0
    socket.remove()
    assert not socket.look_after()
    assert not any(path.parent.glob("*"))


def test_without_a_second_name_it_cannot_be_restored(path: Path) -> None:
    path.unlink()
    socket = ServerSocket(str(path))
    assert not socket.look_after()
    assert not socket.was_there


def test_its_directory_is_restored_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own" / "s"
    socket = ServerSocket(str(path))
    (tmp_path / LINK).write_text("the socket")
    assert socket.look_after()
    assert path.read_text() == "the socket"
    assert path.parent.stat().st_mode & 0o777 == 0o700
