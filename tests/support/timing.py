"""How much time the machine took away while a test measured.

A test marked ``timing`` measures how long something takes. It subtracts what a control has lost in
the same moment, so that a pause of the process, of its server or of the machine does not count.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from tests.support.servers import PrivateServer

PERIOD = 0.005
"""Seconds between two samples."""


class Control:
    """Samples, in a thread, how late it wakes up and how long the server takes for a PING.

    Use it around what is measured, and then subtract :attr:`lost`. On a quiet machine this is less
    than a tenth of the time; beside busy processors, or in a pause, most of it.
    """

    def __init__(self, server: PrivateServer | None = None) -> None:
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="control of a timing test")
        self.lost = 0.0
        """Seconds that the samples were late altogether."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            time.sleep(PERIOD)
            if self._server is not None:
                self._server.call("PING")
            self.lost += time.monotonic() - began - PERIOD
