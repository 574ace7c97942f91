"""Redisson's records, as ``lua/delayed/include/record.lua`` writes and reads them. Pure.

A record is one pending message: ``08`` + 8 id bytes + little-endian length + payload. Older versions of Redisson wrote
an IEEE double as id and no leading ``08``; on 32-bit and Windows servers the length has 4 bytes instead of 8.
"""

from __future__ import annotations


def pack(record_id: bytes, payload: bytes, length_bytes: int) -> bytes:
    """Build the record in the current form (Redisson 3.21.1 and later)."""
    return b"\x08" + record_id + len(payload).to_bytes(length_bytes, "little") + payload


def any_id_of(record: bytes) -> bytes | None:
    """The id of a record in any of the four forms; None where it is none of them."""
    payload = payload_of(record)
    if payload is None:
        return None
    return record[1:9] if len(record) - len(payload) in (17, 13) else record[:8]


def id_of(record: bytes) -> bytes:
    """The id of a record in the current form."""
    return record[1:9]


def payload_of(record: bytes) -> bytes | None:
    """The payload of a record in any of the four forms; None where it is none of them."""
    # Header size, then where the length stands in it.
    forms = ((17, 9), (13, 9)) if record[:1] == b"\x08" else ()
    for header, at in (*forms, (16, 8), (12, 8)):
        if len(record) >= header and int.from_bytes(record[at:header], "little") == len(record) - header:
            return record[header:]
    return None
