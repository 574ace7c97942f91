"""Find out how many messages each side moved, from the commands that the server ran."""

from __future__ import annotations

import re
import socket
import threading
from typing import TYPE_CHECKING, Self

from delayq._redis.rights import checked
from delayq._redis.scripts import scripts_in

if TYPE_CHECKING:
    from tests.support.servers import PrivateServer

_SCRIPTS = (*scripts_in(""), *scripts_in("redisson"))
_FORMS = [form for script in _SCRIPTS for form in (script, checked(script)) if form]
_OURS = {form.sha.encode() for form in _FORMS}
# Redisson's scripts start with different lines, so this tells EVAL calls apart as well.
_FIRST_LINES = {form.text.partition("\n")[0].encode() for form in _FORMS}
# The client that ran it, the command, and the first argument up to its first escaped character.
_LINE = re.compile(rb'\+[0-9.]+ \[\d+ ([^]]+)\] "(\w+)"(?: "([^"\\]*))?')


class MovedByJava:
    """A count of the messages that a queue's Java clients move during the block.

    Redisson's script pushes each message with a command of its own.
    """

    def __init__(self, server: PrivateServer, queue: str) -> None:
        self.count = 0
        self._server = server
        self._ready = queue.encode()
        self._connection = socket.socket(socket.AF_UNIX)
        self._thread = threading.Thread(target=self._read, name="monitor", daemon=True)

    def __enter__(self) -> Self:
        self._connection.connect(str(self._server.socket_path))
        self._connection.sendall(b"MONITOR\r\n")
        assert self._connection.recv(5) == b"+OK\r\n"
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # The server reports commands in order: all that ran earlier come before this one.
        self._server.call("ECHO", "the end")
        self._thread.join(10)
        self._connection.close()
        assert not self._thread.is_alive()

    def _read(self) -> None:
        ours = False
        with self._connection.makefile("rb") as lines:
            for line in lines:
                found = _LINE.match(line)
                if found is None:
                    continue
                who, command, first = found[1], found[2].upper(), found[3]
                if who == b"lua":
                    self.count += command == b"RPUSH" and first == self._ready and not ours
                elif command in {b"EVAL", b"EVALSHA"}:
                    ours = first in _OURS or first in _FIRST_LINES
                elif command == b"ECHO":
                    return
