"""The states of a message in a reliable queue, and every event that changes them. Data only.

Nothing at run time depends on this table: the scripts are the implementation. A test makes every
event happen to a message in every state on a real server, and ``docs/redis-data-model.md`` shows
the same table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from delayq._reliable import scripts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delayq._redis.scripts import Script


class State(StrEnum):
    """The state of an id, as its keys and the server's clock show it.

    Calls that count or list messages report ``OVERDUE`` and ``SUSPECT`` as ready, and ``ON_TRIAL``
    as leased. An ``EXPIRED`` message counts as gone.
    """

    GONE = "gone"
    """Nothing is stored under the id: it is new, or its message was handled or dropped."""
    DELAYED = "delayed"
    """The message waits until it is due."""
    READY = "ready"
    """The message is due, and waits for a claim."""
    LEASED = "leased"
    """A worker has the message."""
    OVERDUE = "overdue"
    """The lease has ended, and no claim has noticed it."""
    SUSPECT = "suspect"
    """A claim has noticed that the lease has ended. The message waits to be handed out alone."""
    ON_TRIAL = "on trial"
    """A worker has the suspect, and no other suspect of the queue."""
    EXPIRED = "expired"
    """The time to live has ended while no worker had the message.

    The next claim drops or buries it.
    """
    DEAD = "dead"
    """The message is a dead letter."""
    REMEMBERED = "remembered"
    """The message was handled, and its id still counts as a duplicate."""


@dataclass(frozen=True)
class Event:
    """An event that may happen to a message.

    Attributes:
        name: The event, in words.
        script: The script that carries it out. None: time passes.
        changes: The new state, by the old one. In any other state, the event changes nothing.
    """

    name: str
    script: Script | None
    changes: Mapping[State, State]


def _all_to(state: State, *before: State) -> dict[State, State]:
    return dict.fromkeys(before, state)


GONE, DELAYED, READY, LEASED, OVERDUE, SUSPECT, ON_TRIAL, EXPIRED, DEAD, REMEMBERED = State
_WITHOUT_WORKER = (DELAYED, READY, OVERDUE, SUSPECT)
# As long as no other worker has claimed the message, the token of a lease that has ended is still
# valid.
_UNDER_TOKEN = (LEASED, OVERDUE, SUSPECT, ON_TRIAL)
_FREE = (GONE, DEAD, EXPIRED)
_CLAIM = {READY: LEASED, OVERDUE: ON_TRIAL, SUSPECT: ON_TRIAL, EXPIRED: GONE}

EVENTS = (
    Event("offered without a delay", scripts.OFFER, _all_to(READY, *_FREE)),
    Event("offered with a delay", scripts.OFFER, _all_to(DELAYED, *_FREE)),
    Event(
        "offered in place of an earlier one",
        scripts.OFFER,
        _all_to(READY, *_FREE, *_WITHOUT_WORKER, REMEMBERED),
    ),
    Event(
        "its delay, lease or dedup window ends",
        None,
        {DELAYED: READY, LEASED: OVERDUE, ON_TRIAL: OVERDUE, REMEMBERED: GONE},
    ),
    Event("its time to live ends", None, _all_to(EXPIRED, *_WITHOUT_WORKER)),
    Event("claimed", scripts.CLAIM, _CLAIM),
    Event(
        "claimed by a client with a suspect at work",
        scripts.CLAIM,
        {READY: LEASED, OVERDUE: SUSPECT, EXPIRED: GONE},
    ),
    Event(
        "claimed, and all attempts are used",
        scripts.CLAIM,
        {**_all_to(DEAD, READY, OVERDUE, SUSPECT), EXPIRED: GONE},
    ),
    Event(
        "claimed from a queue that keeps expired messages", scripts.CLAIM, {**_CLAIM, EXPIRED: DEAD}
    ),
    Event("acknowledged", scripts.ACK, _all_to(GONE, *_UNDER_TOKEN)),
    Event(
        "acknowledged in a queue with a dedup window",
        scripts.ACK,
        _all_to(REMEMBERED, *_UNDER_TOKEN),
    ),
    Event("failed, and retried at once", scripts.NACK, _all_to(READY, *_UNDER_TOKEN)),
    Event("failed, and retried after a delay", scripts.NACK, _all_to(DELAYED, *_UNDER_TOKEN)),
    Event(
        "returned untouched",
        scripts.RELEASE,
        {**_all_to(READY, LEASED, OVERDUE, SUSPECT), ON_TRIAL: SUSPECT},
    ),
    Event("its lease is extended", scripts.EXTEND, _all_to(LEASED, OVERDUE, SUSPECT)),
    Event("buried", scripts.BURY, _all_to(DEAD, *_UNDER_TOKEN)),
    Event("cancelled", scripts.CANCEL, _all_to(GONE, *_WITHOUT_WORKER)),
    Event("rescheduled without a delay", scripts.RESCHEDULE, _all_to(READY, *_WITHOUT_WORKER)),
    Event("rescheduled with a delay", scripts.RESCHEDULE, _all_to(DELAYED, *_WITHOUT_WORKER)),
    Event("purged with the delayed messages", scripts.PURGE, {DELAYED: GONE}),
    Event(
        "purged with the ready messages",
        scripts.PURGE,
        _all_to(GONE, READY, OVERDUE, SUSPECT, EXPIRED),
    ),
    Event(
        "purged with all messages",
        scripts.PURGE,
        _all_to(GONE, *_WITHOUT_WORKER, LEASED, ON_TRIAL, EXPIRED),
    ),
    Event("redriven", scripts.REDRIVE, {DEAD: READY}),
    Event("dropped as a dead letter", scripts.DROP_DEAD, {DEAD: GONE}),
    Event("scheduled as an occurrence", scripts.SCHEDULE, _all_to(DELAYED, GONE, DEAD, REMEMBERED)),
    Event(
        "replaced by an occurrence at another time",
        scripts.SCHEDULE,
        _all_to(GONE, *_WITHOUT_WORKER),
    ),
    Event("its schedule ends", scripts.UNSCHEDULE, _all_to(GONE, *_WITHOUT_WORKER)),
    Event(
        "follows the occurrence that is handed out",
        scripts.OCCUR,
        _all_to(DELAYED, GONE, DEAD, REMEMBERED),
    ),
    Event(
        "handed out while the occurrence before it lives",
        scripts.OCCUR,
        _all_to(GONE, *_UNDER_TOKEN),
    ),
    Event(
        "follows an occurrence that was lost",
        scripts.RECUR,
        _all_to(DELAYED, GONE, DEAD, REMEMBERED),
    ),
    Event("its moment becomes known", scripts.REFILL, _all_to(DELAYED, GONE, DEAD, REMEMBERED)),
)
"""Every event. A change of the queue itself, such as a pause, is none."""
