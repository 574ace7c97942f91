"""A message on its way to the server."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


ENDS_EARLY = (
    "ttl ends before the message is due: it counts from now, so make it longer than the delay"
)


class PlainMessage(NamedTuple):
    """A message with a generated id and the default options: most messages.

    The fields are the arguments that ``offer_new.lua`` takes for it, in order.

    Attributes:
        id: The message's id.
        when: The delay, as :func:`delayq._reliable.bodies.brief` writes it.
        content: Headers and payload, as :func:`delayq._reliable.bodies.content` builds them.
    """

    id: str
    when: int | str
    content: bytes

    @property
    def arguments(self) -> tuple[str | bytes | int, ...]:
        """The arguments that ``offer.lua`` takes for it."""
        return self.id, 0, self.when, 0, 0, "raise", self.content

    def __repr__(self) -> str:
        return f"<PlainMessage {self.id!r}, {len(self.content)} bytes>"


# Builds one from its fields, in half of the time that its class takes.
plain_message: Callable[[tuple[str, int | str, bytes]], PlainMessage] = partial(
    tuple.__new__, PlainMessage
)


class OptionsMessage(NamedTuple):
    """Any message: the arguments that ``offer.lua`` takes for it, in order.

    Attributes:
        id: The message's id.
        priority: 0 to 9.
        when: As in :class:`PlainMessage`; or ``@`` and the moment, as in
            :data:`delayq._durations.When`.
        ttl_us: Time to live, in microseconds; 0 for no limit.
        unique_us: For how long the id counts as taken, whatever becomes of the message, in
            microseconds; 0 for as long as the message lives.
        on_duplicate: How to treat an id that is taken: ``raise``, ``ignore`` or ``replace``.
            ``swap`` replaces an earlier message, and stores nothing if there is none.
        content: As in :class:`PlainMessage`.
    """

    id: str
    priority: int
    when: int | str
    ttl_us: int
    unique_us: int
    on_duplicate: str
    content: bytes

    @property
    def arguments(self) -> tuple[str | bytes | int, ...]:
        """The arguments that ``offer.lua`` takes for it."""
        return self

    def __repr__(self) -> str:
        return f"<OptionsMessage {self.id!r}, {len(self.content)} bytes>"


NewMessage = PlainMessage | OptionsMessage
