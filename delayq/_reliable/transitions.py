"""The states of a message in a reliable queue, and every event that changes them. Data only.

Nothing at run time depends on this table: the scripts are the implementation. A test makes every
event happen to a message in every state on a real server, and ``docs/redis-data-model.md`` shows
the same table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class IdState(StrEnum):
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
    """The lease has ended, and no claim has seen that yet."""
    SUSPECT = "suspect"
    """Two leases in a row were lost, and the message waits to be handed out alone."""
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
    script: str | None
    changes: Mapping[IdState, IdState]


def _all_to(state: IdState, *before: IdState) -> dict[IdState, IdState]:
    return dict.fromkeys(before, state)


GONE, DELAYED, READY, LEASED, OVERDUE, SUSPECT, ON_TRIAL, EXPIRED, DEAD, REMEMBERED = IdState
_WITHOUT_WORKER = (DELAYED, READY, OVERDUE, SUSPECT)
# As long as no other worker has claimed the message, the token of a lease that has ended is still
# valid.
_UNDER_TOKEN = (LEASED, OVERDUE, ON_TRIAL)
_FREE = (GONE, DEAD, EXPIRED)
_CLAIM = {READY: LEASED, OVERDUE: LEASED, SUSPECT: ON_TRIAL, EXPIRED: GONE}

EVENTS = (
    # Those under an id that a client has generated.
    Event("offered as a new message", "offer_new", _all_to(READY, GONE, DEAD, REMEMBERED)),
    Event("offered without a delay", "offer", _all_to(READY, *_FREE)),
    Event("offered with a delay", "offer", _all_to(DELAYED, *_FREE)),
    Event(
        "offered in place of an earlier one",
        "offer",
        _all_to(READY, *_FREE, *_WITHOUT_WORKER, REMEMBERED),
    ),
    Event(
        "its delay, lease or dedup window ends",
        None,
        {DELAYED: READY, LEASED: OVERDUE, ON_TRIAL: OVERDUE, REMEMBERED: GONE},
    ),
    Event("its time to live ends", None, _all_to(EXPIRED, *_WITHOUT_WORKER)),
    Event("claimed", "claim", _CLAIM),
    Event(
        "claimed, and the lease before was lost as well",
        "claim",
        {**_CLAIM, OVERDUE: ON_TRIAL},
    ),
    Event(
        "claimed by a client with a suspect at work",
        "claim",
        {**_all_to(LEASED, READY, OVERDUE), EXPIRED: GONE},
    ),
    Event(
        "claimed, and all attempts are used",
        "claim",
        {**_all_to(DEAD, READY, OVERDUE, SUSPECT), EXPIRED: GONE},
    ),
    Event("claimed from a queue that keeps expired messages", "claim", {**_CLAIM, EXPIRED: DEAD}),
    Event("acknowledged", "ack", _all_to(GONE, *_UNDER_TOKEN)),
    Event(
        "acknowledged in a queue with a dedup window",
        "ack",
        _all_to(REMEMBERED, *_UNDER_TOKEN),
    ),
    Event("acknowledged in a queue that keeps results", "finish", _all_to(GONE, *_UNDER_TOKEN)),
    Event("acknowledged, and followed by another", "ack_then", _all_to(GONE, *_UNDER_TOKEN)),
    Event("failed, and retried at once", "nack", _all_to(READY, *_UNDER_TOKEN)),
    Event("failed, and retried after a delay", "nack", _all_to(DELAYED, *_UNDER_TOKEN)),
    Event("snoozed", "nack", _all_to(DELAYED, *_UNDER_TOKEN)),
    Event(
        "returned untouched",
        "release",
        {**_all_to(READY, LEASED, OVERDUE), ON_TRIAL: SUSPECT},
    ),
    Event("its lease is extended", "extend", _all_to(LEASED, OVERDUE)),
    Event("buried", "bury", _all_to(DEAD, *_UNDER_TOKEN)),
    Event("buried while no worker has it", "bury_waiting", _all_to(DEAD, *_WITHOUT_WORKER)),
    Event("cancelled", "cancel", _all_to(GONE, *_WITHOUT_WORKER)),
    Event(
        "cancelled even if a worker has it",
        "cancel",
        _all_to(GONE, *_WITHOUT_WORKER, LEASED, ON_TRIAL),
    ),
    Event("its batch is looked at", "cancel_members", {EXPIRED: GONE}),
    Event("its batch is cancelled", "cancel_members", _all_to(GONE, *_WITHOUT_WORKER, EXPIRED)),
    Event(
        "its batch is cancelled even if workers have its messages",
        "cancel_members",
        _all_to(GONE, *_WITHOUT_WORKER, LEASED, ON_TRIAL, EXPIRED),
    ),
    Event("rescheduled without a delay", "reschedule", _all_to(READY, *_WITHOUT_WORKER)),
    Event("rescheduled with a delay", "reschedule", _all_to(DELAYED, *_WITHOUT_WORKER)),
    Event("purged with the delayed messages", "purge", {DELAYED: GONE}),
    Event(
        "purged with the ready messages",
        "purge",
        _all_to(GONE, READY, OVERDUE, SUSPECT, EXPIRED),
    ),
    Event(
        "purged with all messages",
        "purge",
        _all_to(GONE, *_WITHOUT_WORKER, LEASED, ON_TRIAL, EXPIRED),
    ),
    Event("redriven", "redrive", {DEAD: READY}),
    Event("redriven, and due as before it was buried", "redrive", {DEAD: DELAYED}),
    Event("dropped as a dead letter", "drop_dead", {DEAD: GONE}),
    Event("scheduled as an occurrence", "schedule", _all_to(DELAYED, GONE, DEAD, REMEMBERED)),
    Event(
        "replaced by an occurrence at another time",
        "schedule",
        _all_to(GONE, *_WITHOUT_WORKER),
    ),
    Event("its schedule ends", "unschedule", _all_to(GONE, *_WITHOUT_WORKER)),
    Event("its schedule is paused", "pause_schedule", _all_to(GONE, *_WITHOUT_WORKER)),
    Event("its schedule is resumed", "resume_schedule", _all_to(DELAYED, GONE, DEAD, REMEMBERED)),
    Event(
        "follows the occurrence that is handed out",
        "occur",
        _all_to(DELAYED, GONE, DEAD, REMEMBERED),
    ),
    Event(
        "handed out while the occurrence before it lives",
        "occur",
        _all_to(GONE, *_UNDER_TOKEN),
    ),
    Event(
        "follows an occurrence that was lost",
        "recur",
        _all_to(DELAYED, GONE, DEAD, REMEMBERED),
    ),
    Event("its moment becomes known", "refill", _all_to(DELAYED, GONE, DEAD, REMEMBERED)),
)
"""Every event. A change of the queue itself, such as a pause, is none."""
