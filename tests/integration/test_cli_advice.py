"""The command line as new users meet it: wrong usage gets one line that says what to do instead."""

from __future__ import annotations

import shlex
import socket
from typing import TYPE_CHECKING

import pytest
import redis

import delayq
from delayq._reliable.keys import ReliableKeys
from delayq.admin.inspect import FoundQueue
from delayq.cli.app import run
from delayq.cli.errors import CommandFailed
from delayq.cli.options import Target
from delayq.cli.worker.child import find

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.servers import PrivateServer


@pytest.fixture(autouse=True)
def _no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DELAYQ_URL", raising=False)


def told(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the single line on stderr."""
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_a_command_needs_a_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run(["offer", "jobs", "1"]) == 2
    assert "--url or set $DELAYQ_URL" in told(capsys)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "needy.py").write_text(
        "import delayq\none = delayq.Worker()\nother = delayq.Worker(None, concurrency=3)\n"
    )
    for where in ("needy:one", "needy:other"):
        with pytest.raises(CommandFailed, match=r"no server given: set \$DELAYQ_URL"):
            find(where)


async def test_connect_without_an_address_warns_of_the_private_server(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    delayq.connect("embedded:")
    assert not caplog.records
    delayq.connect()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "Set $DELAYQ_URL" in record.getMessage()
    monkeypatch.setenv("DELAYQ_URL", "redis://127.0.0.1:1")
    delayq.connect()
    assert len(caplog.records) == 1


def test_a_missing_queue_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("stats", "peek", "list", "pause"):
        assert run([command]) == 2
        assert f"Missing argument 'QUEUE'. (see delayq {command} --help)" in told(capsys)


def test_the_argument_of_each_queue_names_it() -> None:
    for name in ("mails", "delayed:mails", "reliable:x", "-x", "a b", "x:y"):
        for queue in (FoundQueue("reliable", name), FoundQueue("delayed", name)):
            (argument,) = shlex.split(queue.argument)
            assert not argument.startswith("-")
            parsed = Target.parse(argument)
            assert (parsed.kind, parsed.name) == (queue.kind, name)
        parsed = Target.parse_delayed(argument)
        assert (parsed.kind, parsed.name) == ("delayed", name)


def test_a_used_port_is_one_line(server: PrivateServer, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert run(["dashboard", "--url", server.url, "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in told(capsys)


def test_damaged_letters_hide_none(
    server: PrivateServer, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ReliableKeys.of("jobs")
    letter = '{"reason":"rejected","attempt":1,"priority":0,"error":""}\n1 \n5'
    with redis.Redis.from_url(server.url, socket_timeout=60) as raw:
        raw.zadd(keys.dead, {"fine": 1, "damaged": 2})
        raw.hset(keys.dead_messages, mapping={"fine": letter, "damaged": "garbage"})
    for more in ([], ["--long"], ["--json"]):
        assert run(["dead", "list", "jobs", "--url", server.url, *more]) == 0
        shown = capsys.readouterr().out
        assert "fine" in shown
        assert "damaged" in shown
