"""The path of an embedded server's socket. Any file may take the socket's place here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayq._embedded.watchdog import LINK, ServerSocket

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_socket_is_restored_with_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own" / "s"
    socket = ServerSocket(str(path))
    (tmp_path / LINK).write_text("the socket")
    assert socket.look_after()
    assert path.read_text() == "the socket"
    assert path.parent.stat().st_mode & 0o777 == 0o700
