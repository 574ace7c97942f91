"""Redisson's records, as ``lua/redisson/include/record.lua`` reads and writes them. Pure.

A record is one pending message: ``08`` + 8 id bytes + little-endian length + payload. Older
versions of Redisson wrote the id as an IEEE double, without a leading ``08``; on 32-bit and Windows
servers the length has 4 bytes instead of 8.
"""

from __future__ import annotations


def pack(record_id: bytes, payload: bytes, length_bytes: int) -> bytes:
    """Build the record in the current form (Redisson 3.21.1 and later)."""
    return b"\x08" + record_id + len(payload).to_bytes(length_bytes, "little") + payload


def any_id_of(record: bytes) -> bytes | None:
    """Return the id of a record in any of the four forms, or None if it has none of them."""
    payload = payload_of(record)
    if payload is None:
        return None
    return record[1:9] if len(record) - len(payload) in (17, 13) else record[:8]


def id_of(record: bytes) -> bytes:
    """Return the id of a record in the current form."""
    return record[1:9]


def payload_of(record: bytes) -> bytes | None:
    """Return the payload of a record in any of the four forms, or None if it has none of them."""
    # The size of the header, then the offset of the length in it.
    forms = ((17, 9), (13, 9)) if record[:1] == b"\x08" else ()
    for header, at in (*forms, (16, 8), (12, 8)):
        if (
            len(record) >= header
            and int.from_bytes(record[at:header], "little") == len(record) - header
        ):
            return record[header:]
    return None
