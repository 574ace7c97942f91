"""The calls about dead letters."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from delayq._reliable.replies import parse_us
from delayq._reliable.scripts import DROP_DEAD, PAGE, REDRIVE, TRIM_DEAD, ScriptRunner

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# The replies of redrive.lua for letters that stay, and for one that was empty.
_TAKEN, _UNREADABLE, _EMPTY = -1, -2, -3


class Death(NamedTuple):
    """The order of a dead letter in a list.

    Attributes:
        name: The name under which the letter is stored.
        died_us: When the message died, in microseconds.
    """

    name: bytes
    died_us: int


class StoredLetter(NamedTuple):
    """A dead letter.

    Attributes:
        name: The name under which it is stored.
        letter: The letter, as :func:`delayq._reliable.bodies.parse_letter` takes it.
        died_us: When the message died, in microseconds.
    """

    name: bytes
    letter: bytes
    died_us: int


class Redriven(NamedTuple):
    """How many of some dead letters were requeued, and how many stayed."""

    requeued: int
    stayed: int


class LetterStore(ScriptRunner):
    """Reads, redrives and drops dead letters."""

    async def count_dead(self) -> int:
        """Count the dead letters."""
        return int(await self.client.command("ZCARD", self.keys.dead))

    async def dead_page(self, offset: int, limit: int) -> list[StoredLetter]:
        """List up to ``limit`` dead letters, oldest first; ``limit`` is at least 1."""
        letters = await self.letters_of(await self.deaths(offset, limit))
        return [letter for letter in letters if letter is not None]

    async def newest_dead(self, offset: int, limit: int) -> list[StoredLetter]:
        """List up to ``limit`` dead letters, newest first; ``limit`` is at least 1."""
        return (await self.dead_page(-offset - limit, limit))[::-1]

    async def deaths(self, offset: int, limit: int) -> list[Death]:
        """List up to ``limit`` dead letters, oldest first, without reading them; ``limit`` is at
        least 1. A negative offset counts from the end, at which the list ends in any case.
        """
        reply = await self.client.command(
            "ZRANGE", self.keys.dead, offset, offset + limit - 1, "WITHSCORES"
        )
        scores = zip(reply[::2], reply[1::2], strict=True)
        return [Death(name, parse_us(score)) for name, score in scores]

    async def letters_of(self, deaths: Sequence[Death]) -> list[StoredLetter | None]:
        """Read dead letters; None for each that was redriven or dropped meanwhile.

        No command reads more than :data:`PAGE`.
        """
        letters: list[StoredLetter | None] = []
        for first in range(0, len(deaths), PAGE):
            page = deaths[first : first + PAGE]
            bodies = await self.client.command(
                "HMGET", self.keys.dead_messages, *(death.name for death in page)
            )
            letters += [
                None if body is None else StoredLetter(death.name, body, death.died_us)
                for death, body in zip(page, bodies, strict=True)
            ]
        return letters

    async def dead_letter(self, name: bytes) -> StoredLetter | None:
        """Return one dead letter; None if there is none of that name."""
        score = await self.client.command("ZSCORE", self.keys.dead, name)
        body = await self.client.command("HGET", self.keys.dead_messages, name)
        return None if score is None or body is None else StoredLetter(name, body, parse_us(score))

    async def dead_names(self, offset: int, limit: int) -> Sequence[bytes]:
        """List the names of up to ``limit`` dead letters, oldest first; ``limit`` is at least 1."""
        names: list[bytes] = await self.client.command(
            "ZRANGE", self.keys.dead, offset, offset + limit - 1
        )
        return names

    async def find_dead(self, names: Iterable[str | bytes]) -> list[str | bytes]:
        """Return the names of the dead letters that exist, for ids of messages (str) and names of
        letters (bytes); each once.

        Of several letters with one id, the oldest comes first.
        """
        unique = list(dict.fromkeys(names))
        if not unique:
            return unique
        ids = [name.encode() for name in unique if isinstance(name, str)]
        # See lua/reliable/include/letters.lua.
        stamps = (
            await self.client.command("HMGET", self.keys.dead_messages, *(id + b"\0" for id in ids))  # noqa: A001
            if ids
            else []
        )
        groups = [[name] for name in unique if isinstance(name, bytes)]
        groups += [
            [id, *(id + b"\0" + stamp for stamp in (line or b"").split())]
            for id, line in zip(ids, stamps, strict=True)  # noqa: A001
        ]
        candidates = [name for group in groups for name in group]
        scores = await self.client.command("ZMSCORE", self.keys.dead, *candidates)
        died = dict(zip(candidates, scores, strict=True))
        existing = (
            [(float(died[name]), name) for name in group if died[name] is not None]
            for group in groups
        )
        return [name for group in existing for _, name in sorted(group)]

    async def redrive(self, names: Sequence[str | bytes], *, keep_due: bool = False) -> Redriven:
        """Requeue dead letters that existed a moment ago.

        A letter stays if it is unreadable, or if a live message has its id. If ``keep_due``,
        messages that were buried before they were due keep their due times.
        """
        replies = await self.run(REDRIVE, int(keep_due), *names)
        stayed = replies.count(_TAKEN) + replies.count(_UNREADABLE)
        # A missing letter has been requeued: the reply to a first try was lost.
        return Redriven(len(names) - stayed - replies.count(_EMPTY), stayed)

    async def drop_dead(self, names: Sequence[str | bytes]) -> None:
        """Drop dead letters for good."""
        await self.run(DROP_DEAD, *names)

    async def trim_dead(self) -> int:
        """Drop some of the dead letters that are too old or too many, and return how many."""
        return int(await self.run(TRIM_DEAD))
