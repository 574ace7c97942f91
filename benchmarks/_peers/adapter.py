"""Helpers for the adapters.

Each adapter is a program in the environment of its peer, driven by ``benchmarks.peers``.

Run as ``offer URL``, it makes the offers that the lines on its input ask for, and answers each with
a line. Run as ``handle URL default|best FILE``, it is a worker whose handler records in the file
when it was called and when each message was due.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import struct
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

FLUSH_SECONDS = 0.03
BULK = 1000


class Payload(TypedDict):
    due: float
    text: str


class Offers:
    """The offers of a peer: ``offer_one`` takes a due time (Unix seconds), ``offer_many`` several.

    Both may return an awaitable. If ``offer_one`` is a coroutine function, several of its calls
    may be in flight at once.
    """

    def __init__(
        self,
        offer_one: Callable[[float], Any],
        offer_many: Callable[[list[float]], Any] | None = None,
    ) -> None:
        """Create the offers.

        ``offer_many`` takes lists of at most BULK due times; without it, messages are offered
        one by one.
        """
        self.offer_one = offer_one
        self.offer_many = offer_many


class Notes:
    """The handler's records: pairs of doubles, appended to a file by a thread, or immediately in
    processes that end abruptly.
    """

    def __init__(self, file: str) -> None:
        self._fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._records: list[float] = []
        self._at_once = False

    def by_thread(self) -> Notes:
        threading.Thread(target=self._flush_on, daemon=True).start()
        return self

    def at_once(self) -> Notes:
        self._at_once = True
        return self

    def add(self, due: float) -> None:
        if self._at_once:
            os.write(self._fd, struct.pack("<2d", time.time(), due))
        else:
            # Not +=, which would bring back a list that the thread has just taken away.
            self._records.extend((time.time(), due))

    def _flush_on(self) -> None:
        while True:
            time.sleep(FLUSH_SECONDS)
            records, self._records = self._records, []
            # A caller that has just looked up the old list has added to it by then.
            time.sleep(0.001)
            os.write(self._fd, struct.pack(f"<{len(records)}d", *records))


def payload(due: float) -> Payload:
    """Return a payload of some 100 bytes as JSON."""
    return {"due": due, "text": "x" * 62}


async def _answer(offers: Offers, request: dict[str, Any]) -> dict[str, Any]:
    count, spread = request["count"], request["spread"]
    first = time.time() + request["after"]
    # Spread evenly, in random order.
    dues = [first + spread * (0.6180339887 * place % 1) for place in range(count)]
    offer_many, in_flight = offers.offer_many, request["in_flight"]
    started = time.perf_counter()
    if offer_many is not None and request["bulk"]:
        for at in range(0, count, BULK):
            done = offer_many(dues[at : at + BULK])
            if done is not None:
                await done
    elif in_flight > 1:
        await gathered(offers.offer_one, dues, in_flight)
    else:
        for due in dues:
            done = offers.offer_one(due)
            if done is not None:
                await done
    return {"seconds": time.perf_counter() - started, "first": first}


async def _offer(opened: AbstractAsyncContextManager[Offers]) -> None:
    async with opened as offers:
        is_async = inspect.iscoroutinefunction(offers.offer_one)
        print(json.dumps({"is_async": is_async}), flush=True)
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(await _answer(offers, json.loads(line))), flush=True)


def _end_with_the_driver() -> None:
    os.read(0, 1)
    # This also ends the processes that the adapter started, because the driver made it the leader
    # of a process group.
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main(
    offers: Callable[[str], AbstractAsyncContextManager[Offers]],
    handle: Callable[[str, bool, Notes], object],
) -> None:
    """Run the adapter as the command line says.

    Args:
        offers: Opens the peer for offers.
        handle: Runs its worker until the process is killed. Takes the address, whether to use the
            best settings, and the notes.
    """
    if sys.argv[1] == "offer":
        asyncio.run(_offer(offers(sys.argv[2])))
    else:
        threading.Thread(target=_end_with_the_driver, daemon=True).start()
        handle(sys.argv[2], sys.argv[3] == "best", Notes(sys.argv[4]))


async def gathered(
    offer_one: Callable[[float], Any], dues: list[float], in_flight: int = 100
) -> None:
    """Offer all messages, so many at a time: 100 is as many as peers without a bulk call bear."""
    for at in range(0, len(dues), in_flight):
        await asyncio.gather(*map(offer_one, dues[at : at + in_flight]))
