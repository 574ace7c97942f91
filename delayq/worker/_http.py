"""A small HTTP server in threads of its own, which answers even while the event loop is blocked."""

from __future__ import annotations

import errno
import logging
import math
import os
import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit
from weakref import WeakSet

from delayq.worker._answers import Answer, Question

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("delayq.worker")

# The most connections that are open, each of which has a thread, and how long one may be, seconds.
# As many more may be ending.
_MOST_REQUESTS = 32
_REQUEST_WITHIN = 10.0
# How often the thread that accepts connections looks whether it is to stop, seconds.
_LOOK_INTERVAL = 0.05
# How long it waits if no connection can be accepted, seconds.
_NO_DESCRIPTOR_PAUSE = 0.1
# The process was stopped if the thread that accepts connections has not run for this long, seconds.
_PAUSED_AFTER = 1.0


class HttpServer(ThreadingTCPServer):
    """Answers GET requests until it is stopped."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, answer: Callable[[Question], Answer]) -> None:
        """Listen on an address. Raises OSError."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.answer: Callable[[Question], Answer] = answer
        # The open connections, and when each was accepted.
        self._connections: dict[Any, float] = {}
        # Those that were shut down and whose threads have not ended.
        self._ending: WeakSet[Any] = WeakSet()
        self._ran_at, self._resumed_at = time.monotonic(), -math.inf
        super().__init__((host, port), _Handler)
        _of_this_process.add(self)

    def start(self) -> None:
        """Answer in a thread. Raises RuntimeError if it cannot be started."""
        threading.Thread(
            target=self.serve_forever, args=(_LOOK_INTERVAL,), name="delayq health", daemon=True
        ).start()

    def stop(self) -> None:
        """Accept no more connections. This blocks for a moment."""
        self.shutdown()
        self.server_close()

    def runs_for(self) -> float:
        """Return for how long the process has run without a pause, in seconds."""
        now = time.monotonic()
        return 0.0 if now - self._ran_at > _PAUSED_AFTER else now - self._resumed_at

    def disown(self) -> None:
        """Close the sockets in a forked child, where no thread answers."""
        for inherited in (self.socket, *self._connections):
            if (number := inherited.detach()) >= 0:
                os.close(number)

    # Called by the base class

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                # The connection goes on waiting, and would be tried again at once.
                time.sleep(_NO_DESCRIPTOR_PAUSE)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        connections = [*self._connections]
        if len(connections) >= 2 * _MOST_REQUESTS:
            self.shutdown_request(request)
            return
        active = [connection for connection in connections if connection not in self._ending]
        if len(active) >= _MOST_REQUESTS:
            # Connections that ask nothing would keep probes out.
            self._end(active[0])
        self._connections[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Notice pauses, and break connections that send a byte now and then: they would keep
        probes out.
        """
        now = time.monotonic()
        if now - self._ran_at > _PAUSED_AFTER:
            self._resumed_at = now
        self._ran_at = now
        for connection, accepted_at in [*self._connections.items()]:
            if now - accepted_at > _REQUEST_WITHIN:
                self._end(connection)

    def _end(self, connection: Any) -> None:
        self._ending.add(connection)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, _request: Any, client_address: Any) -> None:
        # Those who ask may go away at any moment.
        _log.debug("a request from %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_WITHIN
    server: HttpServer
    server_version, sys_version = "delayq", ""

    def do_GET(self) -> None:
        try:
            url = urlsplit(self.path)
        except ValueError:
            self.send_error(400)
            return
        question = Question(unquote(url.path), url.query, self.headers.get("Accept", ""))
        try:
            answer = self.server.answer(question)
        except Exception:  # noqa: BLE001 - whatever fails, a probe gets an answer
            _log.exception("answering %s failed", question.path)
            answer = Answer(500, b"this failed; the log of the worker says why\n")
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - by the base class
        _log.debug(f"%s: {format}", self.client_address[0], *arguments)


_of_this_process: WeakSet[HttpServer] = WeakSet()


def _after_fork() -> None:
    # The parent's port would stay taken for as long as the child lives.
    for server in _of_this_process:
        server.disown()
    _of_this_process.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
