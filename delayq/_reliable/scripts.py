"""The scripts of a reliable queue."""

from __future__ import annotations

from delayq._redis.scripts import Script

MESSAGES = (
    *(f"live_{priority}" for priority in range(10)),
    "bodies",
    "leases",
    "attempts",
    "expiries",
    "errors",
    "priorities",
)
"""The first keys of every script that touches messages.

``lua/reliable/include/queue.lua`` describes them.
"""

_SETTLED = ("id...", "token...", "priority...")

# A call whose answer was lost is repeated under the same number, and then finds its stored reply.
OFFER = Script(
    "reliable/offer",
    (*MESSAGES, "wake", "done", "settings", "call"),
    (
        "number",
        "epoch",
        "id...",
        "priority...",
        "delay_us...",
        "ttl_us...",
        "on_duplicate...",
        "content...",
    ),
    repeatable=True,
)
RELEASE = Script("reliable/release", (*MESSAGES, "wake"), _SETTLED)
CLAIM = Script(
    "reliable/claim",
    (*MESSAGES, "paused", "dead", "dead_messages", "wake", "settings"),
    (
        "epoch",
        "limit",
        "lease_us",
        "token",
        "max_attempts",
        "signature",
        "suspects",
        "held_id",
        "held_token",
        "company",
    ),
    followed_by=RELEASE,
)
ACK = Script("reliable/ack", (*MESSAGES, "done", "settings"), _SETTLED)
NACK = Script("reliable/nack", (*MESSAGES, "wake"), (*_SETTLED, "delay_us...", "error..."))
EXTEND = Script("reliable/extend", (*MESSAGES, "wake"), ("lease_us", *_SETTLED), repeatable=True)
BURY = Script("reliable/bury", (*MESSAGES, "dead", "dead_messages"), (*_SETTLED, "why..."))
CANCEL = Script("reliable/cancel", MESSAGES, ("id...",))
RESCHEDULE = Script("reliable/reschedule", (*MESSAGES, "wake"), ("id", "delay_us"), repeatable=True)
GET = Script("reliable/get", MESSAGES, ("id...",), repeatable=True)
LIST = Script("reliable/list", MESSAGES, ("state", "offset", "limit"), repeatable=True)
LEASED = Script("reliable/leased", MESSAGES, ("id...",), repeatable=True)
STATS = Script("reliable/stats", (*MESSAGES, "dead", "paused"), (), repeatable=True)
PURGE = Script("reliable/purge", MESSAGES, ("state", "offset", "limit"), repeatable=True)
REDRIVE = Script(
    "reliable/redrive", (*MESSAGES, "wake", "dead", "dead_messages"), ("name...",), repeatable=True
)
DROP_DEAD = Script("reliable/drop_dead", ("dead", "dead_messages"), ("name...",), repeatable=True)
RESUME = Script("reliable/resume", ("paused", "wake"), (), repeatable=True)
SCHEDULE = Script(
    "reliable/schedule",
    (*MESSAGES, "wake", "schedules", "settings"),
    ("name", "timing", "version", "every_us", "priority", "ttl_us", "content", "moment..."),
    repeatable=True,
)
UNSCHEDULE = Script("reliable/unschedule", (*MESSAGES, "schedules"), ("name",))
OCCUR = Script("reliable/occur", (*MESSAGES, "wake", "schedules"), _SETTLED, repeatable=True)
RECUR = Script("reliable/recur", (*MESSAGES, "wake", "schedules"), ("name...",), repeatable=True)
REFILL = Script(
    "reliable/refill",
    (*MESSAGES, "wake", "schedules"),
    ("name", "timing", "moment..."),
    repeatable=True,
)
CONFIGURE = Script(
    "reliable/configure",
    ("settings", "wake"),
    ("expected", "epoch", "field...", "value..."),
    repeatable=True,
)

ALL = (
    OFFER,
    CLAIM,
    ACK,
    NACK,
    RELEASE,
    EXTEND,
    BURY,
    CANCEL,
    RESCHEDULE,
    GET,
    LIST,
    LEASED,
    STATS,
    PURGE,
    REDRIVE,
    DROP_DEAD,
    RESUME,
    SCHEDULE,
    UNSCHEDULE,
    OCCUR,
    RECUR,
    REFILL,
    CONFIGURE,
)
