"""Many calls of one script in one round trip."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from delayq._redis.error_reader import Redirected
from delayq.errors import OutcomeUnknown, ServerError, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayq._redis.client import RedisClient
    from delayq._redis.scripts import Script

    # The keys and the arguments of a call.
    Call = tuple[Sequence[str], Sequence[str | bytes | int]]

_NOT_ANSWERED = (ServerUnavailable, OutcomeUnknown)


async def run_all(client: RedisClient, script: Script, calls: Sequence[Call]) -> list[Any]:
    """Run a repeatable script several times, on the server that has the first call's keys.

    Calls whose keys another server has are then made one by one.

    Returns:
        Each call's answer, or the error that :meth:`RedisClient.run` would raise for it.
    """
    answers: list[Any] = [None] * len(calls)
    left = [*range(len(calls))]
    # Again for a connection that was dead, and a server that does not know the script.
    for spelled_out in (False, True):
        if len(left) > 1:
            again = [calls[place] for place in left]
            some = await _run_together(client, script, again, spelled_out)
            for place, answer in zip(left, some, strict=True):
                answers[place] = answer
            left = [place for place in left if isinstance(answers[place], _NOT_ANSWERED)]
            left = [place for place in left if not isinstance(answers[place], Redirected)]
    alone = left
    if len(calls) > 1:
        alone = [place for place, each in enumerate(answers) if isinstance(each, Redirected)]
    runs = (client.run(script, *calls[place]) for place in alone)
    found = await asyncio.gather(*runs, return_exceptions=True)
    for place, answer in zip(alone, found, strict=True):
        answers[place] = answer
    return answers


async def _run_together(
    client: RedisClient, script: Script, calls: Sequence[Call], spelled_out: bool
) -> list[Any]:
    """Return the answer to each call, or an error."""
    try:
        pool = await client.topology.find(calls[0][0][0])
        connection = await client.acquire(pool)
    except ServerError as error:
        return [error] * len(calls)
    arrived = False
    client.round_trips += 1
    try:
        # EVAL needs no further right, and makes the script known for the calls that follow.
        command = ("EVAL", script.text) if spelled_out else ("EVALSHA", script.sha)
        asked = []
        for keys, args in calls:
            asked.append(connection.ask(*command, len(keys), *keys, *args))
            command = ("EVALSHA", script.sha)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        arrived = connection.is_open
    except OSError as error:
        return [client.interpret(error, pool)] * len(calls)
    finally:
        # A caller that is cancelled leaves answers in flight.
        (pool.release if arrived else pool.abandon)(connection)
    if not arrived:
        client.topology.suspect(pool)
    return [client.interpret(answer, pool) for answer in answers]
