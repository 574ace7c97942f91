"""The scripts of a delayed queue."""

from __future__ import annotations

from delayq._redis.scripts import Script

OFFER = Script(
    "delayed/offer", ("timeout", "ordered", "channel"), ("listed", "delay_us...", "payload...")
)
GIVE_BACK = Script(
    "delayed/give_back",
    ("ready", "timeout", "ordered", "leases", "leased", "fence"),
    ("fence_ms", "call", "places", "payload..."),
    repeatable=True,
)
TRANSFER = Script(
    "delayed/transfer",
    ("ready", "timeout", "ordered", "quarantine", "fence", "leases", "leased", "turns"),
    ("limit", "take", "most_bytes", "lease_us", "each", "call", "signature"),
    followed_by=GIVE_BACK,
)
SET_ASIDE = Script(
    "delayed/set_aside",
    ("quarantine", "leases", "leased", "fence"),
    ("fence_ms", "token", "payload"),
    repeatable=True,
)
CANCEL = Script("delayed/cancel", ("timeout", "ordered"), ("stale", "record..."))
RESCHEDULE = Script("delayed/reschedule", ("timeout", "channel"), ("record", "delay_us"))
PURGE = Script("delayed/purge", ("timeout", "ordered", "ready"), ("state",), repeatable=True)
POLL_PENDING = Script(
    "delayed/poll_pending",
    ("timeout", "ordered", "quarantine", "leases", "leased", "fence"),
    ("limit", "most_bytes", "listed", "lease_us", "token"),
    followed_by=GIVE_BACK,
)
POLL_LAST = Script(
    "delayed/poll_last", ("timeout", "ordered", "quarantine", "destination"), ("listed", "limit")
)
EXPIRE = Script("delayed/expire", ("timeout", "ordered"), ("ttl_ms",), repeatable=True)
ACK = Script("delayed/ack", ("leases", "leased"), ("token...",))
NACK = Script(
    "delayed/nack",
    ("leases", "leased", "timeout", "ordered", "channel"),
    ("token", "delay_us", "listed"),
)
EXTEND = Script("delayed/extend", ("leases",), ("lease_us", "token..."), repeatable=True)
RELEASE = Script(
    "delayed/release",
    ("ready", "timeout", "ordered", "leases", "leased"),
    ("token...",),
    repeatable=True,
)
MIGRATE = Script(
    "delayed/migrate",
    ("timeout", "ordered"),
    ("rewrite", "before", "limit", "record..."),
    repeatable=True,
)

ALL = (
    OFFER,
    TRANSFER,
    GIVE_BACK,
    SET_ASIDE,
    CANCEL,
    RESCHEDULE,
    PURGE,
    POLL_PENDING,
    POLL_LAST,
    EXPIRE,
    ACK,
    NACK,
    EXTEND,
    RELEASE,
    MIGRATE,
)
