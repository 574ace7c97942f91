"""Messages that kill their workers, among others that do not.

Worker processes note what they begin, and each is replaced when it dies. A killer dies at once, or
after a while. :func:`judge` names what must not happen:

- *spared*: a message that kills its workers came again, although it had been alone in its last one
  and all its attempts were used; or it is not a dead letter at the end.
- *innocent*: another message is a dead letter.
- *company*: a message whose last two workers had died came with others in one claim, or its worker
  took others within the next second, although it still had the message.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import random
import signal
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import delayq
from delayq import Offer
from tests.faults.checker import Violation
from tests.faults.consumers import die_with_parent, micros
from tests.faults.history import Delivered, End, Notes, now_us, read_notes
from tests.faults.victims import start

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.servers import PrivateServer

QUEUE = "poison"
LEASE = 2.5
KILLERS, NEIGHBOURS = 20, 200
# Longer than a suspect is certainly alone.
_ALONE_US = 950_000


def work(url: str, notes: Path, who: str, max_attempts: int) -> None:
    """Handle messages, until one of them kills this process."""
    logging.getLogger("delayq").setLevel(logging.CRITICAL)
    asyncio.run(_work(url, Notes(notes), who, max_attempts))


async def _work(url: str, notes: Notes, who: str, max_attempts: int) -> None:
    die_with_parent()
    chance = random.Random(who)

    async def handle(message: delayq.Message[int]) -> None:
        one = Delivered(message.value, now_us(), who, attempt=message.attempt)
        one.claimed_us = micros(message.lease_ends_at) - int(LEASE * 1_000_000)
        notes.began(one)
        await asyncio.sleep(chance.choice((0.0, 0.1, 0.8)) * chance.random())
        if message.value < KILLERS:
            os.kill(os.getpid(), signal.SIGKILL)
        one.end, one.ended_us = End.UNKNOWN, now_us()
        notes.ended(one)

    async with delayq.connect(url) as client:
        worker = delayq.Worker(client, concurrency=50)
        worker.listener(QUEUE, lease=LEASE, max_attempts=max_attempts)(handle)
        await worker.run()


@dataclass
class Outcome:
    """What the workers did, and what became of the messages."""

    delivered: list[Delivered]
    dead: dict[int, int] = field(default_factory=dict)
    """By key, the attempts that were used."""
    deaths: int = 0


async def spread(server: PrivateServer, folder: Path, max_attempts: int, crowd: int = 1) -> Outcome:
    """Offer all messages, replace workers that die until all are handled or dead, and look."""
    outcome, names = Outcome([]), itertools.count()

    def begin() -> Any:
        who = f"process {next(names)}"
        return start(work, server.url, folder / who, who, max_attempts)

    async with delayq.connect(server.url) as client:
        queue: delayq.ReliableQueue[int] = client.reliable_queue(QUEUE)
        chance = random.Random(1)
        keys = chance.sample(range(KILLERS + NEIGHBOURS), KILLERS + NEIGHBOURS)
        # Half of them come while others are suspects.
        await queue.offer_many(
            [
                Offer(key, id=str(key), delay=chance.choice((0, 15)) * chance.random())
                for key in keys
            ]
        )
        processes = [begin() for _ in range(crowd)]
        while (stats := await queue.stats()).ready + stats.delayed + stats.leased > 0:
            await asyncio.sleep(0.02)
            for process in [process for process in processes if not process.is_alive()]:
                processes.remove(process)
                process.close()
                outcome.deaths += 1
                processes.append(begin())
        for process in processes:
            process.kill()
        letters = await queue.dead.list(limit=KILLERS + NEIGHBOURS)
    outcome.dead = {int(letter.id): letter.attempt for letter in letters}
    outcome.delivered = read_notes(folder.glob("process *"))
    return outcome


def judge(outcome: Outcome, max_attempts: int) -> list[Violation]:
    """Return all violations."""
    by_key, by_process = defaultdict[int, list[Delivered]](list), defaultdict[str, Any](list)
    for one in sorted(outcome.delivered, key=lambda one: one.claimed_us):
        by_key[one.key].append(one)
        by_process[one.who].append(one)
    return [*_spared(outcome, by_key, by_process, max_attempts), *_company(by_key, by_process)]


def _spared(
    outcome: Outcome,
    by_key: dict[int, list[Delivered]],
    by_process: dict[str, list[Delivered]],
    max_attempts: int,
) -> Iterator[Violation]:
    for key, used in outcome.dead.items():
        if key >= KILLERS:
            yield Violation("innocent", key, f"is dead after attempt {used}")
    for key in range(KILLERS):
        if key not in outcome.dead:
            yield Violation("spared", key, f"lives after {len(by_key[key])} kills")
        for one in by_key[key][:-1]:
            # Of those before it, others may have been in the same claim.
            if by_process[one.who] == [one] and one.attempt >= max(max_attempts, 3):
                yield Violation("spared", key, f"came again after attempt {one.attempt}")


def _company(
    by_key: dict[int, list[Delivered]], by_process: dict[str, list[Delivered]]
) -> Iterator[Violation]:
    for key, some in by_key.items():
        for first, second, suspect in zip(some, some[1:], some[2:], strict=False):
            if first.ended_us or second.ended_us or suspect.attempt != first.attempt + 2:
                continue
            until = min(suspect.ended_us or math.inf, suspect.claimed_us + _ALONE_US)
            for other in by_process[suspect.who]:
                if other is not suspect and suspect.claimed_us <= other.claimed_us < until:
                    words = f"was a suspect in {suspect.who}, which took {other.key} beside it"
                    yield Violation("company", key, words)
