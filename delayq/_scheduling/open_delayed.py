"""A delayed queue that is open on this client, for every handle of its name."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from delayq._scheduling.offers import Offers
from delayq._scheduling.transfer import TransferTask

if TYPE_CHECKING:
    from delayq._redis.keys import DelayedKeys
    from delayq._scheduling.services import Services
    from delayq._scheduling.turns import Notice


class OpenDelayedQueue:
    """Its way in, and its way out.

    Attributes:
        keys: Its keys.
        listed: Whether what is offered here goes into the ordered list.
        transfer: Moves what is due, and hands it out.
        offers: Stores messages.
        closed: Whether it was closed.
    """

    def __init__(self, keys: DelayedKeys, services: Services, *, listed: bool) -> None:
        self.keys: DelayedKeys = keys
        self.listed: bool = listed
        self.transfer: TransferTask = TransferTask(keys, services, listed=listed)
        self.offers: Offers = Offers(keys, services, self.transfer.announced, listed=listed)
        self.closed: bool = False

    @property
    def name(self) -> str:
        return self.keys.name

    @property
    def channels(self) -> tuple[str, ...]:
        return (self.keys.channel, self.keys.turns)

    @property
    def kind(self) -> str:
        return "delayed"

    def resync_keys(self) -> tuple[str, ...]:
        return (self.keys.timeout, self.keys.leases, self.keys.ready) if self.transfer.watches else ()

    def resynced(self, due_us: int, ready: int) -> None:
        self.transfer.resynced(due_us, ready)

    def heard(self, moment: int) -> None:
        self.transfer.announced(moment)

    def noticed(self, notice: Notice) -> None:
        self.transfer.pushes.noticed(notice)

    def push(self) -> None:
        self.transfer.pushes.push()

    async def aclose(self, grace: float) -> None:
        await asyncio.gather(self.offers.aclose(grace), self.transfer.aclose(grace))
