"""The scripts that serve the queues of both kinds, and their typed replies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from delayq._redis.pipeline import run_all
from delayq._redis.scripts import Script

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from delayq._redis.client import RedisClient

RECHECK = Script("recheck")
DUE_COUNTS = Script("due_counts")


class NextDue(NamedTuple):
    """When a queue needs attention.

    Attributes:
        wait_us: Microseconds until the next message is due; 0 if that is now, -1 if there is none.
        late_us: For how many microseconds it has been due; 0 if it is not.
        listeners: The number of clients that receive its notices on this server; -1 if the user may
            not know it.
        dormant: The number of dormant clients that want messages, on this server.
        ready_or_schedules: For a delayed queue, the number of ready messages; for a reliable one,
            the number of schedules.
        epoch: The epoch of a reliable queue's settings.
    """

    wait_us: int
    late_us: int
    listeners: int
    dormant: int
    ready_or_schedules: int
    epoch: bytes


class RecheckReply(NamedTuple):
    """The reply to one call: the server's time in microseconds, and its queues in order."""

    now_us: int
    queues: Sequence[NextDue]

    @classmethod
    def of(cls, reply: Sequence[Any]) -> RecheckReply:
        """Parse a reply."""
        return cls(reply[0], [*map(NextDue, *(reply[at::6] for at in range(1, 7)))])


async def recheck(
    client: RedisClient, calls: Sequence[Sequence[tuple[str, Sequence[str]]]]
) -> list[RecheckReply | BaseException]:
    """Re-check many queues in one round trip to one server.

    Each call has the kinds and the keys of some queues, in a cluster of one. Returns its reply, or
    the error with which it failed.
    """
    requests = [
        ([key for _, keys in queues for key in keys], [kind for kind, _ in queues])
        for queues in calls
    ]
    return [
        reply if isinstance(reply, BaseException) else RecheckReply.of(reply)
        for reply in await run_all(client, RECHECK, requests)
    ]


async def due_counts(
    client: RedisClient, sets: Sequence[str], edges: Iterable[str | int]
) -> list[int]:
    """Return how many messages in some sets come due between each edge and the next, and after the
    last one.
    """
    counts: list[int] = await client.run(DUE_COUNTS, sets, [*edges])
    return counts
