"""The rules for the keys of all queues: names, prefixes, and cluster slots."""

from __future__ import annotations

from binascii import crc_hqx

from delayq._checks import describe_value
from delayq.errors import BadName

LONGEST_NAME = 512
"""In bytes. Redisson has no limit; no name in practice comes near this one."""
SLOTS = 16384
"""The number of hash slots in a cluster."""
RELIABLE, PARTITION = "delayq:{", "delayq:part:{"
"""The beginnings of a reliable queue's keys, and of one of its partitions'."""


def checked_name(name: str) -> str:
    """Return ``name``. Raises BadName if it is empty, too long or not text."""
    if not isinstance(name, str) or not name:
        raise BadName(f"a queue's name must be a non-empty str, not {describe_value(name)}")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise BadName(f"the queue name {name!r} cannot be encoded as UTF-8") from None
    if size > LONGEST_NAME:
        raise BadName(f"a queue's name must have at most {LONGEST_NAME} bytes, not {size}")
    return name


def hash_tag(key: str) -> str:
    """Return the part of ``key`` that decides its slot (specification, "Hash tags")."""
    start = key.find("{")
    end = key.find("}", start + 1)
    return key[start + 1 : end] if start >= 0 and end > start + 1 else key


def slot_of(key: str) -> int:
    """Return the cluster slot of ``key``: its CRC16, as in the Redis Cluster specification."""
    return crc_hqx(hash_tag(key).encode(errors="surrogateescape"), 0) % SLOTS
