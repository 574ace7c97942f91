"""The path of an embedded server's socket. Any file may take the socket's place here."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from delayq._embedded.watchdog import LINK, ServerSocket

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(params=["the same directory", "a directory of its own"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the socket of the server in the working directory."""
    directory = tmp_path / "data"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return (directory if request.param == "the same directory" else tmp_path / "own") / "s"


@pytest.fixture
def socket(path: Path) -> ServerSocket:
    path.parent.mkdir(exist_ok=True)
    path.write_text("the socket")
    return ServerSocket(str(path))


def test_a_path_that_was_removed_is_restored(socket: ServerSocket, path: Path) -> None:
    assert socket.look_after()
    assert socket.was_there
    path.unlink()
    assert socket.look_after()
    assert path.read_text() == "the socket"


def test_its_directory_is_restored_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own" / "s"
    socket = ServerSocket(str(path))
    (tmp_path / LINK).write_text("the socket")
    assert socket.look_after()
    assert path.read_text() == "the socket"
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_path_without_a_second_name_cannot_be_restored(path: Path) -> None:
    socket = ServerSocket(str(path))
    assert not socket.look_after()
    assert not socket.was_there


def test_a_second_name_of_another_socket_is_replaced(socket: ServerSocket, path: Path) -> None:
    stale = path.with_name(LINK)
    stale.write_text("of a server that was killed")
    assert socket.look_after()
    path.unlink()
    assert socket.look_after()
    assert path.read_text() == "the socket"


def test_it_never_looks_old(socket: ServerSocket, path: Path) -> None:
    os.utime(path, (0, 0))
    assert socket.look_after()
    assert path.stat().st_mtime > 0


def test_removing_it_removes_every_name(socket: ServerSocket, path: Path) -> None:
    assert socket.look_after()
    socket.remove()
    assert not socket.was_there
    assert not socket.look_after()
    assert not any(path.parent.glob("*"))
