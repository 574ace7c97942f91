"""Producers for storms: they offer messages, and note what they were told."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import delayq
from delayq import Offer
from tests.faults.consumers import open_delayed, open_reliable
from tests.faults.history import History, Offered, Told, now_us

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.faults.consumers import Kind

_FAILED = (delayq.ServerUnavailable, delayq.ServerRefused)


def _begin(history: History, messages: Mapping[int, float]) -> None:
    began = now_us()
    for key, delay in messages.items():
        history.offered[key] = Offered(began + int(delay * 1_000_000))


async def offer_together(
    client: delayq.Client,
    kind: Kind,
    history: History,
    messages: Mapping[int, float],
    *,
    named: bool,
) -> None:
    """Offer messages in one call: their keys, each with its delay in seconds."""
    _begin(history, messages)
    outcome, stored = Told.OK, set[int]()
    try:
        if kind == "reliable":
            offers = [
                Offer(
                    key,
                    delay=delay,
                    id=f"m{key}" if named else None,
                    group=history.group_of(key),
                )
                for key, delay in messages.items()
            ]
            await open_reliable(client).offer_many(offers)
        else:
            await open_delayed(client).offer_many([*messages.items()])
    except delayq.OutcomeUnknown as error:
        outcome = Told.UNKNOWN
        if kind != "reliable":
            stored = {int(receipt._payload) for receipt in error.stored}
        elif named:
            stored = {int(name[1:]) for name in error.stored}
    except _FAILED:
        outcome = Told.FAILED
    for key in messages:
        history.offered[key].told = Told.OK if key in stored else outcome


async def offer_each(
    client: delayq.Client, kind: Kind, history: History, messages: Mapping[int, float]
) -> None:
    """Offer messages with a call for each of them, all at once."""
    _begin(history, messages)

    async def offer(key: int, delay: float) -> None:
        try:
            if kind == "reliable":
                await open_reliable(client).offer(key, delay, group=history.group_of(key))
            else:
                await open_delayed(client).offer(key, delay)
            history.offered[key].told = Told.OK
        except _FAILED:
            history.offered[key].told = Told.FAILED
        except delayq.OutcomeUnknown:
            pass

    await asyncio.gather(*(offer(key, delay) for key, delay in messages.items()))
